"""Attention of one new token: query heads that share keys and values read them where they lie.

transformers repeats keys and values for each query head where there is a mask, which copies the whole cache
for every token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

DECODE_ATTENTION = "siirl_decode"
"""Name under which transformers finds `decode_attention`."""


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """Query [B, H, T, D], key and value [B, K, S, D] -> [B, T, H, D], as transformers' "sdpa" has it.

    One token that may see all of S has no order among its heads: those of a key-value head are its queries.
    In fp32 on the CPU two products are quicker for so few of them than torch's kernel, which works in blocks.
    """
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[2] > 1 or heads == groups or extra.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **extra)
    grouped = query.unflatten(1, (groups, heads // groups)).squeeze(3)
    if query.device.type == "cpu" and query.dtype == torch.float32:
        out = _products(grouped, key, value, attention_mask, scaling)
    else:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.flatten(1, 2).unsqueeze(1), None


def _products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    score = torch.matmul(query, key.transpose(2, 3)).mul_(scale)
    if mask is not None:
        score = score.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    return torch.matmul(score.softmax(-1), value)


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


def use_decode_attention(model: PreTrainedModel) -> None:
    """Have the text of a model that attends by "sdpa" do it; others, as those with sinks, and towers stay."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa":
        config._attn_implementation = DECODE_ATTENTION
