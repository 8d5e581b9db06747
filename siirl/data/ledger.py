"""Writes the ledger: what became of each row of a run, as Arrow files that each rank writes for itself.

siirl/data/ledger_events.py says what is in them. Files are Arrow streams: of one that a killed process has
left, all that it had flushed can be read.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from siirl.data.ledger_events import EVENTS, HEADER, KINDS, ROUND_BITS, STEP_BITS, TOKENS

PIECE = 1 << 16
"""Values of a column that are looked at at once."""
SEGMENTS = 8
"""Files of a rank, when the oldest has to go for the bound."""


def row_ids(step: int, round_: int, row_id_B: Tensor) -> Tensor:
    """The number of each row in the whole run, int64 [B]: of its step, its round and its row_id there."""
    return row_id_B + (step << STEP_BITS) + (round_ << ROUND_BITS)


def digests(response_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Equal for rows of which the same tokens are trained at the same places, int64 [B].

    A sum of products modulo 2^64, each place with an odd number of its own: no two rows agree by chance.
    """
    factor_T = torch.from_numpy(_odd_numbers(1 << max(8, response_ids_BT.shape[1].bit_length())))
    factor_T = factor_T[: response_ids_BT.shape[1]].to(response_ids_BT.device)
    return of_rows(
        lambda ids_bT, mask_bT: (ids_bT.long() + 1).mul_(mask_bT).mul_(factor_T).sum(-1),
        response_ids_BT,
        mask_BT,
    )


def of_rows(told: Callable[..., Tensor], *columns_BT: Tensor) -> Tensor:
    """What `told` says of columns, [B], some rows at a time: so what it makes of them stays in the cache."""
    rows = max(1, PIECE // max(1, columns_BT[0].shape[1]))
    return torch.cat([told(*some_bT) for some_bT in zip(*(c.split(rows) for c in columns_BT), strict=True)])


@lru_cache(maxsize=8)
def _odd_numbers(count: int) -> np.ndarray:
    """The first of a fixed sequence (splitmix64), int64."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)


Columns = Mapping[str, Tensor | np.ndarray | Sequence[Any] | int | str]
"""Column of EVENTS -> a value for each row, or one for all."""


def events(kind: str, num_rows: int, columns: Columns) -> pa.RecordBatch:
    """Events of one kind; what a kind does not say is null."""
    given = {"kind": KINDS.index(kind), **columns}
    arrays = []
    for field in EVENTS:
        value = given.get(field.name)
        if value is None:
            arrays.append(pa.nulls(num_rows, field.type))
        elif isinstance(value, int | str):
            arrays.append(pa.repeat(pa.scalar(value, field.type), num_rows))
        else:
            value = value.numpy() if isinstance(value, Tensor) else value
            arrays.append(pa.array(value, field.type, from_pandas=False))
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS)


def token_lists(mask_BT: Tensor, columns: Mapping[str, Tensor | int], taken_B: Tensor) -> pa.RecordBatch:
    """The trained tokens of the rows `taken_B`. columns: of TOKENS, [B, T], [B], or one for all."""
    mask_BT = mask_BT[taken_B]
    offsets = np.zeros(len(mask_BT) + 1, dtype=np.int32)
    np.cumsum(mask_BT.sum(-1).numpy(), out=offsets[1:])
    arrays = []
    for field in TOKENS:
        value = columns.get(field.name)
        if value is None:
            arrays.append(pa.nulls(len(mask_BT), field.type))
        elif isinstance(value, int):
            arrays.append(pa.repeat(pa.scalar(value, field.type), len(mask_BT)))
        elif value.ndim == 1:
            arrays.append(pa.array(value[taken_B].numpy(), field.type))
        else:
            flat = pa.array(value[taken_B][mask_BT].numpy(), field.type.value_type)
            arrays.append(pa.ListArray.from_arrays(offsets, flat, type=field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=TOKENS)


class SegmentedStream:
    """One stream of record batches in files of which the oldest go where they would take too much."""

    def __init__(self, folder: Path, stem: str, schema: pa.Schema, header: Mapping[str, Any], most: float):
        """most: bytes that the files of this rank and stream may take, those of earlier attempts too."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._stem, self._most = folder, stem, most
        self._schema, self._header = schema, dict(header)
        name, _, of_rank = stem.partition(".")
        before = sorted(folder.glob(f"{name.rpartition('_')[0]}_*.{of_rank}.*.arrow"), key=_age)
        self._files, self._number = deque(before), 0
        self._sizes = {path: path.stat().st_size for path in before}
        self._attempt = int(header["attempt"])
        self._open()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append, and hand over to the system: a process that is killed now loses nothing of it."""
        self._writer.write_batch(batch)
        self._file.flush()
        self._sizes[self._files[-1]] = size = self._file.tell()
        if size > self._most / SEGMENTS:
            self.close()
            self._number += 1
            self._open()

    def sync(self) -> None:
        """What was written is on the disk: before a checkpoint that goes on from here."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._writer.close()
        self._file.close()

    def _open(self) -> None:
        while self._files and sum(self._sizes.values()) > self._most * (1 - 1 / SEGMENTS):
            oldest = self._files.popleft()
            del self._sizes[oldest]
            oldest.unlink(missing_ok=True)
        first = _age(self._files[0]) if self._files else (self._attempt, self._number)
        told = json.dumps(self._header | {"segment": self._number, "oldest": first})
        path = self._folder / f"{self._stem}.{self._number}.arrow"
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        schema = self._schema.with_metadata({HEADER: told})
        self._writer = pa.ipc.new_stream(self._file, schema, options=options)
        self._file.flush()
        self._files.append(path)
        self._sizes[path] = self._file.tell()


def _age(path: Path) -> tuple[int, int]:
    """(attempt, segment) of a file."""
    stem, _, segment = path.name.removesuffix(".arrow").rpartition(".")
    return int(stem.partition(".")[0].rpartition("_")[2]), int(segment)


def attempts_in(folder: Path) -> int:
    """The number of the last attempt that has written here; 0: none."""
    numbers = (path.name.partition(".")[0].rpartition("_")[2] for path in folder.glob("*_*.rank_*.arrow"))
    return max((int(number) for number in numbers if number.isdigit()), default=0)
