// Curves of metrics: runs over each other, the agents of a metric in one picture, smoothed by a centred mean.

const CHART = { width: 354, height: 190, left: 52, right: 10, top: 8, bottom: 24 };
const MOST_CHARTS = 60;
const PART = /^(val\/)?reward\/part\//;  // a function or reward that is added to others; docs/rewards.md
const FIRST = [
  "reward/total", "val/reward/mean", PART, "reward/own", "reward/team", "reward/env", "reward/shaping", "reward/zero_std_groups",
  "rollout/response_length", "actor/entropy", "actor/ppo_kl", "actor/ref_kl",
  "actor/grad_norm", "actor/clip_fraction", "actor/rollout_log_prob_diff", "perf/tokens_per_s", "time/step_s",
];
// What stands for a metric in runs that only sample, or are older than it. Names that a metric had are not seen here.
const IN_PLACE = { "reward/total": ["reward/score"] };

// The place of a metric among the usual ones, what is optimised first; others come after them, by name.
function place(name) {
  const at = FIRST.findIndex(first => first === PART ? PART.test(name) : first === name || (IN_PLACE[first] || []).includes(name));
  return at < 0 ? FIRST.length : at;
}
function inOrder(names) { return [...names].sort((a, b) => place(a) - place(b) || (a < b ? -1 : a > b ? 1 : 0)); }
function usual(names) {
  return FIRST.flatMap(name => name === PART ? inOrder(partsOf(names)) : [name, ...(IN_PLACE[name] || [])].filter(known => names.has(known)).slice(0, 1));
}
function partsOf(names) { return [...new Set([...names].map(base).filter(name => PART.test(name)))]; }
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function agentOf(name) { const found = /^agent_(\d+)\//.exec(name); return found ? Number(found[1]) : null; }
function base(name) { return name.replace(/^agent_\d+\//, ""); }

function smooth(values, window) {
  if (window < 2) return values;
  const half = Math.floor(window / 2), sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, index) => {
    const low = Math.max(0, index - half), high = Math.min(values.length, index + half + 1);
    return (sums[high] - sums[low]) / (high - low);
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(times => times * power).find(size => size >= rough) || power * 10;
  const found = [];
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-9 && found.length < 20; index++) found.push(index * step);
  return found;
}

// Step -> seconds since the run began, as far as its metrics say when they were written.
function clockOf(index) {
  const clock = partOf("clock", index) || { steps: [], seconds: [] };
  return step => {
    let low = 0, high = clock.steps.length - 1;
    if (high < 0 || step < clock.steps[0] || step > clock.steps[high]) return null;
    while (high - low > 1) { const middle = (low + high) >> 1; if (clock.steps[middle] <= step) low = middle; else high = middle; }
    const wide = clock.steps[high] - clock.steps[low], part = wide ? (step - clock.steps[low]) / wide : 0;
    return clock.seconds[low] + part * (clock.seconds[high] - clock.seconds[low]);
  };
}

// A line for each (run, agent) that has the metric: colours tell agents of one run, or else runs; dashes the other.
// look: {agent, window, across: "step" or "time", log, zoom: [from, to] or null}
function linesOf(metric, look) {
  const lines = [], several = page.data.runs.length > 1;
  page.data.runs.forEach((item, index) => {
    if (several && keep("hidden-" + index, false)) return;
    const clock = clockOf(index);
    for (const [name, curve] of Object.entries(partOf("curves", index) || {})) {
      const of = agentOf(name);
      if (base(name) !== metric || (look.agent !== "" && of !== null && String(of) !== look.agent)) continue;
      const smoothed = smooth(curve.values, look.window), points = [];
      curve.steps.forEach((step, at) => {
        const x = look.across === "time" ? clock(step) : step;
        if (x === null || (look.log && smoothed[at] <= 0) || (look.zoom && (x < look.zoom[0] || x > look.zoom[1]))) return;
        points.push({ x, step, y: smoothed[at], raw: curve.values[at] });
      });
      if (points.length) lines.push({
        color: several ? COLORS[index % COLORS.length] : of === null ? COLORS[0] : agentColor(of),
        dash: several && of !== null ? DASHES[of % DASHES.length] : "", run: item.label, agent: of,
        label: [several && item.label, of !== null && "agent " + of].filter(Boolean).join(", "), points, clock, of: curve.of,
      });
    }
  });
  return lines;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high) && found.length < 40; power++)
    for (const times of high - low > 3 ? [1] : [1, 2, 5]) found.push(power + Math.log10(times));
  return found.filter(value => value >= low - 1e-9 && value <= high + 1e-9);
}

