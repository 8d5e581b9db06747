"""What ranks tell each other before rows move: which rows they have, and what the columns look like."""

import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from siirl.data.store import Column
from siirl.errors import DagError

SIZES = 6
"""Words at the head of an encoded header: its length, a check sum, and what says how to read the rest."""


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


@dataclass(frozen=True)
class Header:
    """One rank's rows. A rank without the source layout has empty arrays and no specs."""

    row_id: np.ndarray
    """In the source layout, [n]."""
    weight: np.ndarray
    """Of these, [n, k]: what the target's split goes by (RowTable)."""
    held: np.ndarray | None
    """Row ids in the target layout, [m]; None when the rank has no rows there yet."""
    specs: tuple[ColumnSpec, ...]

    def encode(self, check: int) -> np.ndarray:
        """As int64 words: sizes, the length first, then differences of the arrays and specs, compressed."""
        specs = json.dumps([[spec.name, spec.dtype, spec.dims, spec.on_gpu] for spec in self.specs]).encode()
        held = self.row_id[:0] if self.held is None else self.held
        columns = (self.row_id, *self.weight.T, held)
        steps = np.concatenate([np.diff(column, prepend=0) for column in columns])
        packed = zlib.compress(steps.tobytes() + specs, level=1)
        body = np.frombuffer(packed.ljust(-(-len(packed) // 8) * 8), dtype=np.int64)
        num_held = -1 if self.held is None else len(self.held)
        sizes = [SIZES + len(body), check, len(self.row_id), self.weight.shape[1], num_held, len(packed)]
        return np.concatenate([sizes, body])

    @classmethod
    def decode(cls, words: np.ndarray) -> "Header":
        _, _, num_rows, width, num_held, num_packed = words[:SIZES].tolist()
        body = zlib.decompress(words[SIZES:].tobytes()[:num_packed])
        lengths = [*[num_rows] * (1 + width), max(num_held, 0)]
        steps = np.frombuffer(body, dtype=np.int64, count=sum(lengths))
        row_id, *weight, held = (np.cumsum(part) for part in np.split(steps, np.cumsum(lengths)[:-1]))
        return cls(
            row_id,
            np.stack(weight, 1),
            None if num_held < 0 else held,
            _decode_specs(body[steps.nbytes :]),
        )


@lru_cache(maxsize=256)
def _decode_specs(text: bytes) -> tuple[ColumnSpec, ...]:
    return tuple(
        ColumnSpec(name, dtype, tuple(dims), on_gpu) for name, dtype, dims, on_gpu in json.loads(text)
    )


def common_specs(headers: dict[int, Header], ranks: Iterable[int]) -> tuple[ColumnSpec, ...]:
    """One spec for each column, wide enough for the rows of all `ranks`; those without rows do not count.

    DagError if two ranks disagree on the dtype of a column or on a dimension after its first.
    """
    ranks = list(ranks)
    filled = [rank for rank in ranks if len(headers[rank].row_id)] or ranks[:1]
    seen = {headers[rank].specs: rank for rank in reversed(filled)}
    if len(seen) == 1:
        return headers[filled[0]].specs
    first_seen = sorted(seen.items(), key=lambda item: item[1])
    num_columns = len(headers[filled[0]].specs)
    return tuple(
        _common_spec([(specs[column], rank) for specs, rank in first_seen]) for column in range(num_columns)
    )


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
