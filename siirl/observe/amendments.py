"""Changes of a run that goes on: asked for in its folder, taken between two steps, written down. No torch.

OUT/amendment.json         what `siirl amend` asks for, until rank 0 takes it between two steps
OUT/amendment_taken.json   the same from then on, until the launcher has made it the next attempt
OUT/amendments.jsonl       a line for each that was applied, or taken back
"""

import contextlib
import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from siirl.guarded_files import is_own, json_lines, open_regular, write_own

ASKED, TAKEN, JOURNAL = "amendment.json", "amendment_taken.json", "amendments.jsonl"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Amendment:
    """What is asked for."""

    id: str
    run_id: str
    """The start of the run that it was checked against."""
    settings: list[str]
    """As they were typed, without secrets."""
    changes: list[str]
    """What differs, in words: a line each."""
    job: dict[str, Any]
    """The fields of the launcher's Job that become other ones."""
    config_text: str
    """The new run_config.yaml."""


@dataclass(frozen=True)
class Amended:
    """What became of one."""

    id: str
    run_id: str
    time_s: float
    """Seconds since the epoch."""
    step: int
    """The last one before it."""
    settings: list[str]
    changes: list[str]
    state: Literal["applied", "withdrawn"]
    """withdrawn: its first step failed, and the run goes on as it was before."""
    cause: str = ""
    """Why it was withdrawn, in one line."""

    def __str__(self) -> str:
        told = f"after step {self.step}: {' '.join(self.settings)}"
        return told if self.state == "applied" else f"{told} (taken back: {self.cause})"


def ask(folder: Path, amendment: Amendment) -> None:
    """Ask the run of a folder. OSError."""
    write_own(folder / ASKED, dataclasses.asdict(amendment))


def ask_to_save(folder: Path) -> None:
    """Ask for a checkpoint after the step that a run is in, with which its workers end. OSError."""
    write_own(folder / ASKED, {})


def is_asked(folder: Path) -> bool:
    return (folder / ASKED).exists()


def no_longer_ask(folder: Path) -> bool:
    """Take the request back; False if it has been taken, or there is none."""
    try:
        (folder / ASKED).unlink()
    except OSError:
        return False
    return True


def take(folder: Path) -> bool:
    """Whether something is asked for; from now on it is taken. What others could have written is not."""
    asked = folder / ASKED
    try:
        about = asked.lstat()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        if is_own(about):
            os.rename(asked, folder / TAKEN)
            return True
        asked.unlink()
        log.warning("%s was removed: it is not this user's alone, and says what runs", asked)
    return False


def taken(folder: Path, run_id: str) -> Amendment | None:
    """What rank 0 has taken, of this start of the run; from now on it is not there any more."""
    path, found = folder / TAKEN, None
    with contextlib.suppress(OSError, ValueError, TypeError):
        with os.fdopen(open_regular(path)) as file:
            found = Amendment(**json.load(file)) if is_own(os.fstat(file.fileno())) else None
        path.unlink()
    return found if found is not None and found.run_id == run_id else None


def put_back(folder: Path) -> None:
    """The attempt that has taken it did not come to its end: it is asked of the next one."""
    with contextlib.suppress(OSError):
        os.rename(folder / TAKEN, folder / ASKED)


def forget(folder: Path) -> None:
    """What was asked of an earlier start is asked no more."""
    for name in (ASKED, TAKEN):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def record(folder: Path, amended: Amended) -> None:
    """Write a line of the journal. A full disk ends nothing."""
    try:
        with (folder / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(amended)) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", JOURNAL, error)


def recorded(folder: Path) -> list[Amended]:
    """The lines of the journal that are whole."""
    found = []
    for line in json_lines(folder / JOURNAL):
        with contextlib.suppress(TypeError):
            found.append(Amended(**line))
    return found
