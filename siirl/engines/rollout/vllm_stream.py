"""A stream of requests to a vLLM engine's process, which admits them between two of its steps."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from siirl.engines.rollout.base import Completion, Key, Request, RolloutStream
from siirl.engines.rollout.checks import check_complete_responses, check_finite
from siirl.engines.rollout.sampling import derive_seed
from siirl.engines.rollout.vllm_process import EngineProcess
from siirl.errors import RolloutError

if TYPE_CHECKING:
    from siirl.engines.rollout.vllm import VLLMRollout


@dataclass(frozen=True)
class Pending:
    """A request in the engine's process."""

    key: Key
    num_prompt_tokens: int


class VLLMStream(RolloutStream):
    """Requests go to the engine's process at once; it steps whether or not anybody collects."""

    def __init__(self, engine: "VLLMRollout", process: EngineProcess, dtype: str) -> None:
        self._engine, self._process, self._dtype = engine, process, dtype
        self._pending: dict[str, Pending] = {}  # under the names that the process knows
        self._num_submitted = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream; wakes the engine's KV cache. RolloutError also when the process died."""
        if not requests:
            return
        self._engine.check_requests(requests, (pending.key for pending in self._pending.values()))
        if not self._pending:
            self._process.expect()
        names = [str(self._num_submitted + index) for index in range(len(requests))]
        self._num_submitted += len(requests)
        arrays = {
            "prompts": np.array([token for request in requests for token in request.prompt], np.int64),
            "prompt_lengths": np.array([len(request.prompt) for request in requests], np.int64),
            "seeds": np.array([derive_seed(request.seed, 0) for request in requests], np.int64),
        }
        params = [dataclasses.asdict(request.params) for request in requests]
        self._process.send("submit", arrays, names=names, params=params)
        for name, request in zip(names, requests, strict=True):
            self._pending[name] = Pending(request.key, len(request.prompt))

    def collect(self, timeout_s: float) -> list[tuple[Key, Completion]]:
        """See RolloutStream."""
        if not self._pending:
            return []
        return [self._answer(*reply) for reply in self._process.listen(timeout_s)]

    def close(self) -> None:
        """See RolloutStream. RolloutError if the process died."""
        if self._pending:
            self._pending = {}
            self._process.ask("abort")

    def _answer(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Key, Completion]:
        pending = self._pending.pop(values["name"], None)
        if pending is None:
            raise RolloutError(
                f"rollout engine {self._engine.name!r} answered a request that is not pending."
            )
        check_complete_responses([values["finish_reason"]], self._engine.name)
        completion = Completion(
            arrays["tokens"].tolist(),
            arrays["log_probs"].tolist(),
            values["finish_reason"],
            self._engine.weight_version,
        )
        check_finite([(f"request {pending.key!r}", completion)], self._dtype)
        self._engine.count(values["stats"], pending.num_prompt_tokens)
        return pending.key, completion