// zoom: what a stretch that is drawn over the picture is given to.
function chart(metric, lines, look, zoom) {
  const { width, height, left, right, top, bottom } = CHART, up = value => look.log ? Math.log10(value) : value;
  let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
  for (const line of lines) for (const point of line.points) {
    low = Math.min(low, up(point.y)); high = Math.max(high, up(point.y));
    first = Math.min(first, point.x); last = Math.max(last, point.x);
  }
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= room; high += room; }
  if (first === last) { first -= 0.5; last += 0.5; }
  const x = at => left + (at - first) / (last - first) * (width - left - right);
  const y = value => top + (high - up(value)) / (high - low) * (height - top - bottom);
  const axis = at => look.across === "time" ? seconds(Number(at.toPrecision(6))) : String(at);
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0 });
  const end = line => line.points[line.points.length - 1];
  picture.append(draw("title", {}, metric + ": " + lines.map(line => (line.label ? line.label + " " : "") + short(end(line).raw) + " in step " + end(line).step).join("; ")));
  for (const value of look.log ? logTicks(low, high) : ticks(low, high, 4)) {
    const at = top + (high - value) / (high - low) * (height - top - bottom);
    picture.append(draw("line", { class: "tick", x1: left, x2: width - right, y1: at, y2: at }),
      draw("text", { class: "axis", x: left - 5, y: at + 4, "text-anchor": "end" }, short(look.log ? 10 ** value : value)));
  }
  for (const at of ticks(first, last, 5).filter(at => look.across === "time" || Number.isInteger(at))) picture.append(
    draw("text", { class: "axis", x: x(at), y: height - 7, "text-anchor": "middle" }, axis(at)));
  for (const line of lines) {
    const points = line.points.map(point => x(point.x).toFixed(1) + "," + y(point.y).toFixed(1)).join(" ");
    if (line.points.length === 1) picture.append(draw("circle", { cx: x(line.points[0].x), cy: y(line.points[0].y), r: 3, fill: line.color }));
    else picture.append(draw("polyline", { points, fill: "none", stroke: line.color, "stroke-width": 1.6, "stroke-dasharray": line.dash || null }));
  }
  const cursor = draw("line", { class: "tick", y1: top, y2: height - bottom, visibility: "hidden" });
  const stretch = draw("rect", { class: "stretch", y: top, height: height - top - bottom, width: 0, x: 0 });
  picture.append(stretch, cursor);
  let place = last, from = null;
  const point = (clientX, clientY) => {
    const at = Math.max(first, Math.min(last, place));
    cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at)); cursor.setAttribute("visibility", "visible");
    tip(lines.map(line => {
      const near = line.points.reduce((best, other) => Math.abs(other.x - at) < Math.abs(best.x - at) ? other : best);
      const mean = near.y === near.raw ? "" : " (smoothed " + short(near.y) + ")", time = line.clock(near.step);
      return (line.label ? line.label + ": " : "") + short(near.raw) + mean + " in step " + near.step + (time === null ? "" : ", after " + seconds(time));
    }).join("\n"), clientX, clientY);
  };
  const hide = () => { tip(""); cursor.setAttribute("visibility", "hidden"); };
  const under = event => {
    const box = picture.getBoundingClientRect();
    return Math.max(first, Math.min(last, first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (last - first)));
  };
  picture.addEventListener("pointermove", event => {
    place = under(event);
    if (from !== null) { stretch.setAttribute("x", x(Math.min(from, place))); stretch.setAttribute("width", Math.abs(x(place) - x(from))); }
    point(event.clientX, event.clientY);
  });
  picture.addEventListener("pointerdown", event => { from = under(event); picture.setPointerCapture(event.pointerId); });
  picture.addEventListener("pointerup", event => {
    const to = under(event), began = from;
    from = null;
    if (began !== null && Math.abs(x(to) - x(began)) > 6) zoom([Math.min(began, to), Math.max(began, to)]);
  });
  picture.addEventListener("dblclick", () => zoom(null));
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  const positions = [...new Set(lines.flatMap(line => line.points.map(point => point.x)))].sort((a, b) => a - b);
  picture.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const now = positions.findIndex(at => at >= place - 1e-9);
    place = positions[Math.max(0, Math.min(positions.length - 1, (now < 0 ? positions.length - 1 : now) + move))];
    const box = picture.getBoundingClientRect();
    point(box.left + box.width / 2, box.top + 20);
    event.preventDefault();
  });
  const thinned = lines.find(line => line.of);
  return make("figure", { "data-metric": metric }, make("figcaption", {}, metric), picture,
    make("div", { class: "legend" }, lines.length > 1 ? lines.map(line => {
      const stroke = { x1: 0, x2: 22, y1: 4, y2: 4, stroke: line.color, "stroke-width": 2.5, "stroke-dasharray": line.dash || null };
      return make("span", {}, draw("svg", { class: "key", viewBox: "0 0 22 8", "aria-hidden": "true" }, draw("line", stroke)), line.label);
    }) : null, thinned ? make("span", {}, thinned.points.length + " of " + thinned.of + " points") : null));
}

