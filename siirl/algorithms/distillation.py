"""Divergences between a policy and its teachers at each token, and mixtures of teachers.

Legend: B rows on this rank, T response tokens, K words at each token, M teachers.

With p the policy and q the teacher, at each token:
  reverse_kl  KL(p || q)                        forward_kl  KL(q || p)
  jsd         beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p
Source: Agarwal et al., "On-Policy Distillation of Language Models" (2023), equation 1.

With a teacher of another vocabulary, at the first token of each span of equal text: the divergence over the
words that both have, and the L1 distance between the sorted probabilities of the others.
Sources: Patiño et al., "Unlocking On-Policy Distillation for Any Model Family" (2025), GOLD; Boizard et al.,
"Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss for LLMs" (2024), ULD.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from siirl.algorithms.kl import kl_k1, policy_ratio, straight_through

CHUNK = 1 << 22
"""Numbers of a distribution's log-probs that are computed on at once."""
LEAST_REST = 1e-7
"""Probability that all words but the K likeliest have at least: what is left below it is rounding."""
NEVER = -1e4
"""Log-prob of a word that does not count: its probability is 0 in any type."""


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
    return _in_chunks(
        partial(_divergence, name=name, beta=beta, whole=whole), log_prob_BTK, teacher_BTK, chunk=chunk
    )


