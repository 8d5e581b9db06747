"use strict";
// The page: sections as tabs, made of the data anew whenever that changes. All text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["#3b6fb6", "#d9822b", "#3f9b6c", "#a2559b", "#c04f4f", "#8a8a3a", "#4a9fb0", "#9c7d5f"];
const MORE_COLORS = [...COLORS, "#6a5acd", "#c98bb9", "#5f8a5f", "#b5651d", "#2e7f86", "#a0a040", "#d46a6a", "#7893b5"];
const REFRESH_MS = 5000, MOST_WAIT_MS = 60000;
const SECTIONS = [];
const page = { data: null, section: null, run: 0, stale: false, state: {} };
const PARTS = new Map();  // "RUN NAME" -> {value, notes, etag}: what has been read so far of each run
const MOST_TEXTS = 40;  // blocks of conversations that are kept

// An element: attributes as an object ("on..." are functions), then children: elements, or values shown as text.
function make(name, attributes, ...children) { return fill(document.createElement(name), attributes, children); }
function draw(name, attributes, ...children) { return fill(document.createElementNS(SVG, name), attributes, children); }
function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "color") element.style.setProperty("--agent", value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined) element.append(child);
  return element;
}
// needs: names of the parts that it shows, of the chosen run, or (every) of all runs.
function section(id, title, needs, show, every) { SECTIONS.push({ id, title, needs, show, every }); }
function partOf(name, index) { const found = PARTS.get(index + " " + name); return found && found.value; }
// The parts of the chosen run by their names, as far as they have been read.
function run() { return new Proxy({}, { get: (_, name) => partOf(name, page.run) }); }
function needed(shown) {
  const runs = shown.every ? page.data.runs.map((_, index) => index) : [page.run];
  return runs.flatMap(index => shown.needs.map(name => [name, index]));
}

// Reads a part: of this file, or from the server; whether it says anything new.
async function load(name, index) {
  const key = index + " " + name, known = PARTS.get(key);
  if (!page.data.live) {
    if (known) return false;
    const mark = ["part", index, ...name.split(" ")].join("-");
    let element = document.getElementById(mark);
    if (!element && document.readyState === "loading") {  // the file goes on behind this script
      await new Promise(done => document.addEventListener("DOMContentLoaded", done, { once: true }));
      element = document.getElementById(mark);
    }
    PARTS.set(key, element ? JSON.parse(element.textContent) : { value: null, notes: [] });
    return true;
  }
  const headers = known && known.etag ? { "If-None-Match": known.etag } : {};
  const answer = await fetch("part/" + index + "/" + encodeURIComponent(name), { headers, cache: "no-store" });
  if (answer.status === 304) return false;
  if (answer.status !== 200) throw new Error("answer " + answer.status);
  PARTS.set(key, { ...await answer.json(), etag: answer.headers.get("ETag") || "" });
  if (name === "episodes") for (const other of texts(index)) PARTS.delete(other);  // files of them were written since
  return true;
}

function texts(index) { return [...PARTS.keys()].filter(key => key.startsWith(index + " texts ")); }

// The texts of a block of conversations; the ones that were asked for longest ago are forgotten.
async function textsOf(block) {
  const name = "texts " + block, key = page.run + " " + name;
  if (!PARTS.has(key)) await load(name, page.run);
  const found = PARTS.get(key);
  PARTS.delete(key);
  PARTS.set(key, found);
  const kept = texts(page.run);
  for (const other of kept.slice(0, Math.max(0, kept.length - MOST_TEXTS))) PARTS.delete(other);
  return found.value || {};
}
function plural(count, word) { return count + " " + word + (count === 1 ? "" : "s"); }
function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
function seconds(value) {
  if (value < 120) return String(Number(value < 10 ? value.toPrecision(2) : value.toFixed(1))) + " s";
  const minutes = Math.round(value / 60);
  return minutes < 120 ? minutes + " min" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}
function lasting(ms) { return ms < 10000 ? short(ms) + " ms" : seconds(ms / 1000); }
function axisText(ms, wide) { return wide < 10000 ? short(ms) + " ms" : short(ms / 1000) + " s"; }
function agentColor(agent) { return page.data.agent_colors[agent % page.data.agent_colors.length]; }
function choice(title, value, options, change) {
  const chosen = options.map(([key, text]) => make("option", { value: key, selected: String(key) === String(value) }, text));
  return make("label", {}, title, make("select", { onchange: event => change(event.target.value) }, chosen));
}
function keep(key, otherwise) { return key in page.state ? page.state[key] : otherwise; }

