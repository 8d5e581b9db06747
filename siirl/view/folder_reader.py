"""Reading what a run wrote: tolerant of damage, bounded in size. What is left out is said, never hidden.

A folder may be written at the same moment, come from elsewhere, or be damaged; no file in it is trusted.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MOST_LINE_BYTES = 8 << 20


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: Any) -> int | None:
    """An integer that fits 53 bits, as JavaScript's do; or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def tail_bytes(path: Path, most: int) -> tuple[bytes, int]:
    """(the last bytes of a file, how many come before them); nothing of a file that cannot be read."""
    try:
        if not path.is_file():
            return b"", 0
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most))
            return file.read(most), max(0, size - most)
    except OSError:
        return b"", 0


def json_lines(path: Path, most: int, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file's last `most` bytes, a line each; bad lines and cut bytes are noted.

    A last line without an end is being written, and passed over in silence.
    """
    data, before = tail_bytes(path, most)
    lines = data.split(b"\n")
    bad = 0
    for line in lines[1 if before else 0 : -1]:
        if not line.strip():
            continue
        found = _parsed(line)
        if isinstance(found, dict):
            yield found
        else:
            bad += 1
    if before:
        notes.append(f"{path.name}: its first {before / 2**20:.1f} MiB are left out")
    if bad:
        notes.append(f"{path.name}: {bad} damaged line{'s' * (bad > 1)} left out")


def json_file(path: Path, most: int) -> dict[str, Any]:
    """The JSON object that a file holds; empty if it is not there, damaged or too large."""
    data, before = tail_bytes(path, most)
    found = None if before else _parsed(data)
    return found if isinstance(found, dict) else {}


def numbered(folder: Path, before: str, after: str) -> list[tuple[int, Path]]:
    """Files named before + number + after, in the order of their numbers."""
    found = []
    try:
        for path in folder.iterdir():
            digits = path.name.removeprefix(before).removesuffix(after)
            if path.name == f"{before}{digits}{after}" and digits.isascii() and digits.isdigit():
                found.append((int(digits), path))
    except OSError:
        return []
    return sorted(found)


def attempt(read: Callable[[], T], otherwise: T, what: str, notes: list[str]) -> T:
    """What `read` gives; if the folder's content breaks it, `otherwise`, and a note that says so."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  (any content of a damaged file; the rest of the page is shown)
        notes.append(f"{what} cannot be shown: {type(error).__name__}: {error}"[:300])
        return otherwise


def _parsed(text: bytes) -> Any:
    if len(text) > MOST_LINE_BYTES and text.count(b"\n") == 0:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
