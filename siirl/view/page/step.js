// A traced step: what bounds it, and the step again on the plan's picture, moved by hand or played.

const STRIP = { left: 74, width: 1240, row: 22, top: 20 }, PLAY_MS = 8000, TICK_MS = 60;

// Instructions of the step: node or kind -> [start, end, rank].
function played(trace, step) {
  const found = new Map(), alike = trace.groups.alike;  // of thousands of ranks some are shown one by one
  for (const lane of trace.chosen && alike ? alike.lanes : trace.lanes) for (const [name, start, duration, depth, , args] of lane.spans) {
    if (depth !== 0 || args.step !== step || (lane.lane && lane.lane !== "instructions")) continue;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push([start, start + duration, lane.rank, args.ranks || 1]);
  }
  return found;
}

// The nodes that intervals belong to, each with those: serving is for the agents whose engines are on the rank.
function nodesOf(name, spans, nodes) {
  if (name !== "serve") return [[name, spans]];
  return nodes.map(node => [node.name, spans.filter(span => node.serving.includes(span[2]))]).filter(([, of]) => of.length);
}

function strip(bound, begin) {
  STRIP.width = roomWide();
  const ranks = [...new Set(bound.path.map(part => part[0]))].sort((a, b) => a - b);
  const scale = (STRIP.width - STRIP.left) / bound.total_ms;
  const svg = draw("svg", { id: "path", role: "img", width: STRIP.width, viewBox: `0 0 ${STRIP.width} ${STRIP.top + ranks.length * STRIP.row + 6}`,
    "aria-label": "critical path: " + bound.path.map(part => part[1] + " on rank " + part[0]).join(", then ") });
  for (const at of ticks(0, bound.total_ms, 8)) svg.append(
    draw("text", { class: "axis", x: STRIP.left + at * scale, y: 12, "text-anchor": "middle" }, axisText(at, bound.total_ms)));
  ranks.forEach((rank, place) => svg.append(draw("text", { class: "lane", x: 4, y: STRIP.top + place * STRIP.row + 14 }, "rank " + rank)));
  for (const [rank, name, start, end] of bound.path) {
    const x = STRIP.left + (start - begin) * scale, wide = Math.max(0.6, (end - start) * scale), y = STRIP.top + ranks.indexOf(rank) * STRIP.row;
    const box = draw("rect", { class: "span", x: x.toFixed(1), y, width: wide.toFixed(1), height: STRIP.row - 4, fill: nodeColor(name), "data-name": name });
    box.addEventListener("pointermove", event => tip(name + "\nrank " + rank + "\n" + lasting(end - start), event.clientX, event.clientY));
    box.addEventListener("pointerleave", () => tip(""));
    svg.append(box);
    if (wide > 7 * name.length + 8) svg.append(draw("text", { class: "inside", x: x + 4, y: y + 13 }, name));
  }
  const cursor = draw("line", { class: "cursor", y1: STRIP.top - 4, y2: STRIP.top + ranks.length * STRIP.row });
  svg.append(cursor);
  return [svg, at => { for (const side of ["x1", "x2"]) cursor.setAttribute(side, STRIP.left + at * scale); }];
}

function fasterTable(bound) {
  const head = ["instruction", "waited for", "share of the step", "on ranks", "the step, were it twice as fast"];
  const rows = bound.faster.map(row => [[make("i", { class: "patch", color: nodeColor(row.name) }), row.name], lasting(row.ms), (row.share * 100).toFixed(1) + "%", row.ranks.join(", "),
    lasting(row.total_ms) + " (" + (100 * (row.total_ms / bound.total_ms - 1)).toFixed(1) + "%)"]);
  return make("table", { id: "faster" }, make("tr", {}, head.map(title => make("th", { scope: "col" }, title))),
    rows.map(cells => make("tr", {}, cells.map(cell => make("td", {}, cell)))));
}

section("step", "Step", ["timeline", "dag"], () => {
  const trace = run().timeline, dag = run().dag;
  if (!trace || !trace.bounds.length) return [make("p", { class: "box" },
    NO_TRACE)];
  const bound = trace.bounds.find(item => item.step === keep("replayed", null)) || trace.bounds[trace.bounds.length - 1];
  const parts = played(trace, bound.step), begin = bound.begin_ms, edges = trace.edges[bound.step] || [];
  const drawn = dag && picture(dag), [path, move] = strip(bound, begin);
  if (drawn) labelEdges(drawn, edges);
  const now = make("span", { role: "status", id: "now" });
  const slider = make("input", { type: "range", min: 0, max: bound.total_ms, step: "any", value: 0, id: "scrub", "aria-label": "time in step " + bound.step });
  const at = time => {
    slider.value = time;
    move(time);
    const busy = [];
    for (const [name, spans] of parts) {
      const inside = spans.filter(([start, end]) => start - begin <= time && time < end - begin);
      if (inside.length) busy.push(name + " on " + (trace.chosen ? plural(inside.reduce((sum, span) => sum + span[3], 0), "rank")
        : inside.map(span => span[2]).sort((a, b) => a - b).join(", ")));
      for (const [node, of] of nodesOf(name, spans, dag ? dag.nodes : [])) {
        const ground = drawn && drawn.grounds.get(node), now = of.some(span => inside.includes(span));
        if (ground) paint(ground, now ? "#4f8fe0" : of.every(span => span[1] - begin <= time) ? "#3f9b6c" : "", now ? 0.45 : 0.22);
      }
    }
    now.textContent = lasting(time) + " of " + lasting(bound.total_ms) + ": " + (busy.join("; ") || "between instructions");
  };
  let timer = null;
  const button = make("button", { type: "button", id: "play" }, "play");
  const stop = () => { clearInterval(timer); timer = null; button.textContent = "play"; };
  button.addEventListener("click", () => {
    if (timer) return stop();
    if (Number(slider.value) >= bound.total_ms) at(0);
    button.textContent = "pause";
    timer = setInterval(() => {
      const next = Number(slider.value) + bound.total_ms * TICK_MS / PLAY_MS;
      if (!slider.isConnected) return stop();
      at(Math.min(next, bound.total_ms));
      if (next >= bound.total_ms) stop();
    }, TICK_MS);
  });
  slider.addEventListener("input", () => { stop(); at(Number(slider.value)); });
  at(0);
  const steps = trace.bounds.map(item => make("button", { type: "button", "aria-pressed": String(item === bound),
    onclick: () => { page.state.replayed = item.step; redraw(); } }, "step " + item.step));
  return [make("div", { class: "bar" }, steps), make("p", { class: "box alert", id: "bounds" }, bound.text),
    make("div", { class: "bar" }, button, slider, now, drawn && drawn.size),
    drawn ? drawn.box : null,
    make("div", { class: "box lanes" }, make("h2", {}, "What the end of the step waited for"), path, fasterTable(bound)),
    edgesTable(edges)];
});
