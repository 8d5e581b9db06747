// Samples side by side: the whole group of a prompt, all samples as a table, reward against length.

const MOST_POINTS_SHOWN = 3000, MOST_ROWS_SHOWN = 500, MOST_SAID_SHOWN = 160, SCATTER = { height: 340, left: 56, right: 14, top: 10, bottom: 34 };

// Samples of one prompt in one step, of which an advantage is computed: [{key, members, rewards, mean, deviation}].
function groupsOf(episodes, reward, agent) {
  const found = new Map();
  for (const episode of episodes) {
    const key = blockOf(episode) + " " + episode.prompt;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(episode);
  }
  return [...found].filter(([, members]) => members.length > 1).map(([key, members]) => {
    const rewards = members.map(reward), mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    const deviation = Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / rewards.length);
    return { key, members: [...members].sort((a, b) => reward(b) - reward(a)), mean, deviation, flat: isFlat(members, rewards, agent) };
  });
}

// Whether no agent's rewards differ: each has an advantage of its own.
function isFlat(members, rewards, agent) {
  const agents = agent === "" ? [...new Set(members.flatMap(episode => Object.keys(episode.rewards)))] : [];
  return agents.length ? agents.every(who => members.every(episode => episode.rewards[who] === members[0].rewards[who])) : rewards.every(value => value === rewards[0]);
}

// One group: its prompt once, then every sample in a column of its own, the best first.
function groupBox(group, reward, agent) {
  const holder = make("div", { class: "group", id: "group" }, make("p", { class: "faint", role: "status" }, "reading..."));
  const write = async () => {
    const said = await Promise.all(group.members.map(saidIn));
    const asked = said[0].messages.filter((message, at, all) => message.agent === null && !message.tool && all.slice(0, at).every(before => before.agent === null));
    const columns = group.members.map((episode, at) => {
      const own = { ...said[at], messages: said[at].messages.slice(asked.length) }, away = reward(episode) - group.mean;
      return make("div", { class: "sample" }, make("div", { class: "head" }, rewardChip("reward", reward(episode)),
        group.flat ? null : make("span", { class: "faint" }, (away > 0 ? "+" : "") + short(away) + " from the mean"),
        episode.length === null ? null : make("span", {}, plural(episode.length, "token"))), spoken(episode, own, agent, false));
    });
    holder.replaceChildren(...asked.map(message => messageBox(message, "", "", 0)), make("div", { class: "columns", tabindex: 0 }, columns));
  };
  return { holder, written: write().catch(error => holder.replaceChildren(make("p", { class: "down" }, "It cannot be read: " + error.message))) };
}

// Groups one after another: {boxes, written, count}.
function groupsView(episodes, reward, agent, again) {
  const all = groupsOf(episodes, reward, agent), flat = all.filter(group => group.flat).length, which = keep("groups", "");
  const groups = all.filter(group => which === "" || group.flat === (which === "flat"));
  const at = Math.max(0, Math.min(groups.length - 1, groups.findIndex(group => group.key === keep("group", ""))));
  const go = to => { if (groups[to]) { page.state.group = groups[to].key; again(); } };
  const kind = choice("groups", which, [["", "all"], ["mixed", "with different rewards"], ["flat", "with zero std"]], value => { page.state.groups = value; again(); });
  const counts = make("span", { class: "faint" }, plural(all.length, "group") + ", " + flat + " with zero std");
  if (!groups.length) return { boxes: [make("div", { class: "bar" }, kind, counts), make("p", { class: "box" }, "No prompt has several samples here: rollout.n and the filters above decide.")], written: Promise.resolve() };
  const group = groups[at], { holder, written } = groupBox(group, reward, agent), first = group.members[0];
  const move = (text, to) => make("button", { type: "button", id: "go-" + text, disabled: !groups[to], onclick: () => go(to) }, text);
  const head = make("div", { class: "bar" }, move("previous", at - 1), move("next", at + 1), make("span", { role: "status" }, (at + 1) + " of " + groups.length), kind, counts);
  const title = make("h2", {}, first.kind + ", step " + first.step + ": " + first.prompt + " ", make("span", { class: "chip" }, plural(group.members.length, "sample")),
    make("span", { class: "chip" }, "mean " + short(group.mean) + ", deviation " + short(group.deviation)),
    group.flat ? make("span", { class: "chip down", id: "flat" }, "zero std: nothing to learn from") : null);
  return { boxes: [head, make("div", { class: "box" }, title, holder)], written };
}

const TABLE = [
  ["kind", episode => episode.kind], ["step", episode => episode.step], ["prompt", episode => episode.prompt], ["reward", null],
  ["tokens", episode => episode.length], ["turns", episode => episode.turns], ["ended", episode => episode.ended],
];

