// The plan's picture, its nodes coloured by their share of the step's time, or by which ranks are in them.

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
  const places = run().overview.places, by = keep("by", "time");
  const ranksIn = name => places.filter(place => place.node === name).map(place => place.ranks);
  const rows = [...dag.nodes, ...dag.parts].sort((a, b) => (b.share || 0) - (a.share || 0)).map(part => {
    const bar = make("meter", { min: 0, max: 1, value: part.share || 0, "aria-label": part.name + ": share of the step" });
    const cells = [part.name, part.op || "", part.op ? String(part.agent) : "", part.ranks || "",
      part.mean_s === null ? "-" : seconds(part.mean_s), part.share === null ? "-" : (part.share * 100).toFixed(1) + "%", bar, ranksIn(part.name).join(", ")];
    return make("tr", {}, cells.map(cell => make("td", {}, cell)));
  });
  const now = run().overview.state === "running" ? "ranks in it now" : "ranks in it last";
  const heads = ["node", "op", "agent", "ranks", "time", "share", "", now];
  const colors = choice("colours by", by, [["time", "share of the step's time"], ["state", now]], value => { page.state.by = value; redraw(); });
  const about = "times are of the slowest rank, mean of the last 10 steps; nodes on other ranks run at the same time, "
    + "so shares may add up to more than 100%";
  const head = make("tr", {}, heads.map(title => make("th", { scope: "col" }, title)));
  const drawn = picture(dag);
  for (const node of drawn ? dag.nodes : []) {
    const ground = drawn.grounds.get(node.name);
    if (!ground) continue;
    if (by === "time" && node.share !== null) paint(ground, heat(node.share), 0.15 + 0.35 * Math.min(1, node.share * 1.6));
    if (by !== "time" && ranksIn(node.name).length) paint(ground, "#4f8fe0", 0.45);
  }
  return [make("div", { class: "bar" }, colors, make("span", { class: "faint" }, about)),
    drawn ? drawn.box : dag.svg ? make("p", { class: "box" }, "The picture cannot be drawn; its nodes are listed below.") : null,
    make("div", { class: "box scroll", tabindex: 0 }, make("table", { id: "nodes" }, head, rows))];
});
