"""Advantage estimators, picked by `algorithm.adv_estimator`.

Legend: B rows on this rank, T response tokens, G groups (prompts). An estimator is a pure function of the
fields that it needs; none communicates. Where a formula needs sums over the whole batch (whitening), the
estimator declares an `AcrossRanks` step, and `compute_advantage` lets the caller add the sums up.

`response_mask` marks the tokens that the policy produced; tokens between them (tool output) are not steps of
the policy: discounting skips them, and a reward given at one of them counts for the policy's last token
before it. The built-in estimators that compare groups also take the turns of rows as rows with one place,
whose mask is the number of tokens that it stands for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from siirl.algorithms.groups import Groups
from siirl.algorithms.registry import Registry, option_names, pick_options
from siirl.config.algorithm_table import ESTIMATORS, row_of
from siirl.errors import ConfigError, RewardError


class Advantages(NamedTuple):
    """What an estimator gives."""

    advantage_BT: Tensor
    """Zero where response_mask is False."""
    return_BT: Tensor | None = None
    """Target of the value function, with a critic only."""


class AcrossRanks(NamedTuple):
    """A last step that needs the whole batch. Totals are float64 vectors that add up over ranks.

    sums(advantage_BT, mask_BT) -> totals of this rank; apply(advantage_BT, mask_BT, totals of all ranks) ->
    advantage_BT. The mask is the field response_mask.
    """

    sums: Callable[..., Tensor]
    apply: Callable[[Tensor, Tensor, Tensor], Tensor]
    by_group: bool = False
    """sums is given group_id_B, too."""


AcrossRanksStep = AcrossRanks | Callable[[Mapping[str, Any]], AcrossRanks | None] | None
Decorator = Callable[[Callable[..., Advantages]], Callable[..., Advantages]]


@dataclass(frozen=True)
class AdvantageSpec:
    """A named estimator."""

    name: str
    fn: Callable[..., Advantages]
    needs: tuple[str, ...]
    """Batch fields, handed to `fn` by position, in this order."""
    options: tuple[str, ...]
    """Scalars of the configuration, by keyword."""
    across_ranks: AcrossRanksStep
    """Given the options where they decide it."""


ADVANTAGES: Registry[AdvantageSpec] = Registry("advantage estimator", "algorithm.adv_estimator")


def register_advantage(
    name: str,
    needs: tuple[str, ...],
    across_ranks: AcrossRanksStep = None,
) -> Decorator:
    """Make a function known as an estimator; see AdvantageSpec for what the arguments mean.

    The function takes the needed fields by position and its options as keyword-only parameters.
    """

    def add(fn: Callable[..., Advantages]) -> Callable[..., Advantages]:
        ADVANTAGES.add(AdvantageSpec(name, fn, needs, option_names(fn), across_ranks))
        return fn

    return add


def built_in(name: str, across_ranks: AcrossRanksStep = None) -> Decorator:
    """`register_advantage` with the fields of the estimator's row. LookupError if it has none."""
    return register_advantage(name, row_of(ESTIMATORS, name).reads, across_ranks)


def compute_advantage(
    name: str,
    fields: Mapping[str, Tensor],
    options: Mapping[str, Any],
    all_sum: Callable[[Tensor], Tensor] = lambda totals: totals,
) -> Advantages:
    """Run a named estimator on this rank's rows.

    fields: at least what the estimator needs, and response_mask. options: scalars offered; each estimator
    takes what it declares. all_sum: adds a float64 vector over the ranks that hold rows; called once by
    estimators with an AcrossRanks step, also by ranks without rows, and by no others. ConfigError for an
    unknown name, and for what a user's estimator gives that are no advantages.
    """
    spec = ADVANTAGES.get(name)
    result = spec.fn(*(fields[field] for field in spec.needs), **pick_options(name, spec.fn, options))
    _check_kind(name, result, fields["response_mask"])
    step = spec.across_ranks
    if step is not None and not isinstance(step, AcrossRanks):
        step = step(options)
    if step is None:
        return result
    mask_BT = fields["response_mask"]
    groups = (fields["group_id"],) if step.by_group else ()
    totals = all_sum(step.sums(result.advantage_BT, mask_BT, *groups))
    return Advantages(step.apply(result.advantage_BT, mask_BT, totals), result.return_BT)


