"""An engine's weights, written where its loaders put them: from its process's second update on."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from siirl.engines.rollout.served.engine_process import EngineProcess
from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.engine_weights import EngineWeights
from siirl.engines.rollout.served.messages import Call
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.rollout.served.weight_transfer import WeightTransfer, joined_places
from siirl.engines.rollout.served.weight_writing import Filling, WeightWriter
from siirl.engines.rollout.weight_loading import WeightSpecs
from siirl.engines.train.live_weights import LiveWeights
from siirl.errors import RolloutError
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
    ) -> None:
        """See EngineWeights. whole: all bytes of each update are compared, instead of samples."""
        super().__init__(name, specs, device, keeps, shard)
        self._transfer = WeightTransfer(specs, device, keeps, locks=True)
        self._writer = WeightWriter(specs, device, self._transfer.kept, whole)
        self._knows: EngineProcess | None = None  # the process that knows the places
        self._in_place = False  # whether that of the shard's first rank does
        self._told_why = ""
        self.by_loaders = False
        """Have further updates be as those of EngineWeights: to compare both."""

    @property
    def reads_live(self) -> bool:
        """See EngineWeights."""
        return not self.by_loaders

    def replace(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        keeps_kv: bool,
        live: LiveWeights | None = None,
    ) -> None:
        """See EngineWeights."""
        if self.by_loaders:
            super().replace(process, weights, keeps_kv)
            return
        if not self._in_place:
            self._load_all(process, weights, keeps_kv, has_begun=False)
            return
        with phase("begin"):
            in_place = self.together(process, lambda engine: self._begin(engine, in_place=True))
        if in_place:
            self._write_all(process, weights, live, keeps_kv)
        else:
            self._load_all(process, weights, keeps_kv, has_begun=True)

    def go_on_keeping(self) -> None:
        """See EngineWeights; copies live weights in the background."""
        self._writer.keep_now()

    def close(self) -> None:
        """See EngineWeights."""
        super().close()
        self._writer.close()

    def _begin(self, engine: RecoveringEngine, in_place: bool) -> bool:
        """Begin an update, in place if the process can; whether it is. One that was started since cannot."""
        tensors = self._writer.tensors()

        def load(process: EngineProcess) -> bool:
            process.call("begin_update", tensors=tensors)
            return False

        def begin(process: EngineProcess) -> bool:
            if not in_place or process is not self._knows:
                return load(process)
            process.call("begin_writing")
            return True

        return engine.act("begin_update", begin, load)

    def _load_all(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        keeps_kv: bool,
        has_begun: bool,
    ) -> None:
        self._in_place = False
        with self._transfer.buffer() as buffer:
            if not has_begun:
                with phase("begin"):
                    self.together(process, lambda engine: self._begin(engine, in_place=False))
            complete = False
            try:
                self._load(process, weights, buffer)
                complete = True
            finally:  # after a failure, which is the one to tell of, finishing may fail too
                with phase("finish"), nullcontext() if complete else suppress(RolloutError):
                    kept_kv = keeps_kv and complete
                    why_not = self.together(process, lambda engine: self._finish(engine, kept_kv))
        self._look_ahead(why_not)

    def _finish(self, engine: RecoveringEngine, keeps_kv: bool) -> str:
        """End an update by loaders. Why the next one cannot be in place, or ""."""
        return engine.act("finish_update", lambda process: self._finish_loading(process, keeps_kv))

    def _finish_loading(self, process: EngineProcess, keeps_kv: bool) -> str:
        why_not = process.call("finish_update", keeps_kv=keeps_kv)
        self._knows = None if why_not else process
        return why_not

    def _look_ahead(self, why_not: str) -> None:
        self._in_place = not why_not
        if why_not and why_not != self._told_why:
            log.warning("rollout engine %r takes weights one by one, in every sync: %s", self._name, why_not)
        self._told_why = why_not

    def _write_all(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        live: LiveWeights | None,
        keeps_kv: bool,
    ) -> None:
        complete = False
        try:
            buffer = self._writer.buffer()
            place = joined_places(self._shard.gather(buffer.place)) | {"size": buffer.size}
            for filling, told in self._writer.fillings(weights, live):
                self._shard.meet()  # each worker of the engine reads the buffer of a rank of its own
                with phase("load", tensors=len(filling.entries) // 4):
                    self._write(process, filling, told | {"place": place}, live)
            complete = True
        finally:
            with phase("finish"), nullcontext() if complete else suppress(RolloutError):
                why_not = self.together(
                    process, lambda engine: self._finish_writing(engine, keeps_kv and complete, complete)
                )
        self._look_ahead(why_not)

    def _write(
        self,
        process: RecoveringEngine | None,
        filling: Filling,
        told: dict[str, Any],
        live: LiveWeights | None,
    ) -> None:
        """Have the process write a filling; one that has taken its place meanwhile, load it."""
        keeping = self._writer.begin_keeping(filling, live)

        def load(process: EngineProcess) -> None:
            if keeping is not None:
                keeping.result()
            if filling.ended:
                process.ask(Call("update", {"bucket": self._writer.kept_bucket(filling)}))

        def write(process: EngineProcess) -> None:
            if process is self._knows:
                process.ask(Call("write", {"filling": told}))
            else:
                load(process)

        try:
            self.together(process, lambda engine: engine.act("update", write, load))
        finally:
            if keeping is not None:
                keeping.result()

    def _finish_writing(self, engine: RecoveringEngine, keeps_kv: bool, complete: bool) -> str:
        """End an update in place, also one that has failed."""

        def load(process: EngineProcess) -> str:
            return self._finish_loading(process, keeps_kv)

        def write(process: EngineProcess) -> str:
            if process is not self._knows:
                return load(process)
            if complete:
                process.call("finish_writing", keeps_kv=keeps_kv)
            return ""

        return engine.act("finish_update", write, load)
