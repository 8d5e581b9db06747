"""Tokens of a mini-batch that a loss treats differently: those of high covariance (clip_cov, kl_cov), and
those of high entropy.

Legend: B rows on this rank, T response tokens. The covariance of a token is the product of how far its
log-prob and its advantage lie above their means over the mini-batch; log-probs are those of the policy before
the step, so that a pick does not depend on how the mini-batch is cut into micro-batches or spread over ranks.
Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025), section 4.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

TIE = 1e-4
"""Nats within which a token ranks as the last one that is picked.

Samples of a prompt begin with equal tokens; computed in other micro-batches, or on other ranks, they differ
by rounding, which must not decide.
"""


def pick_tokens(
    name: str,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    noise_BT: Tensor,
    options: Mapping[str, Any],
    all_sum: Callable[[Tensor], Tensor] = lambda totals: totals,
    all_gather: Callable[[Tensor], Tensor] = lambda values: values,
    tie: float = 0.0,
) -> Tensor:
    """The tokens that the loss `name` picks, bool [B, T].

    clip_cov picks by chance (the largest noise_BT) a share clip_cov_ratio of all tokens, among those whose
    covariance lies in (clip_cov_lb, clip_cov_ub); kl_cov picks the share kl_cov_ratio of largest covariance,
    and all that are within `tie` of the last one; both at least one token. all_sum adds a float64 vector over
    the ranks of the mini-batch, all_gather joins float64 vectors of equal length; each is called once, also
    by ranks without rows.
    """
    mask_BT = mask_BT.bool()
    log_prob_N, advantage_N = old_log_prob_BT[mask_BT].double(), advantage_BT[mask_BT].double()
    sums = torch.stack([log_prob_N.new_tensor(float(len(log_prob_N))), log_prob_N.sum(), advantage_N.sum()])
    count, log_prob_sum, advantage_sum = all_sum(sums).tolist()
    mean_log_prob, mean_advantage = log_prob_sum / max(count, 1.0), advantage_sum / max(count, 1.0)
    covariance_BT = (old_log_prob_BT.double() - mean_log_prob) * (advantage_BT.double() - mean_advantage)
    if name == "clip_cov":
        inside_BT = (covariance_BT > options["clip_cov_lb"]) & (covariance_BT < options["clip_cov_ub"])
        key_BT, share, tie = noise_BT.double(), options["clip_cov_ratio"], 0.0
        key_BT = key_BT.masked_fill(~inside_BT, -torch.inf)
    else:
        key_BT, share = covariance_BT, options["kl_cov_ratio"]
    key_BT = key_BT.masked_fill(~mask_BT, -torch.inf)
    return _top(key_BT, max(1, int(share * count)), all_gather, tie)


def _top(key_BT: Tensor, num: int, all_gather: Callable[[Tensor], Tensor], tie: float) -> Tensor:
    """The tokens with the `num` largest keys over all ranks, and those within tie; with key -inf never."""
    mine = torch.full((num,), -torch.inf, dtype=torch.float64, device=key_BT.device)
    best = key_BT.flatten().topk(min(num, key_BT.numel())).values
    mine[: len(best)] = best
    least = all_gather(mine).topk(num).values[-1]
    return (key_BT >= least - tie) & (key_BT > -torch.inf)


def high_entropy(
    entropy_BT: Tensor,
    mask_BT: Tensor,
    share: float,
    all_sum: Callable[[Tensor], Tensor] = lambda totals: totals,
    tie: float = 0.0,
) -> Tensor:
    """The trained tokens whose entropy reaches the (1 - share) quantile of the mini-batch, bool [B, T].

    entropy_BT: float32, of the policy before the step. The quantile is that with linear interpolation, so
    tokens of equal entropy, or within `tie` of it, are all in or all out. all_sum adds a float64 vector over
    the ranks of the mini-batch; it is called four times, also by ranks without rows: the least entropy that
    is kept is found by counts of its bytes, from the highest on, so what is exchanged does not grow with the
    batch.
    Source: Wang et al., "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement
    Learning for LLM Reasoning" (2025), section 5.
    """
    mask_BT = mask_BT.bool()
    rank_BT = _rank_of_float32(entropy_BT)
    left_N, least, still = rank_BT[mask_BT], 0, 0.0
    for place in range(3, -1, -1):
        byte_N = left_N >> 8 * place & 255
        count_256 = all_sum(torch.bincount(byte_N, minlength=256).double())
        if place == 3:
            total = float(count_256.sum())
            still = total - math.ceil(round((1 - share) * (total - 1), 6))
        at_least_256 = count_256.flip(0).cumsum(0).flip(0)
        byte = max(int((at_least_256 >= still).sum()) - 1, 0)
        still -= float(at_least_256[byte] - count_256[byte])
        left_N, least = left_N[byte_N == byte], least | byte << 8 * place
    return mask_BT & (rank_BT >= _rank_of_float32(_float32_of_rank(least) - tie).item())


def _rank_of_float32(value_BT: Tensor) -> Tensor:
    """Integers from 0 to 2^32 - 1 in the order of the numbers, int64 [B, T]."""
    bits_BT = (value_BT.float() + 0.0).contiguous().view(torch.int32).long()  # + 0.0: no negative zero
    return torch.where(bits_BT < 0, -bits_BT - 1, bits_BT + 2**31)


def _float32_of_rank(rank: int) -> Tensor:
    """The number that _rank_of_float32 gives a rank to."""
    bits = rank - 2**31 if rank >= 2**31 else -rank - 1
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


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
