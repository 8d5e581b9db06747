"""Divergences between a policy and its teachers at each token, and mixtures of teachers.

Legend: B rows on this rank, T response tokens, K words at each token, M teachers.

With p the policy and q the teacher, at each token:
  reverse_kl  KL(p || q)                        forward_kl  KL(q || p)
  jsd         beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p
Source: Agarwal et al., "On-Policy Distillation of Language Models" (2023), equation 1.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from siirl.algorithms.kl import kl_k1, policy_ratio, straight_through

CHUNK = 1 << 22
"""Numbers of a distribution's log-probs that are computed on at once."""
LEAST_REST = 1e-7
"""Probability that all words but the K likeliest have at least: what is left below it is rounding."""


def sampled_reverse_kl(log_prob_BT: Tensor, old_log_prob_BT: Tensor, teacher_BT: Tensor) -> Tensor:
    """KL(policy || teacher) at each sampled token, in nats: its k1 estimate, with a gradient that is unbiased
    for that of the KL.

    The gradient is that of k2, times the ratio to the policy that sampled: the current one's share of its
    samples.
    """
    estimate_BT = straight_through(kl_k1(log_prob_BT, teacher_BT), log_prob_BT, teacher_BT)
    return policy_ratio(log_prob_BT, old_log_prob_BT).detach() * estimate_BT


def span_sums(value_BT: Tensor, span_BT: Tensor) -> Tensor:
    """The sum of the values of each span, at its last token; 0 at all others, [B, T].

    span_BT: of each token, 1 + the place of the last token of its span; 0: it is in none.
    """
    sum_BT = value_BT.new_zeros(len(value_BT), value_BT.shape[1] + 1)
    return sum_BT.scatter_add(1, span_BT, value_BT)[:, 1:]


def divergence(
    log_prob_BTK: Tensor, teacher_BTK: Tensor, name: str, beta: float, *, whole: bool, chunk: int = CHUNK
) -> Tensor:
    """The divergence at each token, in nats, fp32 [B, T], from log-probs of the same K words by both.

    whole: they are all words; else all others count as one more word. Memory beyond inputs and their
    gradients is a few times `chunk` numbers; backward computes them again.
    """
    shape, width = log_prob_BTK.shape[:-1], log_prob_BTK.shape[-1]
    policy_NK, teacher_NK = log_prob_BTK.reshape(-1, width), teacher_BTK.reshape(-1, width)
    step = max(1, chunk // width)
    formula = partial(_divergence, name=name, beta=beta, whole=whole)
    parts = [
        checkpoint(formula, policy_NK[i : i + step], teacher_NK[i : i + step], use_reentrant=False)
        for i in range(0, len(policy_NK), step)
    ]
    return torch.cat(parts).view(shape) if parts else policy_NK.sum(-1).view(shape)


def _divergence(p_NK: Tensor, q_NK: Tensor, name: str, beta: float, whole: bool) -> Tensor:
    if not whole:
        p_NK, q_NK = _with_rest(p_NK), _with_rest(q_NK)
    if name == "reverse_kl" or (name == "jsd" and beta == 1):
        return _kl(p_NK, q_NK)
    if name == "forward_kl" or beta == 0:
        return _kl(q_NK, p_NK)
    m_NK = torch.logaddexp(q_NK + math.log(beta), p_NK + math.log1p(-beta))
    return beta * _kl(q_NK, m_NK) + (1 - beta) * _kl(p_NK, m_NK)


def _kl(one_NK: Tensor, other_NK: Tensor) -> Tensor:
    return (one_NK.exp() * (one_NK - other_NK)).sum(-1)


def _with_rest(log_prob_NK: Tensor) -> Tensor:
    """The log-probs, and that of all other words together."""
    known_N = log_prob_NK.logsumexp(-1).clamp(max=math.log1p(-LEAST_REST))
    rest_N = torch.log(-torch.expm1(known_N))
    return torch.cat([log_prob_NK, rest_N[:, None]], -1)


def mixture(log_prob_MB: Sequence[Tensor], weight_MB: Tensor) -> Tensor:
    """Log-prob of the mixture of teachers, of the shape of one's; of one teacher, its own tensor.

    log_prob_MB: [B, ...] of each; weight_MB [M, B]: what each counts in each row; 0: nothing, whatever its
    log-probs are. A row has a positive one.
    """
    if len(log_prob_MB) == 1:
        return log_prob_MB[0]
    log_share_MB = (weight_MB / weight_MB.sum(0)).log()
    found = torch.full_like(log_prob_MB[0], -torch.inf)
    for log_prob_B, log_share_B in zip(log_prob_MB, log_share_MB, strict=True):
        share_B = log_share_B.view(-1, *[1] * (log_prob_B.ndim - 1))
        its_B = torch.where(share_B > -torch.inf, log_prob_B + share_B, -torch.inf)
        torch.logaddexp(found, its_B, out=found)
    return found
