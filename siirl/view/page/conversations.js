// Conversations that a run sampled, filtered by step, kind, agent, reward and words.

const MOST_SHOWN = 100, MOST_OPEN = 8, MOST_BESIDE = 40, TYPING_MS = 250;
const ROUNDING = 1e-6;  // numbers below it are what float32 leaves of a difference of equal ones

function rewardChip(source, number) {
  const value = number && Math.abs(number) < ROUNDING ? 0 : number;
  const sign = value > 0 ? " up" : value < 0 ? " down" : "";
  return make("span", { class: "reward" + sign }, (source ? source + " " : "") + (value > 0 ? "+" : "") + short(value));
}

function messageBox(message, agent, by, most) {
  const color = message.agent === null ? null : agentColor(message.agent);
  const other = agent !== "" && message.agent !== null && String(message.agent) !== agent;
  return make("div", { class: "message" + (message.tool ? " tool" : "") + (other ? " other" : ""), color },
    make("div", { class: "head" }, message.turn === null ? null : make("span", {}, String(message.turn)),
      make("span", { class: "name" }, message.who), message.rewards.map(([source, value]) => rewardChip(source, value)),
      creditChips(message.tokens && message.tokens.credit), message.details.map(detail => make("span", {}, detail)), message.errors ? make("span", { class: "down" }, message.errors) : null),
    message.tokens && by && tokenText(message.tokens, by, most) || (message.parts && !keep("as written", false) ? partsBox(message.parts) : make("pre", {}, message.text)));
}

// What a model said, taken apart: its reasoning folded, its answer, its calls.
function partsBox([reasoning, answer, calls]) {
  return [reasoning ? make("details", { class: "reasoning" }, make("summary", {}, "reasoning, " + plural(reasoning.length, "character")), make("pre", {}, reasoning)) : null,
    answer.trim() ? make("pre", { class: "answer" }, answer) : null, calls.map(call => make("pre", { class: "call" }, call)),
    !answer.trim() && !calls.length ? make("p", { class: "faint" }, "It gave no answer.") : null];
}

// Conversations of the same kind about the same prompt in other steps, those of the same sample first.
function samePrompt(episode) {
  const found = run().episodes.filter(item => item.kind === episode.kind && item.prompt === episode.prompt && item.step !== episode.step);
  return found.sort((a, b) => (b.title === episode.title) - (a.title === episode.title) || b.step - a.step).slice(0, MOST_BESIDE);
}

function blockOf(episode) { return episode.kind + " " + episode.step; }

// What was said in an episode: its part of a block of texts, which is read when somebody wants it.
async function saidIn(episode) {
  return (await textsOf(blockOf(episode)))[episode.id] || { messages: [], cut: 0, ended: "", note: "its text cannot be read" };
}

// What the ledger says of an episode's rows, from the prompt to the optimizer step; read when it is opened.
function lifeBox(episode) {
  const box = make("details", { class: "life" }, make("summary", {}, "what became of it"));
  box.addEventListener("toggle", async () => {
    if (!box.open || box.children.length > 1) return;
    const holder = make("pre", { role: "status" }, "reading...");
    box.append(holder);
    const found = await partNamed("lives " + episode.step).catch(error => ({ value: null, notes: [error.message] }));
    const lines = (found.value || {})[episode.life];
    holder.textContent = lines ? lines.join("\n") : found.notes.join("\n") || "The ledger says nothing of it.";
  });
  return box;
}

function spoken(episode, said, agent, named) {
  const by = keep("tokens by", ""), turns = said.messages.map(message => message.tokens).filter(Boolean), most = by && furthest(by, turns);
  const key = by && (turns.some(tokens => tokens.numbers[by]) ? tokenKey(by, most) : episode.tokens ? "it has no token with a " + TOKEN_NUMBERS[by][0] : "its tokens were not written");
  const below = [key, said.cut && plural(said.cut, "message") + " skipped", said.ended && "ended: " + said.ended, said.note];
  return make("div", {}, named ? make("p", { class: "details faint" }, "step " + episode.step + ", reward " + short(episode.reward)) : null,
    said.messages.map(message => messageBox(message, agent, by, most)),
    below.filter(Boolean).map(text => make("p", { class: "details faint" }, text)),
    episode.life ? lifeBox(episode) : null);
}

