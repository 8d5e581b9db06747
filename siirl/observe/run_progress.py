"""How far a run is to go, and how it ended, as it says itself: lines of a file of its folder. No torch."""

import json
import logging
import time
from pathlib import Path
from typing import Any, Literal

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