function tip(text, x, y) {
  const box = document.getElementById("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const wide = box.offsetWidth, high = box.offsetHeight;
  box.style.left = Math.max(4, Math.min(x + 14, innerWidth - wide - 8)) + "px";
  box.style.top = Math.max(4, y + 18 + high > innerHeight ? y - high - 10 : y + 18) + "px";
}

section("overview", "Overview", ["overview"], () => {
  const about = run().overview, parts = [];
  const facts = [
    ["state", [make("span", { class: "state " + about.state, id: "state" }, about.state), about.cause ? " " + about.cause : ""]],
    ["step", make("span", { id: "step" }, about.step === null ? "none yet" : String(about.step),
      about.total ? " of " + about.total : "", " ",
      about.total ? make("progress", { max: about.total, value: about.step || 0, "aria-label": "steps done" }) : null,
      about.left_s !== null ? " about " + seconds(about.left_s) + " left" : "")],
    ["folder", make("code", {}, about.folder)],
    ["command", about.command ? make("details", {}, make("summary", {}, make("code", {}, brief(about.command))), make("code", {}, about.command)) : "-"],
    ["started", [about.started, about.host && " on " + about.host, about.starts > 1 && " (start " + about.starts + " in this folder)"]
      .filter(Boolean).join("") || "-"],
    ["ranks", about.world_size === null ? "-" : String(about.world_size)],
    ["siirl", about.commit.trim() || "-"],
    ["packages", Object.entries(about.packages).map(([name, version]) => name + " " + version).join(", ") || "-"],
  ];
  parts.push(make("div", { class: "box" }, make("h2", {}, about.name),
    make("table", {}, facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value))))));
  page.written = Promise.all([
    later(parts, "Numbers", "curves", "numbers", found => [lastNumbers(found || {})]),
    later(parts, "Alerts", "alerts", "alerts", found => found && found.length ? found.map(alert => make("div", { class: "box alert" }, alert.text))
      : [make("p", { class: "faint" }, "Nothing in the numbers asks for a look.")]),
  ]);
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
  ["reward", ["reward/total", "reward/shaped", "reward/score"]], ["validation reward", ["val/reward/mean"]], ["response length", ["rollout/response_length"]],
  ["entropy", ["actor/entropy"]], ["tokens per second", ["perf/tokens_per_s"]],
];

