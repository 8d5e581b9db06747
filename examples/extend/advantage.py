"""An advantage estimator of your own: reward to go less a fixed baseline.

algorithm.adv_estimator=examples/extend/advantage.py:centred
"""

import torch
from torch import Tensor

from siirl.algorithms.advantages import Advantages, register_advantage


@register_advantage("centred", needs=("reward", "response_mask"))
def centred(reward_BT: Tensor, response_mask_BT: Tensor, *, gamma: float) -> Advantages:
    """Discounted outcome less one half, the same for all tokens; gamma comes from algorithm.gamma."""
    length_B = response_mask_BT.sum(-1)
    outcome_B = reward_BT.sum(-1) * gamma**length_B
    return Advantages(torch.where(response_mask_BT, outcome_B[:, None] - 0.5, 0))
