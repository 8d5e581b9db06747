// What a run is and how it does, on one screen: state, numbers, alerts, settings, ranks.

section("overview", "Overview", ["overview"], () => {
  const about = run().overview, parts = [];
  const facts = [
    ["folder", make("code", {}, about.folder)],
    ["started", [about.started, about.host && " on " + about.host, about.starts > 1 && " (start " + about.starts + " in this folder)"]
      .filter(Boolean).join("") || "-"],
    ["ranks", about.world_size === null ? "-" : String(about.world_size)],
    ["siirl", about.commit.trim() || "-"],
    ["packages", Object.entries(about.packages).map(([name, version]) => name + " " + version).join(", ") || "-"],
  ];
  const table = (rows, id) => make("table", { id }, rows.map(([name, value, title]) => make("tr", {}, make("th", { scope: "row", title }, name), make("td", {}, value))));
  parts.push(make("div", { class: "box" }, make("h2", {}, about.name, " ", make("span", { class: "state " + about.state, id: "state" }, about.state)),
    make("p", { id: "step" }, "step ", about.step === null ? "none yet" : String(about.step), about.total ? " of " + about.total : "", " ",
      about.total ? make("progress", { max: about.total, value: about.step || 0, "aria-label": "steps done" }) : null,
      about.left_s !== null ? " about " + seconds(about.left_s) + " left" : ""), about.cause ? make("p", { class: "down" }, about.cause) : null,
    about.how_on ? make("p", { id: "how_on" }, about.how_on) : null));
  page.written = Promise.all([
    later(parts, "Numbers", "curves", "numbers", found => [lastNumbers(found || {})]),
    later(parts, "Alerts", "alerts", "alerts", found => found && found.length ? found.map(alert => make("div", { class: "box alert" }, alert.text))
      : [make("p", { class: "faint" }, "No alerts.")]),
  ]);
  const settings = about.settings.map(([name, value, key]) => [name, value, key]);
  parts.push(make("h2", {}, "Settings and origin"), make("div", { class: "box" }, make("div", { class: "pair" }, make("div", {}, table(settings, "settings")), make("div", {}, table(facts, "facts"))),
    about.command ? make("details", { id: "command" }, make("summary", {}, "command"), make("pre", { class: "details" }, about.command)) : null));
  if (about.places.length) parts.push(make("h2", {}, about.state === "running" ? "Where each rank is" : "Where each rank was last"), whereRanksAre(about));
  return parts;
});

// A heading, and below it what a part says, once that has been read; a promise of that.
function later(parts, title, name, id, told) {
  const holder = make("div", { id }), index = page.run;
  parts.push(make("h2", {}, title), holder);
  const tell = () => holder.replaceChildren(...told(partOf(name, index)));
  if (partOf(name, index) !== undefined) { tell(); return Promise.resolve(); }
  holder.append(make("p", { class: "faint", role: "status" }, "reading the numbers..."));
  return load(name, index).then(tell, () => holder.replaceChildren(make("p", { class: "down" }, "The numbers cannot be read.")));
}

const SHOWN_FIRST = [
  ["reward", ["reward/total", "reward/score"]], ["validation reward", ["val/reward/mean"]], ["response length", ["rollout/response_length"]],
  ["entropy", ["actor/entropy"]], ["tokens per second", ["perf/tokens_per_s"]],
];

