"""Slots of the KV cache that a running request has: vLLM asks for them anew for each token of each request.

A block has slots for several tokens (16 by default). While a request fills one, there is nothing to allocate
and no full block to note for other prompts to find: all that vLLM's cache manager does then comes to nothing,
and it is more than half of what the scheduler does for a step of decoding.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.llm_engine import LLMEngine

ROOM = "siirl_room"
"""What a request of vLLM's gets: for how many tokens it has slots, and its full blocks when it got them."""
NO_ROOM = (0, 0)
"""Of a request that begins, that was taken off, or that got none: the cache manager is asked."""


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