// A cell that no spreadsheet takes for a formula.
function csvCell(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
  return '"' + text.replaceAll('"', '""') + '"';
}

// What the charts show, unsmoothed, as a table to be saved.
function csvOf(charts) {
  const rows = [["metric", "run", "agent", "step", "seconds", "value"]];
  for (const [metric, lines] of charts) for (const line of lines) for (const point of line.points) {
    const time = line.clock(point.step);
    rows.push([metric, line.run, line.agent === null ? "" : line.agent, point.step, time === null ? "" : Number(time.toFixed(1)), point.raw]);
  }
  return rows.map(row => row.map(csvCell).join(",")).join("\n") + "\n";
}

function save(text, name) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" })), link = make("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

section("curves", "Curves", ["curves", "clock"], () => {
  const names = new Set(), agents = new Set();
  for (const index of page.data.runs.keys()) for (const name of Object.keys(partOf("curves", index) || {})) {
    names.add(base(name));
    if (agentOf(name) !== null) agents.add(agentOf(name));
  }
  if (!names.size) return [make("p", { class: "box" }, "No step has been reported yet: metrics.jsonl is empty or not there.")];
  const words = keep("metric", ""), grid = make("div", { class: "grid" }), count = make("span", { class: "faint", role: "status" });
  const whole = make("button", { type: "button", onclick: () => set("zoom")(null) }, "whole run");
  let charts = [];
  const render = () => {
    const wanted = keep("metric", "").toLowerCase().split(/\s+/).filter(Boolean);
    const look = { agent: keep("agent", ""), window: Number(keep("window", 1)), across: keep("across", "step"), log: keep("scale", "") === "log", zoom: keep("zoom", null) };
    const found = wanted.length ? inOrder([...names].filter(name => wanted.some(word => name.toLowerCase().includes(word)))) : usual(names);
    charts = found.slice(0, MOST_CHARTS).map(name => [name, linesOf(name, look)]).filter(([, lines]) => lines.length);
    grid.replaceChildren(...charts.map(([name, lines]) => chart(name, lines, look, set("zoom"))));
    whole.hidden = !look.zoom;
    count.textContent = charts.length + " of " + plural(names.size, "metric") + (wanted.length ? "" : " (the usual ones; type to see others)");
  };
  const set = key => value => { page.state[key] = value; if (key === "across") page.state.zoom = null; tip(""); render(); };
  const search = make("input", {
    type: "search", list: "metrics", value: words, placeholder: "entropy, time/, ...",
    oninput: event => set("metric")(event.target.value),
  });
  const bar = make("div", { class: "bar" }, make("label", {}, "metrics with", search),
    make("datalist", { id: "metrics" }, [...names].sort().map(name => make("option", { value: name }))),
    choice("smoothing", keep("window", 1), [[1, "none"], [5, "5 points"], [15, "15 points"], [51, "51 points"], [151, "151 points"]], set("window")),
    choice("over", keep("across", "step"), [["step", "steps"], ["time", "wall-clock time"]], set("across")),
    choice("scale", keep("scale", ""), [["", "linear"], ["log", "logarithmic"]], set("scale")),
    agents.size ? choice("agent", keep("agent", ""), [["", "all"], ...[...agents].sort((a, b) => a - b).map(n => [n, "agent " + n])], set("agent")) : null,
    page.data.runs.length > 1 ? page.data.runs.map((item, index) => make("label", {},
      make("input", { type: "checkbox", checked: !keep("hidden-" + index, false), onchange: event => set("hidden-" + index)(!event.target.checked) }),
      item.label)) : null,
    make("button", { type: "button", id: "csv", onclick: () => save(csvOf(charts), "curves.csv") }, "CSV"), whole, count);
  render();
  return [bar, grid, make("p", { class: "faint" }, "Draw over a picture to look closer at a stretch of all of them; a double click shows the whole run.")];
}, true);
