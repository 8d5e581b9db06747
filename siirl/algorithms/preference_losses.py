"""Losses of pairs: a better and a worse response of one prompt.

Legend: B rows of a micro-batch, P pairs among them, T response tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from siirl.algorithms.aggregate import TokenLoss


@dataclass(frozen=True)
class PairLoss:
    """A loss of each pair, [P], and what is reported of it."""

    loss_P: Tensor
    stats: dict[str, Tensor]


def dpo(
    log_prob_BT: Tensor,
    ref_log_prob_BT: Tensor,
    mask_BT: Tensor,
    better_P: Tensor,
    worse_P: Tensor,
    *,
    dpo_beta: float,
) -> PairLoss:
    """-log sigmoid(beta * (d_better - d_worse)), in nats; d: the log-prob of a row less the reference's.

    better_P, worse_P: the rows of each pair. Only log_prob_BT carries gradient. What stands where the mask is
    False counts as 0. Source: Rafailov et al., "Direct Preference Optimization" (2023), equation 7.
    """
    above_BT = torch.where(mask_BT, log_prob_BT - ref_log_prob_BT, 0)
    reward_B = dpo_beta * above_BT.sum(-1)
    return _of_rewards(reward_B[better_P], reward_B[worse_P])


def bradley_terry(score_B: Tensor, better_P: Tensor, worse_P: Tensor) -> PairLoss:
    """-log sigmoid(score of the better response - that of the worse one), in nats: how reward models learn.

    Source: Bradley and Terry (1952); Ouyang et al., "Training language models to follow instructions with
    human feedback" (2022), equation 1.
    """
    return _of_rewards(score_B[better_P], score_B[worse_P])


def _of_rewards(better_P: Tensor, worse_P: Tensor) -> PairLoss:
    margin_P = better_P - worse_P
    stats = {
        "reward_better": better_P.detach(),
        "reward_worse": worse_P.detach(),
        "reward_margin": margin_P.detach(),
        "reward_accuracy": (margin_P.detach() > 0).to(margin_P.dtype),
    }
    return PairLoss(-logsigmoid(margin_P), stats)


def clipped_value_loss(
    value_BT: Tensor, old_value_BT: Tensor, return_BT: Tensor, *, cliprange_value: float
) -> TokenLoss:
    """Half the squared error of the value, or of the value held within cliprange_value of the old one if
    larger.

    Per token, to be aggregated by `aggregate_loss`; only value_BT carries gradient. clip_fraction: tokens
    whose gradient is cut. Source: Schulman et al., PPO reference implementation; "Implementation Matters"
    (2020), section 2.
    """
    near_old_BT = value_BT.clamp(old_value_BT - cliprange_value, old_value_BT + cliprange_value)
    plain_BT = (value_BT - return_BT) ** 2
    clipped_BT = (near_old_BT - return_BT) ** 2
    stats = {
        "clip_fraction": (clipped_BT > plain_BT).to(value_BT.dtype),
        "value": value_BT.detach(),
    }
    return TokenLoss(0.5 * torch.maximum(plain_BT, clipped_BT), stats)
