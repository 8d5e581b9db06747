"""Episodes for readers, as text for the console and logs. page.py draws them as a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_MESSAGE = 20_000  # characters of a message that are shown


@dataclass(frozen=True)
class ShownEpisode:
    """One episode to be shown.

    messages: as in the `conversation` column. rewards: what each agent got in all, by agent number. title:
    which episode it is. note: a line below it, such as the ground truth, or why the episode failed.
    """

    title: str
    messages: Sequence[Mapping[str, Any]]
    rewards: Mapping[int, float] = field(default_factory=dict)
    note: str = ""

    @property
    def turns(self) -> int:
        """How many turns agents have spoken."""
        return sum(message.get("agent") is not None for message in self.messages)

    @property
    def mean_reward(self) -> float:
        """Over its agents; 0 if there is none."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else 0.0


EPISODE = "episode"
"""Key of a sampled row that holds its agent, episode_id and conversation, if it is of an interaction."""


def split_episodes(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[ShownEpisode]]:
    """Sampled rows, with their conversation as text, and the episodes that they are of, each once.

    An agent's reward in an episode is the score of its row; the mean of them if it has several.
    """
    plain: list[dict[str, Any]] = []
    of_episode: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if EPISODE in row:
            of_episode.setdefault(row[EPISODE]["episode_id"], []).append(row)
    episodes = {number: _shown(group) for number, group in of_episode.items()}
    for row in rows:
        kept = {name: value for name, value in row.items() if name != EPISODE}
        if EPISODE in row:
            kept["conversation"] = episode_text(episodes[row[EPISODE]["episode_id"]])
        plain.append(kept)
    return plain, list(episodes.values())


def _shown(rows: Sequence[Mapping[str, Any]]) -> ShownEpisode:
    scores: dict[int, list[float]] = {}
    for row in rows:
        scores.setdefault(row[EPISODE]["agent"], []).append(row["score"])
    first = rows[0]
    return ShownEpisode(
        f"{first['data_source']}, row {first['sample_index']}, episode {first[EPISODE]['episode_id']}",
        first[EPISODE]["conversation"],
        {agent: sum(values) / len(values) for agent, values in sorted(scores.items())},
        f"ground truth: {first['ground_truth']}",
    )


def speaker_name(message: Mapping[str, Any]) -> str:
    """Who said it: the node and its agent, or the role of a prompt, an observation or a tool's response."""
    agent, node = message.get("agent"), message.get("node")
    if agent is None:
        return str(message.get("role") or "?")
    return f"{node} (agent {agent})" if node else f"agent {agent}"


def details_of(message: Mapping[str, Any]) -> list[str]:
    """What else is known of a turn, in a few words each."""
    details = []
    if message.get("finish_reason") not in (None, "stop"):
        details.append(f"ended by {message['finish_reason']}")
    if message.get("tool_errors"):
        details.append(f"tool errors: {_listed(message['tool_errors'])}")
    if message.get("to") is not None:
        details.append(f"only to agent {message['to']}")
    if message.get("weight_version") is not None:
        details.append(f"weights {message['weight_version']}")
    return details


def reward_text(reward: float) -> str:
    """A reward with its sign."""
    return f"{reward:+.4g}" if reward else "0"


def shown_text(content: Any) -> str:
    """The text of a message: long ones are cut in the middle, characters that cannot be shown are marked."""
    text = content if isinstance(content, str) else str(content)
    if len(text) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        text = f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
    return "".join(char if char.isprintable() or char in "\n\t" else _marked(char) for char in text)


def episode_text(episode: ShownEpisode, width: int = 0) -> str:
    """An episode as lines of text: who speaks, what it was rewarded with, and what was said.

    width: characters of a message; longer ones are cut; 0: all.
    """
    rewards = ", ".join(f"agent {agent} {reward_text(reward)}" for agent, reward in episode.rewards.items())
    lines = [episode.title + (f"  [{rewards}]" if rewards else "")]
    for message in episode.messages:
        turn = message.get("turn")
        head = f"  {speaker_name(message)}" if turn is None else f"  {turn}. {speaker_name(message)}"
        if turn is not None and message.get("reward") is not None:
            head += f"  {reward_text(message['reward'])}"
        details = [detail for detail in details_of(message) if not detail.startswith("weights")]
        lines.append(head + (f"  ({'; '.join(details)})" if details else ""))
        text = shown_text(message.get("content", ""))
        text = f"{text[:width]}..." if width and len(text) > width else text
        lines += [f"    | {line}" for line in text.split("\n")]
    return "\n".join([*lines, f"  {episode.note}"] if episode.note else lines)


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _marked(char: str) -> str:
    return f"\\u{ord(char):04x}" if char != "\r" else ""
