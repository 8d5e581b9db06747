"""How an engine's weights are replaced: chunk by chunk, each tensor by the engine's own loaders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.journal import BeginUpdate, FinishUpdate, LoadChunk
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.train.adapters.lora import adapter_name
from siirl.engines.weights.bucket import ChunkPlaces, LiveWeights, WeightChunk, WeightPacker
from siirl.engines.weights.kept import KeptWeights
from siirl.engines.weights.shared_buffer import SharedBuffer
from siirl.engines.weights.target import WeightSpecs
from siirl.errors import RolloutError
from siirl.observe.spans import phase

BUCKET_BYTES = 256 << 20
"""Weights reach the engine's loaders in pieces of this size, or of the largest tensor."""


class EngineWeights:
    """The weights of the engine that the ranks of a shard share; its methods are collective over them.

    They are packed into memory that the engine's process maps. What is kept of them is for a process that
    takes the place of the first one, and lies in host memory: on a CPU the process reads the weights there in
    the first place; on a GPU it is a copy of what passes through a buffer of the device.
    """

    def __init__(
        self, name: str, specs: WeightSpecs, device: torch.device, keeps: bool, shard: EngineShard
    ) -> None:
        """keeps: have a copy for another process."""
        self._name, self._device, self._shard = name, device, shard
        self._packer = WeightPacker({name: spec for name, spec in specs.items() if not adapter_name(name)})
        self._kept = KeptWeights(self._packer.total_bytes, device) if keeps else None
        self._keeps_apart = keeps and device.type != "cpu"

    @property
    def reads_live(self) -> bool:
        """Whether weights are taken where they are trained (LiveWeights), if they are there."""
        return False

    def expect(self, process: RecoveringEngine | None) -> None:
        """`replace` comes next: the process may begin beside what is done until then. Errors as of that."""

    def replace(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        live: LiveWeights | None = None,
    ) -> None:
        """Bring all weights in. RolloutError if that failed, on every rank.

        process: on the first rank of the shard. live: where `weights` come from, if they stay
        there.
        """
        self._load_all(process, weights)

    def go_on_keeping(self) -> None:
        """The engine samples from here on: what is to be kept may be copied beside it."""

    def close(self) -> None:
        """Free all memory. Idempotent."""
        if self._kept is not None:
            self._kept.close()

    def together(self, process: RecoveringEngine | None, act: Callable[[RecoveringEngine], Any]) -> Any:
        """Have the first rank of the shard do something with the process; all of it go on, or none does.

        Its result, a JSON value, on every rank. RolloutError on every rank if that failed. A rank that alone
        went on would wait for the others where they do not come: they take part in the rest of a sync that
        has failed, which is collective too.
        """
        failure, result = None, None
        if process is not None:
            try:
                result = act(process)
            except RolloutError as error:
                failure = error
        failed, result = self._shard.share((failure is not None, result))
        if failure is not None:
            raise failure
        if failed:
            raise RolloutError(f"rollout engine {self._name!r} failed on rank {self._shard.ranks[0]}")
        return result

    def _load_all(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        has_begun: bool = False,
    ) -> Any:
        """Have the engine's loaders take all weights. What finish_update gives, on every rank."""
        with self._transit() as buffer:
            if not has_begun:
                with phase("begin"):
                    self.together(process, self._begin_loading)
            with self._finishing(process, self._finish_loading) as finished:
                self._load(process, weights, buffer)
        return finished.pop()

    @contextmanager
    def _transit(self) -> Iterator[SharedBuffer]:
        """The memory that the process maps during an update. RolloutError if the host has no room for it."""
        if self._kept is not None:
            self._kept.restart()
            if not self._keeps_apart:
                yield self._kept.buffer
                return
        size = max(self._packer.largest_bytes, min(self._packer.total_bytes, BUCKET_BYTES))
        buffer = SharedBuffer(size, self._device)
        try:
            yield buffer
        finally:
            buffer.close()

    @contextmanager
    def _finishing(
        self, process: RecoveringEngine | None, finish: Callable[[RecoveringEngine], Any]
    ) -> Iterator[list[Any]]:
        """What has begun and happens inside is finished, also if it fails; gives what `finish` gave."""
        finished: list[Any] = []
        complete = False
        try:
            yield finished
            complete = True
        finally:  # after a failure, which is the one to tell of, finishing may fail too
            with phase("finish"):
                for _ in range(1 if complete else 2):  # the first one may hear how the begin failed
                    with nullcontext() if complete else suppress(RolloutError):
                        finished.append(self.together(process, finish))
                        break

    def _begin_loading(self, engine: RecoveringEngine) -> None:
        engine.tell(BeginUpdate())

    def _finish_loading(self, engine: RecoveringEngine) -> Any:
        return engine.tell(FinishUpdate())

    def _load(
        self, process: RecoveringEngine | None, weights: Iterator[tuple[str, Tensor]], buffer: SharedBuffer
    ) -> None:
        """Have the engine load all tensors, by way of the buffer."""
        told = {"size": buffer.size, "place": joined_places(self._shard.gather(buffer.place))}
        limit = min(buffer.size, max(self._packer.largest_bytes, BUCKET_BYTES))
        stays = self._kept is not None and buffer is self._kept.buffer
        places = ChunkPlaces(buffer.data, limit, cuts=False, stays=stays)
        for chunk in self._packer.chunks(weights, places, True, self._reserve, lambda begin: None):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._shard.meet()  # each worker of the engine reads the buffer of a rank of its own
            with phase("load", tensors=len(chunk.ended)):
                bucket = self._packer.to_load(chunk, chunk.begin) | told
                self._update(process, chunk, bucket, buffer.data[chunk.begin : chunk.end])

    def _update(
        self,
        process: RecoveringEngine | None,
        chunk: WeightChunk,
        bucket: Mapping[str, Any],
        data: Tensor,
    ) -> None:
        """Have the engine load a chunk, whose bytes are `data`; they are copied to where they are to be kept
        while it does."""

        def update(engine: RecoveringEngine) -> None:
            if not self._keeps_apart:
                engine.tell(LoadChunk(bucket, bucket))
                return
            assert self._kept is not None
            copying = self._kept.copying(chunk.kept, data)
            try:
                engine.tell(LoadChunk(bucket, self._kept_bucket(chunk)))
            finally:
                copying.result()

        self.together(process, update)

    def _reserve(self, num_bytes: int) -> int:
        """Where the next bytes are kept, if they are."""
        return self._kept.reserve(num_bytes) if self._kept is not None else 0

    def _kept_bucket(self, chunk: WeightChunk) -> dict[str, Any]:
        """What a process that takes the place of another one is to load in the place of a chunk."""
        assert self._kept is not None
        buffer = self._kept.buffer
        return self._packer.to_load(chunk, chunk.kept) | {"size": buffer.size, "place": buffer.place}


def joined_places(places: list[dict[str, Any]]) -> dict[str, Any]:
    """One place for the workers of an engine: the first rank's memory, or the handles of all GPUs."""
    if "path" in places[0]:
        return places[0]
    return {"handles": {uuid: handle for place in places for uuid, handle in place["handles"].items()}}
