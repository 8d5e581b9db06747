"""Tensors side by side in a buffer of bytes: how weights are packed, whichever way they go.

Between ranks a bucket has whole tensors, which were announced or planned (Entry). In memory that an engine's
process maps there are chunks of rows (WeightChunk): a tensor that is larger than one may come in several.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

ALIGN_BYTES = 16
PUT_BYTES = 32 << 20
"""What does not stay where it comes from is copied by about so many bytes."""
CUT_ROWS = 16
"""A tensor is cut after a multiple of so many rows, whose bytes ALIGN_BYTES divides."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)} | {
    str(dtype): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}

Named = tuple[str, Tensor]


class Entry(NamedTuple):
    """A tensor of a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Entry":
        return cls(name, tuple(tensor.shape), str(tensor.dtype))

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


def room(num_bytes: int) -> int:
    """Bytes of a tensor in a buffer: rounded up, so that each starts where any dtype may."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Copies:
    """Tensors on their way to where they are packed: cast, those of equal types at once."""

    def __init__(self) -> None:
        self._groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, target: Tensor, source: Tensor) -> None:
        """`source` is to be copied there by `run`."""
        targets, sources = self._groups.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)

    def run(self) -> None:
        """Copy all."""
        for targets, sources in self._groups.values():
            torch._foreach_copy_(targets, sources)

    def run_once(self) -> None:
        """The same, and let go of where they come from."""
        self.run()
        self._groups.clear()


def empty_bucket(entries: Iterable[Entry], device: str | torch.device, beside: int = 0) -> Tensor:
    """Memory for tensors, and for `beside` further bytes behind them."""
    size = sum(room(entry.num_bytes) for entry in entries)
    return torch.empty(size + beside, dtype=torch.uint8, device=device)


@torch.no_grad()
def pack(bucket: Sequence[Named], entries: Iterable[Entry], flat: Tensor) -> None:
    """Copy tensors into a bucket, cast to what its entries say."""
    copies = Copies()
    for (_, tensor), (_, place) in zip(bucket, unpack(entries, flat), strict=True):
        copies.add(place, tensor.detach())
    copies.run()


def unpack(entries: Iterable[Entry], flat: Tensor) -> list[Named]:
    """The tensors of a bucket, views of it."""
    bucket, start = [], 0
    for entry in entries:
        data = flat[start : start + entry.num_bytes]
        bucket.append((entry.name, data.view(DTYPES[entry.dtype]).view(entry.shape)))
        start += room(entry.num_bytes)
    return bucket


@dataclass
class WeightChunk:
    """Rows that lie in a buffer together."""

    begin: int
    end: int = 0
    entries: list[int] = field(default_factory=list)
    """Four numbers for each: which tensor, its first row here, how many, and their first byte."""
    ended: list[tuple[str, int]] = field(default_factory=list)
    """Tensors whose last rows these are, and the byte after `begin` where they start, maybe before it."""
    kept: int = 0
    """The byte of the kept copy that `begin` is."""
    is_last: bool = False
    """All rows of all tensors have come with it."""
    copies: Copies = field(default_factory=Copies)
    """Of the rows into the buffer, where that has not happened."""


@dataclass(frozen=True)
class ChunkPlaces:
    """Where chunks lie in a buffer."""

    data: Tensor
    """The buffer."""
    limit: int
    """Bytes of a chunk at most."""
    cuts: bool
    """Whether what is larger is cut; else nothing may be."""
    stays: bool = False
    """Each begins where the one before ends."""
    half: int = 0
    """Else they begin at the first byte and at this one in turns."""


