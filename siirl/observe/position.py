"""Where a worker is (step, node), in a small file that outlives it and so can name a killed rank's node; how
far a run is to go, and how it ended, as it says itself. No torch.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RECORD_BYTES, PLACE_BYTES, WAITS_BYTES = 384, 96, 128
AT_END = "end"
"""The part of a step in which a rank is that has left one, and not begun the next."""


@dataclass(frozen=True)
class Position:
    """The last place that a worker entered."""

    step: int
    node: str
    time_s: float
    """Seconds since the epoch."""
    part: str = ""
    """Of the step that it is a part of: "step", "validation", its own name, or AT_END; "" unknown."""
    order: tuple[int, ...] = ()
    """Number of the part, and of an instruction its place there (siirl/observe/heartbeat.py); () unknown. Of
    two ranks in one step the one with the smaller is behind."""
    waits: str = ""
    """For whom outside of the run it waits there, in words; "" if it does not."""


class PositionFile:
    """Writes this process's position, in place: one small pwrite for each change, no communication."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._record = b""

    def set(self, step: int, node: str, part: str = "", order: Sequence[int] = ()) -> None:
        place = f"{part[:32]} {' '.join(map(str, order))}"
        record = f"{step}\t{node}".encode()[: RECORD_BYTES - PLACE_BYTES - WAITS_BYTES]
        record += f"\t{time.time():.3f}\t{place}".encode()[:PLACE_BYTES]
        self._record = record
        os.pwrite(self._fd, record.ljust(RECORD_BYTES), 0)

    def wait(self, who: str) -> None:
        """For whom it waits where it is, or "" that it does not any more."""
        waits = f"\t{who}".encode()[:WAITS_BYTES] if who else b""
        os.pwrite(self._fd, (self._record + waits).ljust(RECORD_BYTES), 0)

    def close(self) -> None:
        os.close(self._fd)


def read_position(path: Path) -> Position | None:
    """The position that a worker left in its file; None when it never entered a node."""
    try:
        return position_in(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None


def position_in(text: str) -> Position | None:
    """The position that is written so; None if none is."""
    try:
        step, node, time_s, *place = text.strip().split("\t")
        part, *order = place[0].split(" ") if place else [""]
        waits = place[1] if len(place) > 1 else ""
        return Position(int(step), node, float(time_s), part, tuple(int(number) for number in order), waits)
    except ValueError:
        return None


log = logging.getLogger(__name__)
PROGRESS_FILE = "progress.jsonl"
How = Literal["ended", "failed", "stopped"]


def record_begin(folder: Path, run_id: str, total_steps: int | None) -> None:
    """Rank 0 begins to work. total_steps: of the whole run, earlier starts included; None: it trains none."""
    _append(folder, {"run_id": run_id, "event": "begin", "total_steps": total_steps})


def record_end(folder: Path, run_id: str, how: How, cause: str = "") -> None:
    """How a start of a run ended: rank 0 says that it ended well, the launcher that it failed or was stopped.

    A later line of the same start counts more. cause: one line.
    """
    _append(folder, {"run_id": run_id, "event": "end", "how": how, "cause": cause})


def _append(folder: Path, event: dict[str, Any]) -> None:
    """Add a line. A full disk is said and ends nothing: the run itself finds out where it must write."""
    try:
        with (folder / PROGRESS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time_s": round(time.time(), 3), **event}) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s; readers of the folder will not know", PROGRESS_FILE, error)
