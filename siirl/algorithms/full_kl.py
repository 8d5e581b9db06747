"""KL divergence from the reference over the whole vocabulary, from hidden states, without holding all logits.

Legend: N packed tokens, D hidden size, V words (of this shard), C tokens of a chunk.

With z = logits / temperature, p = softmax(z) of the policy and q that of the reference:
  KL = sum p (log p - log q)        d KL / d z_v = p_v (log p_v - log q_v - KL)
The reference takes no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from siirl.algorithms.log_probs import DEFAULT_CHUNK, Join, capped_, slope_of_cap


def linear_full_kl(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    ref_hidden_ND: Tensor,
    ref_weight_VD: Tensor,
    temperature: float,
    *,
    chunk: int = DEFAULT_CHUNK,
    join: Join = lambda value, how: value,
    cap: float | None = None,
) -> Tensor:
    """KL(policy || reference) at each token in nats, fp32 [N], of the logits hidden @ weight^T of both.

    Memory beyond inputs and their gradients is a few times chunk x V; backward computes the logits again.
    join: for a shard of the words, whose gradient to hidden is then a share; called three times a chunk by
    forward, never by backward. cap: of the logits of both, as in linear_log_prob_entropy.
    """
    return _FullKl.apply(hidden_ND, weight_VD, ref_hidden_ND, ref_weight_VD, temperature, chunk, join, cap)


class _FullKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        ref_hidden_ND: Tensor,
        ref_weight_VD: Tensor,
        temperature: float,
        chunk: int,
        join: Join,
        cap: float | None,
    ) -> Tensor:
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        kl_N = torch.zeros(len(hidden_ND), dtype=wide, device=hidden_ND.device)
        norm_2N = kl_N.new_zeros(2, len(hidden_ND))
        for part in _parts(len(hidden_ND), chunk):
            z_CV = _scaled(hidden_ND[part], weight_VD, temperature, cap)
            ref_CV = _scaled(ref_hidden_ND[part], ref_weight_VD, temperature, cap)
            top_2C = join(torch.stack([z_CV.amax(-1), ref_CV.amax(-1)]), "max")
            sums = [(x - top[:, None]).exp().sum(-1) for x, top in zip((z_CV, ref_CV), top_2C, strict=True)]
            norm_2N[:, part] = top_2C + join(torch.stack(sums), "sum").log()
            log_p_CV = z_CV.sub_(norm_2N[0, part, None])
            difference_CV = log_p_CV - ref_CV.sub_(norm_2N[1, part, None])
            kl_N[part] = join((log_p_CV.exp_() * difference_CV).sum(-1), "sum")
        ctx.save_for_backward(hidden_ND, weight_VD, ref_hidden_ND, ref_weight_VD, norm_2N, kl_N)
        ctx.temperature, ctx.chunk, ctx.cap = temperature, chunk, cap
        return kl_N

    @staticmethod
    def backward(ctx: Any, grad_kl_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, ref_hidden_ND, ref_weight_VD, norm_2N, kl_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=kl_N.dtype) if ctx.needs_input_grad[1] else None
        for part in _parts(len(kl_N), ctx.chunk):
            at = ctx.temperature, ctx.cap
            z_CV, ref_CV = (
                _scaled(x[part], w, *at) for x, w in ((hidden_ND, weight_VD), (ref_hidden_ND, ref_weight_VD))
            )
            slope_CV = slope_of_cap(z_CV * ctx.temperature, ctx.cap) if ctx.cap else None
            log_p_CV, ref_CV = z_CV.sub_(norm_2N[0, part, None]), ref_CV.sub_(norm_2N[1, part, None])
            excess_CV = (log_p_CV - ref_CV).sub_(kl_N[part, None])
            grad_CV = log_p_CV.exp_().mul_(excess_CV).mul_(grad_kl_N[part, None] / ctx.temperature)
            grad_CV = (grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)).to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[part])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_ND[part]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None, None


def _scaled(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, cap: float | None) -> Tensor:
    wide = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
    return capped_((hidden_CD @ weight_VD.t()).to(wide), cap).div_(temperature)


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]
