"""Attention of one new token: query heads that share keys and values read them where they lie.

transformers repeats keys and values for each query head where there is a mask, which copies the whole cache
for every token.
"""

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
    """
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[2] > 1 or heads == groups or extra.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **extra)
    grouped = query.unflatten(1, (groups, heads // groups)).squeeze(3)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.flatten(1, 2).unsqueeze(1), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


def use_decode_attention(model: PreTrainedModel) -> None:
    """Have the text of a model that attends by "sdpa" do it; others, as those with sinks, and towers stay."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa":
        config._attn_implementation = DECODE_ATTENTION
