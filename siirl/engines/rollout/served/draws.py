"""Tokens drawn by the seeds of requests, each row with settings of its own, and their log-probs.

What samplers of engines are made to do. Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from siirl.engines.rollout.sampling import invert, uniforms

Keep = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Logits, top-k and top-p of each row -> the logits, -inf where a token is left out."""


def signed(seed: int) -> int:
    """A seed of 64 bits as the int64 that vLLM keeps."""
    return seed - (1 << 64) if seed >> 63 else seed


def keep_likeliest(scaled_BV: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None) -> Tensor:
    """Logits, -inf but for those that top-k, then top-p of what is left, keep; ties with the last are kept.

    top_k_B: at least 1, any larger number than V for all; top_p_B: 1 for all. None: all, of all rows.
    """
    vocab = scaled_BV.shape[1]
    sorted_BV = scaled_BV.sort(-1, descending=True).values
    count_B1 = torch.full_like(scaled_BV[:, :1], vocab, dtype=torch.int64)
    if top_k_B is not None:
        count_B1 = top_k_B[:, None].to(torch.int64).clamp(max=vocab)
        place_V = torch.arange(vocab, device=scaled_BV.device)
        sorted_BV = sorted_BV.masked_fill(place_V >= count_B1, float("-inf"))
    if top_p_B is not None:
        prob_BV = sorted_BV.softmax(-1)
        before_BV = prob_BV.cumsum(-1, dtype=torch.float64) - prob_BV
        within_B1 = (before_BV < top_p_B[:, None]).sum(-1, keepdim=True).clamp(min=1)
        count_B1 = torch.where(top_p_B[:, None] < 1, torch.minimum(count_B1, within_B1), count_B1)
    return scaled_BV.masked_fill(scaled_BV < sorted_BV.gather(-1, count_B1 - 1), float("-inf"))


def draw(
    logits_BV: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    number_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    keep: Keep = keep_likeliest,
) -> tuple[Tensor, Tensor]:
    """(token_B int64, log_prob_B float32). seed_B and number_B, int64: see sampling.uniforms; on one device.

    temperature_B: 0 for the arg-max, whose log-prob is that of temperature 1. keep: as keep_likeliest, may
    write over the logits that it gets.
    """
    if top_k_B is None and top_p_B is None:
        return _draw(logits_BV, temperature_B, seed_B, number_B)
    scaled_BV = _scaled(logits_BV, temperature_B)
    kept_BV = keep(scaled_BV.clone(), top_k_B, top_p_B)
    token_B, _ = _draw(kept_BV, (temperature_B != 0).float(), seed_B, number_B)
    return token_B, _taken(scaled_BV.log_softmax(-1), token_B)


def _draw(
    logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, number_B: Tensor
) -> tuple[Tensor, Tensor]:
    if logits_BV.is_cuda:
        from siirl.engines.rollout.served.draw_triton import draw as draw_in_one_pass

        return draw_in_one_pass(logits_BV, temperature_B, seed_B, number_B)
    log_prob_BV = _scaled(logits_BV, temperature_B).log_softmax(-1)
    uniform_B = torch.from_numpy(uniforms(seed_B.tolist(), 1, number_B.tolist())[0])
    token_B = invert(log_prob_BV.exp(), uniform_B)
    token_B = torch.where(temperature_B == 0, log_prob_BV.argmax(-1), token_B)
    return token_B, _taken(log_prob_BV, token_B)


def _scaled(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    return logits_BV.float() / torch.where(temperature_B == 0, 1.0, temperature_B)[:, None]


def _taken(log_prob_BV: Tensor, token_B: Tensor) -> Tensor:
    return log_prob_BV.gather(-1, token_B[:, None])[:, 0]
