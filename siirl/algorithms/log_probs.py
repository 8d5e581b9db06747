"""Log-prob of the sampled token, entropy and squares of the distribution, exact in fp32 from bf16 logits.

Legend: N packed tokens, D hidden size, V vocabulary, C tokens of a chunk.

With z = logits / temperature less their maximum, p = softmax(z), y the target and H the entropy:
  log_prob = z_y - log sum exp z            d log_prob / d z_v = [v = y] - p_v
  H = log sum exp z - sum p z               d H / d z_v        = -p_v (log p_v + H)
Both functions save what backward needs in the logits' own dtype and redo the softmax there. Nothing
communicates but what a caller hands in as `join`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

if torch.cuda.is_available():
    from siirl.algorithms import log_probs_triton
else:
    log_probs_triton = None

DEFAULT_CHUNK = 4096
ELSEWHERE = -1
"""The target of a token whose next word is one of another rank's."""


Join = Callable[[Tensor, Literal["max", "sum"]], Tensor]
"""Joins numbers of tokens, float [..., N], over the shards of a vocabulary that is split over ranks."""


def linear_log_prob_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    with_entropy: bool = True,
    chunk: int = DEFAULT_CHUNK,
    kept_bytes: int = 0,
    with_square: bool = False,
    join: Join | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(log_prob_N, entropy_N, None) in nats, fp32, of the logits hidden @ weight^T over temperature.

    The logits, of any float dtype and finite, are never held for all N tokens. entropy_N is None without
    with_entropy.

    with_square: also square_N, the sum of the squared probabilities of all words, without gradient.

    Memory beyond inputs and their gradients is chunk x V, and kept_bytes: the logits of as many first chunks
    as fit into these are saved for backward (in the dtype of hidden), which computes those of the others
    again; nothing but time depends on it. hidden and weight have one dtype, in which the product is computed;
    the gradient of weight is added up in fp32 over chunks.

    join: for a vocabulary that is split over ranks, each with the rows of its own words (at least one); a
    target outside of them is a word of another rank. Four or five numbers a token are joined, once, in
    forward. The gradient to hidden is then this rank's share: the caller adds them up.

    cap: the logits are cap x tanh(logits / cap). Source: Gemma Team, "Gemma 2" (2024), 2.
    """
    settings = (with_entropy, chunk, kept_bytes, with_square, join, cap)
    log_prob_N, entropy_N, square_N = _FromHidden.apply(
        hidden_ND, weight_VD, target_N, temperature, *settings
    )
    return log_prob_N, entropy_N if with_entropy else None, square_N if with_square else None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int,
        kept_bytes: int,
        with_square: bool,
        join: Join | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_prob_N, entropy_N, norm_N2 = _outputs(hidden_ND)
        square_N = torch.zeros_like(log_prob_N)
        kept: list[Tensor] = []
        if join is not None:
            target_N = torch.where((target_N >= 0) & (target_N < len(weight_VD)), target_N, ELSEWHERE)
        for part in _chunks(len(target_N), chunk):
            logits_CV = capped_(hidden_ND[part] @ weight_VD.t(), cap)
            log_prob_N[part], entropy_N[part], norm_N2[part] = _forward_chunk(
                logits_CV, target_N[part].clamp(min=0), temperature, with_entropy
            )
            if with_square:
                square_N[part] = _square_sum(logits_CV, temperature, norm_N2[part])
            kept_bytes -= logits_CV.nbytes
            if kept_bytes >= 0:
                kept.append(logits_CV)
        if join is not None:
            own = (log_prob_N, entropy_N, norm_N2, square_N if with_square else None)
            log_prob_N, entropy_N, norm_N2, square_N = _joined(*own, target_N != ELSEWHERE, join)
        unmoved = () if with_entropy else (entropy_N,)
        _prepare_backward(ctx, temperature, (*unmoved, square_N), chunk)
        ctx.cap = cap
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, entropy_N, norm_N2, *kept)
        return log_prob_N, entropy_N, square_N

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None, of_square_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, entropy_N, norm_N2, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=_wide(weight_VD)) if wants_weight else None
        for i, part in enumerate(_chunks(len(target_N), ctx.chunk)):
            grad_CV = kept[i] if i < len(kept) else capped_(hidden_ND[part] @ weight_VD.t(), ctx.cap)
            slope_CV = slope_of_cap(grad_CV, ctx.cap)
            _backward_chunk(
                grad_CV,
                target_N[part],
                ctx.temperature,
                norm_N2[part],
                _part(grad_log_prob_N, entropy_N, part),
                entropy_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
                grad_CV,
            )
            grad_CV = grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[part])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.t(), hidden_ND[part])
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, *(None for _ in range(8))


def capped_(logits_CV: Tensor, cap: float | None) -> Tensor:
    """cap x tanh(logits / cap), in their memory; as they are where cap is None."""
    return logits_CV if cap is None else logits_CV.div_(cap).tanh_().mul_(cap)


def slope_of_cap(capped_CV: Tensor, cap: float | None) -> Tensor | None:
    """The derivative of capped logits by those before; None where cap is None: it is 1."""
    return None if cap is None else (capped_CV / cap).square_().neg_().add_(1)


def _joined(
    log_prob_N: Tensor, entropy_N: Tensor, norm_N2: Tensor, square_N: Tensor | None, own_N: Tensor, join: Join
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-prob, entropy, norm, sum of squares) over all words, from those over each rank's. Collective.

    With L the log of the sum of a rank's exp z and H its entropy, the mean of z under its softmax is L - H.
    """
    own_log_total_N = norm_N2.sum(1)
    top_N = join(own_log_total_N.clone(), "max")
    own_log_total_N = own_log_total_N - top_N
    share_N = own_log_total_N.exp()
    target_z_N = torch.where(own_N, log_prob_N + own_log_total_N, 0.0)
    squares = [] if square_N is None else [share_N**2 * square_N]
    terms = [share_N, share_N * (own_log_total_N - entropy_N), target_z_N, *squares]
    total_N, weighted_N, target_z_N, *squares = join(torch.stack(terms), "sum")
    log_sum_N = total_N.log()
    norm_N2 = torch.stack((top_N, log_sum_N), dim=1)
    square_N = squares[0] / total_N**2 if squares else torch.zeros_like(total_N)
    return target_z_N - log_sum_N, log_sum_N - weighted_N / total_N, norm_N2, square_N


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; of lower precisions on CUDA by the product's own fp32 sums."""
    if total.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _outputs(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log-prob, entropy and norm (see _forward_chunk) of each token, to be filled."""
    first_N = torch.zeros(len(like), dtype=_wide(like), device=like.device)
    return first_N, torch.zeros_like(first_N), first_N.new_zeros(len(like), 2)


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]


def _part(grad_N: Tensor | None, like_N: Tensor, part: slice) -> Tensor:
    return torch.zeros_like(like_N[part]) if grad_N is None else grad_N[part]


def _prepare_backward(ctx: Any, temperature: float, unmoved: tuple[Tensor, ...], chunk: int) -> None:
    """unmoved: outputs that take no gradient."""
    ctx.temperature = temperature
    ctx.chunk = chunk
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*unmoved)


def _forward_chunk(
    logits_CV: Tensor, target_C: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target, entropy or zeros, norm) of z, the logits over temperature.

    norm [C, 2]: the greatest z, and log sum exp (z - greatest).
    """
    if _has_kernels(logits_CV):
        return log_probs_triton.forward_chunk(logits_CV, target_C, temperature)
    z_CV = _scaled(logits_CV, temperature)
    top_C = z_CV.amax(-1)
    z_CV -= top_C[:, None]
    target_z_C = z_CV.gather(-1, target_C[:, None]).squeeze(-1)
    weight_CV = z_CV.exp() if with_entropy else z_CV.exp_()
    sum_C = weight_CV.sum(-1)
    log_sum_C = sum_C.log()
    entropy_C = torch.zeros_like(sum_C)
    if with_entropy:
        entropy_C = log_sum_C - weight_CV.mul_(z_CV).sum(-1) / sum_C
    return target_z_C - log_sum_C, entropy_C, torch.stack((top_C, log_sum_C), dim=1)


def _square_sum(logits_CV: Tensor, temperature: float, norm_C2: Tensor) -> Tensor:
    """The sum of the squared probabilities of the words; norm as _forward_chunk gives it."""
    log_p_CV = _scaled(logits_CV, temperature).sub_(norm_C2.sum(1, keepdim=True))
    return log_p_CV.mul_(2).exp_().sum(-1)


def _backward_chunk(
    logits_CV: Tensor,
    target_C: Tensor,
    temperature: float,
    norm_C2: Tensor,
    grad_log_prob_C: Tensor,
    entropy_C: Tensor,
    grad_entropy_C: Tensor | None,
    out_CV: Tensor,
) -> None:
    """Gradient to the chunk's logits, in their dtype, into out_CV, which may be logits_CV itself.

    [v = y] g - p_v (g + g_H (log p_v + H)), over temperature; no v is ELSEWHERE.
    """
    if _has_kernels(logits_CV):
        log_probs_triton.backward_chunk(
            logits_CV, target_C, temperature, norm_C2, grad_log_prob_C, entropy_C, grad_entropy_C, out_CV
        )
        return
    log_p_CV = _scaled(logits_CV, temperature)
    log_p_CV -= norm_C2[:, :1]
    log_p_CV -= norm_C2[:, 1:]
    if grad_entropy_C is None:
        grad_CV = log_p_CV.exp_().mul_(-grad_log_prob_C[:, None])
    else:
        p_CV = log_p_CV.exp()
        log_p_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_log_prob_C[:, None])
        grad_CV = p_CV.mul_(log_p_CV).neg_()
    own_C = torch.where(target_C == ELSEWHERE, 0.0, grad_log_prob_C)
    grad_CV.scatter_add_(-1, target_C.clamp(min=0)[:, None], own_C[:, None])
    out_CV.copy_(grad_CV.div_(temperature))


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    z_CV = logits_CV.to(_wide(logits_CV), copy=True)
    return z_CV if temperature == 1.0 else z_CV.div_(temperature)


def _has_kernels(logits_CV: Tensor) -> bool:
    """Whether the Triton kernels serve these logits."""
    return log_probs_triton is not None and logits_CV.is_cuda and logits_CV.dtype != torch.float64
