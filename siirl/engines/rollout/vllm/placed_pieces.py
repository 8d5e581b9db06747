"""Pieces of parameters that are copies of pieces of a model's files: where they are, and what they cover."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from siirl.engines.weights.shard_plan import Box, overlap


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


def source_box(piece: Piece, shape: tuple[int, ...]) -> Box:
    """The rectangle of its tensor, of this shape, that a piece is a copy of. Unresolved if it is none."""
    turned = piece._replace(offset=piece.source_offset, strides=piece.source_strides)
    return tuple(_box(shape, _strides(shape), turned))


def of_box(piece: Piece, shape: tuple[int, ...], box: Box) -> Piece | None:
    """What of a piece comes from a rectangle of its tensor, which lies by itself; None: nothing."""
    own = source_box(piece, shape)
    common = overlap(own, box)
    if common is None:
        return None
    offset, source_offset = piece.offset, 0
    sizes, source_strides = list(piece.sizes), list(piece.source_strides)
    packed = _strides([end - begin for begin, end in box])
    for axis, stride in enumerate(_strides(shape)):
        begin, end = common[axis]
        source_offset += (begin - box[axis][0]) * packed[axis]
        if own[axis][1] - own[axis][0] > 1:
            dim = next(
                d for d, size in enumerate(piece.sizes) if size > 1 and piece.source_strides[d] == stride
            )
            offset += (begin - own[axis][0]) * piece.strides[dim]
            sizes[dim], source_strides[dim] = end - begin, packed[axis]
    return piece._replace(
        offset=offset, sizes=tuple(sizes), source_offset=source_offset, source_strides=tuple(source_strides)
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor that lies row by row."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


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
