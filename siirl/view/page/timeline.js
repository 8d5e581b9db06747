// Ranks over time, from the trace: intervals of nodes, their phases below them. Zoomed by buttons, keys and Ctrl + wheel.

const LANE = { left: 178, row: 15, gap: 7, top: 22, width: 1240 };
const LEAST_PIXELS = 0.4, DEEPEST = 3, MOST_NAMES = 24;

const MEMORY = { peak_gib: "tensors at most", reserved_gib: "reserved at most", device_gib: "in use on the device", host_gib: "memory of the process" };

function factText(key, value) {
  if (key in MEMORY) return MEMORY[key] + " " + gib(value);
  return key === "bytes" ? sizeText(value) + " moved" : key + " " + (Number.isInteger(value) ? value.toLocaleString("en") : short(value));
}

function spanText([name, start, duration, , open, args], lane) {
  const facts = Object.entries(args).map(([key, value]) => typeof value === "number" ? factText(key, value) : key + " " + value);
  return [name + (open ? " (has no end on record)" : ""), (lane.label || "rank " + lane.rank) + (lane.lane ? ", " + lane.lane : ""),
    lasting(duration) + ", from " + lasting(start) + " on", ...facts].join("\n");
}

// Names of the outermost intervals, those that take longest first: they have a colour of their own.
function laneNames(trace) {
  const spent = new Map();
  for (const lane of trace.lanes) for (const span of lane.spans) if (span[3] === 0) spent.set(span[0], (spent.get(span[0]) || 0) + span[2]);
  return [...spent.keys()].sort((a, b) => spent.get(b) - spent.get(a));
}

function lanesPicture(trace, view, chosen, choose) {
  const names = new Set(laneNames(trace)), color = name => names.has(name) ? nodeColor(name) : "#8a929b";
  const scale = (LANE.width - LANE.left) / (view.end - view.start);
  let y = LANE.top, hidden = 0;
  const svg = draw("svg", { id: "lanes", tabindex: 0, role: "application",
    "aria-label": "timeline: arrows choose an interval, plus and minus zoom, Escape shows all" });
  for (const at of ticks(view.start, view.end, 8)) {
    const x = LANE.left + (at - view.start) * scale;
    svg.append(draw("text", { x, y: 13, class: "axis", "text-anchor": "middle" }, axisText(at, view.end - view.start)));
  }
  trace.lanes.forEach((lane, index) => {
    const deep = Math.min(DEEPEST, Math.max(0, ...lane.spans.map(span => span[3])));
    const helper = lane.lane && lane.lane !== "instructions";  // a thread of the rank above it
    svg.append(draw("text", { x: helper ? 16 : 4, y: y + 12, class: helper ? "axis" : null }, draw("title", {}, lane.label + (helper ? ", " + lane.lane : "")),
      (helper ? lane.lane : lane.title || "rank " + lane.rank).slice(0, 27)));
    lane.spans.forEach((span, place) => {
      const [name, start, duration, depth] = span;
      if (start + duration < view.start || start > view.end || depth > DEEPEST) return;
      const x = Math.max(LANE.left, LANE.left + (start - view.start) * scale);
      const wide = Math.min(LANE.width, LANE.left + (start + duration - view.start) * scale) - x;
      const mine = chosen && chosen[0] === index && chosen[1] === place;
      if (wide < LEAST_PIXELS && !mine) { hidden++; return; }
      const box = draw("rect", { class: "span", x: x.toFixed(1), y: y + depth * LANE.row, width: Math.max(0.8, wide).toFixed(1), height: LANE.row - 1,
        fill: color(name), "fill-opacity": depth ? 0.45 : 0.9, "data-name": name });
      if (mine) { box.style.stroke = "var(--ink)"; box.style.strokeWidth = "2"; }
      box.addEventListener("pointermove", event => tip(spanText(span, lane), event.clientX, event.clientY));
      box.addEventListener("pointerleave", () => tip(""));
      box.addEventListener("click", () => choose([index, place]));
      svg.append(box);
      if (wide > 7 * name.length + 8) svg.append(draw("text", { x: x + 4, y: y + depth * LANE.row + 11, "pointer-events": "none" }, name));
    });
    y += (deep + 1) * LANE.row + LANE.gap;
  });
  svg.setAttribute("viewBox", `0 0 ${LANE.width} ${y}`);
  svg.setAttribute("width", LANE.width);
  svg.setAttribute("height", y);
  return [svg, hidden];
}

const NO_TRACE = "No whole step is on record yet. A run records its steps 1, 2, 3, 10, 20, 50, 100, 200 and so on, all of them with trainer.trace=true, none with trainer.trace=false.";
const APART = 0.2;  // of the time shown, between steps: then the last one is shown first