// A conversation; its text is read and written when it is opened, so that thousands stay fast.
function episodeBox(episode, agent, open) {
  const chips = Object.entries(episode.rewards).map(([who, reward]) =>
    make("span", { class: "chip", color: agentColor(Number(who)) }, "agent " + who + ": ", rewardChip("", reward)));
  const known = "open " + page.run + " " + episode.id, box = make("details", { "data-id": episode.id },
    make("summary", { onclick: () => { page.state[known] = !box.open; } }, episode.kind + ", step " + episode.step + ": " + episode.title, chips, make("span", { class: "chip" }, plural(episode.turns, "turn")), episode.tokens ? make("span", { class: "chip" }, "tokens") : null));
  const write = async () => {
    if (!box.open || box.children.length > 1) return;
    const holder = make("div", {}, make("p", { class: "details faint", role: "status" }, "reading..."));
    const others = samePrompt(episode);
    const beside = async id => {
      const shown = [episode, id && others.find(item => item.id === id)].filter(Boolean);
      const said = await Promise.all(shown.map(saidIn));
      holder.className = shown.length > 1 ? "pair" : "";
      holder.replaceChildren(...shown.map((item, index) => spoken(item, said[index], agent, shown.length > 1)));
    };
    if (others.length) box.append(make("div", { class: "details" }, choice("the same prompt, beside it:", "",
      [["", "-"], ...others.map(item => [item.id, "step " + item.step + ", reward " + short(item.reward)])], beside)));
    box.append(holder);
    await beside("").catch(error => holder.replaceChildren(make("p", { class: "details down" }, "It cannot be read: " + error.message)));
  };
  box.addEventListener("toggle", write);
  box.open = keep(known, open);
  return { box, written: write() };
}

// The episodes that have the words, block after block; tell: how far it is, and whether to go on.
async function withWords(episodes, words, tell) {
  const blocks = new Map();
  for (const episode of episodes) blocks.set(blockOf(episode), [...blocks.get(blockOf(episode)) || [], episode]);
  const found = [];
  let searched = 0;
  for (const [block, some] of blocks) {
    const texts = await textsOf(block);
    for (const episode of some) {
      const said = (texts[episode.id] || { messages: [] }).messages.map(message => message.text).join("\n");
      if ((episode.title + "\n" + said).toLowerCase().includes(words)) found.push(episode);
    }
    searched += some.length;
    if (!tell(searched)) return null;
  }
  return found;
}

