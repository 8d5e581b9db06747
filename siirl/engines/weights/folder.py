"""A folder by which weights reach ranks: what has changed since the version that all hold, or everything.

In a step at the learning rates of RL about 99% of bf16 weights stay the same bits (Miahi and Belilovsky,
"Understanding and Exploiting Weight Update Sparsity for Communication-Efficient Distributed RL", 2026). So
the writer and each reader keep the last version in host memory, and of a tensor the folder gets the places
and the steps of the elements that changed; or the tensor, where these are no fewer bytes, or a rank holds
nothing. An index says of every tensor the checksum of all of its bytes as the trainer has them: a reader that
has made other ones has failed, and holds nothing from then on.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from siirl.engines.weights.bucket import Named

FILE_BYTES = 1 << 30
"""What is written lies in files of about this size, and is held in host memory until then."""
INDEX = "index.json"
FAR = 127
"""Elements that lie between two changes are counted up to here in a byte."""
SKIP = 255
"""A byte in the place of a distance: FAR elements have not changed, and the next byte goes on."""
WIDE = -128
"""In a row of steps: the step is among the wide ones."""
FAILURES = (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError)
"""What reading other bytes than were written may raise."""


class WeightFolder:
    """One rank's end of the folder, and the version that it holds. Its weights are the last ones written or
    read, under any names: a tensor whose name, shape or type is new is written whole."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: dict[str, Tensor] = {}
        self.digest = 0
        """Of the index by which this rank came to what it holds, a number of 63 bits; 0: it holds nothing."""

    def __str__(self) -> str:
        return str(self._root)

    def tensors(self) -> Iterator[Named]:
        """What is held, in the order of its export. It is written over by the next version."""
        return iter(self._held.items())

    def write(self, version: int, tensors: Iterable[Named], base: int) -> tuple[int, int]:
        """Write root/version_<version>, complete or not at all; older versions go.

        base: the digest of what all readers hold; with any other than this rank's own all is written whole.
        Gives the digest and how many bytes there are. OSError; what the tensors raise.
        """
        before, base = self._taken(base)
        aside = self._root / "partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        written = _Written(aside)
        entries: dict[str, dict[str, Any]] = {}
        now: dict[str, Tensor] = {}
        for name, tensor in tensors:
            now[name] = new = tensor.detach().to("cpu", copy=True).contiguous()
            entry = {"shape": list(new.shape), "dtype": str(new.dtype), "sum": _checksum(new)}
            changes = _changes(before.pop(name, None), new)
            if changes is None:
                written.add(name, new)
            else:
                entry["changes"], data = changes
                if len(data):
                    written.add(name, torch.from_numpy(data))
            entries[name] = entry
        written.flush()
        text = json.dumps({"base": base, "files": written.files, "tensors": entries}).encode()
        (aside / INDEX).write_bytes(text)
        self._replace(aside, self._folder(version))
        self._held, self.digest = now, _digest(text)
        return self.digest, sum(path.stat().st_size for path in self._folder(version).iterdir())

    def read(self, version: int, digest: int) -> None:
        """Hold what root/version_<version> is. OSError if it is not what was written, or not to be read."""
        if self.digest == digest:
            return
        folder = self._folder(version)
        try:
            text = (folder / INDEX).read_bytes()
            if _digest(text) != digest:
                raise ValueError("it shows another index than was written: not all ranks see the same folder")
            index = json.loads(text)
            self._apply(folder, index)
        except FAILURES as error:
            self._held, self.digest = {}, 0
            raise OSError(f"the weights could not be read from {folder}: {error}") from error
        self.digest = digest

    def _apply(self, folder: Path, index: dict[str, Any]) -> None:
        """Make the tensors of an index of those that are held, and of its files."""
        before, base = self._taken(index["base"])
        if base != index["base"]:
            raise ValueError("it has changes to weights that this rank does not hold")
        entries = index["tensors"]
        now = {name: before[name] for name in entries if "changes" in entries[name]}
        before.clear()
        for file in index["files"]:
            with safe_open(folder / file, "pt") as stored:
                for name in stored.keys():
                    data = stored.get_tensor(name)
                    if (changes := entries[name].get("changes")) is None:
                        now[name] = data.clone()
                    else:
                        _change(now[name], changes, data.numpy())
        self._held = {name: now.pop(name) for name in entries}
        for name, entry in entries.items():
            made = self._held[name]
            told = (entry["shape"], entry["dtype"], entry["sum"])
            if (list(made.shape), str(made.dtype), _checksum(made)) != told:
                raise ValueError(f"{name} is not what was written")

    def _taken(self, base: int) -> tuple[dict[str, Tensor], int]:
        """What is held, and `base`, if it is that; else nothing, and 0. This rank holds nothing meanwhile."""
        held = self._held if base == self.digest else {}
        found = base if base == self.digest else 0
        self._held, self.digest = {}, 0
        return held, found

    def _replace(self, aside: Path, final: Path) -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        for other in self._root.glob("version_*"):
            if other != final:
                shutil.rmtree(other, ignore_errors=True)

    def _folder(self, version: int) -> Path:
        return self._root / f"version_{version}"


