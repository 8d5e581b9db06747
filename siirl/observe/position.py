"""Where a worker is (step, node), in a small file that outlives it and so can name a killed rank's node."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

RECORD_BYTES = 256


@dataclass(frozen=True)
class Position:
    """The last place that a worker entered."""

    step: int
    node: str
    time_s: float
    """Seconds since the epoch."""


class PositionFile:
    """Writes this process's position, in place: one small pwrite for each change, no communication."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def set(self, step: int, node: str) -> None:
        record = f"{step}\t{node}".encode()[: RECORD_BYTES - 32] + f"\t{time.time():.3f}".encode()
        os.pwrite(self._fd, record.ljust(RECORD_BYTES), 0)

    def close(self) -> None:
        os.close(self._fd)


def read_position(path: Path) -> Position | None:
    """The position that a worker left in its file; None when it never entered a node."""
    try:
        step, node, time_s = path.read_text(errors="replace").strip().split("\t")
        return Position(int(step), node, float(time_s))
    except (FileNotFoundError, ValueError):
        return None
