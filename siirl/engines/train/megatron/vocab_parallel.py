"""Log-prob and entropy over a vocabulary that is split over tensor-parallel ranks; no rank sees all logits.

Legend: M predicted tokens, D hidden size, V this rank's words, C tokens of a chunk. The formulas are those of
siirl/algorithms/log_probs.py; maximum, sums and the target's logit are joined over the ranks, C numbers each.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.algorithms.log_probs import linear_log_prob_entropy


def vocab_parallel_log_prob(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    target_M: Tensor,
    first_word: int,
    temperature: float,
    group: dist.ProcessGroup,
    *,
    with_entropy: bool,
    chunk: int,
    keep_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """(log_prob_M, entropy_M or None) in nats at `temperature`, fp32, the same on all ranks of the group.

    weight_VD: the rows of words first_word, first_word + 1, ...; at least one. The gradient to hidden_MD is
    this rank's share: the caller adds them up over the group. backward does not communicate; it computes the
    logits of each chunk again, unless keep_logits. Collective over the group.
    """
    if dist.get_world_size(group) == 1:
        return linear_log_prob_entropy(
            hidden_MD,
            weight_VD,
            target_M,
            temperature,
            with_entropy=with_entropy,
            chunk=chunk,
            keep_logits=keep_logits,
        )
    log_prob_M, entropy_M = _VocabParallel.apply(
        hidden_MD, weight_VD, target_M, first_word, temperature, group, with_entropy, chunk, keep_logits
    )
    return log_prob_M, entropy_M if with_entropy else None


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        target_M: Tensor,
        first_word: int,
        temperature: float,
        group: dist.ProcessGroup,
        with_entropy: bool,
        chunk: int,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        local_M = target_M - first_word
        here_M = (local_M >= 0) & (local_M < len(weight_VD))
        local_M = local_M.clamp(0, len(weight_VD) - 1)
        log_prob_M = torch.zeros(len(target_M), dtype=torch.float32, device=hidden_MD.device)
        entropy_M, log_total_M = torch.zeros_like(log_prob_M), torch.zeros_like(log_prob_M)
        kept: list[Tensor] = []
        for part in _parts(len(target_M), chunk):
            logits_CV = hidden_MD[part] @ weight_VD.t()
            log_prob_M[part], entropy_M[part], log_total_M[part] = _forward_chunk(
                logits_CV, local_M[part], here_M[part], temperature, group, with_entropy
            )
            if keep_logits:
                kept.append(logits_CV)
        ctx.save_for_backward(hidden_MD, weight_VD, local_M, here_M, entropy_M, log_total_M, *kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return log_prob_M, entropy_M

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob_M: Tensor | None, grad_entropy_M: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, local_M, here_M, entropy_M, log_total_M, *kept = ctx.saved_tensors
        grad_hidden_MD = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if grad_log_prob_M is None:
            grad_log_prob_M = torch.zeros_like(log_total_M)
        for number, part in enumerate(_parts(len(local_M), ctx.chunk)):
            logits_CV = kept[number] if kept else hidden_MD[part] @ weight_VD.t()
            log_p_CV = (logits_CV.float() / ctx.temperature).sub_(log_total_M[part, None])
            p_CV = log_p_CV.exp()
            if grad_entropy_M is None:
                grad_CV = p_CV.mul_(-grad_log_prob_M[part, None])
            else:
                log_p_CV.add_(entropy_M[part, None]).mul_(grad_entropy_M[part, None])
                grad_CV = log_p_CV.add_(grad_log_prob_M[part, None]).mul_(p_CV).neg_()
            own_C1 = (grad_log_prob_M[part] * here_M[part])[:, None]
            grad_CV.scatter_add_(-1, local_M[part, None], own_C1)
            grad_CV = grad_CV.div_(ctx.temperature).to(logits_CV.dtype)
            if grad_hidden_MD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_MD[part])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_MD[part]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_MD, grad_weight_VD, None, None, None, None, None, None, None


def _forward_chunk(
    logits_CV: Tensor,
    local_C: Tensor,
    here_C: Tensor,
    temperature: float,
    group: dist.ProcessGroup,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log_prob, entropy, log of the sum of exp(logits / temperature)) of a chunk."""
    z_CV = logits_CV.float()
    largest_C = z_CV.amax(-1)
    dist.all_reduce(largest_C, dist.ReduceOp.MAX, group=group)
    z_CV = (z_CV - largest_C[:, None]).div_(temperature)
    target_C = z_CV.gather(-1, local_C[:, None]).squeeze(-1) * here_C
    weight_CV = z_CV.exp()
    expected_C = (weight_CV * z_CV).sum(-1) if with_entropy else torch.zeros_like(target_C)
    sums = torch.stack([weight_CV.sum(-1), expected_C, target_C])
    dist.all_reduce(sums, group=group)
    total_C, expected_C, target_C = sums
    log_total_C = total_C.log()
    entropy_C = log_total_C - expected_C / total_C if with_entropy else torch.zeros_like(target_C)
    return target_C - log_total_C, entropy_C, log_total_C + largest_C / temperature


def join_words(group: dist.ProcessGroup, value: Tensor, how: Literal["max", "sum"]) -> Tensor:
    """Numbers of tokens, joined over the ranks that share the vocabulary. Collective over the group."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=group)
    return value


def _parts(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]
