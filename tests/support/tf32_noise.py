"""How far kernels that multiply float32 in TF32 may be from exact ones, and what a mistake would be.

vLLM's attention for float32 multiplies so on a GPU: of a factor ten bits of the fraction are left.
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

CUT = 13
"""Bits of a float32 that TF32 does not have."""


def in_tf32(tensor):
    """Rounded to the nearest number that TF32 has."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (1 << CUT - 1)) >> CUT << CUT).view(torch.float32)


class _RoundedFactors(TorchFunctionMode):
    """Has linear layers and attention multiply what is rounded."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        count = {F.linear: 2, torch.matmul: 2, F.scaled_dot_product_attention: 3}.get(func, 0)
        return func(*map(in_tf32, args[:count]), *args[count:], **(kwargs or {}))


def _log_probs(model, ids, **options):
    with torch.no_grad():
        return model(torch.tensor([ids], device=model.device), **options).logits[0].log_softmax(-1)


def tf32_noise(model, rows):
    """The largest difference of a log-prob if all products of the model were so, in a few rows of tokens."""
    worst = 0.0
    for ids in rows:
        exact = _log_probs(model, ids)
        with _RoundedFactors():
            worst = max(worst, float((_log_probs(model, ids) - exact).abs().max()))
    return worst


def hidden_key(model, ids):
    """The smallest difference that it makes to the last token's log-probs if one earlier token is not seen:
    the largest of all words', and the least telling token."""
    exact, found = _log_probs(model, ids)[-1], []
    for place in range(len(ids) - 1):
        seen = torch.ones(len(ids), len(ids), device=model.device).tril().bool()
        seen[-1, place] = False
        mask = torch.zeros(seen.shape, device=model.device).masked_fill(~seen, float("-inf"))
        found.append(float((_log_probs(model, ids, attention_mask=mask[None, None])[-1] - exact).abs().max()))
    return min(found)
