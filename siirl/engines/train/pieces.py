"""A tensor of which this process holds rectangles: what checkpoints see of a sharded parameter.

torch.distributed.checkpoint writes and reads the rectangles as they are, so a checkpoint under Hugging Face
names can be read on any other layout, or by another strategy. No communication.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from siirl.model_files.stored_tensors import ChunkedTensor


class Piece(NamedTuple):
    """A rectangle of a tensor."""

    local: Tensor
    """A view of live memory."""
    offset: tuple[int, ...]
    """Where its first element lies in the whole tensor."""


class PiecewiseTensor(ChunkedTensor):
    """A tensor of a global shape, known here by its pieces only; for checkpoints, not for computing."""

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], pieces: list[Piece], dtype: torch.dtype) -> "PiecewiseTensor":
        device = pieces[0].local.device if pieces else torch.device("cpu")
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor.pieces = pieces
        return tensor

    def __repr__(self) -> str:
        return f"PiecewiseTensor({tuple(self.shape)}, {len(self.pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func is torch.ops.aten.detach.default:
            return own
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            device = (kwargs or {}).get("device") or own.device
            pieces = [Piece(local.to(device, copy=True), offset) for local, offset in own.pieces]
            return cls(tuple(own.shape), pieces, own.dtype)
        if func is torch.ops.aten.copy_.default:
            for mine, theirs in zip(own.pieces, args[1].pieces, strict=True):
                mine.local.copy_(theirs.local)
            return own
        raise TypeError(f"{func} on a {own!r}: it only enters and leaves checkpoints")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(piece.offset), piece.local.shape) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece.local for piece in self.pieces if torch.Size(piece.offset) == index.offset)


def rectangles(flat: Tensor, start: int, inner: tuple[int, ...], origin: tuple[int, ...]) -> Iterator[Piece]:
    """The pieces of consecutive elements of a tensor: of a matrix a part of a row, whole rows, a part of one.

    flat: elements start, start + 1, ... of a row-major block whose rows are of the shape `inner`, and which
    begins at `origin` of the whole tensor.
    """
    end, row = start + flat.numel(), math.prod(inner)
    at = start
    while at < end:
        first = at % row
        stop = min(end, at - first + row) if first or end - at < row else end - end % row
        local, number = flat[at - start : stop - start], origin[0] + at // row
        if not first and stop - at >= row:
            yield Piece(local.view(-1, *inner), (number, *origin[1:]))
        else:
            for part, offset in rectangles(local, first, inner[1:], origin[1:]):
                yield Piece(part.unsqueeze(0), (number, *offset))
        at = stop
