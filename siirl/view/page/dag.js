// The plan's picture, its nodes coloured by their share of the step's time, or by which ranks are in them.

const STATE_COLORS = { failed: "#c8344a", runs: "#4f8fe0", waits: "#e0a030", idle: "#8a929b" };
const STATES = Object.keys(STATE_COLORS);  // a node has the first that one of its ranks has

function heat(share) { return `hsl(${Math.round(130 - 130 * Math.min(1, share * 1.6))} 75% 55%)`; }

const PIXELS_OF_POINT = 4 / 3, EDGE_TEXT = 9;  // points: 12 pixels, as the words of the picture have at least

// A button that shows a picture whole that is wider than the window; else its words are as large as others.
function sizeButton(svg) {
  const wide = parseFloat(svg.getAttribute("width")) * PIXELS_OF_POINT, room = document.getElementById("main").clientWidth - 42;
  svg.style.width = Math.round(wide) + "px";
  if (!(wide > room)) return null;
  const set = () => { const whole = keep("whole picture", false); svg.style.width = whole ? "100%" : Math.round(wide) + "px"; button.setAttribute("aria-pressed", String(whole)); };
  const button = make("button", { type: "button", onclick: () => { page.state["whole picture"] = !keep("whole picture", false); set(); } }, "whole picture");
  set();
  return button;
}

// The picture as an element of its own: {box, svg, grounds: node -> its ground, size: a button or null}; null if it cannot be drawn.
function picture(dag) {
  const parsed = dag.svg ? new DOMParser().parseFromString(dag.svg, "image/svg+xml").documentElement : null;
  if (!parsed || parsed.nodeName !== "svg") return null;
  const svg = document.importNode(parsed, true), grounds = new Map();
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "the plan; its nodes are listed below");
  for (const node of dag.nodes) {
    const ground = svg.querySelector("#" + CSS.escape(node.mark) + " path");
    if (!ground) continue;
    ground.setAttribute("data-node", node.name);
    ground.setAttribute("data-plain", ground.getAttribute("style") || "");
    ground.append(draw("title", {}, node.name + ": " + said(node)));
    grounds.set(node.name, ground);
    const { right, top } = corners(ground);
    svg.append(draw("rect", { class: "swatch", x: right - 11, y: top + 4, width: 7, height: 7, rx: 1.5, fill: nodeColor(node.name) }));
  }
  return { box: make("div", { class: "picture", id: "picture", tabindex: 0 }, svg), svg, grounds, size: sizeButton(svg) };
}

// Where something of the picture is: its corners, from the outline that it is drawn with.
function corners(outline) {
  const numbers = (outline.getAttribute("d") || "").match(/-?\d+(\.\d+)?/g) || [];
  const x = numbers.filter((_, at) => at % 2 === 0).map(Number), y = numbers.filter((_, at) => at % 2 === 1).map(Number);
  return { left: Math.min(...x), right: Math.max(...x), top: Math.min(...y), bottom: Math.max(...y) };
}

// Other words in the place of some of the picture, a line each: above a level arrow, or on a ground that hides it.
function reword(group, lines, kind, about, level) {
  const { left, right, top, bottom } = corners(group.querySelector("path")), size = EDGE_TEXT * 1.15, high = size * lines.length;
  const x = (left + right) / 2, y = level ? (top + bottom) / 2 - high - 2.5 : (top + bottom - high) / 2, wide = Math.max(...lines.map(line => line.length)) * EDGE_TEXT * 0.6;
  const words = lines.map((line, index) => draw("text", { x, y: y + size * (index + 0.8), class: kind, "text-anchor": "middle" }, line));
  words[0].prepend(draw("title", {}, about));
  group.replaceChildren(draw("rect", { class: "ground", x: x - wide / 2, y, width: wide, height: high }), ...words);
}

function sizeText(bytes) {
  const at = bytes ? Math.min(4, Math.floor(Math.log2(bytes) / 10)) : 0;
  return Number((bytes / 2 ** (10 * at)).toPrecision(3)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][at];
}

function edgeWords(edge) { return [edge.turns !== undefined && plural(edge.turns, "turn"), edge.rows !== null && plural(edge.rows, "row"), edge.bytes ? sizeText(edge.bytes) : ""].filter(Boolean); }

// Rows and bytes on the arrows between nodes; what is loaded stands over the node that reads it.
function labelEdges(drawn, edges) {
  for (const edge of edges) {
    const words = edgeWords(edge), between = edge.names.join(" to ");
    if (!words.length) continue;
    if (!edge.mark) {
      const to = drawn.grounds.get(edge.names[1]), end = to && corners(to);
      if (end) drawn.svg.append(draw("text", { x: end.left, y: end.top - 3, class: "edge", "data-edge": between }, words.join(", ")));
      continue;
    }
    const group = drawn.svg.querySelector("#" + CSS.escape(edge.mark));  // none where other arrows imply this one
    if (!group || !group.querySelector("path")) continue;
    group.setAttribute("data-edge", between);
    const ends = edge.names.map(name => drawn.grounds.get(name)).filter(Boolean).map(corners);
    reword(group, words, "edge", between, ends.length > 1 && Math.abs(ends[0].top - ends[1].top) < 1);
  }
}

