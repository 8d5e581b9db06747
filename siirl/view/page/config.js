// All settings of a run, and what another one has instead.

section("config", "Config", ["settings"], () => {
  const mine = new Map((run().settings || []).map(row => [row[0], row])), index = page.run;
  if (!mine.size) return [make("p", { class: "box" }, "The run's configuration cannot be read (job.json, run_config.yaml).")];
  const others = page.data.runs.map((item, other) => [other, item.label]).filter(([other]) => other !== index);
  const table = make("table", { id: "config" }), count = make("span", { class: "faint", role: "status" });
  const render = () => {
    const other = keep("beside", ""), their = new Map((other !== "" && partOf("settings", Number(other)) || []).map(row => [row[0], row]));
    const words = keep("setting", "").toLowerCase(), which = keep("which", other === "" ? "set" : "differ");
    const text = row => row ? row[1] : "-", differs = name => other !== "" && text(mine.get(name)) !== text(their.get(name));
    const names = [...new Set([...mine.keys(), ...their.keys()])].sort().filter(name => name.toLowerCase().includes(words)
      && (which === "all" || (which === "differ" ? differs(name) : [mine, their].some(rows => rows.has(name) && rows.get(name)[2]))));
    const head = ["key", page.data.runs[index].label, ...(other === "" ? ["by"] : [page.data.runs[Number(other)].label])];
    table.replaceChildren(make("tr", {}, head.map(title => make("th", { scope: "col" }, title))), ...names.map(name => {
      const row = mine.get(name), cells = [make("code", {}, name), text(row), other === "" ? row[2] === "chosen" ? "the plan: " + row[3] : row[2] : text(their.get(name))];
      return make("tr", { class: differs(name) ? "differs" : null, "data-key": name }, cells.map(cell => make("td", {}, cell)));
    }));
    count.textContent = names.length + " of " + plural(mine.size, "key");
  };
  const set = key => async value => {
    page.state[key] = value;
    if (key === "beside") delete page.state.which;
    if (key === "beside" && value !== "") await load("settings", Number(value));
    if (key === "beside") return redraw();
    render();
  };
  const beside = keep("beside", "");
  if (beside === String(index)) page.state.beside = "";
  else if (beside !== "" && partOf("settings", Number(beside)) === undefined) page.written = load("settings", Number(beside)).then(render);
  const kinds = [["set", "that were set or chosen"], ["all", "all"], ...(keep("beside", "") === "" ? [] : [["differ", "that differ"]])];
  render();
  return [make("div", { class: "bar" }, make("label", {}, "keys with", make("input", { type: "search", value: keep("setting", ""), oninput: event => set("setting")(event.target.value) })),
    choice("show", keep("which", keep("beside", "") === "" ? "set" : "differ"), kinds, set("which")),
    others.length ? choice("beside", keep("beside", ""), [["", "-"], ...others], set("beside")) : make("span", { class: "faint" }, "siirl view RUN OTHER shows what differs"), count),
    make("div", { class: "box scroll", tabindex: 0 }, table)];
});