section("timeline", "Timeline", ["timeline", "dag"], () => {
  const whole = run().timeline;
  LANE.width = roomWide();
  if (!whole) return [make("p", { class: "box" },
    NO_TRACE)];
  const kinds = { ranks: whole.chosen ? plural(new Set(whole.lanes.map(lane => lane.rank)).size, "rank") + ", evenly chosen" : "ranks" };
  for (const [kind, { lanes, of }] of Object.entries(whole.groups)) if (of > 1) kinds[kind] = (lanes.length < of ? lanes.length + " of " : "")
    + (kind === "alike" ? plural(of, "set") + " of ranks that do the same" : plural(of, kind.replace(/s$/, "")));
  const lanesBy = keep("lanes", "") in kinds ? keep("lanes", "") : whole.chosen && "alike" in kinds ? "alike" : "ranks";
  const trace = { ...whole, lanes: lanesBy === "ranks" ? whole.lanes : whole.groups[lanesBy].lanes };
  const all = { start: 0, end: Math.max(1e-3, ...trace.steps.map(step => step.end)) };
  const last = trace.steps[trace.steps.length - 1], apart = trace.steps.slice(1).reduce((sum, step, at) => sum + Math.max(0, step.start - trace.steps[at].end), 0);
  let view = keep("view", null) || (apart > APART * all.end ? { start: last.start, end: Math.max(last.end, last.start + 1e-3) } : all), chosen = null;
  const holder = make("div", { class: "lanes box" }), note = make("span", { class: "faint", role: "status" });
  const render = focus => {
    const [svg, hidden] = lanesPicture(trace, view, chosen, pick => { chosen = pick; render(true); });
    holder.replaceChildren(svg);
    svg.addEventListener("keydown", keys);
    svg.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 0.7 : 1.4);
    }, { passive: false });
    if (focus) svg.focus();
    const span = chosen && trace.lanes[chosen[0]].spans[chosen[1]];
    note.textContent = span ? spanText(span, trace.lanes[chosen[0]]).replaceAll("\n", "; ")
      : hidden ? plural(hidden, "interval") + " too short to be seen: zoom in" : "";
  };
  const look = next => { view = page.state.view = next; tip(""); render(true); };
  const zoom = times => {
    const middle = (view.start + view.end) / 2, half = Math.max(0.005, (view.end - view.start) / 2 * times);
    look({ start: Math.max(all.start, middle - half), end: Math.min(all.end, middle + half) });
  };
  const pan = part => {
    const wide = view.end - view.start, start = Math.min(all.end - wide, Math.max(all.start, view.start + part * wide));
    look({ start, end: start + wide });
  };
  const keys = event => {
    const { key } = event;
    if (key === "+" || key === "=") zoom(0.5);
    else if (key === "-") zoom(2);
    else if (key === "Escape") { chosen = null; look(all); }
    else if (key.startsWith("Arrow")) {
      const [lane, place] = chosen || [0, -1];
      if (key === "ArrowRight" || key === "ArrowLeft") {
        const next = place + (key === "ArrowRight" ? 1 : -1);
        if (trace.lanes[lane].spans[next]) chosen = [lane, next];
      } else {
        const next = lane + (key === "ArrowDown" ? 1 : -1);
        if (trace.lanes[next]) chosen = [next, 0];
      }
      const span = chosen && trace.lanes[chosen[0]].spans[chosen[1]];
      if (span && (span[1] > view.end || span[1] + span[2] < view.start)) pan((span[1] - view.start) / (view.end - view.start));
      else render(true);
    } else return;
    event.preventDefault();
  };
  const steps = trace.steps.map(step => make("button", { type: "button",
    onclick: () => look({ start: step.start, end: Math.max(step.end, step.start + 1e-3) }) }, "step " + step.step));
  render();
  const lanesChoice = Object.keys(kinds).length > 1 ? choice("lanes", lanesBy, Object.entries(kinds), value => { page.state.lanes = value; redraw(); }) : null;
  return [make("div", { class: "bar" }, lanesChoice, steps, make("button", { type: "button", onclick: () => look(all) }, "all"),
    make("button", { type: "button", onclick: () => zoom(0.5), "aria-label": "zoom in" }, "+"),
    make("button", { type: "button", onclick: () => zoom(2), "aria-label": "zoom out" }, "\u2212"),
    make("button", { type: "button", onclick: () => pan(-0.5), "aria-label": "earlier" }, "\u2190"),
    make("button", { type: "button", onclick: () => pan(0.5), "aria-label": "later" }, "\u2192"), note),
    make("div", { class: "legend" }, laneNames(trace).slice(0, MOST_NAMES).map(name => make("span", {}, make("i", { class: "patch", color: nodeColor(name) }), name))), holder];
});
