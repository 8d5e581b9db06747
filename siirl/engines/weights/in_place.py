"""An engine's weights, written where its loaders put them: from its process's second update on."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.backends.vllm import WRITING_BYTES
from siirl.engines.rollout.served.engine_process import EngineProcess
from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.journal import BeginUpdate, FinishUpdate, Told
from siirl.engines.rollout.served.messages import Call
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.weights.bucket import (
    ALIGN_BYTES,
    ChunkPlaces,
    LiveWeights,
    Named,
    WeightChunk,
    WeightPacker,
)
from siirl.engines.weights.engine_loader import EngineWeights, joined_places
from siirl.engines.weights.kept import KeptWeights
from siirl.engines.weights.shard_plan import Box
from siirl.engines.weights.shard_sync import ArrivingParts, Rounds
from siirl.engines.weights.shared_buffer import SharedBuffer, sampled_sum
from siirl.engines.weights.target import WeightSpecs
from siirl.observe.spans import phase

log = logging.getLogger(__name__)

BUCKET_BYTES = WRITING_BYTES


@dataclass(frozen=True)
class FinishLearning(FinishUpdate):
    """All tensors have come by loaders; gives why the next update cannot be in place, or ""."""

    def tell(self, process: EngineProcess) -> str:
        """See Told."""
        why_not = super().tell(process)
        process.writes_in_place = not why_not
        return why_not


@dataclass(frozen=True)
class BeginWriting(BeginUpdate):
    """All weights are about to be replaced; gives whether in place, else by loaders: of a new process.

    The process begins beside what the worker does next; how that went is heard after the first write.
    """

    def tell(self, process: EngineProcess) -> bool:
        """See Told."""
        if process.writes_in_place:
            process.post(Call("begin_writing", {}))
            return True
        super().tell(process)
        return False


@dataclass(frozen=True)
class WriteChunk(Told):
    """A chunk is there to be written, the last one to finish with; a process that is new loads it.

    It writes while the next one is put elsewhere, and is done with it before the one after that is: that one
    may lie in the same place.
    """

    weights: "WeightsInPlace"
    chunk: WeightChunk
    told: dict[str, Any] | list[Any]
    """Of all workers, or of each."""
    keeping: Future | None
    """The copy that is being made of it."""
    subject = "weights"
    kind = "update"

    def tell(self, process: EngineProcess) -> None:
        """See Told."""
        if not process.writes_in_place:
            if self.keeping is not None:
                self.keeping.result()
            if self.chunk.ended:
                process.call(self.kind, bucket=self.weights.kept_bucket(self.chunk))
            return
        last = self.chunk.is_last
        process.post(Call("finish_writing" if last else "write", {"filling": self.told}))
        with phase("wait_for_engine"):
            process.settle(0 if last else 1)


@dataclass(frozen=True)
class FinishWriting(FinishLearning):
    """The update is over, also one that has failed: for a process that has not written it all."""

    def tell(self, process: EngineProcess) -> str:
        """See Told."""
        if not process.writes_in_place:
            return super().tell(process)
        process.settle()
        return ""


class WeightsInPlace(EngineWeights):
    """See EngineWeights; of an engine whose process can say where its loaders put tensors (ParameterMap).

    In a process's first update the loaders take each tensor, and the process finds out where they land. If it
    does, further updates are written there. A process that has taken the place of a lost one is told a whole
    update by loaders, and so restarts.
    """

    def __init__(
        self,
        name: str,
        specs: WeightSpecs,
        device: torch.device,
        keeps: bool,
        shard: EngineShard,
        whole: bool,
        buffer_bytes: int | None = None,
    ) -> None:
        """See EngineWeights. whole: all bytes of each update are compared, instead of samples.

        buffer_bytes: see WeightWriter.
        """
        super().__init__(name, specs, device, keeps, shard)
        self._writer = WeightWriter(self._packer, device, self._kept, whole, buffer_bytes)
        self._in_place = False  # whether the process of the shard's first rank knows the places
        self._has_begun = False  # an update, which has not come
        self._told_why = ""
        self._whole = whole
        self._has_room = (buffer_bytes or BUCKET_BYTES) >= BUCKET_BYTES  # for two rounds of parts
        self._parts: PartWriter | None = None  # of the parts that are expected

    @property
    def reads_live(self) -> bool:
        """See EngineWeights."""
        return True

    def expect(self, process: RecoveringEngine | None) -> None:
        """See EngineWeights. Idempotent."""
        if self._in_place and not self._has_begun:
            self._in_place = False
            with phase("begin"):
                self._in_place = self.together(process, self._begin_writing)
            self._has_begun = True

    def replace(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        live: LiveWeights | None = None,
    ) -> None:
        """See EngineWeights."""
        self.expect(process)
        has_begun, self._has_begun = self._has_begun, False
        if self._in_place:
            why_not = self._write_all(process, weights, live)
        else:
            self._forget_parts()  # the process finds out anew where tensors land
            why_not = self._load_all(process, weights, has_begun)
        self._in_place = not why_not
        if why_not and why_not != self._told_why:
            log.warning("rollout engine %r takes weights one by one, in every sync: %s", self._name, why_not)
        self._told_why = why_not

    @property
    def knows_parts(self) -> bool:
        """Whether the process can say which parts of tensors its workers keep, and take these alone. What is
        kept for another process are whole tensors."""
        return self._in_place and self._kept is None and self._has_room

    def kept_boxes(self, process: RecoveringEngine | None) -> dict[str, list[Box]] | None:
        """Those of this rank's worker; None if some are no rectangles."""
        of_workers = self.together(process, lambda engine: engine.call("kept_boxes"))
        names, found = list(self._packer.specs), defaultdict(list)
        if None in of_workers:
            return None
        for number, box in of_workers[self._shard.place]:
            found[names[number]].append(tuple(map(tuple, box)))
        return found

    @property
    def expected(self) -> Rounds | None:
        """The parts that come next; None: whole tensors."""
        return None if self._parts is None else self._parts.rounds

    def expect_parts(self, process: RecoveringEngine | None, arriving: Rounds | None) -> None:
        """See RolloutEngine."""
        self._forget_parts()
        self._parts = None if arriving is None else PartWriter(arriving, self._device, self._whole)
        numbers = {name: number for number, name in enumerate(self._packer.specs)}
        mine = arriving and [(numbers[part.name], part.box) for parts in arriving for part in parts]
        of_workers = self._shard.gather(mine)
        told = None if arriving is None else of_workers
        self.together(process, lambda engine: engine.call("take_parts", of_workers=told))

    def _forget_parts(self) -> None:
        if self._parts is not None:
            self._parts.close()
        self._parts = None

    def replace_parts(self, process: RecoveringEngine | None, parts: ArrivingParts) -> None:
        """As `replace`, of the parts that are expected."""
        assert self._parts is not None and self._in_place
        self.expect(process)
        self._has_begun = False
        with self._finishing(process, self._finish_writing):
            for chunk, told in self._parts.fillings(parts):
                of_workers = self._shard.gather(told)
                with phase("load", tensors=len(chunk.entries) // 4):
                    event = WriteChunk(self, chunk, of_workers, None)
                    self.together(process, lambda engine, event=event: engine.tell(event))

    def go_on_keeping(self) -> None:
        """See EngineWeights; copies live weights in the background."""
        if self._kept is not None:
            self._kept.start()

    def close(self) -> None:
        """See EngineWeights."""
        super().close()
        self._writer.close()
        self._forget_parts()

    def kept_bucket(self, chunk: WeightChunk) -> dict[str, Any]:
        """What another process is to load in the place of a chunk; waits until it is kept."""
        assert self._kept is not None
        self._kept.wait()
        return self._kept_bucket(chunk)

    def _begin_loading(self, engine: RecoveringEngine) -> None:
        engine.tell(BeginUpdate({"tensors": self._packer.tensors()}))

    def _finish_loading(self, engine: RecoveringEngine) -> str:
        """Why the next update cannot be in place, or ""."""
        return engine.tell(FinishLearning())

    def _begin_writing(self, engine: RecoveringEngine) -> bool:
        return engine.tell(BeginWriting({"tensors": self._packer.tensors()}))

    def _write_all(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        live: LiveWeights | None,
    ) -> str:
        with self._finishing(process, self._finish_writing) as finished:
            buffer = self._writer.buffer()
            place = joined_places(self._shard.gather(buffer.place)) | {"size": buffer.size}
            for chunk, told in self._writer.fillings(weights, live):
                self._shard.meet()  # each worker of the engine reads the buffer of a rank of its own
                with phase("load", tensors=len(chunk.entries) // 4):
                    keeping = self._writer.begin_keeping(chunk, live)
                    event = WriteChunk(self, chunk, told | {"place": place}, keeping)
                    self.together(process, lambda engine, event=event: engine.tell(event))
        return finished.pop()

    def _finish_writing(self, engine: RecoveringEngine) -> str:
        return engine.tell(FinishWriting())


class PartWriter:
    """Memory that a worker of the engine maps, in which its parts of tensors arrive round by round.

    Rounds take turns with the halves of it: one arrives while the process reads the other.
    """

    def __init__(self, rounds: Rounds, device: torch.device, whole: bool) -> None:
        """whole: see WeightWriter."""
        self.rounds, self._whole = rounds, whole
        sizes = [sum(part.room for part in parts) for parts in rounds]
        self._half, self._number = max(*sizes, ALIGN_BYTES), 0
        self._buffer = SharedBuffer(2 * self._half, device)
        self._entries: list[list[int]] = []
        number = 0
        for place, parts in enumerate(rounds):
            at, entries = place % 2 * self._half, []
            for part in parts:
                entries += [number, 0, part.shape[0] if part.shape else 1, at]
                number, at = number + 1, at + part.room
            self._entries.append(entries)

    def fillings(self, arriving: ArrivingParts) -> Iterator[tuple[WeightChunk, dict[str, Any]]]:
        """What lies in the buffer, round by round, and what the worker is told of it."""

        def memory(place: int, size: int) -> Tensor:
            begin = place % 2 * self._half
            return self._buffer.data[begin : begin + size]

        arriving.memory = memory
        for place, parts in enumerate(arriving):
            self._number += 977
            begin = place % 2 * self._half
            end = begin + sum(part.room for part, _ in parts)
            chunk = WeightChunk(begin, end, self._entries[place], is_last=place == len(self.rounds) - 1)
            with phase("wait_for_device"):
                total = int(sampled_sum(self._buffer.data[begin:end], self._number, self._whole))
            told = {"entries": chunk.entries, "begin": begin, "end": end, "sum": total}
            place_of = self._buffer.place | {"size": self._buffer.size}
            yield chunk, told | {"number": self._number, "whole": self._whole, "place": place_of}

    def close(self) -> None:
        """Free the buffer. Idempotent."""
        self._buffer.close()


class WeightWriter:
    """Packs rows of tensors into a buffer that the engine's process maps once and for all.

    They take turns with the halves of it: one is filled while the process reads the other. A buffer that has
    room for all of them is filled once, and read once.

    With `kept`, a copy for another process: on a CPU that is the buffer itself. A GPU's is made after the
    update, of weights that stay where they are (LiveWeights, or the buffer), or else of each half at once.
    """

    def __init__(
        self,
        packer: WeightPacker,
        device: torch.device,
        kept: KeptWeights | None,
        whole: bool,
        buffer_bytes: int | None = None,
    ) -> None:
        """whole: have all bytes compared by who reads them, instead of samples.

        buffer_bytes: of the device at most, but for what a row takes; None: BUCKET_BYTES.
        """
        self._packer, self._device, self._kept, self._whole = packer, device, kept, whole
        self._buffer_bytes = buffer_bytes
        self._buffer: SharedBuffer | None = None
        self._live: tuple[LiveWeights, list[WeightChunk]] | None = None
        self._keeps_apart = kept is not None and device.type != "cpu"
        self._copying: dict[int, Future] = {}  # first bytes of what is being copied to where it is kept
        self._num_written = 0

    def buffer(self) -> SharedBuffer:
        """The memory that the process maps. RolloutError if the host has no room for a kept copy."""
        if self._kept is not None and not self._keeps_apart:
            return self._kept.buffer
        if self._buffer is None:
            size = min(self._packer.total_bytes, self._buffer_bytes or BUCKET_BYTES)
            self._buffer = SharedBuffer(max(size, 2 * self._packer.cut_bytes), self._device)
        return self._buffer

    def _holds_all(self, buffer: SharedBuffer) -> bool:
        """Whether nothing that lies in the buffer has to make room for more."""
        return buffer.size >= self._packer.total_bytes

    @torch.no_grad()
    def fillings(
        self, weights: Iterable[Named], live: LiveWeights | None
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
            found = self._chunks(weights, buffer, put_at_once=True)
        elif self._live is not None and self._live[0] is live:
            found = iter(self._live[1])
        else:
            self._live = (live, list(self._chunks(weights, buffer, put_at_once=False)))
            found = iter(self._live[1])
        if live is not None and self._kept is not None and self._keeps_apart:
            self._kept.fill_later(self._keep_live)
            live.read_until(self._kept.wait)
        with phase("wait_for_device"):
            self._settle_device(all_streams=True)  # whoever wrote the weights
        num_left = self._packer.num_with_rows
        while True:
            with phase("put"):
                chunk = next(found, None)
                if chunk is None:
                    return
                if live is not None:
                    chunk.copies.run()
                num_left -= len(chunk.ended)
                chunk.is_last = num_left == 0
                told = self._told(chunk, buffer)
            yield chunk, told

    def _chunks(
        self, weights: Iterable[Named], buffer: SharedBuffer, put_at_once: bool
    ) -> Iterator[WeightChunk]:
        """See WeightPacker.chunks, and the class for how these lie."""
        stays = self._kept is not None and buffer is self._kept.buffer
        half = 0 if stays or self._holds_all(buffer) else buffer.size // 2 // ALIGN_BYTES * ALIGN_BYTES
        limit = half or buffer.size
        if stays:
            limit = min(buffer.size, max(BUCKET_BYTES, 2 * self._packer.cut_bytes))
        places = ChunkPlaces(buffer.data, limit, cuts=True, stays=stays, half=half)
        keep = self._kept.reserve if self._kept is not None else lambda num_bytes: 0
        return self._packer.chunks(weights, places, put_at_once, keep, self._wait_for_copy)

    def _wait_for_copy(self, begin: int) -> None:
        """Until what lies at this byte is kept."""
        if (copying := self._copying.pop(begin, None)) is not None:
            with phase("wait_for_copy"):
                copying.result()

    def _told(self, chunk: WeightChunk, buffer: SharedBuffer) -> dict[str, Any]:
        """What the process is told of a chunk, once all of it lies in the buffer."""
        number = self._num_written * 977 + chunk.kept // ALIGN_BYTES
        with phase("wait_for_device"):
            total = int(sampled_sum(buffer.data[chunk.begin : chunk.end], number, self._whole))
            self._settle_device()
        return {
            "entries": chunk.entries,
            "begin": chunk.begin,
            "end": chunk.end,
            "number": number,
            "whole": self._whole,
            "sum": total,
        }

    def begin_keeping(self, chunk: WeightChunk, live: LiveWeights | None) -> Future | None:
        """Begin to copy a chunk to where weights are kept, if it has to make room for another one.

        The next one fills the other half of the buffer meanwhile. What stays in the buffer is copied later,
        while the engine samples: copies to the host are in the way of each answer that comes from the device.
        """
        if not self._keeps_apart or live is not None:
            return None
        assert self._kept is not None
        buffer = self.buffer()
        data = buffer.data[chunk.begin : chunk.end]
        if self._holds_all(buffer):
            self._kept.copy_later(chunk.kept, data)
            return None
        self._copying[chunk.begin] = copying = self._kept.copying(chunk.kept, data)
        return copying

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
                for chunk in self._live[1]:
                    chunk.copies.run()
                    data = buffer[chunk.begin : chunk.end]
                    kept[chunk.kept : chunk.kept + len(data)].copy_(data, non_blocking=True)
            stream.synchronize()

    def _settle_device(self, all_streams: bool = False) -> None:
        """Wait for all that the device has been given, or for this thread's stream of it."""
        if self._device.type == "cuda" and all_streams:
            torch.cuda.synchronize(self._device)
        elif self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