class _Written:
    """Files of tensors, in the order in which these come."""

    def __init__(self, folder: Path) -> None:
        self.files: list[str] = []
        self._folder, self._waiting, self._size = folder, dict[str, Tensor](), 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._waiting[name] = tensor
        self._size += tensor.nbytes
        if self._size >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self.files.append(f"weights_{len(self.files)}.safetensors")
            save_file(self._waiting, self._folder / self.files[-1])
            self._waiting, self._size = {}, 0


def _changes(old: Tensor | None, new: Tensor) -> tuple[list[int], np.ndarray] | None:
    """What makes `new` of `old`: how many bytes each of some rows has, and the rows.

    A step is from an element to its new value, as of whole numbers of its bits: by 1 or -1 of nine in ten
    that change. The first row has the distance of each changed element from the one before, twice, and 1 more
    if its step is a larger one (SKIP); the second one has a bit for each small step; the others have the
    larger ones, in a byte (WIDE), and the wide ones. None if that is no less than the tensor.
    """
    if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        return None
    before, after = _integers(old), _integers(new)
    places = np.flatnonzero(before != after)
    if len(places) >= new.nbytes:
        return None
    steps = after[places] - before[places]
    is_large = (steps != 1) & (steps != -1)
    skips, rest = np.divmod(np.diff(places, prepend=-1) - 1, FAR)
    ends = np.cumsum(skips + 1)
    distances = np.full(ends[-1] if len(ends) else 0, SKIP, np.uint8)
    distances[ends - 1] = 2 * rest + is_large
    large = steps[is_large]
    is_wide = (large <= WIDE) | (large >= -WIDE)
    signs, narrow = np.packbits(steps[~is_large] > 0), np.where(is_wide, WIDE, large).astype(np.int8)
    rows = [row.view(np.uint8) for row in (distances, signs, narrow, large[is_wide])]
    data = np.concatenate(rows)
    return ([len(row) for row in rows[:-1]], data) if len(data) < new.nbytes else None


def _change(tensor: Tensor, lengths: list[int], data: np.ndarray) -> None:
    """Make the changes of `_changes` in place."""
    values = _integers(tensor)
    distances, signs, narrow, wide = np.split(data, np.cumsum(lengths))
    here = distances != SKIP
    places = np.cumsum(np.where(here, distances // 2 + 1, FAR).astype(np.int64))[here] - 1
    is_large = distances[here] % 2 == 1
    large = narrow.view(np.int8).astype(values.dtype)
    large[large == WIDE] = wide.view(values.dtype)
    steps = np.empty(len(places), values.dtype)
    steps[is_large] = large
    steps[~is_large] = 2 * np.unpackbits(signs, count=len(places) - len(large)).astype(values.dtype) - 1
    values[places] += steps


def _integers(tensor: Tensor) -> np.ndarray:
    """The bits of each element, as a whole number with a sign: a view of a contiguous tensor."""
    return _bytes(tensor).view(f"i{tensor.element_size()}")


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor).data)


def _digest(text: bytes) -> int:
    """A number above 0 of 63 bits that other texts do not have."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1 or 1
