"""Weights on their way into the parameters of an engine, once the places of all of them are known there."""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.memory.engine_memory import WRITING_BYTES
from siirl.engines.rollout.served.kept_weights import KeptWeights
from siirl.engines.rollout.served.samples import sampled_sum
from siirl.engines.rollout.served.shared_buffer import SharedBuffer
from siirl.engines.rollout.weight_loading import WeightSpecs
from siirl.engines.train.adapters.lora import adapter_name
from siirl.engines.train.live_weights import LiveWeights
from siirl.observe.spans import phase

BUCKET_BYTES = WRITING_BYTES
ALIGN_BYTES = 16
PUT_BYTES = 32 << 20
"""What does not stay where it comes from is copied by pieces of about so many bytes."""
CUT_ROWS = 16
"""What is larger than a buffer is cut after a multiple of so many rows, whose bytes ALIGN_BYTES divides."""


@dataclass
class WeightChunk:
    """Rows that lie in the buffer together."""

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
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = field(
        default_factory=dict
    )
    """Where they are put and where they come from, by both types."""

    def add(self, target: Tensor, source: Tensor) -> None:
        """`source` is to be copied there by `put`."""
        targets, sources = self.groups.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)

    def put(self) -> None:
        """Copy the rows into the buffer, cast, those of equal types at once."""
        for targets, sources in self.groups.values():
            torch._foreach_copy_(targets, sources)

    def put_once(self) -> None:
        """The same, and let go of where they come from."""
        self.put()
        self.groups.clear()


