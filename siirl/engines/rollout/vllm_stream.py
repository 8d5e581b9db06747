"""A stream of requests to a vLLM engine's process, which admits them between two of its steps."""

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
        params = [vars(request.params) for request in requests]
        self._process.send("submit", arrays, names=names, params=params)
        for name, request in zip(names, requests, strict=True):
            self._pending[name] = Pending(request.key, len(request.prompt))

    def collect(self, timeout_s: float) -> list[tuple[Key, Completion]]:
        """See RolloutStream."""
        if not self._pending:
            return []
        return [answer for reply in self._process.listen(timeout_s) for answer in self._answers(*reply)]

    def close(self) -> None:
        """See RolloutStream. RolloutError if the process died."""
        if self._pending:
            self._pending = {}
            self._process.ask("abort")

    def _answers(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[tuple[Key, Completion]]:
        """The responses that one step of the engine has completed."""
        reasons, version = values["finish_reasons"], self._engine.weight_version
        check_complete_responses(reasons, self._engine.name)
        bounds = np.cumsum(arrays["lengths"])[:-1]
        parts = (np.split(arrays[name], bounds) for name in ("tokens", "log_probs"))
        answers, prompt_tokens = [], 0
        for name, reason, tokens, log_probs in zip(values["names"], reasons, *parts, strict=True):
            pending = self._pending.pop(name, None)
            if pending is None:
                raise RolloutError(
                    f"rollout engine {self._engine.name!r} answered a request that is not pending."
                )
            completion = Completion(tokens.tolist(), log_probs.tolist(), reason, version)
            answers.append((pending.key, completion))
            prompt_tokens += pending.num_prompt_tokens
        check_finite(((f"request {key!r}", completion) for key, completion in answers), self._dtype)
        self._engine.count(values["stats"], prompt_tokens)
        return answers