section("conversations", "Conversations", ["episodes"], () => {
  const episodes = run().episodes || [], filters = keep("filters", { kind: "", step: "", agent: "", least: "", most: "", words: "", order: "" });
  page.state.filters = filters;
  if (!episodes.length) return [make("p", { class: "box" }, "The run has written no samples: see trainer.log_val_generations and trainer.rollout_data_dir.")];
  const list = make("div", { id: "episodes" }), above = make("div", {}), count = make("span", { class: "faint", role: "status" });
  let asked = 0;
  const render = async () => {
    const ticket = ++asked, words = filters.words.toLowerCase();
    const reward = episode => filters.agent === "" ? episode.reward : episode.rewards[filters.agent];
    let found = episodes.filter(episode => (filters.kind === "" || episode.kind === filters.kind)
      && (filters.step === "" || String(episode.step) === filters.step) && reward(episode) !== undefined
      && (filters.least === "" || reward(episode) >= Number(filters.least)) && (filters.most === "" || reward(episode) <= Number(filters.most)));
    if (words) {
      const of = found.length;
      found = await withWords(found, words, searched => {
        if (ticket === asked) count.textContent = "searched " + searched + " of " + of;
        return ticket === asked;
      });
      if (!found) return;
    }
    const look = keep("look", "list");
    const open = episode => {
      const one = episodeBox(episode, filters.agent, true);
      one.box.open = true;
      list.replaceChildren(one.box);
      page.written = one.written;
      one.box.scrollIntoView({ block: "nearest" });
    };
    above.replaceChildren();
    if (look !== "list") {
      list.replaceChildren();
      if (look === "groups") {  // all of each group that has one of them
        const wanted = new Set(found.map(episode => blockOf(episode) + " " + episode.prompt));
        found = episodes.filter(episode => reward(episode) !== undefined && wanted.has(blockOf(episode) + " " + episode.prompt));
      }
      count.textContent = found.length + " of " + plural(episodes.length, "conversation");
      const again = () => { page.written = render(); };
      const shown = look === "groups" ? groupsView(found, reward, filters.agent, again) : look === "table" ? samplesTable(found, reward, open, again)
        : { boxes: [scatter(found, reward, open)], written: null };
      above.replaceChildren(...shown.boxes);
      if (look === "table" && found.length > MOST_ROWS_SHOWN) count.textContent += "; the first " + MOST_ROWS_SHOWN + " in this order are listed";
      return shown.written;
    }
    if (filters.order) found.sort((a, b) => (filters.order === "best" ? -1 : 1) * (reward(a) - reward(b)));
    const coloured = keep("tokens by", "") !== "";
    if (coloured) found = [...found].sort((a, b) => Boolean(b.tokens) - Boolean(a.tokens));
    const boxes = found.slice(0, MOST_SHOWN).map((episode, index) => episodeBox(episode, filters.agent, index < MOST_OPEN));
    list.replaceChildren(...boxes.map(one => one.box));
    count.textContent = found.length + " of " + plural(episodes.length, "conversation")
      + (found.length > MOST_SHOWN ? "; the first " + MOST_SHOWN + " are listed" : "") + (coloured ? "; those whose tokens were written come first" : "");
    await Promise.all(boxes.map(one => one.written));
  };
  const set = key => value => { filters[key] = value; page.written = render(); };
  let typed = null;
  const typing = key => value => { clearTimeout(typed); typed = setTimeout(() => set(key)(value), TYPING_MS); };
  const entry = (title, key, type) => make("label", {}, title,
    make("input", { type, step: "any", value: filters[key], oninput: event => typing(key)(event.target.value) }));
  const steps = [...new Set(episodes.map(episode => episode.step))], kinds = [...new Set(episodes.map(episode => episode.kind))];
  const agents = [...new Set(episodes.flatMap(episode => Object.keys(episode.rewards)))].sort((a, b) => a - b);
  page.written = render();
  const looks = [["list", "list"], ["groups", "groups side by side"], ["table", "table"], ["length", "reward against length"]];
  return [make("div", { class: "bar" },
    choice("show as", keep("look", "list"), looks, value => { page.state.look = value; page.written = render(); }),
    choice("kind", filters.kind, [["", "all"], ...kinds.map(kind => [kind, kind])], set("kind")),
    choice("step", filters.step, [["", "all"], ...steps.map(step => [step, String(step)])], set("step")),
    choice("agent", filters.agent, [["", "all"], ...agents.map(agent => [agent, "agent " + agent])], set("agent")),
    entry("reward from", "least", "number"), entry("to", "most", "number"), entry("words", "words", "search"),
    choice("text", keep("as written", "") ? "1" : "", [["", "in parts"], ["1", "as written"]], value => { page.state["as written"] = value === "1"; page.written = render(); }),
    choice("tokens by", keep("tokens by", ""), tokenChoices(), value => { page.state["tokens by"] = value; page.written = render(); }),
    choice("order", filters.order, [["", "newest"], ["best", "best first"], ["worst", "worst first"]], set("order")), count), above, list];
});
