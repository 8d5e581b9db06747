// The tokens of a turn, coloured by a number that they were trained with; all of them under the pointer, or by arrows.

const TOKEN_NUMBERS = {
  advantage: ["advantage", 0, value => value],
  ratio: ["ratio of the update", 1, value => Math.log(Math.max(value, 1e-6))],
  clip: ["clipped", 0, value => -value],
  weight: ["weight of the correction", 1, value => value - 1],
  old_log_prob: ["log-prob of the trainer", 0, value => value],
  rollout_log_prob: ["log-prob of the engine", 0, value => value],
};
const PART_NAMES = { own: "own", team: "team", env: "environment", shaping: "shaping" };
const DEEPEST_TOKEN = 62;  // per cent of the colour behind the largest number: text stays readable on it

function tokenChoices() { return [["", "no"], ...Object.entries(TOKEN_NUMBERS).map(([name, [title]]) => [name, title])]; }

// What a turn was credited with: the mean advantage of its tokens, and the parts of its reward, each times its weight.
function creditChips(credit) {
  if (!credit || credit.advantage === undefined) return [];
  const parts = Object.entries(PART_NAMES).filter(([name]) => credit[name]);
  return [make("span", { class: "credit" }, "advantage ", rewardChip("", credit.advantage)),
    parts.length ? make("span", { class: "credit" }, "its reward:", parts.flatMap(([name, title]) => [" ", rewardChip(title, credit[name])])) : null];
}

function tokenTitle(tokens, index) {
  const lines = Object.entries(TOKEN_NUMBERS).filter(([name]) => name in tokens.numbers)
    .map(([name, [title]]) => title + " " + (name === "clip" ? (tokens.numbers.clip[index] ? "yes" : "no") : short(tokens.numbers[name][index])));
  return [JSON.stringify(tokens.texts[index]), ...lines].join("\n");
}

// The largest distance from the middle of a number, over some turns: what has the deepest colour.
function furthest(name, turns) {
  const [, , from] = TOKEN_NUMBERS[name];
  let most = 0;
  for (const tokens of turns) for (const value of tokens.numbers[name] || []) if (value !== null) most = Math.max(most, Math.abs(from(value)));
  return most;
}

function tokenText(tokens, name, most) {
  const [title, , from] = TOKEN_NUMBERS[name], values = tokens.numbers[name];
  if (!values) return null;
  const spans = tokens.texts.map((text, index) => {
    const far = values[index] === null || !most ? 0 : from(values[index]) / most, span = make("span", { class: far < 0 ? "token less" : "token more" }, text);
    span.style.setProperty("--deep", Math.round(DEEPEST_TOKEN * Math.abs(far)) + "%");
    return span;
  });
  const box = make("pre", { class: "tokens", tabindex: 0, role: "group", "aria-label": plural(spans.length, "token") + " by " + title + ": arrows read one after another" }, spans);
  let chosen = -1;
  const tell = (index, x, y) => {
    if (spans[chosen]) spans[chosen].classList.remove("read");
    chosen = index;
    if (spans[chosen]) spans[chosen].classList.add("read");
    tip(index < 0 ? "" : tokenTitle(tokens, index), x, y);
  };
  box.addEventListener("pointermove", event => tell(spans.indexOf(event.target), event.clientX, event.clientY));
  box.addEventListener("pointerleave", () => tell(-1));
  box.addEventListener("blur", () => tell(-1));
  box.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !spans.length) return;
    const next = Math.max(0, Math.min(spans.length - 1, chosen + step)), at = spans[next].getBoundingClientRect();
    tell(next, at.left, at.bottom);
    event.preventDefault();
  });
  return [box, tokens.left_out ? make("p", { class: "faint" }, plural(tokens.left_out, "more token") + " of it were trained") : null];
}

// What the colours of a conversation mean.
function tokenKey(name, most) {
  const [title, middle] = TOKEN_NUMBERS[name];
  if (name === "clip") return title + ": coloured where a bound of the loss cut off the gradient";
  if (name.endsWith("log_prob")) return title + ": the deepest is " + short(-most) + " nats";
  const edges = name === "ratio" ? [Math.exp(-most), Math.exp(most)] : [middle - most, middle + most];
  return title + ": the deepest colours are " + short(edges[0]) + " and " + short(edges[1]) + ", none is " + middle;
}
