"use strict";
// The page: sections as tabs, made of the data anew whenever that changes. All text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["#3b6fb6", "#d9822b", "#3f9b6c", "#a2559b", "#c04f4f", "#8a8a3a", "#4a9fb0", "#9c7d5f"];
const REFRESH_MS = 5000, MOST_WAIT_MS = 60000;
const SECTIONS = [];
const page = { data: null, section: null, run: 0, etag: "", state: {} };

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
function section(id, title, show) { SECTIONS.push({ id, title, show }); }
function run() { return page.data.runs[page.run]; }
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

section("overview", "Overview", () => {
  const about = run().overview, parts = [];
  const facts = [
    ["state", [make("span", { class: "state " + about.state, id: "state" }, about.state), about.cause ? " " + about.cause : ""]],
    ["step", make("span", { id: "step" }, about.step === null ? "none yet" : String(about.step),
      about.total ? " of " + about.total : "", " ",
      about.total ? make("progress", { max: about.total, value: about.step || 0, "aria-label": "steps done" }) : null,
      about.left_s !== null ? " about " + seconds(about.left_s) + " left" : "")],
    ["folder", make("code", {}, about.folder)],
    ["command", make("code", {}, about.command || "-")],
    ["started", [about.started, about.host && " on " + about.host, about.starts > 1 && " (start " + about.starts + " in this folder)"]
      .filter(Boolean).join("") || "-"],
    ["ranks", about.world_size === null ? "-" : String(about.world_size)],
    ["siirl", about.commit.trim() || "-"],
    ["packages", Object.entries(about.packages).map(([name, version]) => name + " " + version).join(", ") || "-"],
  ];
  parts.push(make("div", { class: "box" }, make("h2", {}, about.name),
    make("table", {}, facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value))))));
  parts.push(make("h2", {}, "Alerts"));
  for (const alert of run().alerts) parts.push(make("div", { class: "box alert" }, alert.text));
  if (!run().alerts.length) parts.push(make("p", { class: "faint" }, "Nothing in the numbers asks for a look."));
  if (about.ranks.length) {
    const rows = about.ranks.map(rank => make("tr", {},
      [rank.rank, rank.step, rank.node, rank.time_s === null ? "-" : seconds(Math.max(0, page.data.made_s - rank.time_s)) + " before"].map(cell => make("td", {}, String(cell)))));
    parts.push(make("h2", {}, about.state === "running" ? "Where each rank is" : "Where each rank was last"),
      make("div", { class: "box scroll", tabindex: 0 }, make("table", {},
        make("tr", {}, ["rank", "step", "node", "entered, before this page was made"].map(cell => make("th", { scope: "col" }, cell))), rows)));
  }
  if (run().notes.length) parts.push(make("h2", {}, "Left out"),
    make("ul", { class: "box", id: "notes" }, run().notes.map(note => make("li", {}, note))));
  return parts;
});

function healthSection() {
  section("health", "Health", () => {
    const { errors, logs } = run().health, parts = [make("h2", {}, "Errors")];
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

function show(id, focus) {
  page.section = SECTIONS.some(item => item.id === id) ? id : "overview";
  tip("");
  for (const tab of document.getElementById("tabs").children) {
    const chosen = tab.id === "tab-" + page.section;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) tab.focus();
  }
  const main = document.getElementById("main"), shown = SECTIONS.find(item => item.id === page.section);
  const at = scrollY;
  let content;
  try {
    content = shown.show();
  } catch (error) {
    content = make("p", { class: "box down" }, "This section cannot be shown: " + error.message);
  }
  main.replaceChildren(make("div", { role: "tabpanel", id: "panel", "aria-labelledby": "tab-" + page.section }, content));
  scrollTo(0, at);
}

function redraw() { show(page.section); }

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
    const answer = await fetch("data.json", { headers: page.etag ? { "If-None-Match": page.etag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      page.etag = answer.headers.get("ETag") || "";
      const active = document.activeElement, busy = active && document.getElementById("main").contains(active) && active.matches("input, select");
      page.data = await answer.json();
      header();
      if (!busy) redraw();
    } else if (answer.status !== 304) throw new Error("answer " + answer.status);
  } catch {
    next = Math.min(MOST_WAIT_MS, wait * 2);
    document.getElementById("made").textContent = "as of " + page.data.made + "; siirl view does not answer";
  }
  setTimeout(() => refresh(next), next);
}

function start() {
  healthSection();
  page.data = JSON.parse(document.getElementById("data").textContent);
  tabs();
  header();
  document.getElementById("run").addEventListener("change", event => { page.run = Number(event.target.value); redraw(); });
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== page.section) show(location.hash.slice(1)); });
  show(location.hash.slice(1));
  if (page.data.live) setTimeout(() => refresh(REFRESH_MS), REFRESH_MS);
}
