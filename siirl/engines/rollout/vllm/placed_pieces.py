"""Pieces of parameters that are copies of pieces of a model's files: where they are, and what they cover."""

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn


class Piece(NamedTuple):
    """Elements of a parameter, and those of a tensor of the files that they are copies of."""

    layer: nn.Module
    param: str
    offset: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]


class Unresolved(Exception):
    """The places of a model's weights are not known, for this reason: they are loaded one by one."""


class Memory(NamedTuple):
    """Where a parameter lies, and how."""

    address: int
    layout: tuple

    @classmethod
    def of(cls, param: Tensor) -> "Memory":
        size = param.untyped_storage().nbytes()
        layout = (tuple(param.shape), param.stride(), param.dtype, param.device, param.storage_offset(), size)
        return cls(param.data_ptr(), layout)


def uncovered(
    shape: tuple[int, ...], strides: tuple[int, ...], pieces: list[Piece]
) -> list[tuple[slice, ...]]:
    """Boxes of a parameter in no piece. Unresolved if an element is in two, or a piece is no box."""
    boxes = [_box(shape, strides, piece) for piece in pieces]
    edges = [
        sorted({0, size, *(box[axis][0] for box in boxes), *(box[axis][1] for box in boxes)})
        for axis, size in enumerate(shape)
    ]
    places = [{edge: place for place, edge in enumerate(axis)} for axis in edges]
    counts = np.zeros([max(1, len(axis) - 1) for axis in edges], dtype=np.int32)
    for box in boxes:
        cells = tuple(slice(places[a][begin], places[a][end]) for a, (begin, end) in enumerate(box))
        counts[cells] += 1
    if counts.max(initial=1) > 1:
        raise Unresolved(f"{called(pieces[0].layer, pieces[0].param)} gets some of its weights twice")
    spare = []
    for cell in np.argwhere(counts == 0):
        spare.append(tuple(slice(edges[a][at], edges[a][at + 1]) for a, at in enumerate(cell)))
    if len(spare) > 64:
        raise Unresolved(f"{called(pieces[0].layer, pieces[0].param)} gets weights for some of it only")
    return spare


def _box(shape: tuple[int, ...], strides: tuple[int, ...], piece: Piece) -> list[tuple[int, int]]:
    """[begin, end) of a piece along each axis of its parameter."""
    left, begins = piece.offset, [0] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: -strides[axis]):
        if shape[axis] > 1:
            begins[axis], left = divmod(left, strides[axis])
    own = {stride: size for stride, size in zip(piece.strides, piece.sizes, strict=True) if size > 1}
    box = []
    for axis, begin in enumerate(begins):
        size = own.pop(strides[axis], 1) if shape[axis] > 1 else 1
        box.append((begin, begin + size))
    fits = all(end <= size for (_, end), size in zip(box, shape, strict=True))
    if left or own or not fits or math.prod(end - begin for begin, end in box) != math.prod(piece.sizes):
        raise Unresolved(f"{called(piece.layer, piece.param)} is loaded in pieces that are no rectangles")
    return box


def of_rows(piece: Piece, shape: tuple[int, ...], first: int, rows: int) -> Piece | None:
    """What of a piece comes from some rows of its tensor, whose strides are those of a whole one."""
    row = math.prod(shape[1:])
    if not piece.sizes or piece.source_strides[0] != row or len(piece.sizes) != len(shape):
        raise RuntimeError(f"{called(piece.layer, piece.param)} cannot be written by rows")
    begin = piece.source_offset // row
    low, high = max(begin, first), min(begin + piece.sizes[0], first + rows)
    if low >= high:
        return None
    skipped = low - begin
    return piece._replace(
        offset=piece.offset + skipped * piece.strides[0],
        sizes=(high - low, *piece.sizes[1:]),
        source_offset=piece.source_offset + skipped * row,
    )


def elements(param: Tensor, piece: Piece) -> Tensor:
    held = param.data
    return held.as_strided(piece.sizes, piece.strides, held.storage_offset() + piece.offset)


def end_of(piece: Piece) -> int:
    steps = ((size - 1) * stride for size, stride in zip(piece.sizes, piece.strides, strict=True))
    return piece.offset + sum(steps) + 1


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def called(layer: nn.Module, param: str) -> str:
    return f"{param} of a {type(layer).__name__}"
