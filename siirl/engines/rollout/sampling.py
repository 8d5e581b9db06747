"""Seeds and token sampling of the rollout engines: pure functions of (seed, sample, position) and logits.

Shapes: B rows, V vocabulary, T response tokens.
"""

import numpy as np
import torch
from torch import Tensor

from siirl.data.completions import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_MAX_LOGITS = 1 << 26
"""Logits sampled at once, as fp32 temporaries: bounds memory at 1,024 rows of a 150k vocabulary."""
_BLOCK = 1024
"""Tokens whose weights `invert` adds before it accumulates them."""


def derive_seed(seed: int, sample: int) -> int:
    """The 63-bit seed of sample number `sample` of a prompt whose seed is `seed`; every rollout engine uses
    it.

    Output number `sample` of the SplitMix64 stream of `seed`, less its lowest bit. Source: Steele, Lea,
    Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    state = (seed + (sample + 1) * _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
    state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
    return (state ^ (state >> 31)) >> 1


def later_seed(seed: int, start: int) -> int:
    """The seed whose numbers (see `uniforms`) are those of `seed` from number `start` on."""
    return (seed + start * _GOLDEN) & _MASK


def uniforms(seeds: list[int], num_positions: int, first: list[int] | None = None) -> np.ndarray:
    """One number of (0, 1) for each position of each row, float64, shape [T, B]: column b depends on
    seeds[b] alone.

    first: the position at which the column of each row begins; 0 by default. The SplitMix64 stream of each
    seed, its upper 32 bits: never 0 or 1, also after multiplication by a total probability.
    """
    start = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    number = np.arange(1, num_positions + 1, dtype=np.uint64)[:, None]
    if first is not None:
        number = number + np.array(first, dtype=np.uint64)
    state = start + number * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    bits = (state ^ (state >> np.uint64(31))) >> np.uint64(32)
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


def sample_tokens(logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row by inversion of the cumulative distribution: (token_B int64, log_prob_B float32,
    nats).

    log_prob is that of softmax(logits / temperature), before top-k and top-p; at temperature 0 the token is
    the arg-max and its log-prob is that of temperature 1. Non-finite logits give a non-finite log-prob. No
    communication.
    """
    rows = max(1, _MAX_LOGITS // logits_BV.shape[1])
    if logits_BV.shape[0] <= rows:
        return _sample(logits_BV, uniform_B, params)
    parts = [
        _sample(*part, params) for part in zip(logits_BV.split(rows), uniform_B.split(rows), strict=True)
    ]
    tokens, log_probs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _sample(logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    logits_BV = logits_BV.float()
    if params.temperature not in (0, 1):
        logits_BV = logits_BV / params.temperature
    log_prob_BV = logits_BV.log_softmax(-1)
    if params.temperature == 0:
        token_B = logits_BV.argmax(-1)
    else:
        prob_BV = log_prob_BV.exp()
        if params.top_k > 0 or params.top_p < 1:
            prob_BV = prob_BV.masked_fill(logits_BV < _threshold(logits_BV, params), 0.0)
        token_B = invert(prob_BV, uniform_B)
    return token_B, log_prob_BV.gather(-1, token_B[:, None])[:, 0]


def invert(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token of each row, int64, at which the cumulative distribution passes uniform_B (float64, (0, 1)).

    weight_BV: float32, at least 0, of any sum above 0; a token of weight 0 is never drawn. A large vocabulary
    is added up in blocks first, and only the block that holds the token is accumulated: one pass over the
    weights. No communication.
    """
    vocab = weight_BV.shape[1]
    if vocab <= 8 * _BLOCK:
        return _pass(weight_BV, uniform_B)[0]
    whole = vocab // _BLOCK * _BLOCK
    block_BN = weight_BV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < vocab:
        block_BN = torch.cat([block_BN, weight_BV[:, whole:].sum(-1, keepdim=True)], dim=1)
    block_B, within_B = _pass(block_BN, uniform_B)
    token_BK = block_B[:, None] * _BLOCK + torch.arange(_BLOCK, device=weight_BV.device)
    inner_BK = weight_BV.gather(1, token_BK.clamp(max=vocab - 1)).masked_fill(token_BK >= vocab, 0.0)
    return (block_B * _BLOCK + _pass(inner_BK, within_B)[0]).clamp_(max=vocab - 1)


def _pass(weight_BK: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """(The place where the cumulative weight passes uniform_B of the total, how far into that weight it is).

    The latter is a number of [0, 1], uniform as well. Rounding never leads past the last weight above 0.
    """
    cumulative_BK = weight_BK.cumsum(-1, dtype=torch.float64)
    target_B1 = (uniform_B.clamp(max=1 - 2.0**-52) * cumulative_BK[:, -1])[:, None]
    # NaN weights would give a place past the last, which a device reports far from here.
    place_B1 = torch.searchsorted(cumulative_BK, target_B1, right=True).clamp_(max=weight_BK.shape[1] - 1)
    left_B1 = cumulative_BK.gather(1, place_B1) - target_B1
    within_B1 = 1 - left_B1 / weight_BK.gather(1, place_B1)
    return place_B1[:, 0], within_B1[:, 0].clamp_(min=0)


def _threshold(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """The lowest logit that top-k, then top-p of what is left, keep: [B, 1]. Ties with it are kept too.

    Source: Holtzman et al., "The curious case of neural text degeneration" (2020): the smallest set of most
    probable tokens whose mass reaches top_p.
    """
    vocab = logits_BV.shape[1]
    kept_BK = logits_BV.topk(min(params.top_k, vocab) if params.top_k > 0 else vocab).values
    if params.top_p >= 1:
        return kept_BK[:, -1:]
    prob_BK = kept_BK.softmax(-1)
    before_BK = prob_BK.cumsum(-1, dtype=torch.float64) - prob_BK
    count_B1 = (before_BK < params.top_p).sum(-1, keepdim=True).clamp_(min=1)
    return kept_BK.gather(-1, count_B1 - 1)
