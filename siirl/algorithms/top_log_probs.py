"""Log-probs of several words at each token, or of all words, from hidden states, in chunks of tokens.

Legend: N packed tokens, D hidden size, V words (of this shard), K words of each token, C tokens of a chunk.

With z = logits / temperature, p = softmax(z) and G the sum of the gradients g to the K log-probs of a token:
  log p_k = z_k - log sum exp z            sum_k g_k d log p_k / d z_v = [v = k] g_k - p_v G
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siirl.algorithms.log_probs import DEFAULT_CHUNK, Join, capped_, slope_of_cap


@dataclass(frozen=True)
class WordShard:
    """Which words of the vocabulary a rank has."""

    first: int
    total: int
    """Words of all ranks."""
    index: int = 0
    count: int = 1
    """Ranks that share the vocabulary, in the order of their words."""


def linear_log_probs_of(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    ids_NK: Tensor | None,
    temperature: float,
    *,
    chunk: int = DEFAULT_CHUNK,
    shard: WordShard | None = None,
    join: Join = lambda value, how: value,
    cap: float | None = None,
) -> Tensor:
    """Log-probs in nats, fp32 [N, K], of words at each token, by the logits hidden @ weight^T; with gradient.

    ids_NK: which words; None: all, in order. Memory beyond inputs, outputs and their gradients is a few times
    chunk x V; backward computes the logits again. join: for a shard of the words, whose gradient to hidden is
    then a share; called by forward alone. cap: of the logits, as in linear_log_prob_entropy.
    """
    shard = shard or WordShard(0, len(weight_VD))
    return _LogProbsOf.apply(hidden_ND, weight_VD, ids_NK, temperature, chunk, shard, join, cap)


@torch.no_grad()
def linear_top_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    top_k: int,
    temperature: float,
    *,
    chunk: int = DEFAULT_CHUNK,
    shard: WordShard | None = None,
    join: Join = lambda value, how: value,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs in nats, fp32 [N, K]; which words they are of, int64 [N, K]) of the K likeliest words.

    K is top_k, or the number of words if that is less. Without gradient; arguments as above.
    """
    shard = shard or WordShard(0, len(weight_VD))
    width = min(top_k, shard.total)
    value_NK = torch.zeros(len(hidden_ND), width, dtype=_wide(weight_VD), device=hidden_ND.device)
    ids_NK = torch.zeros(len(hidden_ND), width, dtype=torch.int64, device=hidden_ND.device)
    for part in _parts(len(hidden_ND), chunk):
        z_CV = _scaled(hidden_ND[part], weight_VD, temperature, cap)
        norm_C = _norm(z_CV, join)
        own_Ck, place_Ck = z_CV.topk(min(width, z_CV.shape[1]))
        found = z_CV.new_full((2, len(z_CV), shard.count, width), 0.0, dtype=torch.float64)
        found[0, :, shard.index] = -torch.inf
        found[:, :, shard.index, : own_Ck.shape[1]] = torch.stack([own_Ck.double(), place_Ck + shard.first])
        z_CM, word_CM = join(found, "sum").flatten(2)
        top_CK, at_CK = z_CM.topk(width)
        value_NK[part], ids_NK[part] = top_CK - norm_C[:, None], word_CM.gather(1, at_CK).long()
    return value_NK, ids_NK


