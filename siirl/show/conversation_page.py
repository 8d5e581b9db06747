"""Episodes as one HTML page that needs nothing but itself: no scripts, fonts or pictures from elsewhere.

Everything that a model, a tool or an environment wrote is escaped; the page forbids itself all connections.
"""

import functools
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from siirl.guarded_files import write_whole
from siirl.show.conversation_text import (
    ShownEpisode,
    details_of,
    errors_of,
    has_env_rewards,
    notes_of,
    parts_of,
    reward_text,
    rewards_of,
    shown_text,
    speaker_name,
)
from siirl.show.plan_picture import AGENT_COLORS

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

SCRIPT = """
const form = document.forms[0], count = document.getElementById("count");
const episodes = [...document.querySelectorAll("main > details")];
function show() {
  const agent = form.agent.value, words = form.words.value.toLowerCase();
  const least = form.least.value === "" ? -Infinity : Number(form.least.value);
  const most = form.most.value === "" ? Infinity : Number(form.most.value);
  let shown = 0;
  for (const episode of episodes) {
    const reward = agent === "" ? episode.dataset.reward : episode.getAttribute("data-reward-" + agent);
    const visible = reward !== null && Number(reward) >= least && Number(reward) <= most
      && (words === "" || episode.textContent.toLowerCase().includes(words));
    episode.hidden = !visible;
    shown += visible;
    for (const message of episode.querySelectorAll(".message[data-agent]"))
      message.classList.toggle("other", agent !== "" && message.dataset.agent !== agent);
  }
  count.textContent = shown + " of " + episodes.length + " episodes";
}
form.addEventListener("input", show);
form.addEventListener("submit", event => event.preventDefault());
form.order.addEventListener("input", () => {
  const sign = { worst: 1, best: -1 }[form.order.value] || 0;
  const key = episode => sign ? sign * Number(episode.dataset.reward) : Number(episode.dataset.place);
  for (const episode of [...episodes].sort((a, b) => key(a) - key(b))) episode.parentNode.append(episode);
});
show();
"""


@functools.cache
def page_style() -> str:
    """How all pages of siirl look."""
    return files("siirl.show").joinpath("page.css").read_text(encoding="utf-8")


def page(episodes: Sequence[ShownEpisode], title: str) -> str:
    """The page as text, in the design of `siirl view`. Turns are coloured by agent, rewards by sign; a form
    filters episodes by agent, reward and words, and orders them.
    """
    agents = sorted({agent for episode in episodes for agent in _agents(episode)})
    options = "".join(f'<option value="{agent}">agent {agent}</option>' for agent in agents)
    body = "\n".join(_episode(place, episode) for place, episode in enumerate(episodes))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_safe(title)}</title>
<style>{page_style()}</style>
</head>
<body>
<header>
<h1>{_safe(title)}</h1>
<form>
<label>agent <select name="agent"><option value="">all</option>{options}</select></label>
<label>reward from <input name="least" type="number" step="any"></label>
<label>to <input name="most" type="number" step="any"></label>
<label>words <input name="words" type="search"></label>
<label>order <select name="order"><option value="">as it was</option>
<option value="worst">worst first</option><option value="best">best first</option></select></label>
<span id="count" class="faint"></span>
</form>
</header>
<main>
{body or "<p>No episodes.</p>"}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def write_page(path: Path, episodes: Sequence[ShownEpisode], title: str) -> None:
    """Write the page to `path`, whole or not at all; its folder is made. One rank calls it."""
    write_whole(path, page(episodes, title).encode("utf-8", "replace"))


def _agents(episode: ShownEpisode) -> set[int]:
    spoke = {message["agent"] for message in episode.messages if message.get("agent") is not None}
    return spoke | set(episode.rewards)


def _episode(place: int, episode: ShownEpisode) -> str:
    by_agent = {agent: episode.rewards.get(agent, 0.0) for agent in sorted(_agents(episode))}
    data = "".join(f' data-reward-{agent}="{reward:.6g}"' for agent, reward in by_agent.items())
    chips = "".join(
        f'<span class="chip" style="{_color(agent)}">agent {agent}: {_reward(reward)}</span>'
        for agent, reward in episode.rewards.items()
    )
    with_env = has_env_rewards(episode)
    messages = "\n".join(_message(message, with_env) for message in episode.messages)
    notes = "".join(f'\n<p class="details faint">{_safe(note)}</p>' for note in notes_of(episode))
    turns = f"{episode.turns} turn{'' if episode.turns == 1 else 's'}"
    return (
        f'<details open data-place="{place}" data-reward="{episode.mean_reward:.6g}"{data}>\n'
        f'<summary>{_safe(episode.title)}{chips}<span class="chip">{turns}</span></summary>\n'
        f"{messages}{notes}\n</details>"
    )


def _message(message: Any, with_env: bool) -> str:
    agent, turn = message.get("agent"), message.get("turn")
    mine = f' data-agent="{int(agent)}" style="{_color(agent)}"' if agent is not None else ""
    parts = [f"<span>{int(turn)}</span>"] if turn is not None else []
    parts.append(f'<span class="name">{_safe(speaker_name(message))}</span>')
    parts += [_reward(value, f"{source} ") for source, value in rewards_of(message, with_env)]
    parts += [f"<span>{_safe(detail)}</span>" for detail in details_of(message)]
    if errors := errors_of(message):
        parts.append(f'<span class="down">{_safe(errors)}</span>')
    kind = "message tool" if message.get("role") == "tool" else "message"
    return f'<div class="{kind}"{mine}><div class="head">{"".join(parts)}</div>{_text(message)}</div>'


def _text(message: Any) -> str:
    """What was said, or its parts: reasoning, folded, answer and calls."""
    said = parts_of(message)
    if said is None:
        return _pre("text", message.get("content", ""))
    reasoning, answer, calls = said
    folded = f'<details class="reasoning"><summary>reasoning</summary>{_pre("text", reasoning)}</details>'
    answered = _pre("text", answer) if answer.strip() or not calls else ""
    return (folded if reasoning else "") + answered + "".join(_pre("call", call) for call in calls)


def _pre(kind: str, text: Any) -> str:
    return f'<pre class="{kind}">\n{_safe(text)}</pre>'  # HTML drops the first line break


def _reward(reward: float, source: str = "") -> str:
    """A reward, green or red; its sign is also written out."""
    sign = " up" if reward > 0 else " down" if reward < 0 else ""
    return f'<span class="reward{sign}">{source}{reward_text(reward)}</span>'


def _color(agent: int) -> str:
    return f"--agent: {AGENT_COLORS[agent % len(AGENT_COLORS)]}"


def _safe(text: Any) -> str:
    return escape(shown_text(text), quote=True)