class WeightWriter:
    """Packs rows of tensors into a buffer that the engine's process maps once and for all.

    They take turns with the halves of it: one is filled while the process reads the other. A buffer that has
    room for all of them is filled once, and read once.

    With `kept`, a copy for another process: on a CPU that is the buffer itself. A GPU's is made after the
    update, of weights that stay where they are (LiveWeights, or the buffer), or else of each half at once.
    """

    def __init__(
        self,
        specs: WeightSpecs,
        device: torch.device,
        kept: KeptWeights | None,
        whole: bool,
        buffer_bytes: int | None = None,
    ) -> None:
        """whole: have all bytes compared by who reads them, instead of samples.

        buffer_bytes: of the device at most, but for what a row takes; None: BUCKET_BYTES.
        """
        self._specs = {name: spec for name, spec in specs.items() if adapter_name(name) is None}
        self._device, self._kept, self._whole = device, kept, whole
        self._numbers = {name: number for number, name in enumerate(self._specs)}
        self._total = sum(_room(math.prod(shape) * dtype.itemsize) for shape, dtype in self._specs.values())
        self._num_with_rows = sum(0 not in shape[:1] for shape, _ in self._specs.values())
        self._buffer_bytes = buffer_bytes
        self._buffer: SharedBuffer | None = None
        self._live: tuple[LiveWeights, list[WeightChunk]] | None = None
        self._keeps_apart = kept is not None and device.type != "cpu"
        self._copying: dict[int, Future] = {}  # first bytes of what is being copied to where it is kept
        self._num_written = 0

    def tensors(self) -> dict[str, list]:
        """What the engine is to find the places of, as JSON values."""
        return {
            "names": list(self._specs),
            "shapes": [list(shape) for shape, _ in self._specs.values()],
            "dtypes": [str(dtype).removeprefix("torch.") for _, dtype in self._specs.values()],
        }

    def buffer(self) -> SharedBuffer:
        """The memory that the process maps. RolloutError if the host has no room for a kept copy."""
        if self._kept is not None and not self._keeps_apart:
            return self._kept.buffer
        if self._buffer is None:
            size = max(min(self._total, self._buffer_bytes or BUCKET_BYTES), 2 * self._rows_to_cut())
            self._buffer = SharedBuffer(size, self._device)
        return self._buffer

    def _holds_all(self, buffer: SharedBuffer) -> bool:
        """Whether nothing that lies in the buffer has to make room for more."""
        return buffer.size >= self._total

    @torch.no_grad()
    def fillings(
        self, weights: Iterable[tuple[str, Tensor]], live: LiveWeights | None
    ) -> Iterator[tuple[WeightChunk, dict[str, Any]]]:
        """Fill the buffer again and again; what is in it, and what the process is told of it.

        weights: checked ones; of `live`, they are asked for once only. What was kept is lost.
        """
        if self._kept is not None:
            with phase("wait_for_copy"):
                self._kept.restart()
        self._copying.clear()
        buffer = self.buffer()
        self._num_written += 1
        if live is None:
            found = self._cut(weights, buffer, put_at_once=True)
        elif self._live is not None and self._live[0] is live:
            found = iter(self._live[1])
        else:
            self._live = (live, list(self._cut(weights, buffer, put_at_once=False)))
            found = iter(self._live[1])
        if live is not None and self._kept is not None and self._keeps_apart:
            self._kept.fill_later(self._keep_live)
            live.read_until(self._kept.wait)
        with phase("wait_for_device"):
            self._settle_device(all_streams=True)  # whoever wrote the weights
        num_left = self._num_with_rows
        while True:
            with phase("put"):
                filling = next(found, None)
                if filling is None:
                    return
                if live is not None:
                    filling.put()
                num_left -= len(filling.ended)
                filling.is_last = num_left == 0
                told = self._told(filling, buffer)
            yield filling, told

    def _told(self, filling: WeightChunk, buffer: SharedBuffer) -> dict[str, Any]:
        """What the process is told of a filling, once all of it lies in the buffer."""
        number = self._num_written * 977 + filling.kept // ALIGN_BYTES
        with phase("wait_for_device"):
            total = int(sampled_sum(buffer.data[filling.begin : filling.end], number, self._whole))
            self._settle_device()
        return {
            "entries": filling.entries,
            "begin": filling.begin,
            "end": filling.end,
            "number": number,
            "whole": self._whole,
            "sum": total,
        }

    def begin_keeping(self, filling: WeightChunk, live: LiveWeights | None) -> Future | None:
        """Begin to copy a filling to where weights are kept, if it has to make room for another one.

        The next one fills the other half of the buffer meanwhile. What stays in the buffer is copied later,
        while the engine samples: copies to the host are in the way of each answer that comes from the device.
        """
        if not self._keeps_apart or live is not None:
            return None
        assert self._kept is not None
        buffer = self.buffer()
        data = buffer.data[filling.begin : filling.end]
        if self._holds_all(buffer):
            self._kept.copy_later(filling.kept, data)
            return None
        self._copying[filling.begin] = copying = self._kept.copying(filling.kept, data)
        return copying

    def kept_bucket(self, filling: WeightChunk) -> dict[str, Any]:
        """What another process is to load in the place of this filling; waits until it is kept."""
        assert self._kept is not None
        self._kept.wait()
        specs = [self._specs[name] for name, _ in filling.ended]
        return {
            "names": [name for name, _ in filling.ended],
            "dtypes": [str(dtype).removeprefix("torch.") for _, dtype in specs],
            "shapes": [list(shape) for shape, _ in specs],
            "starts": [filling.kept + start for _, start in filling.ended],
            "size": self._kept.buffer.size,
            "place": self._kept.buffer.place,
        }

    def keep_now(self) -> None:
        """Begin to copy what is to be kept and is not yet, in the background."""
        if self._kept is not None:
            self._kept.start()

    def close(self) -> None:
        """Free the buffer. Idempotent."""
        self._live = None
        if self._buffer is not None:
            self._buffer.close()

    def _keep_live(self) -> None:
        """Copy all live weights to where they are kept, by way of the buffer, on a stream of their own."""
        assert self._kept is not None and self._live is not None
        buffer, kept = self.buffer().data, self._kept.buffer.data
        with torch.cuda.device(self._device), torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for filling in self._live[1]:
                    filling.put()
                    data = buffer[filling.begin : filling.end]
                    kept[filling.kept : filling.kept + len(data)].copy_(data, non_blocking=True)
            stream.synchronize()

    def _cut(
        self, weights: Iterable[tuple[str, Tensor]], buffer: SharedBuffer, put_at_once: bool
    ) -> Iterator[WeightChunk]:
        """Deal rows into fillings; only a tensor that is larger than one is cut.

        put_at_once: what comes does not stay; see the class for how its fillings lie.
        """
        stays = self._kept is not None and buffer is self._kept.buffer
        half = 0 if stays or self._holds_all(buffer) else buffer.size // 2 // ALIGN_BYTES * ALIGN_BYTES
        limit = half or buffer.size
        if stays:
            limit = min(buffer.size, max(BUCKET_BYTES, 2 * self._rows_to_cut()))
        filling = WeightChunk(0)
        used = waits = 0

        def closed() -> WeightChunk:
            nonlocal filling, used, waits
            done, waits = filling, 0
            if put_at_once:
                done.put_once()
            done.end = done.begin + used
            done.kept = self._kept.reserve(used) if self._kept is not None else 0
            filling, used = WeightChunk(done.end if stays else half - done.begin), 0
            return done

        for name, tensor in weights:
            shape, dtype = self._specs[name]
            rows, row_bytes = (shape[0] if shape else 1), math.prod(shape[1:]) * dtype.itemsize
            first = 0
            while first < rows:
                size = min(rows - first, (limit - used) // max(row_bytes, 1))
                if size < rows - first:
                    size = size // CUT_ROWS * CUT_ROWS if rows * row_bytes > limit else 0
                if size == 0:
                    yield closed()
                    if (copying := self._copying.pop(filling.begin, None)) is not None:
                        with phase("wait_for_copy"):
                            copying.result()
                    continue
                start = filling.begin + used
                place = buffer.data[start : start + size * row_bytes].view(dtype)
                source = tensor.detach()[first : first + size] if shape else tensor.detach()
                target = place.view(size, *shape[1:]) if shape else place.view(())
                filling.add(target, source)
                waits += target.nbytes
                if put_at_once and waits > PUT_BYTES:
                    filling.put_once()
                    waits = 0
                filling.entries += [self._numbers[name], first, size, start]
                if first + size == rows:
                    filling.ended.append((name, used - first * row_bytes))
                first, used = first + size, used + _room(size * row_bytes)
        if used:
            yield closed()

    def _settle_device(self, all_streams: bool = False) -> None:
        """Wait for all that the device has been given, or for this thread's stream of it."""
        if self._device.type == "cuda" and all_streams:
            torch.cuda.synchronize(self._device)
        elif self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _rows_to_cut(self) -> int:
        """Bytes of the largest rows after which a tensor is cut."""
        rows = (math.prod(shape[1:]) * dtype.itemsize for shape, dtype in self._specs.values())
        return CUT_ROWS * _room(max(rows))


def _room(num_bytes: int) -> int:
    """Bytes in a buffer: rounded up, so that what comes next starts where any type may."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
