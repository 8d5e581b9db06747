"""The conversations that a run wrote as samples: a list of them, and their texts apart, a file at a time."""

from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from siirl.runs.folder_reader import Skipped, attempt, json_lines, mapping, number, numbered, whole
from siirl.show.conversation_text import (
    EPISODE,
    LENGTH,
    SAID,
    SAMPLE,
    ShownEpisode,
    details_of,
    errors_of,
    has_env_rewards,
    parts_of,
    reward_of,
    rewards_of,
    sample_name,
    shown_text,
    speaker_name,
)

MOST_TOKEN_FILE_BYTES, MOST_TOKENS = 16 << 20, 4096
NUMBERS = ("rollout_log_prob", "old_log_prob", "advantage", "ratio", "clip", "weight")
PARTS = ("advantage", "own", "team", "env", "shaping")

Turns = dict[tuple[Hashable, Hashable], dict[str, Any]]
"""(speaker, turn) -> the tokens of a turn, and what it was credited with."""


def read_tokens(path: Path, skipped: Skipped) -> dict[Hashable, Turns]:
    """Which sample -> its turns; nothing where there is no file. Damaged lines are passed over and noted."""
    found: dict[Hashable, Turns] = {}
    damaged = 0
    for line in json_lines(path, MOST_TOKEN_FILE_BYTES, skipped):
        turns = attempt(partial(_turns, line), None, "tokens", Skipped())
        if turns is None:
            damaged += 1
            continue
        found.setdefault(_sample(line, line.get("episode_id")), {}).update(turns)
    if damaged:
        skipped.add("tokens", f"those of damaged rows were skipped: {damaged}")
    return found


