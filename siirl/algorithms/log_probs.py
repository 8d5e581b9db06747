"""Log-probability of the sampled token and entropy of the distribution, exact in fp32 from bf16 logits.

Legend: N packed tokens, D hidden size, V vocabulary, C tokens of a chunk.

With z = logits / temperature less their maximum, p = softmax(z), y the target and H the entropy:
  log_prob = z_y - log sum exp z            d log_prob / d z_v = [v = y] - p_v
  H = log sum exp z - sum p z               d H / d z_v        = -p_v (log p_v + H)
No communication. Both functions save what backward needs in the logits' own dtype and redo the softmax there.
"""

from typing import Any

import torch
from torch import Tensor

DEFAULT_CHUNK = 4096


def log_prob_and_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """(log_prob_N, entropy_N) in nats, fp32, at `temperature`, with gradient to the logits.

    Logits of any float dtype, finite; work beyond them is bounded by chunk x V fp32. entropy_N is None
    without with_entropy, and takes no gradient without entropy_grad.
    """
    log_prob_N, entropy_N = _FromLogits.apply(
        logits_NV, target_N, temperature, with_entropy, entropy_grad, chunk
    )
    return log_prob_N, entropy_N if with_entropy else None


def linear_log_prob_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    chunk: int = DEFAULT_CHUNK,
    keep_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log_prob_and_entropy of the logits hidden @ weight^T, without holding them for all N tokens.

    Memory beyond inputs and their gradients is chunk x V. backward computes each chunk's logits again;
    keep_logits saves them instead (N x V in the dtype of hidden) for a third less work. hidden and weight
    have one dtype, in which the product is computed; the gradient of weight is added up in fp32 over chunks.
    """
    log_prob_N, entropy_N = _FromHidden.apply(
        hidden_ND, weight_VD, target_N, temperature, with_entropy, entropy_grad, chunk, keep_logits
    )
    return log_prob_N, entropy_N if with_entropy else None


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_N: Tensor,
        temperature: float,
        with_entropy: bool,
        entropy_grad: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        log_prob_N, entropy_N = _outputs(logits_NV)
        for part in _chunks(len(target_N), chunk):
            log_prob_N[part], entropy_N[part] = _forward_chunk(
                logits_NV[part], target_N[part], temperature, with_entropy
            )
        _prepare_backward(ctx, temperature, entropy_N, with_entropy and entropy_grad, chunk)
        ctx.save_for_backward(logits_NV, target_N, entropy_N)
        return log_prob_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits_NV, target_N, entropy_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for part in _chunks(len(target_N), ctx.chunk):
            grad_NV[part] = _backward_chunk(
                logits_NV[part],
                target_N[part],
                ctx.temperature,
                _part(grad_log_prob_N, entropy_N, part),
                entropy_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
            )
        return grad_NV, None, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        temperature: float,
        with_entropy: bool,
        entropy_grad: bool,
        chunk: int,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        log_prob_N, entropy_N = _outputs(hidden_ND)
        kept: list[Tensor] = []
        for part in _chunks(len(target_N), chunk):
            logits_CV = hidden_ND[part] @ weight_VD.t()
            log_prob_N[part], entropy_N[part] = _forward_chunk(
                logits_CV, target_N[part], temperature, with_entropy
            )
            if keep_logits:
                kept.append(logits_CV)
        _prepare_backward(ctx, temperature, entropy_N, with_entropy and entropy_grad, chunk)
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, entropy_N, *kept)
        return log_prob_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, entropy_N, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=_wide(weight_VD)) if wants_weight else None
        for i, part in enumerate(_chunks(len(target_N), ctx.chunk)):
            grad_CV = _backward_chunk(
                kept[i] if kept else hidden_ND[part] @ weight_VD.t(),
                target_N[part],
                ctx.temperature,
                _part(grad_log_prob_N, entropy_N, part),
                entropy_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
            )
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[part])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_ND[part]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _outputs(like: Tensor) -> tuple[Tensor, Tensor]:
    first_N = torch.zeros(len(like), dtype=_wide(like), device=like.device)
    return first_N, torch.zeros_like(first_N)


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]


def _part(grad_N: Tensor | None, like_N: Tensor, part: slice) -> Tensor:
    return torch.zeros_like(like_N[part]) if grad_N is None else grad_N[part]


def _prepare_backward(
    ctx: Any, temperature: float, entropy_N: Tensor, entropy_grad: bool, chunk: int
) -> None:
    ctx.temperature = temperature
    ctx.chunk = chunk
    ctx.set_materialize_grads(False)
    if not entropy_grad:
        ctx.mark_non_differentiable(entropy_N)


def _shifted(logits_CV: Tensor, temperature: float) -> Tensor:
    z_CV = logits_CV.to(_wide(logits_CV), copy=True)
    z_CV -= z_CV.amax(-1, keepdim=True)
    return z_CV if temperature == 1.0 else z_CV.div_(temperature)


def _forward_chunk(
    logits_CV: Tensor, target_C: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    z_CV = _shifted(logits_CV, temperature)
    target_z_C = z_CV.gather(-1, target_C[:, None]).squeeze(-1)
    if not with_entropy:
        log_total_C = z_CV.exp_().sum(-1).log()
        return target_z_C - log_total_C, torch.zeros_like(log_total_C)
    weight_CV = z_CV.exp()
    total_C = weight_CV.sum(-1)
    log_total_C = total_C.log()
    entropy_C = log_total_C - weight_CV.mul_(z_CV).sum(-1) / total_C
    return target_z_C - log_total_C, entropy_C


def _backward_chunk(
    logits_CV: Tensor,
    target_C: Tensor,
    temperature: float,
    grad_log_prob_C: Tensor,
    entropy_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Gradient to the chunk's logits, in their dtype: [v = y] g - p_v (g + g_H (log p_v + H)), over
    temperature."""
    log_p_CV = _shifted(logits_CV, temperature)
    log_p_CV -= log_p_CV.exp().sum(-1, keepdim=True).log()
    if grad_entropy_C is None:
        grad_CV = log_p_CV.exp_().mul_(-grad_log_prob_C[:, None])
    else:
        p_CV = log_p_CV.exp()
        log_p_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_log_prob_C[:, None])
        grad_CV = p_CV.mul_(log_p_CV).neg_()
    grad_CV.scatter_add_(-1, target_C[:, None], grad_log_prob_C[:, None])
    return grad_CV.div_(temperature).to(logits_CV.dtype)
