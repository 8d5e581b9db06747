"""A policy loss of your own: REINFORCE whose importance weight is a smooth function of the ratio.

actor_rollout_ref.actor.policy_loss.loss_mode=examples/extend/policy_loss.py:squashed
"""

from torch import Tensor

from siirl.algorithms.aggregate import TokenLoss
from siirl.algorithms.policy_losses import register_policy_loss


@register_policy_loss("squashed")
def squashed(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_ratio_high: float,
) -> TokenLoss:
    """-w A log pi with w = tanh(r / c) * c, c = 1 + clip_ratio_high: no token loses its gradient."""
    ratio_BT = (log_prob_BT - old_log_prob_BT).detach().exp()
    bound = 1 + clip_ratio_high
    weight_BT = (ratio_BT / bound).tanh() * bound
    return TokenLoss(-weight_BT * advantage_BT * log_prob_BT, {"weight": weight_BT})
