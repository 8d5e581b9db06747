"""Episodes for readers, as text for the console and logs. conversation_page.py draws them as a page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from siirl.observe.printable import printable

MAX_MESSAGE = 20_000  # characters of a message that are shown


@dataclass(frozen=True)
class ShownEpisode:
    """One episode to be shown."""

    title: str
    """Which episode it is."""
    messages: Sequence[Mapping[str, Any]]
    """As in the `conversation` column."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """What each agent got in all, by agent number."""
    note: str = ""
    """A line below it, such as the ground truth."""
    ended: str = ""
    """Why it was over before its last node, if it was."""

    @property
    def turns(self) -> int:
        """How many turns agents have spoken."""
        return sum(message.get("agent") is not None for message in self.messages)

    @property
    def mean_reward(self) -> float:
        """Over its agents; 0 if there is none."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else 0.0


EPISODE = "episode"
"""Key of a sampled row of an interaction: its agent, episode_id, conversation, why that ended, and the last
turn in the row, or None.
"""

CHAT = "chat"
"""Key of a sampled row: its agent and the messages of its prompt, for the page; files have them as text."""

WANTED = "wanted"
"""Key in CHAT: which trained row it is (siirl/nodes/trained_tokens.py), in steps that write these."""

TOTAL = "reward/total"
"""Key of a sampled row whose reward is more than its score: all that it gets (docs/rewards.md)."""

SAID = "said"
"""Key of a sampled row that has more than an answer: {reasoning, answer, calls}; in EPISODE by turns."""

LENGTH = "response_length"
"""Key of a sampled row: tokens of the response."""

_ABOUT = ("node", "data_source", "sample_index", "row_id", "score", "prompt", "response", "ground_truth")
SAMPLE = (*_ABOUT, CHAT, EPISODE, TOTAL, SAID, LENGTH)
"""Keys that every sampled row has; what it has besides is what its reward function returned."""


def sample_name(node: Any, prompt: Any, episode: Any, row: Any) -> str:
    """Of a row that a node scored, or of an episode (-1: of none), in its step; the ledger tells it, too."""
    return f"{prompt} {row} {node}" if episode == -1 else f"{prompt} episode {episode}"


def split_episodes(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[ShownEpisode]]:
    """Sampled rows to be shown, those of an episode as one with the whole conversation, and the episodes.

    A row's score stands at the last turn in it. An agent's reward is the mean of what its rows get in all. A
    row of no interaction is an episode of one turn, and shown as it is.
    """
    shown: list[dict[str, Any]] = []
    single: list[ShownEpisode] = []
    of_episode: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if EPISODE in row:
            key = (row["data_source"], row["sample_index"], row[EPISODE]["episode_id"])
            of_episode.setdefault(key, []).append(row)
        else:
            if CHAT in row:
                single.append(_single(row, len(single)))
            shown.append({key: value for key, value in row.items() if key != CHAT})
    episodes = [_shown(group) for group in of_episode.values()]
    for (source, index, number), episode in zip(of_episode, episodes, strict=True):
        shown.append(
            {
                "data_source": source,
                "sample_index": index,
                "rewards": {f"agent {agent}": reward for agent, reward in episode.rewards.items()},
                EPISODE: {"episode_id": number, "ended": episode.ended},
                "messages": list(episode.messages),
                "conversation": episode_text(episode),
            }
        )
    return shown, [*single, *episodes]


def reward_of(row: Mapping[str, Any]) -> Any:
    """What a sampled row gets in all."""
    return row.get(TOTAL, row.get("score"))


def _single(row: Mapping[str, Any], place: int) -> ShownEpisode:
    """A prompt and its response as an episode of one turn. place: among the samples that are shown."""
    agent = row[CHAT]["agent"]
    spoken = {"agent": agent, "turn": 0, "node": "", "content": row["response"], "score": row.get("score")}
    spoken |= {SAID: row[SAID]} if SAID in row else {}
    return ShownEpisode(
        f"{row['data_source']}, row {row['sample_index']}, sample {place}",
        [*row[CHAT]["prompt"], spoken],
        {agent: reward_of(row)},
        _note([row], [agent]),
    )


def _shown(rows: Sequence[Mapping[str, Any]]) -> ShownEpisode:
    rewards: dict[int, list[float]] = {}
    messages = [dict(message) for message in rows[0][EPISODE]["conversation"]]
    for row in sorted(rows, key=lambda row: row[EPISODE]["agent"]):
        agent, turn = row[EPISODE]["agent"], row[EPISODE].get("turn")
        rewards.setdefault(agent, []).append(reward_of(row))
        spoken = [message for message in messages if message["agent"] == agent]
        for message in spoken:
            if parts := row[EPISODE].get(SAID, {}).get(message["turn"]):
                message[SAID] = parts
        for message in ([m for m in spoken if m["turn"] == turn] or spoken[-1:]) if "score" in row else ():
            message["score"] = message.get("score", 0.0) + row["score"]
    return ShownEpisode(
        f"{rows[0]['data_source']}, row {rows[0]['sample_index']}, episode {rows[0][EPISODE]['episode_id']}",
        messages,
        {agent: sum(values) / len(values) for agent, values in rewards.items()},
        _note(rows, [row[EPISODE]["agent"] for row in rows]),
        rows[0][EPISODE].get("ended", ""),
    )


