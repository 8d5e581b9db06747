"""Parcels: rows on their way to another rank, as bytes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from siirl.data.assign import repeated_ids, some
from siirl.data.header import ColumnSpec, Specs, common_specs, decode_specs, encode_specs
from siirl.data.rows import object_column, object_element, objects, widened
from siirl.data.store import Column
from siirl.errors import DagError

HEAD = 3
"""Words before a parcel: how many rows, and the bytes of the specs and of the objects."""


@dataclass(frozen=True)
class Parcel:
    """Rows of one source shard for one rank."""

    row_id: np.ndarray
    """[n]."""
    specs: Specs
    """Of the columns."""
    columns: Sequence[Column]
    """Tensors; object columns, or lists of their elements."""
    positions: np.ndarray
    """Which rows of the columns these are, [n]."""


@dataclass(frozen=True)
class Packed:
    """A parcel as bytes."""

    data: Tensor
    """uint8 [bytes]."""
    row_bytes: int
    """Of these, what the columns take."""


def pack(
    columns: Sequence[Column], specs: Specs, row_id: np.ndarray, positions: np.ndarray, device: torch.device
) -> Packed:
    """Some rows as bytes: the head, ids and specs, then the tensors side by side, then objects as JSON;
    padded to whole words."""
    text = encode_specs(specs)
    tensors = [(column, spec) for column, spec in zip(columns, specs, strict=True) if not spec.is_object]
    others = [(column, spec) for column, spec in zip(columns, specs, strict=True) if spec.is_object]
    index = torch.from_numpy(positions)
    rows = [
        _to_bytes(column.index_select(0, index.to(column.device)).to(device), spec)
        for column, spec in tensors
    ]
    blob = b""
    if others and len(positions):
        elements = [_elements(column) for column, _ in others]
        blob = _dump(elements, [spec for _, spec in others], positions)
    head = np.array([len(positions), len(text), len(blob)])
    words = np.concatenate([head, row_id[positions], np.frombuffer(text, dtype=np.int64)])
    matrix = torch.cat(rows, dim=1).view(-1) if rows and len(positions) else torch.empty(0, dtype=torch.uint8)
    parts = [
        torch.from_numpy(words).view(torch.uint8),
        matrix,
        torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8),
    ]
    parts.append(torch.zeros(-sum(map(len, parts)) % 8, dtype=torch.uint8))
    data = torch.cat([part.to(device) for part in parts])
    return Packed(data, matrix.numel() + len(blob))


def unpack(data: Tensor) -> Parcel:
    """The rows of `pack`."""
    count, num_text, num_blob = data[: HEAD * 8].view(torch.int64).tolist()
    ends = np.cumsum([HEAD * 8, count * 8, num_text]).tolist()
    row_id = data[ends[0] : ends[1]].cpu().numpy().view(np.int64)
    specs = decode_specs(data[ends[1] : ends[2]].cpu().numpy().tobytes())
    row_bytes = [0 if spec.is_object else spec.row_bytes for spec in specs]
    matrix = data[ends[2] : ends[2] + count * sum(row_bytes)].view(count, sum(row_bytes))
    begin = ends[2] + matrix.numel()
    blob = data[begin : begin + num_blob].cpu().numpy().tobytes() if num_blob else b""
    loaded = iter(_load(blob) if blob else [[] for spec in specs if spec.is_object])
    last = np.cumsum(row_bytes).tolist()
    columns = [
        next(loaded) if spec.is_object else _from_bytes(matrix[:, end - spec.row_bytes : end], spec)
        for spec, end in zip(specs, last, strict=True)
    ]
    return Parcel(row_id, specs, columns, np.arange(count))


def join(
    parts: Mapping[int, Parcel],
    columns: Sequence[Column],
    specs: Specs,
    num_rows: int,
    held: np.ndarray | None,
    device: torch.device,
    rowset: str,
) -> tuple[Sequence[Column], np.ndarray, dict[int, np.ndarray]]:
    """The columns of a rank's target rows, their ids, and which of them each part has brought.

    columns, specs, num_rows: what the rank has in the source layout; without the layout, no columns, and
    specs of columns without rows. held: the ids that the rows are to follow; None: they ascend. DagError if
    they are others, or one comes twice.
    """
    row_id = np.concatenate([np.empty(0, dtype=np.int64), *(part.row_id for part in parts.values())])
    ascending = np.argsort(row_id, kind="stable")
    in_order = row_id[ascending]
    if held is not None and not np.array_equal(np.sort(held), in_order):
        raise DagError(
            f"a layout of {rowset!r} already holds {len(held)} rows, others than the {len(row_id)} that "
            "arrive: columns of one layout must have the same rows."
        )
    if len(repeated := in_order[1:][in_order[1:] == in_order[:-1]]):
        raise DagError(repeated_ids(some(repeated), rowset))
    order = ascending if held is None else ascending[np.searchsorted(in_order, held)]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    ends = np.cumsum([len(part.row_id) for part in parts.values()])
    arrived = dict(zip(parts, np.split(place, ends[:-1]), strict=True)) if parts else {}
    filled = [part for part in parts.values() if len(part.row_id)]
    if len(filled) == 1 and filled[0].columns is columns:
        index = filled[0].positions[order]
        if np.array_equal(index, np.arange(num_rows)):
            return columns, row_id[order], arrived
    seen = dict(enumerate(part.specs for part in filled)) or {0: specs}
    joined = [
        _join_objects([(part.columns[number], part.positions) for part in filled], order)
        if spec.is_object
        else _join_tensors([(part.columns[number], part.positions) for part in filled], order, spec, device)
        for number, spec in enumerate(common_specs(seen, seen))
    ]
    return joined, row_id[order], arrived


def _join_tensors(
    parts: Sequence[tuple[Tensor, np.ndarray]], order: np.ndarray, spec: ColumnSpec, device: torch.device
) -> Tensor:
    home = device if spec.on_gpu else torch.device("cpu")
    if not parts:
        return torch.empty((0, *spec.dims), dtype=spec.torch_dtype, device=home)
    picked = []
    for column, positions in parts:
        rows = column.detach().index_select(0, torch.from_numpy(positions).to(column.device)).to(home)
        picked.append(widened(rows, spec.name, spec.dims[0]) if spec.dims else rows)
    return torch.cat(picked).index_select(0, torch.from_numpy(order).to(home))


def _join_objects(
    parts: Sequence[tuple[Column | list[NonTensorData], np.ndarray]], order: np.ndarray
) -> NonTensorData | NonTensorStack:
    elements = []
    for column, positions in parts:
        own = column if isinstance(column, list) else _elements(column)
        elements += [own[position] for position in positions]
    return NonTensorStack(*[elements[place] for place in order]) if len(order) else object_column([])


def _to_bytes(column: Tensor, spec: ColumnSpec) -> Tensor:
    """Rows as bytes, [rows, row_bytes], padded to the common width."""
    column = column.detach()
    if spec.dims:
        column = widened(column, spec.name, spec.dims[0])
    return column.reshape(len(column), math.prod(spec.dims)).contiguous().view(torch.uint8)


def _from_bytes(matrix: Tensor, spec: ColumnSpec) -> Tensor:
    shape = (len(matrix), *spec.dims)
    # Without elements, or as a part of a wider matrix, bytes have strides that no wider dtype can view.
    if not matrix.numel():
        return torch.empty(shape, dtype=spec.torch_dtype, device=matrix.device)
    return matrix.clone(memory_format=torch.contiguous_format).view(spec.torch_dtype).view(shape)


def _elements(column: NonTensorData | NonTensorStack) -> list[NonTensorData]:
    if isinstance(column, NonTensorStack):
        return column.tensordicts
    rows = TensorDict({"values": column}, batch_size=column.batch_size)
    return list(map(object_element, objects(rows, "values")))


def _dump(elements: list[list[NonTensorData]], specs: list[ColumnSpec], positions: np.ndarray) -> bytes:
    """The values at `positions` of each column, as JSON; a value that rows share, as samples do, once.

    DagError if one is not a JSON value.
    """
    columns = []
    for column in elements:
        chosen = [column[position] for position in positions]
        distinct = {id(element): element for element in chosen}
        number = {of: place for place, of in enumerate(distinct)}
        values = [element.data for element in distinct.values()]
        columns.append((values, [number[id(element)] for element in chosen]))
    try:
        return json.dumps(columns).encode()
    except (TypeError, ValueError) as error:
        names = ", ".join(spec.name for spec in specs)
        raise DagError(
            f"a value of {names} cannot move to another rank: {error}. Object fields hold JSON values only."
        ) from error


def _load(blob: bytes) -> list[list[NonTensorData]]:
    """The columns of `_dump`, row by row."""
    columns = []
    for values, numbers in json.loads(blob):
        elements = list(map(object_element, values))
        columns.append([elements[number] for number in numbers])
    return columns
