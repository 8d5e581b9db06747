"""The conversations that a run wrote as samples, newest first, of at most so many."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from siirl.runs.folder_reader import LeftOut, attempt, json_lines, number, numbered, whole
from siirl.show.conversation_text import (
    EPISODE,
    ShownEpisode,
    details_of,
    errors_of,
    has_env_rewards,
    rewards_of,
    shown_text,
    speaker_name,
)

MOST_EPISODES, MOST_CHARACTERS, MOST_FILE_BYTES, MOST_MESSAGES = 400, 4 << 20, 16 << 20, 200
KINDS = ("validation", "train")
_ROW_KEYS = ("step", "node", "data_source", "sample_index", "score", "prompt", "response", "ground_truth")


def read_episodes(folders: Mapping[str, Path], left_out: LeftOut) -> list[dict[str, Any]]:
    """Episodes as the page shows them, newest step first. folders: kind of samples -> its folder."""
    files = [
        (step, kind, path)
        for kind in KINDS
        if kind in folders
        for step, path in numbered(folders[kind], "step_", ".jsonl", left_out)
    ]
    files.sort(key=lambda item: (-item[0], KINDS.index(item[1])))
    shown: list[dict[str, Any]] = []
    characters = damaged = 0
    for place, (step, kind, path) in enumerate(files):
        for index, row in enumerate(json_lines(path, MOST_FILE_BYTES, left_out)):
            if len(shown) >= MOST_EPISODES or characters >= MOST_CHARACTERS:
                left_out.add(
                    "conversations",
                    f"the newest {len(shown)} are shown, down to step {step}; older ones are "
                    f"in {len(files) - place} file{'s' * (len(files) - place > 1)} of the run's folder",
                )
                return shown
            episode = attempt(partial(_shown, row), None, "a conversation", LeftOut())
            if episode is None:
                damaged += 1
                continue
            characters += sum(len(message["text"]) for message in episode["messages"])
            shown.append({"id": f"{kind} {step}.{index}", "step": step, "kind": kind, **episode})
    if damaged:
        left_out.add("conversations", f"damaged ones were left out: {damaged}")
    return shown


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    episode = _of_interaction(row) if "messages" in row else _of_row(row)
    with_env = has_env_rewards(episode)
    return {
        "title": shown_text(episode.title),
        "prompt": shown_text(f"{row.get('data_source')}, row {row.get('sample_index')}"),
        "rewards": {str(agent): number(reward) for agent, reward in episode.rewards.items()},
        "reward": number(episode.mean_reward),
        "messages": [_message(message, with_env) for message in episode.messages[:MOST_MESSAGES]],
        "cut": max(0, len(episode.messages) - MOST_MESSAGES),
        "ended": shown_text(episode.ended),
        "note": shown_text(episode.note),
    }


def _of_interaction(row: dict[str, Any]) -> ShownEpisode:
    """An episode of agents that talk, as siirl/show/conversation_text.py turns rows into it."""
    about = row.get(EPISODE) or {}
    title = f"{row.get('data_source')}, row {row.get('sample_index')}, episode {about.get('episode_id')}"
    rewards = {
        int(name.removeprefix("agent ")): reward for name, reward in (row.get("rewards") or {}).items()
    }
    notes = [line.strip() for line in str(row.get("conversation", "")).splitlines()[-3:]]
    truth = next((line for line in notes if line.startswith("ground truth: ")), "")
    return ShownEpisode(title, row["messages"], rewards, truth, str(about.get("ended") or ""))


def _of_row(row: dict[str, Any]) -> ShownEpisode:
    """A prompt and its response, of a run whose agents do not talk."""
    title = f"{row.get('data_source')}, row {row.get('sample_index')}"
    spoken = {"agent": 0, "turn": 0, "node": "", "content": row["response"], "score": row["score"]}
    agent = str(row.get("node", "")).removeprefix("agent_").partition(".")[0]
    if agent.isascii() and agent.isdigit():
        spoken["agent"] = int(agent)
    messages = [{"role": "prompt", "content": row.get("prompt", "")}, spoken]
    besides = "".join(f"; {name} {value}" for name, value in row.items() if name not in _ROW_KEYS)
    return ShownEpisode(
        title, messages, {spoken["agent"]: row["score"]}, f"ground truth: {row.get('ground_truth')}{besides}"
    )


def _message(message: Mapping[str, Any], with_env: bool) -> dict[str, Any]:
    return {
        "who": shown_text(speaker_name(message)),
        "agent": whole(message.get("agent")),
        "turn": whole(message.get("turn")),
        "tool": message.get("role") == "tool",
        "rewards": [[source, number(value)] for source, value in rewards_of(message, with_env)],
        "details": [shown_text(detail) for detail in details_of(message)],
        "errors": shown_text(errors_of(message)),
        "text": shown_text(message.get("content", "")),
    }
