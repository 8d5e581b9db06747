"""Numbers that show an algorithm's health, as sums that add up over micro-batches and ranks.

Legend: B rows on this rank, T response tokens, N any number of trained tokens. No communication.
"""

import torch
from torch import Tensor

from siirl.algorithms.advantages import LEAST_SIGNAL
from siirl.algorithms.groups import Groups, is_varied
from siirl.observe.metrics import Metrics


def advantage_stats(advantage_BT: Tensor, mask_BT: Tensor) -> Metrics:
    """mean, square_mean, max and min of the advantage over trained tokens; signal: share of those with some.

    The standard deviation is sqrt(square_mean - mean^2): a deviation itself does not add up over ranks.
    """
    kept_N = advantage_BT[mask_BT.bool()].double()
    metrics = Metrics()
    count = len(kept_N)
    metrics.mean("mean", kept_N.sum().item(), count)
    metrics.mean("square_mean", (kept_N**2).sum().item(), count)
    metrics.mean("signal", (kept_N.abs() > LEAST_SIGNAL).sum().item(), count)
    if count:
        metrics.max("max", kept_N.max().item())
        metrics.min("min", kept_N.min().item())
    return metrics


def group_stats(score_B: Tensor, group_id_B: Tensor) -> Metrics:
    """zero_std_groups: share of groups whose scores are all equal.

    All rows of a group must be on this rank; ranks that hold other groups add up.
    """
    metrics = Metrics()
    groups = Groups.of(group_id_B)
    varied_G = torch.zeros_like(groups.count_G, dtype=torch.bool)
    varied_G[groups.index_B] = is_varied(score_B, group_id_B)
    metrics.mean("zero_std_groups", (~varied_G).sum().item(), len(varied_G))
    return metrics


def score_stats(score_B: Tensor) -> Metrics:
    """score: the mean over rows; score_max and score_min."""
    metrics = Metrics()
    metrics.mean("score", score_B.sum().item(), len(score_B))
    if len(score_B):
        metrics.max("score_max", score_B.max().item())
        metrics.min("score_min", score_B.min().item())
    return metrics


def length_stats(response_length_B: Tensor, score_B: Tensor) -> Metrics:
    """Mean response length, in tokens, of rows with a positive score (length_success) and of the others."""
    metrics = Metrics()
    success_B = score_B > 0
    for name, chosen_B in (("length_success", success_B), ("length_failure", ~success_B)):
        metrics.mean(name, response_length_B[chosen_B].sum().item(), chosen_B.sum().item())
    return metrics


def explained_variance_sums(value_BT: Tensor, return_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sums over trained tokens for `explained_variance`, float64 [5]; they add up over ranks."""
    mask_BT = mask_BT.bool()
    return_N = return_BT[mask_BT].double()
    error_N = return_N - value_BT[mask_BT].double()
    count = return_N.new_tensor(float(len(return_N)))
    return torch.stack([count, return_N.sum(), (return_N**2).sum(), error_N.sum(), (error_N**2).sum()])


def explained_variance(sums: Tensor) -> float:
    """1 - Var(return - value) / Var(return) of summed `explained_variance_sums`; 0 where returns do not vary.

    1: the critic predicts every return; 0: no better than their mean; negative: worse.
    """
    count, total, total_sq, error, error_sq = sums.tolist()
    if count == 0:
        return 0.0
    variance = total_sq / count - (total / count) ** 2
    error_variance = error_sq / count - (error / count) ** 2
    return 1.0 - error_variance / variance if variance > 1e-12 else 0.0
