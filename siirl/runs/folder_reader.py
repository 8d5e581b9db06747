"""Reading files that a run wrote: tolerant of damage, bounded in size, never raising for what stands in one.

A folder may be written at the same moment, come from elsewhere, or be damaged; no file in it is trusted.
What cannot be read, or was left out, is said in `Skipped`.
"""

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from siirl.guarded_files import open_below
from siirl.launch.run_record import CONFIG_FILE, RUN_FILE
from siirl.observe.curve import METRICS_FILE
from siirl.observe.printable import printable
from siirl.spelling import size_text

T = TypeVar("T")
MOST_LINE_BYTES, MOST_REASON = 8 << 20, 300
MOST_FILE_BYTES = 1 << 30
MARKS = (RUN_FILE, CONFIG_FILE, METRICS_FILE)
"""A folder with one of these is a run's."""
LEVELS = 4
"""Folders between a file of a run and the run."""


class Skipped(dict[str, str]):
    """File, or other part of a run -> why it could not be read, or not all of it; printable, a line each."""

    def add(self, what: Path | str, why: object) -> None:
        name = what.name if isinstance(what, Path) else what
        reason = one_line(str(why))[:MOST_REASON]
        before = self.get(name)
        self[name] = reason if before in (None, reason) else f"{before}; {reason}"


def one_line(text: str) -> str:
    """Text of models, users and their exceptions as one printable line."""
    return printable(" ".join(text.split()))


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if value.__class__ is float:
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer with hundreds of digits
        return None


def whole(value: Any) -> int | None:
    """An integer that fits 53 bits, as JavaScript's do; or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def word(value: Any) -> str:
    """A text or a number as one printable line; "" for anything else."""
    return one_line(str(value)) if isinstance(value, str | int | float) else ""


def mapping(value: Any) -> dict[str, Any]:
    """What is a table; {} for anything else."""
    return value if isinstance(value, dict) else {}


def first_skipped(num_bytes: int) -> str:
    """What is said of a file whose beginning was not read."""
    return f"its first {size_text(num_bytes)} are skipped"


@contextmanager
def opened(path: Path, skipped: Skipped) -> Iterator[BinaryIO]:
    """A file of a run to read from: a regular one below its folder; of all else nothing, which is noted.

    All that is shown of a run is read by this: a link may lead to what is the reader's alone, and a pipe
    nowhere.
    """
    try:
        file: BinaryIO = os.fdopen(open_below(top_of(path), path), "rb")
    except FileNotFoundError:
        file = io.BytesIO()
    except OSError as error:
        skipped.add(path, error.strerror or error)
        file = io.BytesIO()
    with file:
        try:
            yield file
        except OSError as error:
            skipped.add(path, error.strerror or error)


def top_of(path: Path) -> Path:
    """The folder of the run that a file is of, by its MARKS; its own folder if it is of none.

    A link is none: what it leads to may have marks of its own.
    """
    try:
        return _marked(path.parent)
    except LookupError:
        return path.parent


@lru_cache(maxsize=4096)
def _marked(folder: Path) -> Path:
    """The closest folder with marks, itself or above; LookupError if there is none, which may change."""
    for one in (folder, *list(folder.parents)[: LEVELS - 1]):
        if any(os.path.lexists(one / name) for name in MARKS) and not one.is_symlink():
            return one
    raise LookupError(folder)


def tail(path: Path, most: int | None, skipped: Skipped) -> tuple[bytes, int]:
    """(the last bytes of a file, how many come before them); nothing where there is no file.

    most: how many; None: all of a file, up to MOST_FILE_BYTES.
    """
    with opened(path, skipped) as file:
        size = file.seek(0, os.SEEK_END)
        before = max(0, size - (MOST_FILE_BYTES if most is None else most))
        file.seek(before)
        return file.read(size - before), before
    return b"", 0


def part(path: Path, start: int, most: int, skipped: Skipped) -> bytes:
    """At most `most` bytes of a regular file from `start` on; b"" at its end, or where there is none."""
    with opened(path, skipped) as file:
        file.seek(start)
        return file.read(most)
    return b""


def content(path: Path, skipped: Skipped, last: int | None = None) -> bytes:
    """The bytes of a file, or the `last` of them; b"" where there is none."""
    return tail(path, last, skipped)[0]


def json_value(text: bytes) -> Any:
    """What a text is in JSON; None if it is damaged."""
    try:
        return msgspec.json.decode(text)  # three times as fast as json, but it takes no NaN
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    except RecursionError:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_lines(path: Path, most: int, skipped: Skipped) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file's last `most` bytes, a line each; bad lines and cut bytes are noted."""
    return json_objects(whole_lines(path, most, skipped)[0], path, skipped)


def whole_lines(path: Path, most: int, skipped: Skipped) -> tuple[list[bytes], bool]:
    """(the whole lines of a file's last `most` bytes, whether some come before them), which is noted.

    A last line without an end is being written, and passed over in silence.
    """
    data, before = tail(path, most, skipped)
    if before:
        skipped.add(path, first_skipped(before))
    return data.split(b"\n")[1 if before else 0 : -1], before > 0


def json_objects(lines: Iterable[bytes], path: Path, skipped: Skipped) -> Iterator[dict[str, Any]]:
    """The JSON objects of the lines of a file; how many are bad is noted."""
    bad = 0
    for line in lines:
        if not line.strip(b"\0 \t\r"):
            continue
        found = json_value(line) if len(line) <= MOST_LINE_BYTES else None
        if isinstance(found, dict):
            yield found
        else:
            bad += 1
    if bad:
        skipped.add(path, f"{bad} damaged line{'s' * (bad > 1)} skipped")


def json_file(path: Path, most: int, skipped: Skipped) -> dict[str, Any]:
    """The JSON object that a file holds; empty if it is not there, damaged or too large."""
    data, before = tail(path, most, skipped)
    found = json_value(data) if data and not before else None
    if data and not isinstance(found, dict):
        skipped.add(path, f"it is larger than {most >> 20} MiB" if before else "it holds no object of JSON")
    return found if isinstance(found, dict) else {}


def numbered(folder: Path, before: str, after: str, skipped: Skipped) -> list[tuple[int, Path]]:
    """Files named before + number + after, in the order of their numbers."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                digits = entry.name.removeprefix(before).removesuffix(after)
                named = entry.name == f"{before}{digits}{after}" and digits.isascii() and digits.isdigit()
                if named and len(digits) < 10 and not entry.is_dir(follow_symlinks=False):
                    found.append((int(digits), Path(entry.path)))
    except FileNotFoundError:
        return []
    except OSError as error:
        skipped.add(folder, error.strerror or error)
        return []
    return sorted(found)


def attempt(read: Callable[[], T], otherwise: T, what: str, skipped: Skipped) -> T:
    """What `read` gives; if the folder's content breaks it, `otherwise`, and a note that says so."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  (any content of a damaged file; the rest of the page is shown)
        skipped.add(what, f"cannot be shown: {type(error).__name__}: {error}")
        return otherwise