def _in_chunks(formula: Callable[..., Tensor], *columns: Tensor, chunk: int) -> Tensor:
    """The formula of the last dimension of columns [B, T, ...], at each token, so many numbers at once."""
    shape = columns[0].shape[:-1]
    flat = [column.reshape(-1, column.shape[-1]) for column in columns]
    step = max(1, chunk // flat[0].shape[1])
    parts = [
        checkpoint(formula, *(column[i : i + step] for column in flat), use_reentrant=False)
        for i in range(0, len(flat[0]), step)
    ]
    return torch.cat(parts).view(shape) if parts else flat[0].sum(-1).view(shape)


def span_divergence(
    log_prob_BTK: Tensor,
    teacher_BTW: Tensor,
    sampled_BT: Tensor,
    ids_BTK: Tensor | None,
    token_BT: Tensor,
    span_BT: Tensor,
    name: str,
    beta: float,
    unshared_coef: float,
    chunk: int = CHUNK,
) -> Tensor:
    """The divergence from a teacher of another vocabulary, at the first token of each span; 0 at all others.

    log_prob_BTK: of the words ids_BTK, or of all; sampled_BT: of the tokens token_BT. teacher_BTW: K of the
    same words, then, where it says all, of those that the policy does not have, in descending order; -inf of
    one that it does not have, inf of its own first token of a span of several tokens. In such a span, of
    either, the place of the policy's first token is that of the whole span. What is not compared counts as
    one more word; unshared_coef: weight of the distance between sorted probabilities of what only one has.
    """
    place_T = torch.arange(span_BT.shape[1], device=span_BT.device)
    begins_BT = (span_BT > 0) & (span_BT != span_BT.roll(1, 1).masked_fill(place_T == 0, 0))
    long_BT = begins_BT & (span_BT > place_T + 1)
    text_BT = span_sums(sampled_BT, span_BT).gather(1, (span_BT - 1).clamp(min=0))
    words = torch.arange(log_prob_BTK.shape[-1], device=span_BT.device) if ids_BTK is None else ids_BTK
    is_text_BTK = long_BT[..., None] & (words == token_BT[..., None])
    log_prob_BTK = torch.where(is_text_BTK, text_BT[..., None].to(log_prob_BTK.dtype), log_prob_BTK)
    teacher_BTW = torch.where(begins_BT[..., None], teacher_BTW, 0)
    coef = unshared_coef if ids_BTK is None else 0.0
    formula = partial(_shared_divergence, name=name, beta=beta, coef=coef)
    return torch.where(begins_BT, _in_chunks(formula, log_prob_BTK, teacher_BTW, chunk=chunk), 0)


def _shared_divergence(p_NK: Tensor, q_NW: Tensor, name: str, beta: float, coef: float) -> Tensor:
    q_NK, others_NU = q_NW.split([p_NK.shape[1], q_NW.shape[1] - p_NK.shape[1]], -1)
    shared_NK = q_NK.isfinite()
    known = (torch.where(shared_NK, x_NK, NEVER) for x_NK in (p_NK, q_NK))
    found_N = _divergence(*known, name, beta, whole=False)
    if not coef:
        return found_N
    own_NK = torch.where(q_NK == -torch.inf, p_NK.exp(), 0).sort(-1, descending=True).values
    both = pad_sequence([own_NK.t(), others_NU.exp().t()])  # [words of the longer, 2, N], 0 where one ends
    return found_N + coef * (both[:, 0] - both[:, 1]).abs().sum(0)


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


@dataclass(frozen=True)
class TeacherSpans:
    """What a teacher of another vocabulary says of M spans, in its own words."""

    top_log_prob_MK: Tensor
    """At the first of its tokens: of top_ids_MK, or of all its words."""
    top_ids_MK: Tensor | None
    own_token_M: Tensor
    """That token."""
    token_M: Tensor
    """The policy's first token."""
    log_prob_M: Tensor
    """Of the whole span."""
    is_long_M: Tensor
    """Whether either has several tokens there."""

    def in_policy_words(
        self, policy_of: Sequence[Tensor], table_M: Tensor, num_words: int
    ) -> dict[str, Tensor]:
        """top_log_prob, and where there are such top_ids, as span_divergence reads them.

        policy_of: tables [V] of the policy's word of each of the teacher's, -1: none; table_M: which of them.
        num_words: of the policy.
        """
        if self.top_ids_MK is None:
            return {"top_log_prob": self._of_all(policy_of, table_M, num_words)}
        word_MK = torch.stack(list(policy_of))[table_M[:, None], self.top_ids_MK]
        again_MK = self.is_long_M[:, None] & (word_MK == self.token_M[:, None])
        top_MK = self.top_log_prob_MK.masked_fill((word_MK < 0) | again_MK, -torch.inf)
        own_MK = self.top_ids_MK == self.own_token_M[:, None]
        place_M = torch.where(own_MK.any(-1), own_MK.int().argmax(-1), own_MK.shape[1] - 1)
        long_m = self.is_long_M.nonzero().squeeze(1)
        top_MK[long_m, place_M[long_m]] = self.log_prob_M[long_m]
        word_MK[long_m, place_M[long_m]] = self.token_M[long_m]
        return {"top_log_prob": top_MK, "top_ids": word_MK.clamp_(min=0)}

    def _of_all(self, policy_of: Sequence[Tensor], table_M: Tensor, num_words: int) -> Tensor:
        long_m = self.is_long_M.nonzero().squeeze(1)
        top_MV = self.top_log_prob_MK.clone()
        top_MV[long_m, self.own_token_M[long_m]] = -torch.inf
        num_others = max(int((table_V < 0).sum()) for table_V in policy_of)
        found = top_MV.new_full((len(top_MV), num_words + num_others), -torch.inf)
        for number, table_V in enumerate(policy_of):
            row_m, (word_S,) = (table_M == number).nonzero().squeeze(1), (table_V >= 0).nonzero(as_tuple=True)
            found[row_m[:, None], table_V[word_S]] = top_MV[row_m[:, None], word_S]
            others = top_MV[row_m][:, table_V < 0].sort(-1, descending=True).values
            found[row_m, num_words : num_words + others.shape[1]] = others
        word_m = torch.stack(list(policy_of))[table_M, self.own_token_M][long_m]
        found[long_m[word_m >= 0], word_m[word_m >= 0]] = torch.inf
        found[long_m, self.token_M[long_m]] = self.log_prob_M[long_m]
        return found


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