function edgesTable(edges) {
  const cells = edges.filter(edge => edgeWords(edge).length).map(edge => [...edge.names, edge.turns !== undefined ? plural(edge.turns, "turn") : edge.rows === null ? "-" : String(edge.rows), edge.bytes ? sizeText(edge.bytes) : "-"]);
  return make("details", {}, make("summary", {}, "rows and bytes from node to node"), make("table", { class: "details", id: "edges" },
    make("tr", {}, ["from", "to", "rows", "moved between ranks"].map(title => make("th", { scope: "col" }, title))), cells.map(row => make("tr", {}, row.map(cell => make("td", {}, cell))))));
}

// color "": as the picture has it.
function paint(ground, color, opacity) {
  ground.setAttribute("style", color ? "fill: " + color + "; opacity: " + opacity : ground.getAttribute("data-plain"));
}

function said(part) {
  return part.mean_s === null ? "not in the measured steps" : seconds(part.mean_s) + " a step, " + (part.share * 100).toFixed(1) + "% of it";
}

section("dag", "DAG", ["dag", "overview"], () => {
  const dag = run().dag;
  if (!dag) return [make("p", { class: "box" }, "The folder has no plan that can be read (job.json).")];
  const about = run().overview, by = keep("by", about.state !== "ended" && about.places.length ? "state" : "time");
  const placesAt = name => about.places.filter(place => place.at === name || place.node === name);
  const saidAt = name => placesAt(name).map(place => brief(place.ranks) + (place.state === "runs" ? "" : " " + doingText(place).replace("waits", place.count > 1 ? "wait" : "waits")));
  const doingNow = STATES.map(state => [state, about.places.filter(place => place.state === state).reduce((sum, place) => sum + place.count, 0)])
    .filter(([, count]) => count).map(([state, count]) => count + " " + (state === "idle" || state === "failed" ? state : count > 1 ? state.slice(0, -1) : state));
  const rows = [...dag.nodes, ...dag.parts].sort((a, b) => (b.share || 0) - (a.share || 0)).map(part => {
    const bar = make("meter", { min: 0, max: 1, value: part.share || 0, "aria-label": part.name + ": share of the step" });
    const named = [make("i", { class: "patch", color: nodeColor(part.name) }), part.name];
    const cells = [named, part.op || "", part.op ? String(part.agent) : "", part.ranks || "",
      part.mean_s === null ? "-" : seconds(part.mean_s), part.share === null ? "-" : (part.share * 100).toFixed(1) + "%", bar, saidAt(part.name).join("; ")];
    return make("tr", {}, cells.map(cell => make("td", {}, cell)));
  });
  const now = about.state === "running" ? "ranks in it now" : "ranks in it last";
  const heads = ["node", "op", "agent", "ranks", "time", "share", "", now];
  const colors = choice("colours by", by, [["time", "share of the step's time"], ["state", now]], value => { page.state.by = value; redraw(); });
  const legend = by === "time" ? "times are of the slowest rank, mean of the last 10 steps; nodes on other ranks run at the same time, "
    + "so shares may add up to more than 100%" : "blue: runs; amber: waits for ranks that are behind; red: failed; grey: idle, no rank is in it";
  const head = make("tr", {}, heads.map(title => make("th", { scope: "col" }, title)));
  const drawn = picture(dag);
  for (const link of drawn ? dag.links : []) {
    const group = drawn.svg.querySelector("#" + CSS.escape(link.mark));
    if (group && link.version !== null) reword(group, ["weights " + link.version], "edge weights", link.name + ": after so many steps of the optimizer");
  }
  if (drawn) labelEdges(drawn, dag.edges);
  for (const node of drawn ? dag.nodes : []) {
    const ground = drawn.grounds.get(node.name);
    if (!ground) continue;
    if (by === "time" && node.share !== null) paint(ground, heat(node.share), 0.15 + 0.35 * Math.min(1, node.share * 1.6));
    const state = STATES.find(state => placesAt(node.name).some(place => place.state === state)) || "idle";
    if (about.places.length && (by !== "time" || state === "failed")) {
      paint(ground, STATE_COLORS[state], state === "failed" ? 0.6 : 0.45);
      ground.setAttribute("data-state", state);
      ground.firstChild.textContent += "\n" + (saidAt(node.name).join("\n") || "idle");
    }
  }
  return [make("div", { class: "bar" }, colors, drawn && drawn.size, make("span", { class: "faint" }, legend),
    by === "time" || !doingNow.length ? null : make("span", { id: "doing", role: "status" }, plural(about.places.reduce((sum, place) => sum + place.count, 0), "rank") + ": " + doingNow.join(", "))),
    drawn ? drawn.box : dag.svg ? make("p", { class: "box" }, "The picture cannot be drawn; its nodes are listed below.") : null,
    dag.edges_step === null || !drawn ? null : make("p", { class: "faint" }, "On the arrows: rows (between agents that talk, turns) that the reader took in step " + dag.edges_step + " and bytes that ranks sent each other for them."),
    make("div", { class: "box scroll", tabindex: 0 }, make("table", { id: "nodes" }, head, rows)),
    dag.edges_step === null ? null : edgesTable(dag.edges)];
});