class WeightPacker:
    """Deals the tensors of a model into chunks, in the types that an engine wants."""

    def __init__(self, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """specs: shapes and types of the tensors that come."""
        self.specs = dict(specs)
        self._numbers = {name: number for number, name in enumerate(self.specs)}
        sizes = [room(math.prod(shape) * dtype.itemsize) for shape, dtype in self.specs.values()]
        self.total_bytes, self.largest_bytes = sum(sizes), max(sizes, default=0)
        self.num_with_rows = sum(0 not in shape[:1] for shape, _ in self.specs.values())
        rows = (math.prod(shape[1:]) * dtype.itemsize for shape, dtype in self.specs.values())
        self.cut_bytes = CUT_ROWS * room(max(rows, default=0))
        """Of the largest rows after which a tensor is cut: a chunk has room for them."""

    def tensors(self) -> dict[str, list]:
        """What the numbers in a chunk's entries mean, as JSON values."""
        return self._described(self.specs)

    def to_load(self, chunk: WeightChunk, first: int) -> dict[str, Any]:
        """The whole tensors that end in a chunk which lies at byte `first`, as JSON values.

        With the size and the place of the memory this is what an engine's loaders are told: an "update".
        """
        starts = [first + start for _, start in chunk.ended]
        return {**self._described(name for name, _ in chunk.ended), "starts": starts}

    def _described(self, names: Iterable[str]) -> dict[str, list]:
        specs = {name: self.specs[name] for name in names}
        return {
            "names": list(specs),
            "shapes": [list(shape) for shape, _ in specs.values()],
            "dtypes": [str(dtype).removeprefix("torch.") for _, dtype in specs.values()],
        }

    def chunks(
        self,
        weights: Iterable[Named],
        places: ChunkPlaces,
        put_at_once: bool,
        keep: Callable[[int], int],
        wait_for: Callable[[int], None],
    ) -> Iterator[WeightChunk]:
        """Deal rows into chunks.

        put_at_once: into the buffer, as what comes does not stay; else by the chunk's copies. keep: where so
        many bytes are to be kept. wait_for: until what lies at this byte may be written over.
        """
        data, limit = places.data, places.limit
        chunk = WeightChunk(0)
        used = waits = 0

        def closed() -> WeightChunk:
            nonlocal chunk, used, waits
            done, waits = chunk, 0
            if put_at_once:
                done.copies.run_once()
            done.end = done.begin + used
            done.kept = keep(used)
            chunk, used = WeightChunk(done.end if places.stays else places.half - done.begin), 0
            return done

        for name, tensor in weights:
            shape, dtype = self.specs[name]
            rows, row_bytes = (shape[0] if shape else 1), math.prod(shape[1:]) * dtype.itemsize
            if rows == 0 and not places.cuts:
                chunk.ended.append((name, used))
            first = 0
            while first < rows:
                size = min(rows - first, (limit - used) // max(row_bytes, 1))
                if size < rows - first:
                    cuts = places.cuts and rows * row_bytes > limit
                    size = size // CUT_ROWS * CUT_ROWS if cuts else 0
                if size == 0:
                    yield closed()
                    wait_for(chunk.begin)
                    continue
                start = chunk.begin + used
                place = data[start : start + size * row_bytes].view(dtype)
                source = tensor.detach()[first : first + size] if shape else tensor.detach()
                target = place.view(size, *shape[1:]) if shape else place.view(())
                chunk.copies.add(target, source)
                waits += target.nbytes
                if put_at_once and waits > PUT_BYTES:
                    chunk.copies.run_once()
                    waits = 0
                chunk.entries += [self._numbers[name], first, size, start]
                if first + size == rows:
                    chunk.ended.append((name, used - first * row_bytes))
                first, used = first + size, used + room(size * row_bytes)
        if used or chunk.ended:
            yield closed()


class HeldMemory:
    """The places of some tensors, and views of them. Their storages stay there as long as these views do."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views = [tensor.detach() for tensor in tensors]
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._addresses = [*map(Tensor.data_ptr, tensors)]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._sizes = [*map(UntypedStorage.nbytes, self._storages)]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these lie where those did, one by one: the same storages, of the same sizes, in which they
        have the same first bytes, shapes, strides and types.

        One comparison after the other, each in a loop of C: in a sync all that is touched comes from far.
        """
        return (
            [*map(Tensor.data_ptr, tensors)] == self._addresses
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and all(map(Tensor.is_set_to, tensors, self._views))
            and [*map(UntypedStorage.nbytes, self._storages)] == self._sizes
        )


class LiveWeights:
    """Whole tensors under the names of the model's files: views of live memory, the same in every step.

    As an iterable it is what export_weights yields, in the master type.
    """

    def __init__(self, tensors: Mapping[str, Tensor], memory: Sequence[Tensor] = ()) -> None:
        """memory: where all of the model lies."""
        self._tensors = dict(tensors)
        self._memory = HeldMemory(memory)
        self._sizes: dict[torch.dtype | None, int] = {}
        self._readers: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def lies_in(self, memory: Sequence[Tensor]) -> bool:
        """Whether the model still lies in the memory that these are views of, see HeldMemory."""
        return self._memory.is_of(memory)

    def num_bytes(self, dtype: torch.dtype | None) -> int:
        """Of all tensors, once floating ones are of `dtype`; None: of their own."""
        if dtype not in self._sizes:
            types = (
                (x, dtype if dtype and x.is_floating_point() else x.dtype) for x in self._tensors.values()
            )
            self._sizes[dtype] = sum(x.numel() * found.itemsize for x, found in types)
        return self._sizes[dtype]

    def read_until(self, done: Callable[[], None]) -> None:
        """Somebody reads them in the background: `done` returns once that has ended."""
        self._readers.append(done)

    def settle(self) -> None:
        """Wait for those who read: the weights are about to change, or to go."""
        while self._readers:
            self._readers.pop()()
