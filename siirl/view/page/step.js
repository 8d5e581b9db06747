// A traced step: what bounds it, and the step again on the plan's picture, moved by hand or played.

const STRIP = { left: 74, width: 1240, row: 22, top: 20 }, PLAY_MS = 8000, TICK_MS = 60;

// Where the plan's picture has a box: its corners, from the outline that it is drawn with.
function corners(ground) {
  const numbers = (ground.getAttribute("d") || "").match(/-?\d+(\.\d+)?/g) || [];
  const x = numbers.filter((_, at) => at % 2 === 0).map(Number), y = numbers.filter((_, at) => at % 2 === 1).map(Number);
  return { left: Math.min(...x), right: Math.max(...x), top: Math.min(...y), bottom: Math.max(...y) };
}

function sizeText(bytes) {
  const at = bytes ? Math.min(4, Math.floor(Math.log2(bytes) / 10)) : 0;
  return Number((bytes / 2 ** (10 * at)).toPrecision(3)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][at];
}

function edgeText(edge) {
  return [edge.rows !== null && plural(edge.rows, "row"), edge.bytes ? sizeText(edge.bytes) : ""].filter(Boolean).join(", ");
}

function labelEdges(drawn, dag, edges) {
  const boxes = [...drawn.grounds.values()].map(corners);
  const between = (left, right) => boxes.some(box => left < box.left && box.right < right);
  const ofMark = new Map(dag.nodes.map(node => [node.mark, node.name])), taken = [];
  for (const edge of edges) {
    const to = drawn.grounds.get(ofMark.get(edge.to)), from = drawn.grounds.get(ofMark.get(edge.from)), text = edgeText(edge);
    if (!edge.drawn || !to || !text || (edge.from && !from)) continue;
    const end = corners(to), begin = from && corners(from);
    if (begin && between(begin.right, end.left)) continue;  // a long way has no place of its own: the table has it
    const x = begin && begin.right < end.left ? (begin.right + end.left) / 2 : end.left;
    let y = begin ? (begin.top + begin.bottom + end.top + end.bottom) / 4 - 11 : end.top - 3;
    while (taken.some(other => Math.abs(other.x - x) < 46 && Math.abs(other.y - y) < 8)) y += 8;
    taken.push({ x, y });
    drawn.svg.append(draw("text", { x, y, class: "edge", "text-anchor": "middle", "data-edge": edge.names.join(" to ") }, text));
  }
}

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

function strip(bound, begin) {
  const ranks = [...new Set(bound.path.map(part => part[0]))].sort((a, b) => a - b);
  const names = [...new Set(bound.path.map(part => part[1]))], scale = (STRIP.width - STRIP.left) / bound.total_ms;
  const svg = draw("svg", { id: "path", role: "img", viewBox: `0 0 ${STRIP.width} ${STRIP.top + ranks.length * STRIP.row + 6}`,
    "aria-label": "critical path: " + bound.path.map(part => part[1] + " on rank " + part[0]).join(", then ") });
  for (const at of ticks(0, bound.total_ms, 8)) svg.append(
    draw("text", { class: "axis", x: STRIP.left + at * scale, y: 12, "text-anchor": "middle" }, axisText(at, bound.total_ms)));
  ranks.forEach((rank, place) => svg.append(draw("text", { class: "lane", x: 4, y: STRIP.top + place * STRIP.row + 14 }, "rank " + rank)));
  for (const [rank, name, start, end] of bound.path) {
    const x = STRIP.left + (start - begin) * scale, wide = Math.max(0.6, (end - start) * scale), y = STRIP.top + ranks.indexOf(rank) * STRIP.row;
    const color = name === "between instructions" ? "#8a929b" : COLORS[names.indexOf(name) % COLORS.length];
    const box = draw("rect", { class: "span", x: x.toFixed(1), y, width: wide.toFixed(1), height: STRIP.row - 4, fill: color, "data-name": name });
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
  const rows = bound.faster.map(row => [row.name, lasting(row.ms), (row.share * 100).toFixed(1) + "%", row.ranks.join(", "),
    lasting(row.total_ms) + " (" + (100 * (row.total_ms / bound.total_ms - 1)).toFixed(1) + "%)"]);
  return make("table", { id: "faster" }, make("tr", {}, head.map(title => make("th", { scope: "col" }, title))),
    rows.map(cells => make("tr", {}, cells.map(cell => make("td", {}, cell)))));
}

section("step", "Step", ["timeline", "dag"], () => {
  const trace = run().timeline, dag = run().dag;
  if (!trace || !trace.bounds.length) return [make("p", { class: "box" },
    "There is no trace of a whole step: run with trainer.trace=true (and trainer.trace_steps=[...] for some steps only).")];
  const bound = trace.bounds.find(item => item.step === keep("replayed", null)) || trace.bounds[trace.bounds.length - 1];
  const parts = played(trace, bound.step), begin = bound.begin_ms, edges = trace.edges[bound.step] || [];
  const drawn = dag && picture(dag), [path, move] = strip(bound, begin);
  if (drawn) labelEdges(drawn, dag, edges);
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
      const ground = drawn && drawn.grounds.get(name);
      if (ground) paint(ground, inside.length ? "#4f8fe0" : spans.every(span => span[1] - begin <= time) ? "#3f9b6c" : "", inside.length ? 0.6 : 0.22);
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
  const listed = edges.filter(edgeText).map(edge => make("tr", {}, [edge.names[0], edge.names[1], edge.rows === null ? "-" : String(edge.rows),
    edge.bytes ? sizeText(edge.bytes) : "-"].map(cell => make("td", {}, cell))));
  return [make("div", { class: "bar" }, steps), make("p", { class: "box alert", id: "bounds" }, bound.text),
    make("div", { class: "bar" }, button, slider, now),
    drawn ? drawn.box : null,
    make("div", { class: "box lanes" }, make("h2", {}, "What the end of the step waited for"), path, fasterTable(bound)),
    make("details", {}, make("summary", {}, "rows and bytes from node to node"), make("table", { class: "details", id: "edges" },
      make("tr", {}, ["from", "to", "rows", "moved between ranks"].map(title => make("th", { scope: "col" }, title))), listed))];
});
