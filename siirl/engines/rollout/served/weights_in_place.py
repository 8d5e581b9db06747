"""An engine's weights, written where its loaders put them: from its process's second update on."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from siirl.engines.rollout.served.engine_process import EngineProcess
from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.engine_weights import EngineWeights
from siirl.engines.rollout.served.messages import Call
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.rollout.served.weight_transfer import joined_places
from siirl.engines.rollout.served.weight_writing import WeightChunk, WeightWriter
from siirl.engines.rollout.weight_loading import WeightSpecs
from siirl.engines.train.live_weights import LiveWeights
from siirl.observe.spans import phase

log = logging.getLogger(__name__)


class WeightsInPlace(EngineWeights):
    """See EngineWeights; of an engine whose process can say where its loaders put tensors (Places).

    In a process's first update the loaders take each tensor, and the process finds out where they land. If it
    does, further updates are written there. A process that has taken the place of a lost one is told a whole
    update by loaders, and so begins anew.
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
        self._writer = WeightWriter(specs, device, self._transfer.kept, whole, buffer_bytes)
        self._knows: EngineProcess | None = None  # the process that knows the places
        self._in_place = False  # whether that of the shard's first rank does
        self._has_begun = False  # an update, which has not come
        self._told_why = ""

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
        keeps_kv: bool,
        live: LiveWeights | None = None,
    ) -> None:
        """See EngineWeights."""
        self.expect(process)
        has_begun, self._has_begun = self._has_begun, False
        if self._in_place:
            why_not = self._write_all(process, weights, live, keeps_kv)
        else:
            why_not = self._load_all(process, weights, keeps_kv, has_begun)
        self._in_place = not why_not
        if why_not and why_not != self._told_why:
            log.warning("rollout engine %r takes weights one by one, in every sync: %s", self._name, why_not)
        self._told_why = why_not

    def go_on_keeping(self) -> None:
        """See EngineWeights; copies live weights in the background."""
        self._writer.keep_now()

    def close(self) -> None:
        """See EngineWeights."""
        super().close()
        self._writer.close()

    def _begin_loading(self, engine: RecoveringEngine) -> None:
        engine.call("begin_update", tensors=self._writer.tensors())

    def _finish_loading(self, engine: RecoveringEngine, keeps_kv: bool, complete: bool) -> str:
        """Why the next update cannot be in place, or ""."""
        return engine.act("finish_update", lambda process: self._finish_in(process, keeps_kv))

    def _finish_in(self, process: EngineProcess, keeps_kv: bool) -> str:
        why_not = process.call("finish_update", keeps_kv=keeps_kv)
        self._knows = None if why_not else process
        return why_not

    def _begin_writing(self, engine: RecoveringEngine) -> bool:
        """Begin an update in place; False: by loaders, of a process that was started since.

        The process begins beside what the worker does next; how that went is heard after the first write.
        """

        def load(process: EngineProcess) -> bool:
            process.call("begin_update", tensors=self._writer.tensors())
            return False

        def write(process: EngineProcess) -> bool:
            if process is not self._knows:
                return load(process)
            process.post(Call("begin_writing", {}))
            return True

        return engine.act("begin_update", write, load)

    def _write_all(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        live: LiveWeights | None,
        keeps_kv: bool,
    ) -> str:
        with self._finishing(process, self._finish_writing, keeps_kv) as finished:
            buffer = self._writer.buffer()
            place = joined_places(self._shard.gather(buffer.place)) | {"size": buffer.size}
            for filling, told in self._writer.fillings(weights, live):
                self._shard.meet()  # each worker of the engine reads the buffer of a rank of its own
                with phase("load", tensors=len(filling.entries) // 4):
                    self._write(process, filling, told | {"place": place}, live, keeps_kv)
        return finished.pop()

    def _write(
        self,
        process: RecoveringEngine | None,
        filling: WeightChunk,
        told: dict[str, Any],
        live: LiveWeights | None,
        keeps_kv: bool,
    ) -> None:
        """Have the process write a filling, and finish with the last one; a process that has taken its place
        meanwhile, load it.

        It writes while the next one is put elsewhere, and is done with it before the one after that is: that
        one may lie in the same place.
        """
        keeping = self._writer.begin_keeping(filling, live)

        def load(process: EngineProcess) -> None:
            if keeping is not None:
                keeping.result()
            if filling.ended:
                process.ask(Call("update", {"bucket": self._writer.kept_bucket(filling)}))

        def write(process: EngineProcess) -> None:
            if process is not self._knows:
                load(process)
                return
            last = {"keeps_kv": keeps_kv} if filling.is_last else {}
            process.post(Call("finish_writing" if last else "write", {"filling": told, **last}))
            with phase("wait_for_engine"):
                process.settle(0 if last else 1)

        self.together(process, lambda engine: engine.act("update", write, load))

    def _finish_writing(self, engine: RecoveringEngine, keeps_kv: bool, complete: bool) -> str:
        """End an update in place, also one that has failed: of a process that has not written it all."""

        def load(process: EngineProcess) -> str:
            return self._finish_in(process, keeps_kv)

        def write(process: EngineProcess) -> str:
            return load(process) if process is not self._knows else ""

        return engine.act("finish_update", write, load)
