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

// A part of the chosen run that is read when somebody wants it.
async function partNamed(name) {
  if (!PARTS.has(page.run + " " + name)) await load(name, page.run);
  return PARTS.get(page.run + " " + name);
}

// The texts of a block of conversations; the ones that were asked for longest ago are forgotten.
async function textsOf(block) {
  const name = "texts " + block, key = page.run + " " + name, found = await partNamed(name);
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
  if (minutes >= 2880) return Math.floor(minutes / 1440) + " d " + Math.floor(minutes % 1440 / 60) + " h";
  return minutes < 120 ? minutes + " min" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}
function lasting(ms) { return ms < 10000 ? short(ms) + " ms" : seconds(ms / 1000); }
function axisText(ms, wide) { return wide < 10000 && ms < 10000 ? short(ms) + " ms" : short(ms / 1000) + " s"; }
function agentColor(agent) { return page.data.agent_colors[agent % page.data.agent_colors.length]; }
// The colour of a node in every section, by its place in the plan; what a step does besides nodes has quiet ones.
const OTHER_COLORS = { load: "#9aa2ab", reshard: "#6b737c", weight_sync: "#b03a48", free: "#c3c8cd", report: "#b9a98c", checkpoint: "#8c7a5b", validation: "#7d8f69", "between instructions": "#8a929b" };
function nodeColor(name) {
  const dag = run().dag, at = dag ? dag.nodes.findIndex(node => node.name === name) : -1;
  if (at >= 0) return MORE_COLORS[at % MORE_COLORS.length];
  if (Object.hasOwn(OTHER_COLORS, name)) return OTHER_COLORS[name];
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 997;
  const free = MORE_COLORS.slice(dag ? dag.nodes.length : 0), colors = free.length ? free : MORE_COLORS;
  return colors[sum % colors.length];
}
// How wide a picture in a box can be without being scrolled; words stay as large as they are.
function roomWide() { return Math.max(640, document.getElementById("main").clientWidth - 74); }
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

// What was left out of the parts that are shown.
function notShown(parts) {
  const notes = [...new Set(parts.flatMap(([name, index]) => (PARTS.get(index + " " + name) || { notes: [] }).notes))];
  return notes.length ? [make("h2", {}, "Left out"), make("ul", { class: "box notes" }, notes.map(note => make("li", {}, note)))] : [];
}

function healthSection() {
  section("health", "Health", ["health"], () => {
    const { errors, logs, starts, attempts, amendments, engines, service, last_sign_s } = run().health, parts = [make("h2", {}, "Attempts")];
    const ago = at => seconds(Math.max(0, page.data.made_s - at)) + " before this page was made";
    const rows = (head, lines, id) => make("div", { class: "box scroll", tabindex: 0 }, make("table", { id },
      make("tr", {}, head.map(title => make("th", { scope: "col" }, title))), lines.map(cells => make("tr", {}, cells.map(cell => make("td", {}, cell))))));
    parts.push(make("p", { id: "life" }, [starts && plural(starts, "start") + " of this run", attempts.length ? plural(attempts.length, "attempt") + " of the last one failed" : "no attempt was lost",
      last_sign_s && "last heartbeat " + ago(last_sign_s)].filter(Boolean).join("; ") + "."));
    if (attempts.length) parts.push(rows(["attempt", "ended", "by", "went on from"], attempts.map(one => [String(one.attempt), ago(one.ended_s), one.cause, one.next]), "attempts"));
    if (amendments.length) parts.push(rows(["amended while it went on"], amendments.map(line => [line]), "amendments"));
    if (engines.length) parts.push(make("h2", {}, "Engines and queues, as last reported"), rows(["metric", "agent", "value", ""],
      engines.map(([metric, agent, value, meaning]) => [metric, agent === null ? "" : String(agent), short(value), meaning]), "engines"));
    if (service) parts.push(make("h2", {}, "Tenants of the service" + (service.told_s ? ", " + ago(service.told_s) : "")),
      rows(["tenant", "adapters, ranks", "sessions", "samplers", "requests waiting", "MB waiting", "tokens had", "MB unread"],
        service.tenants.map(([name, ranks, sessions, samplers, waiting, waitingBytes, tokens, unreadBytes]) => [name, ranks.join(", ") || "none", String(sessions),
          String(samplers), String(waiting), (waitingBytes / 1e6).toFixed(1), short(tokens), (unreadBytes / 1e6).toFixed(1)]), "tenants"));
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
    content = missing.length ? [make("p", { class: "faint", role: "status" }, "reading...")] : [shown.show(), notShown(wanted)];
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
