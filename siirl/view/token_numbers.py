"""What the tokens of sampled rows were trained with, as a run wrote it, for the page."""

from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

from siirl.runs.folder_reader import LeftOut, attempt, json_lines, mapping, number, whole
from siirl.show.conversation_text import EPISODE, shown_text

MOST_FILE_BYTES, MOST_TOKENS = 16 << 20, 4096
NUMBERS = ("rollout_log_prob", "old_log_prob", "advantage", "ratio", "clip", "weight")
PARTS = ("advantage", "own", "team", "env", "shaping")

Turns = dict[tuple[Hashable, Hashable], dict[str, Any]]
"""(speaker, turn) -> the tokens of a turn, and what it was credited with."""


def read_tokens(path: Path, left_out: LeftOut) -> dict[Hashable, Turns]:
    """Which sample -> its turns; nothing where there is no file. Damaged lines are passed over and noted."""
    found: dict[Hashable, Turns] = {}
    damaged = 0
    for line in json_lines(path, MOST_FILE_BYTES, left_out):
        turns = attempt(partial(_turns, line), None, "tokens", LeftOut())
        if turns is None:
            damaged += 1
            continue
        found.setdefault(_sample(line, line.get("episode_id")), {}).update(turns)
    if damaged:
        left_out.add("tokens", f"those of damaged rows were left out: {damaged}")
    return found


def sample_of(row: dict[str, Any]) -> Hashable:
    """Which sample a line of the sampled rows or conversations is, as read_tokens names it."""
    return _sample(row, mapping(row.get(EPISODE)).get("episode_id"))


def _sample(row: dict[str, Any], episode: Any) -> Hashable:
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