// The last values of what is looked at first, each with its curve in small, agent by agent.
function lastNumbers(curves) {
  const cards = [];
  const [reward, validation, ...others] = SHOWN_FIRST;
  const parts = partsOf(Object.keys(curves)).map(name => [name.replace(PART, (_, val) => val ? "validation: " : ""), [name]]);
  for (const [title, names] of [reward, validation, ...parts, ...others]) {
    const of = name => Object.keys(curves).filter(known => known.replace(/^agent_\d+\//, "") === name);
    const found = names.map(of).find(known => known.length) || [], rows = [];
    for (const name of found) {
      const { steps, values } = curves[name], agent = /^agent_(\d+)\//.exec(name);
      rows.push(make("div", { class: "number", "data-last": name, title: name + " in step " + steps[steps.length - 1] },
        agent ? make("span", { class: "name", color: agentColor(Number(agent[1])) }, agent[1]) : null, make("b", {}, short(values[values.length - 1])),
        sparkline(steps, values, agent ? agentColor(Number(agent[1])) : COLORS[0])));
    }
    if (rows.length) cards.push(make("figure", {}, make("figcaption", {}, title, rows.length > 1 ? make("span", { class: "faint" }, " by agent") : null), rows));
  }
  return cards.length ? make("div", { class: "cards" }, cards) : make("p", { class: "faint" }, "No step has been reported yet.");
}

function sparkline(steps, values, color) {
  const wide = 150, high = 28, low = Math.min(...values), top = Math.max(...values), first = steps[0], last = steps[steps.length - 1];
  const x = step => last === first ? wide / 2 : 2 + (step - first) / (last - first) * (wide - 4), y = value => top === low ? high / 2 : 3 + (top - value) / (top - low) * (high - 6);
  const points = steps.map((step, index) => x(step).toFixed(1) + "," + y(values[index]).toFixed(1)).join(" ");
  return draw("svg", { class: "spark", viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": "from " + short(values[0]) + " to " + short(values[values.length - 1]) },
    steps.length > 1 ? draw("polyline", { points, fill: "none", stroke: color, "stroke-width": 1.5 }) : draw("circle", { cx: x(first), cy: y(values[0]), r: 2.5, fill: color }));
}

function brief(ranks) { return ranks.length > 120 ? ranks.slice(0, 118) + "\u2026" : ranks; }
function doingText(place) { return brief(place.text) || place.state; }
function placeColor(index) { return index < 0 ? "var(--shade)" : COLORS[index % COLORS.length]; }

// Ranks in the same node of the same step as one row, who is behind first; machines and shards as cells.
function whereRanksAre(about) {
  const ago = at => seconds(Math.max(0, page.data.made_s - at));
  const rows = about.places.map((place, index) => make("tr", {}, [make("span", {}, make("i", { class: "patch", color: placeColor(index) }), String(place.count)),
    brief(place.ranks), String(place.step), place.node + (place.at && place.at !== place.node ? " for " + place.at : ""), about.state === "ended" ? "-" : doingText(place),
    (ago(place.first_s) === ago(place.last_s) ? "" : ago(place.first_s) + " to ") + ago(place.last_s) + " before"].map(cell => make("td", {}, cell))));
  const grids = Object.entries(about.groups).map(([kind, cells]) => make("div", {}, make("h3", {}, plural(cells.length, kind.replace(/s$/, ""))), grid(kind, cells, about.places)));
  return make("div", { class: "box scroll", tabindex: 0 }, make("table", { id: "places" },
    make("tr", {}, ["ranks", "which", "step", "node", about.state === "running" ? "now" : "last", "entered, before this page was made"].map(cell => make("th", { scope: "col" }, cell))), rows), grids);
}

// A cell for each group of ranks, coloured by where most of them are, marked where they are apart. Arrows read them.
function grid(kind, cells, places) {
  const wide = 64, size = 14, svg = draw("svg", { class: "cells", id: "cells-" + kind, tabindex: 0, role: "img", width: Math.min(cells.length, wide) * size,
    height: Math.ceil(cells.length / wide) * size, "aria-label": plural(cells.length, kind.replace(/s$/, "")) + ": arrows read one after another; the table above has them by place" });
  const text = ([label, counts]) => [label, ...counts.map(([place, count]) => places[place] ? count + " in step " + places[place].step + ", " + places[place].node + (places[place].state === "runs" ? "" : ": " + doingText(places[place])) : count + " elsewhere")].join("\n");
  cells.forEach((cell, index) => {
    const [first] = cell[1], box = draw("rect", { x: index % wide * size, y: Math.floor(index / wide) * size, width: size - 2, height: size - 2,
      fill: first && places[first[0]] ? placeColor(first[0]) : placeColor(-1), class: cell[1].length > 1 ? "apart" : null });
    box.addEventListener("pointermove", event => tip(text(cell), event.clientX, event.clientY));
    box.addEventListener("pointerleave", () => tip(""));
    svg.append(box);
  });
  let chosen = -1;
  svg.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide }[event.key];
    if (!move) return;
    chosen = Math.max(0, Math.min(cells.length - 1, chosen + move));
    const box = svg.children[chosen].getBoundingClientRect();
    tip(text(cells[chosen]), box.left, box.bottom);
    event.preventDefault();
  });
  svg.addEventListener("blur", () => tip(""));
  return svg;
}
