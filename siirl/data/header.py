"""What ranks tell each other before rows move: which rows they have, and what the columns look like."""

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from siirl.data.store import Column
from siirl.errors import DagError

SIZES = 4
"""Words at the head of an encoded header, which say how to read the rest."""


@dataclass(frozen=True)
class ColumnSpec:
    """How a column looks on some rank."""

    name: str
    dtype: str
    """ "object" for JSON."""
    dims: tuple[int, ...] = ()
    """Beyond B."""
    on_gpu: bool = False

    @classmethod
    def of(cls, name: str, column: Column) -> "ColumnSpec":
        if not isinstance(column, Tensor):
            return cls(name, "object")
        dtype = str(column.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(column.shape[1:]), column.is_cuda)

    @property
    def is_object(self) -> bool:
        return self.dtype == "object"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.dims) * self.torch_dtype.itemsize


Specs = tuple[ColumnSpec, ...]


def encode_specs(specs: Specs) -> bytes:
    """As JSON, padded to whole words."""
    text = json.dumps([[spec.name, spec.dtype, spec.dims, spec.on_gpu] for spec in specs]).encode()
    return text.ljust(-(-len(text) // 8) * 8)


@lru_cache(maxsize=256)
def decode_specs(text: bytes) -> Specs:
    return tuple(
        ColumnSpec(name, dtype, tuple(dims), on_gpu) for name, dtype, dims, on_gpu in json.loads(text)
    )


def check_of(specs: Specs) -> int:
    """A number that differs where columns cannot be joined: by dtype, or by a dimension after the first."""
    return zlib.crc32(repr([(spec.dtype, len(spec.dims), spec.dims[1:]) for spec in specs]).encode())


def common_specs(seen: Mapping[int, Specs], ranks: Iterable[int]) -> Specs:
    """One spec for each column, wide enough for the rows of all `ranks`. seen: the columns of each rank.

    DagError if two ranks disagree on the dtype of a column or on a dimension after its first.
    """
    distinct: dict[Specs, int] = {}
    for rank in ranks:
        distinct.setdefault(seen[rank], rank)
    columns = zip(*distinct, strict=True)
    return tuple(_common_spec([*zip(specs, distinct.values(), strict=True)]) for specs in columns)


def _common_spec(seen: list[tuple[ColumnSpec, int]]) -> ColumnSpec:
    """seen: a column's specs, each with a rank that has it."""
    first, first_rank = seen[0]
    for other, rank in seen:
        if (other.dtype, len(other.dims), other.dims[1:]) != (first.dtype, len(first.dims), first.dims[1:]):
            raise DagError(
                f"{first.name!r} has rows of {first.dtype} {list(first.dims)} on rank {first_rank}, but of "
                f"{other.dtype} {list(other.dims)} on rank {rank}: between ranks, only the first of these "
                "dimensions may differ. Make the op that writes it return one dtype and shape."
            )
    dims = tuple(max(sizes) for sizes in zip(*(spec.dims for spec, _ in seen), strict=True))
    return ColumnSpec(first.name, first.dtype, dims, any(spec.on_gpu for spec, _ in seen))


@dataclass(frozen=True)
class Header:
    """One rank's rows. A rank without the source layout has empty arrays."""

    row_id: np.ndarray
    """In the source layout, [n]."""
    weight: np.ndarray
    """Of these, [n, k]: what the target's split goes by (RowTable)."""
    held: np.ndarray | None
    """Row ids in the target layout, [m]; None when the rank has no rows there yet."""

    @cached_property
    def words(self) -> np.ndarray:
        """As int64 words: sizes, then differences of the arrays, compressed."""
        held = self.row_id[:0] if self.held is None else self.held
        num_held = -1 if self.held is None else len(self.held)
        columns = (self.row_id, *self.weight.T, held)
        steps = np.concatenate([np.diff(column, prepend=0) for column in columns])
        packed = zlib.compress(steps.tobytes(), level=1)
        body = np.frombuffer(packed.ljust(-(-len(packed) // 8) * 8), dtype=np.int64)
        sizes = [len(self.row_id), self.weight.shape[1], num_held, len(packed)]
        return np.concatenate([sizes, body])

    def padded(self, num_words: int) -> np.ndarray:
        """`words`, as so many."""
        return np.pad(self.words, (0, num_words - len(self.words)))

    @classmethod
    def decode(cls, words: np.ndarray) -> "Header":
        """From `words`; others may follow."""
        num_rows, width, num_held, num_packed = words[:SIZES].tolist()
        lengths = [*[num_rows] * (1 + width), max(num_held, 0)]
        steps = np.frombuffer(zlib.decompress(words[SIZES:].tobytes()[:num_packed]), dtype=np.int64)
        row_id, *weight, held = (np.cumsum(part) for part in np.split(steps, np.cumsum(lengths)[:-1]))
        return cls(row_id, np.stack(weight, 1), None if num_held < 0 else held)
