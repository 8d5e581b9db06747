"""Checkpoints in the memory of several machines: each file is kept on two, and comes back from either.

The ranks of a machine write into a folder of theirs. Each rank sends the files that it wrote to the rank in
the same place of the next machine. So all that one machine had is there after it is lost with its memory.

consumes      the files of a checkpoint in this machine's folder
produces      the same files in the next machine's; when a run goes on, those that a machine lacks and reads
waits for     the ranks of both machines, over the group of `ranks`
unblocked by  the end of the connection if one of them dies, or the group's deadline
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.checkpoint.files import MANIFEST, put_back, step_folder
from siirl.checkpoint.held_files import Held, Version, held_files, newest_whole
from siirl.checkpoint.together import Together
from siirl.observe.spans import waiting

CHUNK_BYTES = 64 << 20
File = tuple[str, int]
"""Its path in a checkpoint, and its size."""


def copy_to_next(aside: Path, written: Sequence[Path], step: int, ranks: Together) -> None:
    """Have the next machine keep the files that this rank wrote, and keep those of the last one's rank.

    Collective over `ranks`.
    """
    world = ranks.gather_on_all([(_name(path, aside), path.stat().st_size) for path in written])
    ahead = (ranks.rank + ranks.per_machine) % len(world)
    behind = (ranks.rank - ranks.per_machine) % len(world)
    with ranks.stage(step, "making room for the copies of another machine"):
        for name, size in world[behind]:
            _make_room(aside / name, size)
    with ranks.stage(step, "copying to another machine"):
        sent = [work for path in written for work in _send(path, ahead, ranks.group)]
        for name, size in world[behind]:
            _receive(aside / name, size, behind, ranks.group)
        _finish(sent)


class Fetcher:
    """Finds the newest checkpoint that is whole in the memory of all machines, and fetches what is read.

    Collective over `ranks` throughout.
    """

    def __init__(self, ranks: Together):
        self._ranks = ranks
        self._held: list[set[str]] = []
        """What each machine has of the checkpoint that was found."""

    def newest(self) -> Path | None:
        """Its folder, on every machine: with its manifest, and with all files but those of tensors."""
        ranks = self._ranks
        mine: list[Held] = []
        with ranks.stage(None, "looking for one in memory"):
            if ranks.first_here:
                put_back(ranks.root)
                mine = held_files(ranks.root, contents=True)
        machines = ranks.gather_on_all(mine)[:: ranks.per_machine]
        version = newest_whole(machines)
        if version is None:
            return None
        self._held = [_paths_of(version, machine) for machine in machines]
        checkpoint = step_folder(ranks.root, version.step)
        have_it = [any(held.version == version for held in machine) for machine in machines]
        source = have_it.index(True) * ranks.per_machine
        text = (checkpoint / MANIFEST).read_text() if ranks.rank == source else None
        text = ranks.gather_on_all(text)[source]
        with ranks.stage(version.step, "looking for one in memory"):
            if ranks.first_here and not have_it[ranks.rank // ranks.per_machine]:
                checkpoint.mkdir(parents=True, exist_ok=True)
                (checkpoint / MANIFEST).write_text(text)
        everywhere = set().union(*self._held)
        self.fetch(checkpoint, version.step, {name for name in everywhere if not name.endswith(".distcp")})
        return checkpoint

    def fetch(self, checkpoint: Path, step: int, names: set[str]) -> None:
        """Have the files of these names that this rank is going to read, and that its machine lacks."""
        ranks = self._ranks
        here = ranks.rank // ranks.per_machine
        wanted = ranks.gather_on_all(sorted(names - self._held[here]))
        moves = list(self._moves(wanted))
        sizes = {
            name: (checkpoint / name).stat().st_size
            for name, source, _ in moves
            if source == here and ranks.first_here
        }
        told = ranks.gather_on_all(sizes)
        first = {machine: machine * ranks.per_machine for machine in range(len(self._held))}
        with ranks.stage(step, "making room for what other machines have"):
            for name, source, target in moves:
                if ranks.rank == first[target]:
                    _make_room(checkpoint / name, told[first[source]][name])
        with ranks.stage(step, "fetching from other machines"):
            for name, source, target in moves:
                if ranks.rank == first[source]:
                    _finish(_send(checkpoint / name, first[target], ranks.group))
                elif ranks.rank == first[target]:
                    _receive(checkpoint / name, told[first[source]][name], first[source], ranks.group)
        for name, _, target in moves:
            self._held[target].add(name)

    def _moves(self, wanted: Sequence[Sequence[str]]) -> Iterator[tuple[str, int, int]]:
        """(name, machine that has it, machine that lacks it), in the same order on all ranks."""
        per_machine = self._ranks.per_machine
        for target in range(len(self._held)):
            of_ranks = wanted[target * per_machine : (target + 1) * per_machine]
            for name in sorted({name for names in of_ranks for name in names}):
                sources = [machine for machine, held in enumerate(self._held) if name in held]
                yield name, sources[target % len(sources)], target


def _paths_of(version: Version, machine: Sequence[Held]) -> set[str]:
    return {path for held in machine if held.version == version for path in held.paths}


def _name(path: Path, folder: Path) -> str:
    return PurePosixPath(path.relative_to(folder)).as_posix()


def _make_room(path: Path, size: int) -> None:
    """An empty file of that size. OSError if there is no room for it: later writing would not say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _send(path: Path, to: int, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Begin to send a file to a rank of the group; `_finish` what is returned."""
    parts = _parts(path, path.stat().st_size, False)
    with waiting():
        works = [dist.isend(part, group=group, group_dst=to) for part in parts]
    return [work for work in works if work is not None]


def _finish(works: Sequence[dist.Work]) -> None:
    with waiting():
        for work in works:
            work.wait()


def _receive(path: Path, size: int, source: int, group: dist.ProcessGroup | None) -> None:
    with waiting():
        for part in _parts(path, size, True):
            dist.recv(part, group=group, group_src=source)


def _parts(path: Path, size: int, changed: bool) -> Sequence[Tensor]:
    """The bytes of a file in memory, as they lie there. changed: what is written goes to the file."""
    if not size:
        return []
    return torch.from_file(str(path), shared=changed, size=size, dtype=torch.uint8).split(CHUNK_BYTES)