@torch.no_grad()
def linear_drawn_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    num_draws: int,
    temperature: float,
    seed: int,
    *,
    chunk: int = DEFAULT_CHUNK,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probs in nats at temperature 1, fp32 [N, K]; which words they are of, int64 [N, K]) of K words at
    each token that are drawn at the temperature, with replacement; at 0 all are the likeliest.

    By the inverse of the cumulative distribution, in float64. Arguments as above.
    """
    draw = torch.Generator(hidden_ND.device).manual_seed(seed)
    value_NK = torch.zeros(len(hidden_ND), num_draws, dtype=_wide(weight_VD), device=hidden_ND.device)
    ids_NK = torch.zeros_like(value_NK, dtype=torch.int64)
    for part in _parts(len(hidden_ND), chunk):
        z_CV = _scaled(hidden_ND[part], weight_VD, 1.0, cap)
        over_CV = z_CV - z_CV.amax(-1, keepdim=True)
        u_CK = torch.rand(ids_NK[part].shape, dtype=torch.float64, device=z_CV.device, generator=draw)
        if temperature == 0:
            ids_NK[part] = over_CV.argmax(-1, keepdim=True)
        else:
            sum_CV = (over_CV.double() / temperature).exp_().cumsum(-1)
            ids_NK[part] = torch.searchsorted(sum_CV, u_CK * sum_CV[:, -1:], right=True)
            ids_NK[part].clamp_(max=z_CV.shape[1] - 1)
        value_NK[part] = z_CV.log_softmax(-1).gather(1, ids_NK[part])
    return value_NK, ids_NK


class _LogProbsOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        ids_NK: Tensor | None,
        temperature: float,
        chunk: int,
        shard: WordShard,
        join: Join,
        cap: float | None,
    ) -> Tensor:
        width = shard.total if ids_NK is None else ids_NK.shape[1]
        norm_N = torch.zeros(len(hidden_ND), dtype=_wide(weight_VD), device=hidden_ND.device)
        value_NK = norm_N.new_zeros(len(hidden_ND), width)
        for part in _parts(len(hidden_ND), chunk):
            z_CV = _scaled(hidden_ND[part], weight_VD, temperature, cap)
            norm_N[part] = _norm(z_CV, join)
            own_CK = value_NK[part]
            if ids_NK is None:
                own_CK[:, shard.first : shard.first + z_CV.shape[1]] = z_CV
            else:
                place_CK, mine_CK = _own(ids_NK[part], shard, z_CV.shape[1])
                own_CK.copy_(torch.where(mine_CK, z_CV.gather(1, place_CK), 0.0))
            value_NK[part] = join(own_CK, "sum") - norm_N[part, None]
        ctx.save_for_backward(hidden_ND, weight_VD, ids_NK, norm_N)
        ctx.temperature, ctx.chunk, ctx.shard, ctx.cap = temperature, chunk, shard, cap
        return value_NK

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, ids_NK, norm_N = ctx.saved_tensors
        shard = ctx.shard
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=norm_N.dtype) if ctx.needs_input_grad[1] else None
        for part in _parts(len(norm_N), ctx.chunk):
            z_CV = _scaled(hidden_ND[part], weight_VD, ctx.temperature, ctx.cap)
            slope_CV = slope_of_cap(z_CV * ctx.temperature, ctx.cap) if ctx.cap else None
            p_CV = z_CV.sub_(norm_N[part, None]).exp_()
            given_CK = grad_NK[part]
            grad_CV = p_CV.mul_(-given_CK.sum(-1, keepdim=True))
            if ids_NK is None:
                grad_CV += given_CK[:, shard.first : shard.first + grad_CV.shape[1]]
            else:
                place_CK, mine_CK = _own(ids_NK[part], shard, grad_CV.shape[1])
                grad_CV.scatter_add_(1, place_CK, torch.where(mine_CK, given_CK, 0.0))
            grad_CV = grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)
            grad_CV = grad_CV.div_(ctx.temperature).to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[part])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_ND[part]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None, None


def _own(ids_CK: Tensor, shard: WordShard, num_words: int) -> tuple[Tensor, Tensor]:
    """(place of each word among this shard's, clamped; whether it is one of them)."""
    place_CK = ids_CK - shard.first
    return place_CK.clamp(0, num_words - 1), (place_CK >= 0) & (place_CK < num_words)


def _norm(z_CV: Tensor, join: Join) -> Tensor:
    """log sum exp over all words."""
    top_C = join(z_CV.amax(-1), "max")
    return top_C + join((z_CV - top_C[:, None]).exp_().sum(-1), "sum").log()


def _scaled(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, cap: float | None) -> Tensor:
    return capped_((hidden_CD @ weight_VD.t()).to(_wide(weight_VD)), cap).div_(temperature)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]
