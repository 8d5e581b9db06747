"""How the weights of a vLLM engine are replaced: by vLLM's loaders at first, from then on in place."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from siirl.engines.rollout.vllm.engine_process import EngineProcess
from siirl.engines.rollout.vllm.engine_shard import EngineShard
from siirl.engines.rollout.vllm.messages import Call
from siirl.engines.rollout.vllm.recovery import RecoveringEngine
from siirl.engines.rollout.vllm.weight_transfer import WeightTransfer, joined_places
from siirl.engines.rollout.vllm.weight_writing import Filling, WeightWriter
from siirl.engines.rollout.weight_loading import WeightSpecs
from siirl.engines.train.live_weights import LiveWeights
from siirl.errors import RolloutError
from siirl.observe.spans import phase

log = logging.getLogger(__name__)


class EngineWeights:
    """The weights of the engine that the ranks of a shard share; all its methods are collective over them.

    In a process's first update vLLM's own loaders take each tensor, and the process finds out where they
    land. If it does, further updates are written there. A process that has taken the place of a lost one is
    told a whole update by loaders, and so begins anew.
    """

    def __init__(
        self, name: str, specs: WeightSpecs, device: torch.device, keeps: bool, shard: EngineShard, once: bool
    ) -> None:
        """keeps: have a copy for another process. once: they come once, as the base of adapters does."""
        self._name, self._shard, self._once = name, shard, once
        self._transfer = WeightTransfer(specs, device, keeps)
        self._writer = WeightWriter(specs, device, self._transfer.kept)
        self._knows: EngineProcess | None = None  # the process that knows the places
        self._in_place = False  # whether that of the shard's first rank does
        self._told_why = ""

    def replace(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        live: LiveWeights | None,
        keeps_kv: bool,
    ) -> None:
        """Bring all weights in. live: where `weights` come from, if they stay there.

        keeps_kv: see NativeEngine.finish_update. RolloutError if that failed, on every rank.
        """
        if self._in_place and WeightWriter.is_on():
            with phase("begin"):
                in_place = self.together(process, lambda engine: self._begin(engine, in_place=True))
            if in_place:
                self._write(process, weights, live, keeps_kv)
                return
            self._load(process, weights, keeps_kv, has_begun=True)
        else:
            self._load(process, weights, keeps_kv, has_begun=False)

    def go_on_keeping(self) -> None:
        """Copy what is to be kept of live weights in the background, from here on."""
        self._writer.end()

    def close(self) -> None:
        """Free all memory. Idempotent."""
        self._transfer.close()
        self._writer.close()

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

    def _begin(self, engine: RecoveringEngine, in_place: bool) -> bool:
        """Begin an update, in place if the process can; whether it is. One that was started since cannot."""
        tensors = self._writer.tensors() if WeightWriter.is_on() and not self._once else {}

        def load(process: EngineProcess) -> bool:
            process.call("begin_update", tensors=tensors)
            return False

        def begin(process: EngineProcess) -> bool:
            if not in_place or process is not self._knows:
                return load(process)
            process.call("begin_writing")
            return True

        return engine.act("begin_update", begin, load)

    def _load(
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
                place = joined_places(self._shard.gather(buffer.place))
                for bucket, data in self._transfer.fill(weights, buffer):
                    described = bucket | {"size": buffer.size, "place": place}
                    with phase("load", tensors=len(bucket["names"])):
                        self._update(process, described, data)
                complete = True
            finally:  # after a failure, which is the one to tell of, finishing may fail too
                with phase("finish"), nullcontext() if complete else suppress(RolloutError):
                    kept_kv = keeps_kv and complete
                    why_not = self.together(process, lambda engine: self._finish(engine, kept_kv))
        self._look_ahead(why_not)

    def _update(self, process: RecoveringEngine | None, bucket: dict[str, Any], data: Tensor) -> None:
        """Have the engine load a bucket, whose bytes are `data`."""

        def update(engine: RecoveringEngine) -> None:
            with self._transfer.keeping(bucket, data) as again:
                engine.ask(Call("update", {"bucket": bucket}), Call("update", {"bucket": again}))

        self.together(process, update)

    def _finish(self, engine: RecoveringEngine, keeps_kv: bool) -> str:
        """End an update by loaders. Why the next one cannot be in place, or ""."""
        return engine.act("finish_update", lambda process: self._finish_loading(process, keeps_kv))

    def _finish_loading(self, process: EngineProcess, keeps_kv: bool) -> str:
        why_not = process.call("finish_update", keeps_kv=keeps_kv)
        self._knows = None if why_not else process
        return why_not

    def _look_ahead(self, why_not: str) -> None:
        self._in_place = not why_not
        if why_not and why_not != self._told_why and not self._once and WeightWriter.is_on():
            log.warning("rollout engine %r takes weights one by one, in every sync: %s", self._name, why_not)
        self._told_why = why_not

    def _write(
        self,
        process: RecoveringEngine | None,
        weights: Iterator[tuple[str, Tensor]],
        live: LiveWeights | None,
        keeps_kv: bool,
    ) -> None:
        buffer = self._writer.buffer()
        place = joined_places(self._shard.gather(buffer.place)) | {"size": buffer.size}
        complete = False
        try:
            for filling, told in self._writer.fillings(weights, live):
                with phase("load", tensors=len(filling.entries) // 4):
                    self._write_filling(process, filling, told | {"place": place}, live)
            complete = True
        finally:
            with phase("finish"), nullcontext() if complete else suppress(RolloutError):
                why_not = self.together(
                    process, lambda engine: self._finish_writing(engine, keeps_kv and complete, complete)
                )
        self._look_ahead(why_not)

    def _write_filling(
        self,
        process: RecoveringEngine | None,
        filling: Filling,
        told: dict[str, Any],
        live: LiveWeights | None,
    ) -> None:
        """Have the process write it; one that has taken its place meanwhile, load it."""
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
            return process.call("finish_writing", keeps_kv=keeps_kv) if complete else ""

        return engine.act("finish_update", write, load)
