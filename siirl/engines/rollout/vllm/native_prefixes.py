"""vLLM's attention on Hopper GPUs, where responses to one prompt read its keys once in a decode step.

vLLM's prefix cache has them share the blocks, and its attention reads those for each of them. This backend
is vLLM's own for FlashAttention 3, but in steps in which each row has one token: see shared_prompts. It is
registered under vLLM's name for backends of others (ATTENTION_BACKEND) where native.py is imported, so also
in vLLM's workers, and before the engine's graphs are captured.
"""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from siirl.engines.rollout.vllm.shared_prompts import RunFinder, Runs, attend
from siirl.errors import NotSupportedError

KEY = "actor_rollout_ref.rollout.share_prompts_in_decode"
FUNCTION = "flash_attn_varlen_func"
"""Under which vLLM's module of this attention has FlashAttention's function."""
VERSION = 3
"""The FlashAttention that was held against one part."""


class SharedPromptBackend(FlashAttentionBackend):
    """See above."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """What is put together of a row follows from its neighbours."""
        return False

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """See AttentionBackend."""
        return SharedPromptAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """See AttentionBackend."""
        return SharedPromptBuilder


class SharedPromptBuilder(FlashAttentionMetadataBuilder):
    """What a step's attention reads: in a decode step each row's own part, and beside it the runs."""

    # A graph that was captured for rows of one token is right for no others, so vLLM captures none for both.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False  # what runs are found in is the table

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        """See AttentionMetadataBuilder."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _refuse(
            ("FlashAttention", get_flash_attn_version(), VERSION),
            ("decode_context_parallel_size", self.dcp_world_size, 1),
            ("speculative_config", vllm_config.speculative_config, None),
            ("enable_prefix_caching", bool(vllm_config.cache_config.enable_prefix_caching), True),
        )
        num_rows = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self._finder = RunFinder(num_rows, self.num_heads_q // self.num_heads_kv, self.block_size, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **options: Any,
    ) -> FlashAttentionMetadata:
        """See AttentionMetadataBuilder. What decides is the same at a graph's capture and its replays."""
        given = common_attn_metadata
        one_each = given.max_query_len == 1 and given.num_actual_tokens == given.num_reqs
        if not one_each or common_prefix_len or given.causal is not True:
            return super().build(common_prefix_len, given, fast_build, **options)
        num_rows = given.num_reqs
        runs = self._finder.find(given.block_table_tensor[:num_rows], given.seq_lens[:num_rows])
        own = copy.copy(given)
        own.seq_lens, own.block_table_tensor = runs.suffix_lens, runs.suffix_table
        metadata = super().build(0, own, fast_build, **options)
        vars(metadata)["runs"] = runs
        return metadata


class SharedPromptAttention(FlashAttentionImpl):
    """vLLM's attention of a layer; where there are runs, in two parts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See FlashAttentionImpl."""
        super().__init__(*args, **options)
        _refuse(
            ("FlashAttention", self.vllm_flash_attn_version, VERSION),
            ("the kind of attention", self.attn_type, AttentionType.DECODER),
            ("a sliding window", tuple(self.sliding_window), (-1, -1)),
            ("a soft cap", self.logits_soft_cap or None, None),
            ("whether it has alibi slopes", self.alibi_slopes is not None, False),
            ("whether it has sinks", self.sinks is not None, False),
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        *others: Any,
        **options: Any,
    ) -> Tensor:
        """See AttentionImpl."""
        runs = getattr(attn_metadata, "runs", None)
        inner = super().forward
        if runs is None:
            return inner(layer, query, key, value, kv_cache, attn_metadata, output, *others, **options)
        with _in_two_parts(runs):
            return inner(layer, query, key, value, kv_cache, attn_metadata, output, *others, **options)


@contextmanager
def _in_two_parts(runs: Runs) -> Iterator[None]:
    """vLLM's attention as it is, with a FlashAttention that also does the part that rows share.

    How the pages, their scales and the queries are laid out is vLLM's, and differs by version.
    """
    function, calls = getattr(flash_attn, FUNCTION), []

    @functools.wraps(function)
    def in_two_parts(**call: Any) -> Tensor:
        calls.append(len(call))
        return attend(function, runs, **call)

    setattr(flash_attn, FUNCTION, in_two_parts)
    try:
        yield
    finally:
        setattr(flash_attn, FUNCTION, function)
    if len(calls) != 1:
        raise RuntimeError(f"vLLM's attention called {FUNCTION} {len(calls)} times: set {KEY}=False")


def _refuse(*seen: tuple[str, Any, Any]) -> None:
    """Raise unless each value, of a name, is the one of which two parts were held against one."""
    for name, value, known in seen:
        if value != known:
            raise NotSupportedError(
                f"not supported yet: {KEY}: {name} is {value}, and {known} is what it was held against. "
                "Set it to False."
            )
