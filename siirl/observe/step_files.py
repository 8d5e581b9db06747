"""Folders of files step_N.* stay within bounds: of the older steps every second one is removed. No torch."""

import contextlib
import re
from pathlib import Path

NAME = re.compile(r"step_(\d+)\.\w+")


def bytes_of(gib: float | None) -> float | None:
    return None if gib is None else gib * 2**30


class StepFiles:
    """The files of steps in some folders, which take `most_bytes` in each of them at most; None: any size.

    What is left of a long run is dense in its last steps, and thinner the older they are. The newest stays.
    """

    def __init__(self, most_bytes: float | None):
        self._most_bytes = most_bytes
        self._sizes: dict[Path, int] = {}
        """Of each folder, as far as this process knows."""

    def added(self, *paths: Path) -> None:
        """Files of a step are written, all of them in one folder."""
        if self._most_bytes is None:
            return
        folder = paths[0].parent
        with contextlib.suppress(OSError):  # the run goes on without
            if folder in self._sizes:
                self._sizes[folder] += sum(path.stat().st_size for path in paths)
            else:
                self._sizes[folder] = sum(map(_size, _by_step(folder).values()))
            if self._sizes[folder] > self._most_bytes:
                self._sizes[folder] = _thin_out(folder, self._most_bytes)


def _thin_out(folder: Path, most_bytes: float) -> int:
    """Remove steps until the rest takes `most_bytes` at most, or is one step; its size."""
    found = _by_step(folder)
    sizes = {step: _size(paths) for step, paths in found.items()}
    while len(sizes) > 1 and sum(sizes.values()) > most_bytes:
        older = sorted(sizes)[: (len(sizes) + 1) // 2]
        for step in older[1::2] or older:
            for path in found[step]:
                path.unlink(missing_ok=True)
            del sizes[step]
    return sum(sizes.values())


def _by_step(folder: Path) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for path in folder.iterdir():
        if named := NAME.fullmatch(path.name):
            found.setdefault(int(named[1]), []).append(path)
    return found


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
