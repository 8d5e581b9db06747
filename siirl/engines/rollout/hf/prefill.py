"""Reads prompts into a KV cache. Shapes: D distinct prompts, B samples, P prompt width, V vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from siirl.engines.rollout.hf.kv_cache import Block, new_cache


def read_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], count_D: Tensor, prefill_tokens: int
) -> tuple[Tensor, list[Block]]:
    """Logits after each prompt, [B, V], and the caches of their tokens; both count_D[d] times for prompts[d].

    prefill_tokens bounds the padded tokens of one forward (at least one prompt goes through). The cost is
    that of D prompts. No communication.
    """
    blocks, logits = [], []
    for part in _parts([len(prompt) for prompt in prompts], prefill_tokens):
        cache, last_logits = _read(model, prompts[part])
        rows = torch.arange(len(last_logits)).repeat_interleave(count_D[part]).to(model.device)
        blocks.append(Block(cache, rows))
        logits.append(last_logits.index_select(0, rows))
    return torch.cat(logits), blocks


def _parts(lengths: list[int], max_tokens: int) -> list[slice]:
    """Consecutive prompts whose padded size stays within max_tokens (single prompts may exceed it)."""
    parts, start, width = [], 0, 0
    for index, length in enumerate(lengths):
        width = max(width, length)
        if index > start and width * (index + 1 - start) > max_tokens:
            parts.append(slice(start, index))
            start, width = index, length
    return [*parts, slice(start, len(lengths))]


def _read(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> tuple[Cache, Tensor]:
    """One prefill forward of left-padded prompts: the cache, and the logits after the last tokens, [D, V]."""
    length_D = torch.tensor([len(prompt) for prompt in prompts])
    width = int(length_D.max())
    real_DP = torch.arange(width) >= width - length_D[:, None]
    ids_DP = torch.zeros(len(prompts), width, dtype=torch.int64)
    ids_DP[real_DP] = torch.tensor([token for prompt in prompts for token in prompt])
    position_DP = (torch.arange(width) - (width - length_D[:, None])).clamp_(min=0)
    cache = new_cache(width)
    output = model(
        input_ids=ids_DP.to(model.device),
        position_ids=position_DP.to(model.device),
        attention_mask=None if bool(real_DP.all()) else real_DP.to(model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache, output.logits[:, -1]
