"""Weights for tokens that another engine sampled than the one that trains on them.

Legend: B rows, T response tokens. log_ratio_BT is the trainer's log-prob of each sampled token (by the
weights that sampled it) less the rollout engine's; the two differ by numerics, and by weights when rollouts
run ahead. Multiply a policy loss per token by the weights; the normalisation of the loss stays. No
gradient, no communication.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from siirl.algorithms.advantages import LEAST_SIGNAL
from siirl.algorithms.aggregate import masked_row_mean
from siirl.algorithms.kl import MAX_LOG_RATIO
from siirl.algorithms.tensor_metrics import TensorMetrics, masked_sums

Level = Literal["token", "sequence", "geometric"]
"""What the ratio is taken of: each token, the row (product over tokens), or the geometric mean over them."""

Divergence = Literal["max_k2", "sum_k2", "mean_k2", "max_k3", "sum_k3", "mean_k3"]
"""Of a row: the largest, the sum or the mean of its tokens' k2 or k3."""


def importance_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Trainer over rollout probability at a level, [B, T], at most e^20; 1 where the mask is False."""
    mask_BT = mask_BT.bool()
    log_ratio_BT = torch.where(mask_BT, log_ratio_BT.detach(), 0)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    elif level == "geometric":
        log_ratio_BT = masked_row_mean(log_ratio_BT, mask_BT)[:, None].expand_as(log_ratio_BT)
    return torch.where(mask_BT, log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 1)


def truncated_weight(log_ratio_BT: Tensor, mask_BT: Tensor, *, level: Level, cap: float) -> Tensor:
    """Importance ratio, at most `cap`, [B, T].

    Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), truncated
    importance sampling.
    """
    return importance_ratio(log_ratio_BT, mask_BT, level).clamp(max=cap)


def masked_weight(log_ratio_BT: Tensor, mask_BT: Tensor, *, level: Level, low: float, high: float) -> Tensor:
    """Importance ratio where it lies in [low, high], else 0, [B, T].

    level "token" with both bounds is IcePop; low 0 is masked importance sampling.
    Sources: "Every Step Evolves" (2025), IcePop; "When Speed Kills Stability" (2025).
    """
    ratio_BT = importance_ratio(log_ratio_BT, mask_BT, level)
    return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, 0)


def accepted_rows(log_ratio_BT: Tensor, mask_BT: Tensor, *, level: Level, low: float, high: float) -> Tensor:
    """Rows whose ratio lies in [low, high], bool [B]; at level "token", rows all of whose tokens do.

    Reject a row by weight 0 for all of its tokens. A row without trained tokens is accepted.
    """
    ratio_BT = importance_ratio(log_ratio_BT, mask_BT, level)
    inside_BT = (ratio_BT >= low) & (ratio_BT <= high)
    return (inside_BT | ~mask_BT.bool()).all(-1)


def row_divergence(log_ratio_BT: Tensor, mask_BT: Tensor, how: Divergence) -> Tensor:
    """How far trainer and rollout engine are apart over the trained tokens of each row, in nats, [B].

    With d the log ratio of a token, k2 is d^2 / 2 and k3 is e^d - 1 - d: both are 0 or more, k3 with
    KL(rollout, trainer) as its expectation. 0 for a row without trained tokens. Rows of too large a
    divergence are rejected.
    Source: Schulman, "Approximating KL divergence" (2020), of the ratio that importance sampling takes.
    """
    mask_BT = mask_BT.bool()
    reduce, _, kind = how.partition("_")
    d_BT = torch.where(mask_BT, log_ratio_BT.detach(), 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value_BT = 0.5 * d_BT**2 if kind == "k2" else torch.expm1(d_BT) - d_BT
    if reduce == "mean":
        return masked_row_mean(value_BT, mask_BT)
    return value_BT.sum(-1) if reduce == "sum" else value_BT.amax(-1)


def off_policy_negatives(
    log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, delta: float
) -> Tensor:
    """Tokens of negative advantage in rows that have left the policy that sampled them, bool [B, T].

    A row has, if log(rollout / policy), averaged over its trained tokens, is more than `delta` nats; the
    policy is that of the optimizer step, so it counts what earlier mini-batches and older weights moved, too.
    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), off-policy sequence masking.
    """
    drift_B = masked_row_mean(rollout_log_prob_BT - log_prob_BT.detach(), mask_BT)
    return mask_BT.bool() & (advantage_BT < -LEAST_SIGNAL) & (drift_B > delta)[:, None]


@dataclass(frozen=True)
class Correction:
    """Which weights `correction_weights` gives."""

    weight: Literal["none", "truncate", "mask", "filter"] = "none"
    """What happens to the ratio at `level`; "filter": a weight of 1 inside the bounds, 0 outside."""
    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    reject: Literal["none"] | Level | Divergence = "none"
    """The level at which rows are rejected by their ratio, or what of their divergence."""
    reject_low: float = 0.5
    reject_high: float = 2.0
    reject_divergence: float = 0.0

    @property
    def is_used(self) -> bool:
        return self.weight != "none" or self.reject != "none"


def correction_weights(log_ratio_BT: Tensor, mask_BT: Tensor, correction: Correction) -> Tensor:
    """The weight of each token's loss, [B, T]: that of its ratio, and 0 in a rejected row.

    `filter` takes the bounds of `mask` without the ratio: a token or a row counts wholly or not at all.
    """
    weight_BT = torch.ones_like(log_ratio_BT)
    level, low, high = correction.level, correction.low, correction.high
    if correction.weight == "truncate":
        weight_BT = truncated_weight(log_ratio_BT, mask_BT, level=level, cap=high)
    elif correction.weight != "none":
        weight_BT = masked_weight(log_ratio_BT, mask_BT, level=level, low=low, high=high)
        if correction.weight == "filter":
            weight_BT = (weight_BT > 0).to(weight_BT.dtype)
    match correction.reject:
        case "none":
            return weight_BT
        case "token" | "sequence" | "geometric" as at:
            bounds = {"low": correction.reject_low, "high": correction.reject_high}
            accepted_B = accepted_rows(log_ratio_BT, mask_BT, level=at, **bounds)
        case how:
            accepted_B = row_divergence(log_ratio_BT, mask_BT, how) <= correction.reject_divergence
    return torch.where(accepted_B[:, None], weight_BT, 0)


def correction_stats(log_ratio_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor) -> TensorMetrics:
    """Means over trained tokens: ratio; kl: k1 and k3 of KL(rollout || trainer); weight, weight_square,
    masked.

    The effective sample size, as a share of the tokens, is weight^2 / weight_square.
    """
    log_ratio_BT = log_ratio_BT.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_BT = weight_BT.double()
    columns = {
        "ratio": log_ratio_BT.exp(),
        "kl_k1": -log_ratio_BT,
        "kl_k3": torch.expm1(log_ratio_BT) - log_ratio_BT,
        "weight": weight_BT,
        "weight_square": weight_BT**2,
        "masked": (weight_BT == 0).double(),
    }
    metrics, num_tokens = TensorMetrics(), mask_BT.sum()
    for name, total in zip(columns, masked_sums(list(columns.values()), mask_BT), strict=True):
        metrics.mean(name, total, num_tokens)
    return metrics
