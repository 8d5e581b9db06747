"""Tokens of responses that are in work, kept here until they end: what vLLM does for each of them costs more.

vLLM cuts the log-prob of each request out of those of a step, and hands each token through its output
processor, which is there to stream them. Of hundreds of requests that is much of what the host does for
a step of decoding, with one thread, and the device waits where the host is slow.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsLists


def own_name(request_id: str) -> str:
    """The name under which a request was added, of the one that vLLM gave it."""
    return request_id.split("-")[0]


class KeptTokens:
    """Tokens and log-probs of the requests of an engine, by the names under which they were added."""

    def __init__(self, engine: LLMEngine) -> None:
        """Take what the engine's steps sample from now on. Once for each engine, and only if `can_keep`."""
        self._token_ids: dict[str, list[int]] = defaultdict(list)
        self._log_probs: dict[str, list[float]] = defaultdict(list)
        core: Any = engine.engine_core
        scheduler = core.engine_core.scheduler
        scheduler.update_from_output = functools.partial(self._update, scheduler.update_from_output)

    @staticmethod
    def can_keep(engine: LLMEngine) -> bool:
        """Not where the scheduler is in another process, nor where vLLM counts tokens as they come."""
        return hasattr(engine.engine_core, "engine_core") and not engine.log_stats

    def _update(self, update: Callable, scheduled: Any, sampled: Any) -> dict[int, EngineCoreOutputs]:
        """What the scheduler makes of a step, but for what is kept here."""
        found: LogprobsLists | None = sampled.logprobs
        sampled.logprobs = None
        updated = update(scheduled, sampled)
        column: list[float] = [] if found is None else found.logprobs[:, 0].tolist()
        starts = None if found is None else found.cu_num_generated_tokens
        for outputs in updated.values():
            if outputs.outputs:
                keep = functools.partial(self._keep, column, starts, sampled.req_id_to_index)
                outputs.outputs = [output for output in outputs.outputs if not keep(output)]
        return updated

    def _keep(
        self, column: list[float], starts: list[int] | None, places: dict[str, int], output: EngineCoreOutput
    ) -> bool:
        """Keep what a step sampled for a request; whether there is no more to say than that.

        Where there is, the output gets the tokens that were kept before. column: log-probs of sampled tokens;
        places: of requests among the step's; starts: where the tokens of each begin, None: one of each.
        """
        name, token_ids = own_name(output.request_id), output.new_token_ids
        if column:
            place = places[output.request_id]
            start = place if starts is None else starts[place]
            self._log_probs[name] += column[start : start + len(token_ids)]
        if output.routed_experts is None and output == EngineCoreOutput(output.request_id, token_ids):
            self._token_ids[name] += token_ids
            return True
        output.new_token_ids = self.take_token_ids(name) + token_ids
        return False

    def take_token_ids(self, name: str) -> list[int]:
        """Tokens of a request that vLLM's output processor has not seen yet; they count as seen then."""
        return self._token_ids.pop(name, [])

    def take_log_probs(self, name: str) -> list[float]:
        """Of all tokens of a request, which has ended; none are left."""
        return self._log_probs.pop(name, [])

    def forget(self, names: Iterable[str]) -> None:
        """Drop what is kept of requests that end without an answer."""
        for name in names:
            self.take_token_ids(name)
            self.take_log_probs(name)
