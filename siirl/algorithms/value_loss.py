"""The critic's loss.

Legend: B rows of a micro-batch, T response tokens.
"""

import torch
from torch import Tensor

from siirl.algorithms.aggregate import TokenLoss


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