def _check_kind(name: str, result: object, mask_BT: Tensor) -> None:
    """ConfigError unless these are advantages of the rows."""
    if isinstance(result, Advantages) and isinstance(result.advantage_BT, Tensor):
        shape = tuple(result.advantage_BT.shape)
        if shape == tuple(mask_BT.shape):
            return
        gave = f"advantages of shape {shape}"
    else:
        gave = f"a {type(result).__name__}"
    raise ConfigError(
        f"algorithm.adv_estimator={name} gave {gave}, not Advantages of shape {tuple(mask_BT.shape)}, a "
        "number for each token of each row. Return siirl.algorithms.advantages.Advantages(advantage_BT, "
        "return_BT); return_BT is for a critic only."
    )


def _moments(advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    inside_BT = mask_BT.bool()
    kept, count = advantage_BT[inside_BT].double(), mask_BT[inside_BT].double()
    return torch.stack([count.sum(), (count * kept).sum(), (count * kept**2).sum()])


def _whiten(advantage_BT: Tensor, mask_BT: Tensor, totals: Tensor) -> Tensor:
    count, total, total_sq = totals.to(advantage_BT.device).unbind()
    mean = total / count.clamp(min=1)
    variance = (total_sq - count * mean**2).clamp(min=0) / (count - 1).clamp(min=1)
    white_BT = (advantage_BT.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask_BT.bool(), white_BT, 0).to(advantage_BT.dtype)


LEAST_SIGNAL = 1e-5
"""Advantages nearer to 0 are none: with a KL in the reward, those of equal scores are its rounding."""


def _row_counts(advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    mask_BT = mask_BT.bool()
    trained_B = mask_BT.any(-1)
    with_signal_B = ((advantage_BT.abs() > LEAST_SIGNAL) & mask_BT).any(-1)
    return torch.stack([trained_B.sum(), with_signal_B.sum()]).double()


def _group_counts(advantage_BT: Tensor, mask_BT: Tensor, group_id_B: Tensor) -> Tensor:
    groups, mask_BT = Groups.of(group_id_B), mask_BT.bool()
    with_signal_B = ((advantage_BT.abs() > LEAST_SIGNAL) & mask_BT).any(-1)
    counts = [(groups.sum(has_B) > 0).sum() for has_B in (mask_BT.any(-1), with_signal_B)]
    return torch.stack(counts).double()


def _upweight_signal(advantage_BT: Tensor, mask_BT: Tensor, totals: Tensor) -> Tensor:
    groups, groups_with_signal = totals.to(advantage_BT.device).unbind()
    return (advantage_BT * (groups / groups_with_signal.clamp(min=1))).to(advantage_BT.dtype)


def _upweight_signal_thrice(advantage_BT: Tensor, mask_BT: Tensor, totals: Tensor) -> Tensor:
    rows, rows_with_signal = totals.to(advantage_BT.device).unbind()
    return (advantage_BT * (rows / rows_with_signal.clamp(min=1)).clamp(max=3)).to(advantage_BT.dtype)


WHITEN = AcrossRanks(_moments, _whiten)
"""Zero mean and unit variance (n - 1) over all trained tokens of the batch."""

UPWEIGHT_SIGNAL = AcrossRanks(_group_counts, _upweight_signal, by_group=True)
"""Scale by groups / groups with an advantage (LEAST_SIGNAL), so that the others do not shrink the step."""


def _over_tokens(value_B: Tensor, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask_BT.bool(), value_B[:, None], 0).to(dtype)


def _less_group_mean(reward_BT: Tensor, group_id_B: Tensor) -> tuple[Tensor, Tensor, Groups]:
    score_B = reward_BT.double().sum(-1)
    groups = Groups.of(group_id_B)
    return score_B - groups.rows(groups.mean(score_B)), score_B, groups


@built_in("grpo")
def grpo(
    reward_BT: Tensor,
    response_mask_BT: Tensor,
    group_id_B: Tensor,
    *,
    norm_adv_by_std_in_grpo: bool,
    epsilon: float = 1e-6,
) -> Advantages:
    """Outcome less the group's mean, over the group's standard deviation if asked, the same for all tokens of
    a row.

    A group of one row, or of equal outcomes, has advantage 0: it carries no signal.
    Source: DeepSeekMath (2024), section 4.1.2; without the deviation: Dr. GRPO, "Understanding R1-Zero-Like
    Training" (2025).
    """
    advantage_B, score_B, groups = _less_group_mean(reward_BT, group_id_B)
    if norm_adv_by_std_in_grpo:
        advantage_B = advantage_B / (groups.rows(groups.std(score_B)) + epsilon)
    return Advantages(_over_tokens(advantage_B, response_mask_BT, reward_BT.dtype))


@built_in("rloo")
def rloo(reward_BT: Tensor, response_mask_BT: Tensor, group_id_B: Tensor) -> Advantages:
    """Outcome less the mean outcome of the other rows of the group; 0 for a group of one row.

    Equal to n / (n - 1) times the distance from the group's mean. Source: "Back to Basics" (2024), section 3.
    """
    advantage_B, _, groups = _less_group_mean(reward_BT, group_id_B)
    scale_G = groups.count_G.double() / (groups.count_G - 1).clamp(min=1)
    return Advantages(_over_tokens(advantage_B * groups.rows(scale_G), response_mask_BT, reward_BT.dtype))


@built_in("opo")
def opo(reward_BT: Tensor, response_mask_BT: Tensor, group_id_B: Tensor) -> Advantages:
    """Outcome less the length-weighted mean outcome of the group, the baseline of least gradient variance.

    Length: trained tokens of the row. Source: "On-Policy RL with Optimal Reward Baseline" (2025), equation 8.
    """
    score_B = reward_BT.double().sum(-1)
    length_B = response_mask_BT.double().sum(-1)
    groups = Groups.of(group_id_B)
    baseline_G = groups.sum(length_B * score_B) / groups.sum(length_B).clamp(min=1)
    return Advantages(_over_tokens(score_B - groups.rows(baseline_G), response_mask_BT, reward_BT.dtype))


@built_in("optimal_token_baseline")
def optimal_token_baseline(
    reward_BT: Tensor,
    response_mask_BT: Tensor,
    group_id_B: Tensor,
    old_log_prob_BT: Tensor,
    old_prob_square_BT: Tensor,
) -> Advantages:
    """Reward to go of a trained token less the baseline of its step that has the least gradient variance.

    The baseline is the mean over the group's rows that have such a step, weighted by the squared norm of the
    gradient so far. That norm is of the logits: the sum of 1 - 2 p + sum of all words' p^2 over the row's
    trained tokens up to this one, with p the probability of the token. Where all were certain it is the plain
    mean. A step that one row alone has gives advantage 0. Source: Li et al., "The Optimal Token Baseline:
    Variance Reduction for Long-Horizon LLM-RL" (2026), with the logit-gradient proxy.
    """
    energy_BT = 1 - 2 * old_log_prob_BT.double().exp() + old_prob_square_BT.double()
    steps = _policy_steps(reward_BT, response_mask_BT, energy_BT.clamp(min=0))
    step_T = torch.arange(energy_BT.shape[1], device=energy_BT.device)
    has_BT = (step_T < steps.mask_BT.sum(-1, keepdim=True)).double()
    return_BT = discounted_sum(steps.reward_BT, 1.0)
    groups = Groups.of(group_id_B)
    weight_BT = has_BT * steps.value_BT.cumsum(-1)
    weight_BT = torch.where(groups.rows(groups.sum(weight_BT)) > 0, weight_BT, has_BT)
    baseline_GT = groups.sum(weight_BT * return_BT) / groups.sum(weight_BT)
    return Advantages(steps.unpack(return_BT - groups.rows(baseline_GT)).to(reward_BT.dtype))


@built_in("gpg", across_ranks=UPWEIGHT_SIGNAL)
def gpg(reward_BT: Tensor, response_mask_BT: Tensor, group_id_B: Tensor) -> Advantages:
    """Outcome less the group's mean, scaled up by the share of groups without signal in the whole batch.

    A row whose score is its group's mean has no signal, its group may have one.

    Source: "GPG: Group Policy Gradient" (2025), equation 7 with F_norm = 1; alpha is the AcrossRanks step.
    """
    advantage_B, _, _ = _less_group_mean(reward_BT, group_id_B)
    return Advantages(_over_tokens(advantage_B, response_mask_BT, reward_BT.dtype))


@built_in("maxrl")
def maxrl(reward_BT: Tensor, response_mask_BT: Tensor, group_id_B: Tensor) -> Advantages:
    """Outcome less the group's mean, over that mean: the gradient of the log of the success rate, where the
    plain one is that of the rate.

    0 in a group without a success. Scores are 0 or 1, or shares of a success; RewardError for a negative one.
    Source: Tajwar et al., "Maximum Likelihood Reinforcement Learning" (2026), the estimator that averages
    over the successes, less the mean of all scores.
    """
    advantage_B, score_B, groups = _less_group_mean(reward_BT, group_id_B)
    if bool((score_B < 0).any()):
        raise RewardError(
            f"algorithm.adv_estimator=maxrl with a reward of {float(score_B.min()):g}: it divides by the "
            "mean of a prompt's rewards, which stands for its success rate. Give rewards of 0 or more, or "
            "set algorithm.adv_estimator=grpo."
        )
    mean_B = groups.rows(groups.mean(score_B))
    advantage_B = torch.where(mean_B > 0, advantage_B / mean_B, 0)
    return Advantages(_over_tokens(advantage_B, response_mask_BT, reward_BT.dtype))


def _row_moments(advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    trained_B = mask_BT.bool().any(-1)
    row_B = advantage_BT.double().sum(-1) / mask_BT.bool().sum(-1).clamp(min=1)
    return torch.stack([trained_B.sum(), row_B.sum(), (row_B**2).sum()]).double()


def _normalize_rows(advantage_BT: Tensor, mask_BT: Tensor, totals: Tensor) -> Tensor:
    count, total, total_sq = totals.to(advantage_BT.device).unbind()
    mean = total / count.clamp(min=1)
    std = ((total_sq - count * mean**2).clamp(min=0) / (count - 1).clamp(min=1)).sqrt()
    normal_BT = (advantage_BT.double() - mean) / (std + 1e-6)
    return torch.where(mask_BT.bool(), normal_BT, 0).to(advantage_BT.dtype)


NORMALIZE_ROWS = AcrossRanks(_row_moments, _normalize_rows)
"""Zero mean and unit deviation (n - 1) over the batch's rows with a trained token; one advantage a row."""


@built_in("gdpo", across_ranks=NORMALIZE_ROWS)
def gdpo(
    reward_part_BK: Tensor,
    response_mask_BT: Tensor,
    group_id_B: Tensor,
    *,
    gdpo_rewards: Mapping[str, float],
    epsilon: float = 1e-6,
) -> Advantages:
    """Each reward less its group's mean and over its group's deviation, then their weighted sum, which is
    normalised over the batch.

    K: the rewards, in the order of gdpo_rewards (name -> weight). So a reward counts by its weight, whatever
    its scale, and rows that differ in any reward differ in the advantage. A reward that does not vary in a
    group counts nothing there. Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization for
    Multi-reward RL Optimization" (2026), section 3.
    """
    groups = Groups.of(group_id_B)
    advantage_B = torch.zeros(len(group_id_B), dtype=torch.float64, device=group_id_B.device)
    for part_B, weight in zip(reward_part_BK.double().unbind(-1), gdpo_rewards.values(), strict=True):
        distance_B = part_B - groups.rows(groups.mean(part_B))
        advantage_B += weight * distance_B / (groups.rows(groups.std(part_B)) + epsilon)
    return Advantages(_over_tokens(advantage_B, response_mask_BT, reward_part_BK.dtype))


def _cpgd_step(options: Mapping[str, Any]) -> AcrossRanks | None:
    by_filter = options["weight_factor_in_cpgd"] == "clip_filter_like_weight"
    return AcrossRanks(_row_counts, _upweight_signal_thrice) if by_filter else None


@built_in("cpgd", across_ranks=_cpgd_step)
def cpgd(
    reward_BT: Tensor,
    response_mask_BT: Tensor,
    group_id_B: Tensor,
    *,
    weight_factor_in_cpgd: str,
    epsilon: float = 1e-6,
) -> Advantages:
    """Outcome less the group's mean, times a weight: what CPGD's loss is used with.

    STD_weight: 1 / (standard deviation of the group + epsilon); clip_filter_like_weight: rows / rows with
    signal in the whole batch, at most 3; naive: 1. Source: "CPGD" (2025), section 3.
    """
    advantage_B, score_B, groups = _less_group_mean(reward_BT, group_id_B)
    if weight_factor_in_cpgd == "STD_weight":
        advantage_B = advantage_B / (groups.rows(groups.std(score_B)) + epsilon)
    return Advantages(_over_tokens(advantage_B, response_mask_BT, reward_BT.dtype))


@built_in("grpo_passk")
def grpo_passk(
    reward_BT: Tensor,
    response_mask_BT: Tensor,
    group_id_B: Tensor,
    *,
    norm_adv_by_std_in_grpo: bool,
    epsilon: float = 1e-6,
) -> Advantages:
    """The best row of a group gets its lead over the second best; all others get 0.

    Ties for the best have no lead: the whole group gets 0.
    Source: "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning" (2025),
    leave-one-out pass@k.
    """
    score_B = reward_BT.double().sum(-1)
    groups = Groups.of(group_id_B)
    best_B = score_B == groups.rows(groups.max(score_B))
    several_best_G = groups.sum(best_B) > 1
    rest_B = score_B.masked_fill(best_B, -torch.inf)
    second_G = torch.where(several_best_G, groups.max(score_B), groups.max(rest_B))
    second_G = torch.where(groups.count_G > 1, second_G, groups.max(score_B))
    advantage_B = torch.where(best_B, score_B - groups.rows(second_G), 0)
    if norm_adv_by_std_in_grpo:
        advantage_B = advantage_B / (groups.rows(groups.std(score_B)) + epsilon)
    return Advantages(_over_tokens(advantage_B, response_mask_BT, reward_BT.dtype))


def discounted_sum(value_BT: Tensor, discount: float) -> Tensor:
    """out[t] = sum over k >= t of discount^(k - t) * value[k], shape [B, T], in O(log T) vector operations.

    Doubles the window each round; all factors are powers of `discount` <= 1, so nothing is divided and
    rounding does not grow with T.
    """
    step, factor = 1, discount
    while step < value_BT.shape[-1] and factor != 0:
        value_BT = value_BT + factor * pad(value_BT[:, step:], (0, step))
        step, factor = 2 * step, factor * factor
    return value_BT


class _PolicySteps(NamedTuple):
    """The trained tokens of each row moved together: step s of row b is its s-th trained token. float64 [B,
    T]."""

    reward_BT: Tensor
    value_BT: Tensor
    step_BT: Tensor  # of each token: the step that it belongs to, -1 before the first
    mask_BT: Tensor

    def unpack(self, x_BT: Tensor) -> Tensor:
        return torch.where(self.mask_BT, x_BT.gather(-1, self.step_BT.clamp(min=0)), 0)


def _policy_steps(reward_BT: Tensor, mask_BT: Tensor, value_BT: Tensor | None = None) -> _PolicySteps:
    mask_BT = mask_BT.bool()
    num_rows, width = mask_BT.shape
    step_BT = mask_BT.long().cumsum(-1) - 1
    packed = reward_BT.new_zeros(2, num_rows, width + 1, dtype=torch.float64)
    outside = width  # a column for what belongs to no step, cut off below
    packed[0].scatter_add_(-1, step_BT.masked_fill(step_BT < 0, outside), reward_BT.double())
    if value_BT is not None:
        packed[1].scatter_(-1, step_BT.masked_fill(~mask_BT, outside), value_BT.double())
    return _PolicySteps(packed[0, :, :-1], packed[1, :, :-1], step_BT, mask_BT)


@built_in("gae", across_ranks=WHITEN)
def gae(
    reward_BT: Tensor, value_BT: Tensor, response_mask_BT: Tensor, *, gamma: float, lam: float
) -> Advantages:
    """Generalised advantage estimate and its return (advantage + value); the advantage is whitened over the
    batch.

    The value after a row's last trained token is 0, also for truncated rows.
    Source: Schulman et al., "High-Dimensional Continuous Control Using GAE" (2015), equation 16.
    """
    steps = _policy_steps(reward_BT, response_mask_BT, value_BT)
    next_value_BT = pad(steps.value_BT[:, 1:], (0, 1))
    delta_BT = steps.reward_BT + gamma * next_value_BT - steps.value_BT
    advantage_BT = discounted_sum(delta_BT, gamma * lam)
    return_BT = advantage_BT + steps.value_BT
    dtype = reward_BT.dtype
    return Advantages(steps.unpack(advantage_BT).to(dtype), steps.unpack(return_BT).to(dtype))


def _reward_to_go(reward_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    steps = _policy_steps(reward_BT, mask_BT)
    return steps.unpack(discounted_sum(steps.reward_BT, gamma))


@built_in("reinforce_plus_plus", across_ranks=WHITEN)
def reinforce_plus_plus(reward_BT: Tensor, response_mask_BT: Tensor, *, gamma: float) -> Advantages:
    """Discounted reward to go (KL penalties included when they are in the reward), whitened over the batch.

    Source: "REINFORCE++" (2025), equations 6 to 8.
    """
    return Advantages(_reward_to_go(reward_BT, response_mask_BT, gamma).to(reward_BT.dtype))


@built_in("reinforce_plus_plus_baseline", across_ranks=WHITEN)
def reinforce_plus_plus_baseline(
    reward_BT: Tensor, response_mask_BT: Tensor, group_id_B: Tensor
) -> Advantages:
    """Outcome less the group's mean, whitened over the batch rather than by the group's deviation.

    Source: "REINFORCE++" (2025), the variant with baseline.
    """
    advantage_B, _, _ = _less_group_mean(reward_BT, group_id_B)
    return Advantages(_over_tokens(advantage_B, response_mask_BT, reward_BT.dtype))


@built_in("remax")
def remax(reward_BT: Tensor, response_mask_BT: Tensor, baseline_score_B: Tensor) -> Advantages:
    """Reward to go less the score of the prompt's greedy response. Source: "ReMax" (2023), equation 4."""
    to_go_BT = _reward_to_go(reward_BT, response_mask_BT, 1.0)
    baseline_BT = _over_tokens(baseline_score_B.double(), response_mask_BT, torch.float64)
    return Advantages((to_go_BT - baseline_BT).to(reward_BT.dtype))
