// Curves of metrics: runs over each other, the agents of a metric in one picture, smoothed by a centred mean.

const CHART = { width: 440, height: 210, left: 52, right: 10, top: 8, bottom: 24 };
const MOST_CHARTS = 60;
const FIRST = [
  "reward/total", "val/reward/mean", "reward/own", "reward/team", "reward/env", "reward/shaping", "reward/group_degenerate",
  "rollout/response_length", "actor/entropy", "actor/ppo_kl", "actor/ref_kl",
  "actor/grad_norm", "actor/clip_fraction", "actor/rollout_log_prob_diff", "perf/tokens_per_s", "time/step_s",
];
// What stands for a metric in runs that do not have it: written before it had its name, or of what only samples.
const OLDER = { "reward/total": ["reward/shaped", "reward/score"] };

// The place of a metric among the usual ones, what is optimised first; others come after them, by name.
function place(name) {
  const at = FIRST.findIndex(first => first === name || (OLDER[first] || []).includes(name));
  return at < 0 ? FIRST.length : at;
}
function inOrder(names) { return [...names].sort((a, b) => place(a) - place(b) || (a < b ? -1 : a > b ? 1 : 0)); }
function usual(names) {
  return FIRST.map(name => [name, ...(OLDER[name] || [])].find(known => names.has(known))).filter(Boolean);
}
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

// A line for each (run, agent) that has the metric: colours tell agents of one run, or else runs; dashes the other.
function linesOf(metric, agent, window) {
  const lines = [], several = page.data.runs.length > 1;
  page.data.runs.forEach((item, index) => {
    if (several && keep("hidden-" + index, false)) return;
    for (const [name, curve] of Object.entries(partOf("curves", index) || {})) {
      if (base(name) !== metric || (agent !== "" && agentOf(name) !== null && String(agentOf(name)) !== agent)) continue;
      const of = agentOf(name);
      lines.push({
        color: several ? COLORS[index % COLORS.length] : of === null ? COLORS[0] : agentColor(of),
        dash: several && of !== null ? DASHES[of % DASHES.length] : "",
        label: [several && item.label, of !== null && "agent " + of].filter(Boolean).join(", "),
        steps: curve.steps, values: smooth(curve.values, window), raw: curve.values, of: curve.of,
      });
    }
  });
  return lines;
}

