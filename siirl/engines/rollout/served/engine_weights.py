"""How an engine's weights are replaced: bucket by bucket, each tensor by the engine's own loaders."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.messages import Call, Doubt
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.rollout.served.weight_transfer import Bucket, WeightTransfer, joined_places
from siirl.engines.rollout.weight_loading import WeightSpecs
from siirl.engines.train.live_weights import LiveWeights
from siirl.errors import RolloutError
from siirl.observe.spans import phase


class EngineWeights:
    """The weights of the engine that the ranks of a shard share; its methods are collective over them."""

    def __init__(
        self, name: str, specs: WeightSpecs, device: torch.device, keeps: bool, shard: EngineShard
    ) -> None:
        """keeps: have a copy for another process."""
        self._name, self._shard = name, shard
        self._transfer = WeightTransfer(specs, device, keeps)

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
        keeps_kv: bool,
        live: LiveWeights | None = None,
    ) -> None:
        """Bring all weights in. RolloutError if that failed, on every rank.

        process: on the first rank of the shard. keeps_kv: see NativeEngine.finish_update. live: where
        `weights` come from, if they stay there.
        """
        self._load_all(process, weights, keeps_kv)

    def go_on_keeping(self) -> None:
        """The engine samples from here on: what is to be kept may be copied beside it."""

    def close(self) -> None:
        """Free all memory. Idempotent."""
        self._transfer.close()

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
        keeps_kv: bool,
        has_begun: bool = False,
    ) -> Any:
        """Have the engine's loaders take all weights. What finish_update gives, on every rank."""
        with self._transfer.buffer() as buffer:
            if not has_begun:
                with phase("begin"):
                    self.together(process, self._begin_loading)
            with self._finishing(process, self._finish_loading, keeps_kv) as finished:
                self._load(process, weights, buffer)
        return finished.pop()

    @contextmanager
    def _finishing(
        self, process: RecoveringEngine | None, finish: Callable[..., Any], keeps_kv: bool
    ) -> Iterator[list[Any]]:
        """What has begun and happens inside is finished, also if it fails; gives what `finish` gave.

        finish: called with the engine, whether it keeps its KV cache, and whether all is there.
        """
        finished: list[Any] = []
        complete = False
        try:
            yield finished
            complete = True
        finally:  # after a failure, which is the one to tell of, finishing may fail too
            if process is not None and not complete:
                for message in (Doubt(), Doubt()):  # the first one may hear how the begin failed
                    with suppress(RolloutError):
                        process.ask(message)
            with phase("finish"), nullcontext() if complete else suppress(RolloutError):
                keeps = keeps_kv and complete
                finished.append(self.together(process, lambda engine: finish(engine, keeps, complete)))

    def _begin_loading(self, engine: RecoveringEngine) -> None:
        engine.call("begin_update")

    def _finish_loading(self, engine: RecoveringEngine, keeps_kv: bool, complete: bool) -> Any:
        return engine.call("finish_update", keeps_kv=keeps_kv)

    def _load(
        self, process: RecoveringEngine | None, weights: Iterator[tuple[str, Tensor]], buffer: Any
    ) -> None:
        """Have the engine load all buckets, by way of the buffer."""
        place = joined_places(self._shard.gather(buffer.place))
        for bucket, data in self._transfer.fill(weights, buffer):
            self._shard.meet()  # each worker of the engine reads the buffer of a rank of its own
            with phase("load", tensors=len(bucket["names"])):
                self._update(process, bucket | {"size": buffer.size, "place": place}, data)

    def _update(self, process: RecoveringEngine | None, bucket: Bucket, data: Tensor) -> None:
        """Have the engine load a bucket, whose bytes are `data`."""

        def update(engine: RecoveringEngine) -> None:
            with self._transfer.keeping(bucket, data) as again:
                engine.ask(Call("update", {"bucket": bucket}), Call("update", {"bucket": again}))

        self.together(process, update)
