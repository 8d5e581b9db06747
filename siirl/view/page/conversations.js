// Conversations that a run sampled, filtered by step, kind, agent, reward and words.

const MOST_SHOWN = 100, MOST_OPEN = 8, MOST_BESIDE = 40;

function rewardChip(source, value) {
  const sign = value > 0 ? " up" : value < 0 ? " down" : "";
  return make("span", { class: "reward" + sign }, (source ? source + " " : "") + (value > 0 ? "+" : "") + short(value));
}

function messageBox(message, agent) {
  const color = message.agent === null ? null : agentColor(message.agent);
  const other = agent !== "" && message.agent !== null && String(message.agent) !== agent;
  return make("div", { class: "message" + (message.tool ? " tool" : "") + (other ? " other" : ""), color },
    make("div", { class: "head" }, message.turn === null ? null : make("span", {}, String(message.turn)),
      make("span", { class: "name" }, message.who), message.rewards.map(([source, value]) => rewardChip(source, value)),
      message.details.map(detail => make("span", {}, detail)), message.errors ? make("span", { class: "down" }, message.errors) : null),
    make("pre", {}, message.text));
}

// Conversations of the same kind about the same prompt in other steps, those of the same sample first.
function samePrompt(episode) {
  const found = run().episodes.filter(item => item.kind === episode.kind && item.prompt === episode.prompt && item.step !== episode.step);
  return found.sort((a, b) => (b.title === episode.title) - (a.title === episode.title) || b.step - a.step).slice(0, MOST_BESIDE);
}

function spoken(episode, agent, named) {
  const below = [episode.cut && plural(episode.cut, "message") + " left out", episode.ended && "ended: " + episode.ended, episode.note];
  return make("div", {}, named ? make("p", { class: "details faint" }, "step " + episode.step + ", reward " + short(episode.reward)) : null,
    episode.messages.map(message => messageBox(message, agent)),
    below.filter(Boolean).map(text => make("p", { class: "details faint" }, text)));
}

function episodeBox(episode, agent, open) {
  const chips = Object.entries(episode.rewards).map(([who, reward]) =>
    make("span", { class: "chip", color: agentColor(Number(who)) }, "agent " + who + " ", rewardChip("", reward)));
  const turns = episode.messages.filter(message => message.agent !== null).length;
  const box = make("details", { "data-id": episode.id },
    make("summary", {}, episode.kind + ", step " + episode.step + ": " + episode.title, chips, make("span", { class: "chip" }, plural(turns, "turn"))));
  const write = () => {  // only when it is opened: hundreds stay fast
    if (!box.open || box.children.length > 1) return;
    const holder = make("div");
    const beside = id => {
      const other = id && run().episodes.find(item => item.id === id);
      holder.className = other ? "pair" : "";
      holder.replaceChildren(...[episode, other].filter(Boolean).map(item => spoken(item, agent, Boolean(other))));
    };
    const others = samePrompt(episode);
    if (others.length) box.append(make("div", { class: "details" }, choice("the same prompt, beside it:", "",
      [["", "-"], ...others.map(item => [item.id, "step " + item.step + ", reward " + short(item.reward)])], beside)));
    beside("");
    box.append(holder);
  };
  box.addEventListener("toggle", write);
  box.open = open;
  write();
  return box;
}

section("conversations", "Conversations", () => {
  const episodes = run().episodes, filters = keep("filters", { kind: "", step: "", agent: "", least: "", most: "", words: "", order: "" });
  page.state.filters = filters;
  if (!episodes.length) return [make("p", { class: "box" }, "The run has written no samples: see trainer.log_val_generations and trainer.rollout_data_dir.")];
  const list = make("div", { id: "episodes" }), count = make("span", { class: "faint", role: "status" });
  const texts = episodes.map(episode => (episode.title + "\n" + episode.messages.map(message => message.text).join("\n")).toLowerCase());
  const render = () => {
    const words = filters.words.toLowerCase();
    const reward = episode => filters.agent === "" ? episode.reward : episode.rewards[filters.agent];
    const found = episodes.filter((episode, index) => (filters.kind === "" || episode.kind === filters.kind)
      && (filters.step === "" || String(episode.step) === filters.step) && reward(episode) !== undefined
      && (filters.least === "" || reward(episode) >= Number(filters.least)) && (filters.most === "" || reward(episode) <= Number(filters.most))
      && (words === "" || texts[index].includes(words)));
    if (filters.order) found.sort((a, b) => (filters.order === "best" ? -1 : 1) * (reward(a) - reward(b)));
    list.replaceChildren(...found.slice(0, MOST_SHOWN).map((episode, index) => episodeBox(episode, filters.agent, index < MOST_OPEN)));
    count.textContent = found.length + " of " + plural(episodes.length, "conversation")
      + (found.length > MOST_SHOWN ? "; the first " + MOST_SHOWN + " are listed" : "");
  };
  const set = key => value => { filters[key] = value; render(); };
  const entry = (title, key, type) => make("label", {}, title,
    make("input", { type, step: "any", value: filters[key], oninput: event => set(key)(event.target.value) }));
  const steps = [...new Set(episodes.map(episode => episode.step))], kinds = [...new Set(episodes.map(episode => episode.kind))];
  const agents = [...new Set(episodes.flatMap(episode => Object.keys(episode.rewards)))].sort((a, b) => a - b);
  render();
  return [make("div", { class: "bar" },
    choice("kind", filters.kind, [["", "all"], ...kinds.map(kind => [kind, kind])], set("kind")),
    choice("step", filters.step, [["", "all"], ...steps.map(step => [step, String(step)])], set("step")),
    choice("agent", filters.agent, [["", "all"], ...agents.map(agent => [agent, "agent " + agent])], set("agent")),
    entry("reward from", "least", "number"), entry("to", "most", "number"), entry("words", "words", "search"),
    choice("order", filters.order, [["", "newest"], ["best", "best first"], ["worst", "worst first"]], set("order")), count), list];
});
