"""The few tokens of a mini-batch that clip_cov and kl_cov treat differently: those of high covariance.

Legend: B rows on this rank, T response tokens. The covariance of a token is the product of how far its
log-prob and its advantage lie above their means over the mini-batch; log-probs are those of the policy before
the step, so that a pick does not depend on how the mini-batch is cut into micro-batches or spread over ranks.
Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025), section 4.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def pick_tokens(
    name: str,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    noise_BT: Tensor,
    options: Mapping[str, Any],
    all_sum: Callable[[Tensor], Tensor] = lambda totals: totals,
    all_gather: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """The tokens that the loss `name` picks, bool [B, T].

    clip_cov picks by chance (the largest noise_BT) a share clip_cov_ratio of all tokens, among those whose
    covariance lies in (clip_cov_lb, clip_cov_ub); kl_cov picks the share kl_cov_ratio of largest covariance;
    both at least one token. all_sum adds a float64 vector over the ranks of the mini-batch, all_gather joins
    float64 vectors of equal length; each is called once, also by ranks without rows.
    """
    mask_BT = mask_BT.bool()
    log_prob_N, advantage_N = old_log_prob_BT[mask_BT].double(), advantage_BT[mask_BT].double()
    sums = torch.stack([log_prob_N.new_tensor(float(len(log_prob_N))), log_prob_N.sum(), advantage_N.sum()])
    count, log_prob_sum, advantage_sum = all_sum(sums).tolist()
    mean_log_prob, mean_advantage = log_prob_sum / max(count, 1.0), advantage_sum / max(count, 1.0)
    covariance_BT = (old_log_prob_BT.double() - mean_log_prob) * (advantage_BT.double() - mean_advantage)
    if name == "clip_cov":
        inside_BT = (covariance_BT > options["clip_cov_lb"]) & (covariance_BT < options["clip_cov_ub"])
        key_BT, share = noise_BT.double().masked_fill(~inside_BT, -torch.inf), options["clip_cov_ratio"]
    else:
        key_BT, share = covariance_BT, options["kl_cov_ratio"]
    key_BT = key_BT.masked_fill(~mask_BT, -torch.inf)
    return _top(key_BT, max(1, int(share * count)), all_gather)


def _top(key_BT: Tensor, num: int, all_gather: Callable[[Tensor], Tensor]) -> Tensor:
    """The tokens with the `num` largest keys over all ranks; those with key -inf never."""
    mine = torch.full((num,), -torch.inf, dtype=torch.float64, device=key_BT.device)
    best = key_BT.flatten().topk(min(num, key_BT.numel())).values
    mine[: len(best)] = best
    least = all_gather(mine).topk(num).values[-1]
    return (key_BT >= least) & (key_BT > -torch.inf)


def token_noise(row_id_B: Tensor, width: int, seed: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [B, width], that depend on (seed, row id, position) alone.

    Source: the mixing steps of SplitMix64; Steele et al., "Fast splittable pseudorandom number generators"
    (2014).
    """
    position_T = torch.arange(width, device=row_id_B.device)
    mixed_BT = row_id_B.long()[:, None] * -7046029254386353131 + position_T * 2862933555777941757 + seed
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed_BT = (mixed_BT ^ (mixed_BT >> shift & ((1 << 64 - shift) - 1))) * factor
    return (mixed_BT >> 11 & ((1 << 53) - 1)).double() / 2**53