function chart(metric, lines) {
  const { width, height, left, right, top, bottom } = CHART;
  let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
  for (const line of lines) {
    for (const value of line.values) { low = Math.min(low, value); high = Math.max(high, value); }
    first = Math.min(first, line.steps[0]);
    last = Math.max(last, line.steps[line.steps.length - 1]);
  }
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= room; high += room; }
  if (first === last) { first -= 0.5; last += 0.5; }
  const x = step => left + (step - first) / (last - first) * (width - left - right);
  const y = value => top + (high - value) / (high - low) * (height - top - bottom);
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0 });
  picture.append(draw("title", {}, metric + ": " + lines.map(line =>
    (line.label ? line.label + " " : "") + short(line.raw[line.raw.length - 1]) + " in step " + line.steps[line.steps.length - 1]).join("; ")));
  for (const value of ticks(low, high, 4)) picture.append(
    draw("line", { class: "tick", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    draw("text", { class: "axis", x: left - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  for (const step of ticks(first, last, 5).filter(Number.isInteger)) picture.append(
    draw("text", { class: "axis", x: x(step), y: height - 7, "text-anchor": "middle" }, String(step)));
  for (const line of lines) {
    const points = line.steps.map((step, index) => x(step).toFixed(1) + "," + y(line.values[index]).toFixed(1)).join(" ");
    if (line.steps.length === 1) picture.append(draw("circle", { cx: x(line.steps[0]), cy: y(line.values[0]), r: 3, fill: line.color }));
    else picture.append(draw("polyline", { points, fill: "none", stroke: line.color, "stroke-width": 1.6, "stroke-dasharray": line.dash || null }));
  }
  const cursor = draw("line", { class: "tick", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(cursor);
  let place = last;
  const point = (clientX, clientY) => {
    const step = Math.round(Math.max(first, Math.min(last, place)));
    cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); cursor.setAttribute("visibility", "visible");
    const said = lines.map(line => {
      let at = 0;
      line.steps.forEach((other, index) => { if (Math.abs(other - step) < Math.abs(line.steps[at] - step)) at = index; });
      const mean = line.values[at] === line.raw[at] ? "" : " (smoothed " + short(line.values[at]) + ")";
      return (line.label ? line.label + ": " : "") + short(line.raw[at]) + mean + " in step " + line.steps[at];
    });
    tip(said.join("\n"), clientX, clientY);
  };
  const hide = () => { tip(""); cursor.setAttribute("visibility", "hidden"); };
  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    place = first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (last - first);
    point(event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    place = Math.max(first, Math.min(last, Math.round(place) + move));
    const box = picture.getBoundingClientRect();
    point(box.left + box.width / 2, box.top + 20);
    event.preventDefault();
  });
  const left_out = lines.find(line => line.of);
  return make("figure", { "data-metric": metric }, make("figcaption", {}, metric), picture,
    make("div", { class: "legend" }, lines.length > 1 ? lines.map(line => {
      const stroke = { x1: 0, x2: 22, y1: 4, y2: 4, stroke: line.color, "stroke-width": 2.5, "stroke-dasharray": line.dash || null };
      return make("span", {}, draw("svg", { class: "key", viewBox: "0 0 22 8", "aria-hidden": "true" }, draw("line", stroke)), line.label);
    }) : null, left_out ? make("span", {}, left_out.steps.length + " of " + left_out.of + " points") : null));
}

section("curves", "Curves", ["curves"], () => {
  const names = new Set(), agents = new Set();
  for (const index of page.data.runs.keys()) for (const name of Object.keys(partOf("curves", index) || {})) {
    names.add(base(name));
    if (agentOf(name) !== null) agents.add(agentOf(name));
  }
  const words = keep("metric", ""), window = Number(keep("window", 1)), agent = keep("agent", "");
  const grid = make("div", { class: "grid" }), count = make("span", { class: "faint", role: "status" });
  const render = () => {
    const wanted = keep("metric", "").toLowerCase().split(/\s+/).filter(Boolean);
    const found = wanted.length ? inOrder([...names].filter(name => wanted.some(word => name.toLowerCase().includes(word)))) : usual(names);
    const charts = found.slice(0, MOST_CHARTS).map(name => [name, linesOf(name, keep("agent", ""), Number(keep("window", 1)))]);
    grid.replaceChildren(...charts.filter(([, lines]) => lines.length).map(([name, lines]) => chart(name, lines)));
    count.textContent = Math.min(found.length, MOST_CHARTS) + " of " + plural(names.size, "metric")
      + (wanted.length ? "" : " (the usual ones; type to see others)");
  };
  const set = key => value => { page.state[key] = value; render(); };
  const search = make("input", {
    type: "search", list: "metrics", value: words, placeholder: "entropy, time/, ...",
    oninput: event => set("metric")(event.target.value),
  });
  const bar = make("div", { class: "bar" }, make("label", {}, "metrics with", search),
    make("datalist", { id: "metrics" }, [...names].sort().map(name => make("option", { value: name }))),
    choice("smoothing", window, [[1, "none"], [5, "5 points"], [15, "15 points"], [51, "51 points"], [151, "151 points"]], set("window")),
    agents.size ? choice("agent", agent, [["", "all"], ...[...agents].sort((a, b) => a - b).map(n => [n, "agent " + n])], set("agent")) : null,
    page.data.runs.length > 1 ? page.data.runs.map((item, index) => make("label", {},
      make("input", { type: "checkbox", checked: !keep("hidden-" + index, false), onchange: event => set("hidden-" + index)(!event.target.checked) }),
      item.label)) : null, count);
  if (!names.size) return [make("p", { class: "box" }, "No step has been reported yet: metrics.jsonl is empty or not there.")];
  render();
  return [bar, grid];
}, true);
