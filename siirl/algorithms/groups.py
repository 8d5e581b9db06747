"""Statistics over groups of rows: the samples of one prompt share a group id.

Legend: B rows on this rank, G groups among them. Group ids are arbitrary integers in any order; all rows of a
group are on this rank (layouts with split "group"). Sums run in float64, so equal fp32 values give a
deviation of exactly 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from siirl.errors import ConfigError


@dataclass(frozen=True)
class Groups:
    """Which group each row belongs to."""

    index_B: Tensor
    """0..G-1."""
    count_G: Tensor
    """Rows of each group (at least 1)."""

    @classmethod
    def of(cls, group_id_B: Tensor) -> "Groups":
        """Number the distinct ids. No communication."""
        _, index_B, count_G = torch.unique(group_id_B, return_inverse=True, return_counts=True)
        return cls(index_B, count_G)

    def rows(self, value_G: Tensor) -> Tensor:
        """Give every row the value of its group, shape [B]."""
        return value_G[self.index_B]

    def sum(self, value_B: Tensor) -> Tensor:
        """Sum over the rows of each group, float64, shape [G], or [G, T] of values [B, T]."""
        shape = (len(self.count_G), *value_B.shape[1:])
        total_G = torch.zeros(shape, dtype=torch.float64, device=value_B.device)
        return total_G.index_add_(0, self.index_B, value_B.double())

    def mean(self, value_B: Tensor) -> Tensor:
        """Mean over the rows of each group, float64, shape [G]."""
        return self.sum(value_B) / self.count_G

    def std(self, value_B: Tensor) -> Tensor:
        """Sample standard deviation (n - 1) of each group, float64, shape [G]; 0 for a group of one row."""
        deviation_B = value_B.double() - self.rows(self.mean(value_B))
        return (self.sum(deviation_B**2) / (self.count_G - 1).clamp(min=1)).sqrt()

    def max(self, value_B: Tensor) -> Tensor:
        """Largest value of each group, shape [G]."""
        return self._extreme(value_B, "amax")

    def min(self, value_B: Tensor) -> Tensor:
        """Smallest value of each group, shape [G]."""
        return self._extreme(value_B, "amin")

    def _extreme(self, value_B: Tensor, reduce: str) -> Tensor:
        value_G = value_B.new_zeros(len(self.count_G))
        return value_G.scatter_reduce_(0, self.index_B, value_B, reduce, include_self=False)


def is_varied(value_B: Tensor, group_id_B: Tensor) -> Tensor:
    """Whether the values in the row's group differ, bool [B]: groups that do not carry no group-relative
    signal.

    Every rank that holds rows calls it; no communication. Source: DAPO (2025), dynamic sampling.
    """
    groups = Groups.of(group_id_B)
    return groups.rows(groups.max(value_B) > groups.min(value_B))


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
