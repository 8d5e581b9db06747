"""Weights that ranks of a trainer send as they have them: each the rows that are its own, gathered nowhere.

An FSDP2 trainer has each tensor cut along its rows. Gathered first and sent by some of its ranks afterwards,
a byte crosses twice. By a layout of the rows, which the first sync tells all ranks, each sends its pieces, in
the buckets of a plan (planned_sync.py), and who receives them puts them together.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from siirl.engines.weights.bucket import DTYPES, Entry, Named
from siirl.model_files.file_parts import FilePart


class Whole(NamedTuple):
    """A tensor of a trainer, of which each rank has a piece."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[int, ...]
    """Elements that each rank has: consecutive ones, in the order of the ranks."""
    parts: tuple[FilePart, ...]
    """The tensors of the model's files that are in it."""


class RowLayout(NamedTuple):
    """How a trainer's weights are cut over its ranks."""

    ranks: tuple[int, ...]
    """Of the run, in the order of their pieces."""
    device: str
    """Type of the device on which these lie."""
    tensors: tuple[Whole, ...]

    @classmethod
    def from_json(cls, content: list[Any]) -> "RowLayout":
        """What json makes of it and back again."""
        ranks, device, tensors = content
        found = []
        for name, shape, dtype, pieces, parts in tensors:
            of_files = (FilePart(part, tuple(size), tuple(step), first) for part, size, step, first in parts)
            found.append(Whole(name, tuple(shape), dtype, tuple(pieces), tuple(of_files)))
        return cls(tuple(ranks), device, tuple(found))

    def buckets(self, limit: int) -> tuple[tuple[Entry, ...], ...]:
        """Pieces that travel together, about `limit` bytes of each rank: a bucket of each rank in turns."""
        found: list[tuple[Entry, ...]] = []
        group: list[Whole] = []
        size = 0
        for tensor in (*self.tensors, None):
            num_bytes = max(tensor.pieces) * DTYPES[tensor.dtype].itemsize if tensor else 0
            if group and (tensor is None or size + num_bytes > limit):
                for place in range(len(self.ranks)):
                    found.append(tuple(Entry(one.name, (one.pieces[place],), one.dtype) for one in group))
                group, size = [], 0
            if tensor is not None:
                group.append(tensor)
                size += num_bytes
        return tuple(found)

    def joined(self, pieces: Iterator[Named]) -> Iterator[Named]:
        """The tensors of the files, from the pieces of all ranks in the order of the buckets."""
        wholes = {tensor.name: tensor for tensor in self.tensors}
        waiting: dict[str, list[Tensor]] = {}
        for name, piece in pieces:
            waiting.setdefault(name, []).append(piece)
            if len(waiting[name]) == len(self.ranks):
                whole = torch.cat(waiting.pop(name)).view(wholes[name].shape)
                for part in wholes[name].parts:
                    yield part.name, part.of(whole).contiguous()


def whole_at_first(name: str, tensor: Tensor, ranks: Sequence[int]) -> Whole:
    """A tensor that every rank has, and the first one sends."""
    shape, count = tuple(tensor.shape), math.prod(tensor.shape)
    part = FilePart(name, shape, torch.empty(shape, device="meta").stride(), 0)
    return Whole(name, shape, str(tensor.dtype), (count, *(0 for _ in ranks[1:])), (part,))