// The last values of what is looked at first, each with its curve in small, agent by agent.
function lastNumbers(curves) {
  const rows = [];
  for (const [title, names] of SHOWN_FIRST) {
    const of = name => Object.keys(curves).filter(known => known.replace(/^agent_\d+\//, "") === name);
    const found = names.map(of).find(known => known.length) || [];
    for (const name of found) {
      const { steps, values } = curves[name], agent = /^agent_(\d+)\//.exec(name);
      rows.push(make("tr", { "data-last": name }, make("th", { scope: "row" }, title + (agent ? ", agent " + agent[1] : "")), make("td", {}, short(values[values.length - 1])),
        make("td", { class: "faint" }, "step " + steps[steps.length - 1]), make("td", {}, sparkline(steps, values, agent ? agentColor(Number(agent[1])) : COLORS[0]))));
    }
  }
  return rows.length ? make("div", { class: "box" }, make("table", {}, rows)) : make("p", { class: "faint" }, "No step has been reported yet.");
}

function sparkline(steps, values, color) {
  const wide = 220, high = 28, low = Math.min(...values), top = Math.max(...values), first = steps[0], last = steps[steps.length - 1];
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

// What was left out of the parts that are shown.
function leftOut(parts) {
  const notes = [...new Set(parts.flatMap(([name, index]) => (PARTS.get(index + " " + name) || { notes: [] }).notes))];
  return notes.length ? [make("h2", {}, "Left out"), make("ul", { class: "box notes" }, notes.map(note => make("li", {}, note)))] : [];
}

function healthSection() {
  section("health", "Health", ["health"], () => {
    const { errors, logs, starts, attempts, engines, last_sign_s } = run().health, parts = [make("h2", {}, "Attempts")];
    const ago = at => seconds(Math.max(0, page.data.made_s - at)) + " before this page was made";
    const rows = (head, lines, id) => make("div", { class: "box scroll", tabindex: 0 }, make("table", { id },
      make("tr", {}, head.map(title => make("th", { scope: "col" }, title))), lines.map(cells => make("tr", {}, cells.map(cell => make("td", {}, cell))))));
    parts.push(make("p", { id: "life" }, [starts && plural(starts, "start") + " of this run", attempts.length ? plural(attempts.length, "attempt") + " of the last one failed" : "no attempt was lost",
      last_sign_s && "last sign of life " + ago(last_sign_s)].filter(Boolean).join("; ") + "."));
    if (attempts.length) parts.push(rows(["attempt", "ended", "by", "went on from"], attempts.map(one => [String(one.attempt), ago(one.ended_s), one.cause, one.next]), "attempts"));
    if (engines.length) parts.push(make("h2", {}, "Engines and queues, as last reported"), rows(["metric", "agent", "value", ""],
      engines.map(([metric, agent, value, meaning]) => [metric, agent === null ? "" : String(agent), short(value), meaning]), "engines"));
    parts.push(make("h2", {}, "Errors"));
    for (const error of errors) {
      const where = ["rank " + error.rank, error.host, error.node !== "None" && error.node,
        error.step !== "None" && "step " + error.step].filter(Boolean).join(", ");
      parts.push(make("div", { class: "box" }, make("h3", {}, where + (error.secondary === "True" ? " (a follower: its peer went away)" : "")),
        make("pre", { class: "down" }, error.error),
        make("details", {}, make("summary", {}, "traceback"), make("pre", { class: "details" }, error.traceback))));
    }
    if (!errors.length) parts.push(make("p", { class: "faint" }, "No rank has left an error."));
    parts.push(make("h2", {}, "Last lines of the logs"));
    for (const log of logs) parts.push(make("details", { open: errors.some(error => log.name === "rank_" + error.rank + ".log") },
      make("summary", {}, log.name), make("pre", { class: "details" }, log.lines.join("\n") || "(empty)")));
    if (!logs.length) parts.push(make("p", { class: "faint" }, "There are no logs in the folder."));
    return parts;
  });
}

// What can be scrolled or have the focus in a section; a section that is drawn anew has it in the same order.
const SCROLLED = ".scroll, .lanes, .picture", FOCUSED = "button, input, select, summary, [tabindex]";

function show(id, focus) {
  const before = page.section;
  page.section = SECTIONS.some(item => item.id === id) ? id : "overview";
  page.stale = false;
  tip("");
  for (const tab of document.getElementById("tabs").children) {
    const chosen = tab.id === "tab-" + page.section;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) tab.focus();
  }
  const main = document.getElementById("main"), shown = SECTIONS.find(item => item.id === page.section);
  const at = scrollY, wanted = needed(shown), missing = wanted.filter(([name, index]) => !PARTS.has(index + " " + name));
  let content;
  try {
    content = missing.length ? [make("p", { class: "faint", role: "status" }, "reading...")] : [shown.show(), leftOut(wanted)];
  } catch (error) {
    content = make("p", { class: "box down" }, "This section cannot be shown: " + error.message);
  }
  const panel = make("div", { role: "tabpanel", id: "panel", "aria-labelledby": "tab-" + page.section }, content);
  const scrolled = [...main.querySelectorAll(SCROLLED)].map(item => [item.scrollLeft, item.scrollTop]);
  const focused = [...main.querySelectorAll(FOCUSED)].indexOf(document.activeElement);
  main.replaceChildren(panel);
  scrollTo(0, at);
  if (before === page.section && !missing.length) {
    main.querySelectorAll(SCROLLED).forEach((item, index) => item.scrollTo(...scrolled[index] || [0, 0]));
    if (focused >= 0) main.querySelectorAll(FOCUSED)[focused]?.focus({ preventScroll: true });
  }
  if (!missing.length) return Promise.resolve();
  return Promise.all(missing.map(([name, index]) => load(name, index))).then(
    () => panel.isConnected ? show(page.section) : null,
    error => panel.replaceChildren(make("p", { class: "box down" }, "This section cannot be read: " + error.message)));
}

function redraw() { return show(page.section); }

function header() {
  const names = page.data.runs.map((item, index) => make("option", { value: index, selected: index === page.run }, item.label));
  document.getElementById("run").replaceChildren(...names);
  document.getElementById("which").hidden = names.length < 2;
  document.getElementById("made").textContent = (page.data.live ? "as of " : "written ") + page.data.made;
}

function tabs() {
  const list = document.getElementById("tabs");
  list.replaceChildren(...SECTIONS.map(item => make("button",
    { role: "tab", id: "tab-" + item.id, "aria-controls": "panel", type: "button", onclick: () => { location.hash = item.id; } }, item.title)));
  list.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = SECTIONS.findIndex(item => item.id === page.section);
    location.hash = SECTIONS[(at + step + SECTIONS.length) % SECTIONS.length].id;
    show(location.hash.slice(1), true);
    event.preventDefault();
  });
}

async function refresh(wait) {
  let next = REFRESH_MS;
  try {
    const shown = page.section, asked = needed(SECTIONS.find(item => item.id === shown));
    if (shown === "overview") asked.push(["alerts", page.run], ["curves", page.run]);
    const news = await Promise.all(asked.map(([name, index]) => load(name, index)));
    const now = new Date();
    page.data.made_s = now / 1000;
    page.data.made = now.toLocaleString();
    header();
    const active = document.activeElement, busy = active && document.getElementById("main").contains(active) && active.matches("input, select, svg");
    page.stale = page.stale || shown === page.section && news.some(Boolean);
    if (page.stale && !busy) redraw();
  } catch {
    next = Math.min(MOST_WAIT_MS, wait * 2);
    document.getElementById("made").textContent = "as of " + page.data.made + "; siirl view does not answer";
  }
  setTimeout(() => refresh(next), next);
}

function start() {
  healthSection();
  page.data = JSON.parse(document.getElementById("data").textContent);
  page.data.runs.forEach((item, index) => PARTS.set(index + " overview", item.overview));
  tabs();
  header();
  document.getElementById("run").addEventListener("change", event => { page.run = Number(event.target.value); redraw(); });
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== page.section) show(location.hash.slice(1)); });
  show(location.hash.slice(1));
  if (page.data.live) setTimeout(() => refresh(REFRESH_MS), REFRESH_MS);
}