def sample_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Which sample a line of the sampled rows or conversations is, as read_tokens names it."""
    return _sample(row, mapping(row.get(EPISODE)).get("episode_id"))


def _sample(row: dict[str, Any], episode: Any) -> tuple[Any, ...]:
    row_id = whole(row.get("row_id")) if whole(episode) is None else None
    return whole(row.get("sample_index")), whole(episode), row_id


def _turns(line: dict[str, Any]) -> Turns:
    """The turns of a row. KeyError, TypeError or ValueError where it is damaged."""
    tokens, speaker = line["tokens"], whole(line["speaker"])
    texts, turn_of = tokens["text"][:MOST_TOKENS], tokens["turn"][:MOST_TOKENS]
    names = [name for name in NUMBERS if name in tokens]
    columns = {name: [number(value) for value in tokens[name][: len(texts)]] for name in names}
    if any(len(column) != len(texts) for column in (turn_of, *columns.values())):
        raise ValueError("columns of unequal length")
    found: Turns = {}
    for about in line["turns"]:
        places = [place for place, turn in enumerate(turn_of) if turn == about["turn"]]
        found[speaker, whole(about["turn"])] = {
            "texts": [shown_text(texts[place]) for place in places],
            "numbers": {name: [column[place] for place in places] for name, column in columns.items()},
            "credit": {name: number(about[name]) for name in PARTS if name in about},
            "left_out": max(0, (whole(about.get("tokens")) or 0) - len(places)),
        }
    return found


MOST_EPISODES, MOST_FILE_BYTES, MOST_MESSAGES, MOST_ENDED = 20_000, 16 << 20, 200, 300
KINDS = ("validation", "train")
_ROW_KEYS = ("step", *SAMPLE)


class Episodes:
    """The samples of a run: a list of them all, and the texts file by file."""

    def __init__(self, folders: Mapping[str, Path], tokens: Path, ledger: Path):
        """folders: kind of samples -> its folder. tokens: the folder of what samples were trained with."""
        self._folders, self._tokens, self._ledger = folders, tokens, ledger
        self._listed: dict[Path, tuple[Any, list[dict[str, Any]], int]] = {}

    def files(self, skipped: Skipped) -> list[tuple[int, str, Path]]:
        """(step, kind, file), the newest step first."""
        found = [
            (step, kind, path)
            for kind in KINDS
            if kind in self._folders
            for step, path in numbered(self._folders[kind], "step_", ".jsonl", skipped)
        ]
        return sorted(found, key=lambda item: (-item[0], KINDS.index(item[1])))

    def listed(self, skipped: Skipped) -> list[dict[str, Any]]:
        """All but the texts of the newest episodes. "block": which `texts` an episode is in."""
        shown: list[dict[str, Any]] = []
        damaged, files = 0, self.files(skipped)
        for place, (step, kind, path) in enumerate(files):
            if len(shown) >= MOST_EPISODES:
                left = len(files) - place
                skipped.add(
                    "conversations",
                    f"the newest {len(shown)} are listed, down to step {files[place - 1][0]}; older ones are "
                    f"in {left} file{'s' * (left > 1)} of the run's folder",
                )
                break
            rows, bad = self._file(step, kind, path, skipped)
            shown += rows
            damaged += bad
        if damaged:
            skipped.add("conversations", f"damaged ones were skipped: {damaged}")
        return shown

    def _file(self, step: int, kind: str, path: Path, skipped: Skipped) -> tuple[list[dict[str, Any]], int]:
        """(list entries of a file, how many are damaged); read again when it has changed."""
        about = signatures([path, self._tokens / path.name])
        if path not in self._listed or self._listed[path][0] != about:
            rows, damaged = [], 0
            told = {"tokens": kind == "train" and about[1] != (0, 0)}
            in_ledger = kind == "train" and self._ledger.is_dir()
            for index, row in enumerate(json_lines(path, MOST_FILE_BYTES, skipped)):
                entry = attempt(partial(_entry, row, in_ledger), None, "a conversation", Skipped())
                if entry is None:
                    damaged += 1
                else:
                    rows.append({"id": f"{kind} {step}.{index}", "step": step, "kind": kind, **told, **entry})
            self._listed[path] = (about, rows, damaged)
        return self._listed[path][1:]

    def texts(self, block: str, skipped: Skipped) -> dict[str, dict[str, Any]]:
        """Of a block, as "validation 30": id of an episode -> what was said in it."""
        kind, _, step = block.partition(" ")
        if kind not in self._folders or not (step.isascii() and step.isdigit() and len(step) < 10):
            return {}
        found, name = {}, f"step_{int(step)}.jsonl"
        tokens = read_tokens(self._tokens / name, skipped) if kind == "train" else {}
        for index, row in enumerate(json_lines(self._folders[kind] / name, MOST_FILE_BYTES, skipped)):
            turns = tokens.get(sample_of(row), {})
            said = attempt(partial(_said, row, turns), None, "a conversation", Skipped())
            if said is not None:
                found[f"{kind} {int(step)}.{index}"] = said
        return found


def signatures(paths: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """(time of the last change, size) of files; two that are equal mean that nothing was written."""
    found = []
    for path in paths:
        try:
            about = path.stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((about.st_mtime_ns, about.st_size))
    return tuple(found)


def _entry(row: dict[str, Any], in_ledger: bool) -> dict[str, Any]:
    """What the list says of an episode. in_ledger: the run has one, in which it is found by its "life"."""
    episode = _read(row)
    prompt, number_of, row_id = sample_of(row)
    life = sample_name(row.get("node"), prompt, -1 if number_of is None else number_of, row_id)
    return {
        **({"life": shown_text(life)} if in_ledger else {}),
        "title": shown_text(episode.title),
        "prompt": shown_text(f"{row.get('data_source')}, row {row.get('sample_index')}"),
        "rewards": {str(agent): number(reward) for agent, reward in episode.rewards.items()},
        "reward": number(episode.mean_reward),
        "turns": sum(1 for message in episode.messages if whole(message.get("agent")) is not None),
        "length": _length(row, episode),
        "ended": shown_text(episode.ended)[:MOST_ENDED],
    }


def _length(row: dict[str, Any], episode: ShownEpisode) -> int | None:
    """Tokens that agents said; None where that was not written."""
    if LENGTH in row:
        return whole(row[LENGTH])
    counts = [
        whole(message.get("tokens")) for message in episode.messages if message.get("agent") is not None
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _said(row: dict[str, Any], turns: Turns) -> dict[str, Any]:
    episode = _read(row)
    with_env = has_env_rewards(episode)
    return {
        "messages": [_message(message, with_env, turns) for message in episode.messages[:MOST_MESSAGES]],
        "cut": max(0, len(episode.messages) - MOST_MESSAGES),
        "ended": shown_text(episode.ended),
        "note": shown_text(episode.note),
    }


def _read(row: dict[str, Any]) -> ShownEpisode:
    return _of_interaction(row) if "messages" in row else _of_row(row)


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
    spoken = {"agent": 0, "turn": 0, "node": "", "content": row["response"], "score": row.get("score")}
    agent = str(row.get("node", "")).removeprefix("agent_").partition(".")[0]
    if agent.isascii() and agent.isdigit():
        spoken["agent"] = int(agent)
    spoken |= {SAID: row[SAID]} if SAID in row else {}
    messages = [{"role": "prompt", "content": row.get("prompt", "")}, spoken]
    besides = "".join(f"; {name} {value}" for name, value in row.items() if name not in _ROW_KEYS)
    return ShownEpisode(
        title,
        messages,
        {spoken["agent"]: reward_of(row)},
        f"ground truth: {row.get('ground_truth')}{besides}",
    )


def _message(message: Mapping[str, Any], with_env: bool, turns: Turns) -> dict[str, Any]:
    tokens = turns.get((whole(message.get("agent")), whole(message.get("turn"))))
    parts = parts_of(message)
    return {
        **({"parts": parts} if parts else {}),
        **({"tokens": tokens} if tokens else {}),
        "who": shown_text(speaker_name(message)),
        "agent": whole(message.get("agent")),
        "turn": whole(message.get("turn")),
        "tool": message.get("role") == "tool",
        "rewards": [[source, number(value)] for source, value in rewards_of(message, with_env)],
        "details": [shown_text(detail) for detail in details_of(message)],
        "errors": shown_text(errors_of(message)),
        "text": shown_text(message.get("content", "")),
    }