def _note(rows: Sequence[Mapping[str, Any]], agents: Sequence[int]) -> str:
    """The ground truth, and what the reward functions returned besides the scores of rows, agent by agent."""
    notes = [f"ground truth: {rows[0]['ground_truth']}"]
    for agent, row in sorted(zip(agents, rows, strict=True), key=lambda pair: pair[0]):
        if info := ", ".join(f"{name} {_number(value)}" for name, value in row.items() if name not in SAMPLE):
            notes.append(f"agent {agent}: {info}")
    return "; ".join(notes)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def speaker_name(message: Mapping[str, Any]) -> str:
    """Who said it: an agent's node and the agent, an environment's node, a tool, or the role in a prompt."""
    agent, node = message.get("agent"), message.get("node")
    if agent is not None:
        return f"{node} (agent {agent})" if node else f"agent {agent}"
    if message.get("role") == "tool":
        return f"tool {message['tool']}" if message.get("tool") else "tool"
    return f"{node} (environment)" if node else str(message.get("role") or "?")


def details_of(message: Mapping[str, Any]) -> list[str]:
    """What else is known of a message, in a few words each."""
    details = []
    if message.get("finish_reason") not in (None, "stop"):
        details.append(f"ended by {message['finish_reason'].replace('_', ' ')}")
    if message.get("tool_calls"):
        details.append(f"{message['tool_calls']} tool call{'s' * (message['tool_calls'] != 1)}")
    if message.get("to") is not None and message.get("role") != "tool" and not message.get("tool_calls"):
        details.append(f"only to agent {message['to']}")
    if message.get("weight_version") is not None:
        several = message.get("weight_versions")
        named = f"{several[0]}-{several[-1]}" if several else message["weight_version"]
        details.append(f"weights {named}")
    return details


def parts_of(message: Mapping[str, Any]) -> tuple[str, str, list[str]] | None:
    """(reasoning, answer, calls) of a turn that has more than an answer; None of any other."""
    said = message.get(SAID)
    if not isinstance(said, Mapping):
        return None
    calls = said.get("calls")
    told = (
        [_call(call) for call in calls if isinstance(call, Mapping)]
        if isinstance(calls, list | tuple)
        else []
    )
    return shown_text(said.get("reasoning") or ""), shown_text(said.get("answer") or ""), told


def _call(call: Mapping[str, Any]) -> str:
    if "malformed" in call:
        return f"a call that cannot be read: {shown_text(call['malformed'])}"
    arguments = call.get("arguments")
    named = arguments.items() if isinstance(arguments, Mapping) else ()
    told = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in named)
    return shown_text(f"{call.get('name')}({told})")


def errors_of(message: Mapping[str, Any]) -> str:
    """What went wrong with the tools that a turn calls, or in the tool that answers; empty: nothing."""
    errors = message.get("tool_errors") or message.get("error")
    return f"tool errors: {_listed(errors)}" if errors else ""


def rewards_of(message: Mapping[str, Any], with_env: bool) -> list[tuple[str, float]]:
    """What a turn got, by its source: the environment, if that named it, and the score of the row it ends.

    with_env: whether the environment's are shown; see has_env_rewards.
    """
    if message.get("turn") is None:
        return []
    named = with_env and (message.get("rewarded") or message.get("reward"))
    found = [("env", message.get("reward") or 0.0)] if named else []
    return [*found, ("score", message["score"])] if message.get("score") is not None else found


def has_env_rewards(episode: ShownEpisode) -> bool:
    """Whether an environment rewarded any turn."""
    return any(message.get("reward") for message in episode.messages)


def reward_text(reward: float) -> str:
    """A reward with its sign."""
    return f"{reward:+.4g}" if reward else "0"


def shown_text(content: Any) -> str:
    """The text of a message: long ones are cut in the middle, characters that cannot be shown are marked."""
    text = content if isinstance(content, str) else str(content)
    if len(text) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        text = f"{text[:half]}\n... ({len(text) - 2 * half} characters skipped) ...\n{text[-half:]}"
    return printable(text)


def episode_text(episode: ShownEpisode) -> str:
    """An episode as lines of text: who speaks, what it was rewarded with, and what was said."""
    rewards = ", ".join(f"agent {agent} {reward_text(reward)}" for agent, reward in episode.rewards.items())
    lines = [episode.title + (f"  [{rewards}]" if rewards else "")]
    with_env = has_env_rewards(episode)
    for message in episode.messages:
        turn = message.get("turn")
        head = f"  {speaker_name(message)}" if turn is None else f"  {turn}. {speaker_name(message)}"
        head += "".join(f"  {source} {reward_text(value)}" for source, value in rewards_of(message, with_env))
        details = [detail for detail in details_of(message) if not detail.startswith("weights")]
        details += [errors] if (errors := errors_of(message)) else []
        lines.append(head + (f"  ({'; '.join(details)})" if details else ""))
        text = shown_text(message.get("content", ""))
        lines += [f"    | {line}" for line in text.split("\n")]
    return printable("\n".join([*lines, *(f"  {note}" for note in notes_of(episode))]))


def notes_of(episode: ShownEpisode) -> list[str]:
    """The lines below an episode: why it ended, if that is to be said, and its note."""
    ended = [f"ended: {episode.ended}"] if episode.ended else []
    return [*ended, *([episode.note] if episode.note else [])]


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
