"""Weights by which PF-PPO draws the rows that it trains on.

Legend: N rows of the whole batch.
"""

import torch
from torch import Tensor

from siirl.errors import ConfigError

METHODS = ("pow", "max_min", "max_random")


def resampling_weights(
    score_N: Tensor, *, reweight_method: str = "pow", weight_pow: float = 2.0, floor: float = 1e-8
) -> Tensor:
    """Weight of each row in the draw, float64 [N], all positive.

    pow: |score|^weight_pow. max_min: only rows with the largest or the smallest score. max_random: 0.4 for
    rows with the largest score, 0.1 for the others. floor: what is added, so that equal or zero scores are
    drawn alike. Source: "Policy Filtration for RLHF" (2024), section 4. ConfigError for an unknown method.
    """
    score_N = score_N.double()
    if reweight_method == "pow":
        return score_N.abs() ** weight_pow + floor
    if reweight_method not in METHODS:
        raise ConfigError(
            f"algorithm.pf_ppo.reweight_method={reweight_method!r} is not known: known are "
            f"{', '.join(METHODS)}."
        )
    if not len(score_N):
        return score_N
    largest_N = score_N == score_N.max()
    if reweight_method == "max_random":
        return torch.where(largest_N, 0.4, 0.1).double()
    return (largest_N | (score_N == score_N.min())).double() + floor
