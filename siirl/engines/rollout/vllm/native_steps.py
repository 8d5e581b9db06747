"""What vLLM does for each token of each request, done once: with hundreds of requests it is much of what the
host does for a step of decoding, with one thread, and the device waits where the host is slow.

Tokens of responses in flight are kept here until they end. vLLM cuts each request's log-prob out of those of
a step, and hands each token through its output processor, which is there to stream them.

Slots of the KV cache are asked for once a block, which has those of several tokens (16 by default). While a
request fills one, there is nothing to allocate and no full block to note for other prompts to find: all that
vLLM's cache manager does then comes to nothing, and it is more than half of what the scheduler does for a
step of decoding.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import LogprobsLists

ROOM = "siirl_room"
"""What a request of vLLM's gets: for how many tokens it has slots, and its full blocks when it got them."""
NO_ROOM = (0, 0)
"""Of a request that begins, that was taken off, or that got none: the cache manager is asked."""


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
        for outputs in updated.values():
            if outputs.outputs:
                keep = functools.partial(self._keep, column, sampled.req_id_to_index)
                outputs.outputs = [output for output in outputs.outputs if not keep(output)]
        return updated

    def _keep(self, column: list[float], places: dict[str, int], output: EngineCoreOutput) -> bool:
        """Keep what a step sampled for a request; whether there is no more to say than that.

        Where there is, the output gets the tokens that were kept before. column: log-probs of the tokens, one
        of each request; places: of requests among the step's.
        """
        name, token_ids = own_name(output.request_id), output.new_token_ids
        if column:
            start = places[output.request_id]
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


def ask_for_slots_once_a_block(engine: LLMEngine) -> None:
    """Once for each engine. Left as it is where a layer does not see whole rows, as blocks are freed there
    while a row grows, and where the scheduler is in another process.
    """
    core: Any = engine.engine_core
    if not hasattr(core, "engine_core"):
        return
    manager = core.engine_core.scheduler.kv_cache_manager
    kinds = manager.coordinator.single_type_managers
    if kinds and all(type(kind) is FullAttentionManager for kind in kinds):
        width = min(kind.block_size for kind in kinds)
        manager.allocate_slots = functools.partial(
            _allocate, manager.allocate_slots, width, manager.empty_kv_cache_blocks
        )


def _allocate(
    allocate: Callable,
    width: int,
    nothing: Any,
    request: Any,
    num_new_tokens: int,
    num_lookahead_tokens: int = 0,
    **begins: Any,
) -> Any:
    """KVCacheManager.allocate_slots, but for a running request that has slots and fills no block: `nothing`.

    width: tokens of a block. begins: what else is said of a request that begins, or that was taken off.
    """
    end = request.num_computed_tokens + num_new_tokens
    num_full = min(end, request.num_tokens) // width
    num_slots, was_full = NO_ROOM if begins else getattr(request, ROOM, NO_ROOM)
    if num_full == was_full and end + num_lookahead_tokens <= num_slots:
        return nothing
    given = allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **begins)
    grown = given is not None and not begins
    setattr(request, ROOM, (_up(end + num_lookahead_tokens, width), num_full) if grown else NO_ROOM)
    return given


def _up(count: int, width: int) -> int:
    return -(-count // width) * width