// All samples as a table, sorted by the column that was chosen; a row opens its conversation below: {boxes, written}.
function samplesTable(episodes, reward, open, again) {
  const [by, down] = keep("sorted", ["step", true]), value = (title, read) => episode => title === "reward" ? reward(episode) : read(episode);
  const [, read] = TABLE.find(([title]) => title === by), chosen = value(by, read);
  const order = (a, b) => { const x = chosen(a), y = chosen(b); return (x === null) - (y === null) || (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); };
  const columns = TABLE.filter(([title, of]) => title === "reward" || episodes.some(episode => of(episode) !== null && of(episode) !== ""));
  const heads = columns.map(([title]) => make("th", { scope: "col", "aria-sort": title === by ? (down ? "descending" : "ascending") : "none" },
    make("button", { type: "button", class: "sort", onclick: () => { page.state.sorted = [title, title === by ? !down : true]; again(); } }, title + (title === by ? (down ? " \u2193" : " \u2191") : ""))));
  const shown = [...episodes].sort(order).slice(0, MOST_ROWS_SHOWN), said = shown.map(() => make("td", { class: "said" }));
  const rows = shown.map((episode, at) => make("tr", { "data-row": episode.id },
    columns.map(([title, of]) => {
      const shown = value(title, of)(episode);
      return make("td", {}, title === "prompt" ? make("button", { type: "button", class: "sort", onclick: () => open(episode) }, shown) : title === "reward" ? rewardChip("", shown) : shown === null ? "-" : String(shown));
    }), said[at]));
  const table = make("table", { id: "samples" }, make("tr", {}, heads, make("th", { scope: "col" }, "what was said last")), rows);
  return { boxes: [make("div", { class: "box scroll", tabindex: 0 }, table)], written: writeSaid(shown, said) };
}

// The beginning of each sample's last words into its cell, as they are read, for as long as the table is shown.
async function writeSaid(episodes, cells) {
  for (const [at, episode] of episodes.entries()) {
    const { messages } = await saidIn(episode).catch(() => ({ messages: [] })), last = messages.findLast(message => message.agent !== null);
    if (!cells[at].isConnected) return;
    const text = (last ? last.parts ? last.parts[1].trim() || last.parts[2].join(" ") : last.text : "").trim();
    cells[at].textContent = text.length > MOST_SAID_SHOWN ? text.slice(0, MOST_SAID_SHOWN) + "\u2026" : text;
  }
}

// Reward against length, a point for each sample, newer ones darker; a click opens its conversation below.
function scatter(episodes, reward, open) {
  const shown = episodes.filter(episode => episode.length !== null).slice(0, MOST_POINTS_SHOWN);
  if (!shown.length) return make("p", { class: "box" }, "How long these samples are was not written.");
  const { height, left, right, top, bottom } = SCATTER, width = roomWide(), steps = shown.map(episode => episode.step), kinds = [...new Set(shown.map(episode => episode.kind))];
  const bounds = values => { const low = Math.min(...values), high = Math.max(...values); return low === high ? [low - 0.5, high + 0.5] : [low, high]; };
  const [short_, long] = bounds(shown.map(episode => episode.length)), [low, high] = bounds(shown.map(reward)), [old, young] = bounds(steps);
  const x = value => left + (value - short_) / (long - short_) * (width - left - right), y = value => top + (high - value) / (high - low) * (height - top - bottom);
  const svg = draw("svg", { id: "scatter", role: "img", width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": "reward against length of " + plural(shown.length, "sample") + "; the table has the numbers" });
  for (const value of ticks(low, high, 5)) svg.append(draw("line", { class: "tick", x1: left, x2: width - right, y1: y(value), y2: y(value) }), draw("text", { class: "axis", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  for (const value of ticks(short_, long, 8).filter(Number.isInteger)) svg.append(draw("text", { class: "axis", x: x(value), y: height - 18, "text-anchor": "middle" }, String(value)));
  svg.append(draw("text", { class: "axis", x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "tokens that agents said"));
  const places = new Map();  // samples that would lie over each other are one point, the newest first
  for (const episode of shown) {
    const at = [episode.kind, Math.round(x(episode.length) / 3), Math.round(y(reward(episode)) / 3)].join(" ");
    if (!places.has(at)) places.set(at, []);
    places.get(at).push(episode);
  }
  for (const found of places.values()) {
    const [episode] = found, dot = draw("circle", { class: "dot", cx: x(episode.length).toFixed(1), cy: y(reward(episode)).toFixed(1), r: Math.min(16, 3 + Math.sqrt(found.length)).toFixed(1),
      fill: COLORS[kinds.indexOf(episode.kind)], "fill-opacity": 0.25 + 0.6 * (episode.step - old) / (young - old) });
    dot.addEventListener("pointermove", event => tip([episode.kind + ", step " + episode.step + ": " + episode.title, "reward " + short(reward(episode)) + ", " + plural(episode.length, "token"),
      ...(found.length > 1 ? [plural(found.length, "sample") + " here"] : [])].join("\n"), event.clientX, event.clientY));
    dot.addEventListener("pointerleave", () => tip(""));
    dot.addEventListener("click", () => open(episode));
    svg.append(dot);
  }
  return make("div", { class: "box lanes" }, make("div", { class: "legend" }, kinds.map((kind, at) => make("span", {}, make("i", { class: "patch", color: COLORS[at] }), kind)), "newer steps are darker, more samples larger; a click opens one"), svg);
}
