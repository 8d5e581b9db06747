// The plan's picture, its nodes coloured by their share of the step's time, or by which ranks are in them.

const STATE_COLORS = { failed: "#c8344a", runs: "#4f8fe0", waits: "#e0a030", idle: "#8a929b" };
const STATES = Object.keys(STATE_COLORS);  // a node has the first that one of its ranks has

function heat(share) { return `hsl(${Math.round(130 - 130 * Math.min(1, share * 1.6))} 75% 55%)`; }

// The picture as an element of its own: {box, svg, grounds: node -> its ground}; null if it cannot be drawn.
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
  }
  return { box: make("div", { class: "picture", id: "picture", tabindex: 0 }, svg), svg, grounds };
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
    const cells = [part.name, part.op || "", part.op ? String(part.agent) : "", part.ranks || "",
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
    const words = drawn.svg.querySelector("#" + CSS.escape(link.mark) + " text");
    if (words && link.version !== null) words.textContent = "weights " + link.version;
  }
  for (const node of drawn ? dag.nodes : []) {
    const ground = drawn.grounds.get(node.name);
    if (!ground) continue;
    if (by === "time" && node.share !== null) paint(ground, heat(node.share), 0.15 + 0.35 * Math.min(1, node.share * 1.6));
    const state = STATES.find(state => placesAt(node.name).some(place => place.state === state)) || "idle";
    if (by !== "time" && about.places.length) {
      paint(ground, STATE_COLORS[state], 0.45);
      ground.setAttribute("data-state", state);
      ground.firstChild.textContent += "\n" + (saidAt(node.name).join("\n") || "idle");
    }
  }
  return [make("div", { class: "bar" }, colors, make("span", { class: "faint" }, legend),
    by === "time" || !doingNow.length ? null : make("span", { id: "doing", role: "status" }, plural(about.places.reduce((sum, place) => sum + place.count, 0), "rank") + ": " + doingNow.join(", "))),
    drawn ? drawn.box : dag.svg ? make("p", { class: "box" }, "The picture cannot be drawn; its nodes are listed below.") : null,
    make("div", { class: "box scroll", tabindex: 0 }, make("table", { id: "nodes" }, head, rows))];
});
