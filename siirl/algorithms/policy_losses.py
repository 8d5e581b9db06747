"""Policy losses, picked by `actor_rollout_ref.actor.policy_loss.loss_mode`.

Legend: B rows of a micro-batch, T response tokens. Each is a pure function of (log_prob_BT, old_log_prob_BT,
advantage_BT, mask_BT) and keyword-only options; it returns the loss of every token, to be aggregated by
`aggregate_loss`. Only log_prob_BT carries gradient. With one optimizer step per rollout batch the caller may
pass log_prob_BT.detach() as the old one. Losses of the whole row give each token the row's ratio as its value
and the token's own log-prob as its gradient, so that weights of tokens (advantages, rollout correction) act
on those tokens. Where the mask is False anything may stand, inf and NaN too: it counts as 0. Nothing
communicates, and no token depends on another row, so any split of the rows gives the same loss.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siirl.algorithms.aggregate import TokenLoss, masked_row_mean, trained_only
from siirl.algorithms.kl import MAX_LOG_RATIO
from siirl.algorithms.registry import Registry, option_names, pick_options

PolicyLossFn = Callable[..., TokenLoss]
MIN_LOG_ROW_RATIO = math.log(1e-8)


@dataclass(frozen=True)
class PolicyLossSpec:
    """A named policy loss."""

    name: str
    fn: PolicyLossFn
    options: tuple[str, ...]
    """What it takes from the configuration, by keyword."""


POLICY_LOSSES: Registry[PolicyLossSpec] = Registry(
    "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode"
)


def register_policy_loss(*names: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Make a function known as a policy loss, under one or several names."""

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        for name in names:
            POLICY_LOSSES.add(PolicyLossSpec(name, fn, option_names(fn)))
        return fn

    return add


def compute_policy_loss(
    name: str,
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    options: Mapping[str, Any],
) -> TokenLoss:
    """Run a named policy loss; it takes of `options` what it declares. ConfigError for an unknown name."""
    spec = POLICY_LOSSES.get(name)
    picked = pick_options(name, spec.fn, options)
    columns = (trained_only(x_BT, mask_BT) for x_BT in (log_prob_BT, old_log_prob_BT, advantage_BT))
    return spec.fn(*columns, mask_BT.bool(), **picked)


def _log_ratio(log_prob_BT: Tensor, old_log_prob_BT: Tensor) -> Tensor:
    return (log_prob_BT - old_log_prob_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _row_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The geometric mean of the ratios of each row, at each of its tokens, without gradient."""
    mean_B = masked_row_mean(log_ratio_BT.detach(), mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return mean_B.exp()[:, None].expand_as(log_ratio_BT)


def _by_token(ratio_BT: Tensor, log_BT: Tensor) -> Tensor:
    """ratio_BT as value, ratio_BT times the gradient of log_BT as gradient."""
    return ratio_BT * (log_BT - log_BT.detach()).exp()


def _stats(log_ratio_BT: Tensor, **columns_BT: Tensor) -> dict[str, Tensor]:
    """ratio; ppo_kl: k1 estimate of KL(old || policy); approx_kl: its k3 estimate; and further columns."""
    log_ratio_BT = log_ratio_BT.detach()
    ratio_BT = log_ratio_BT.exp()
    stats = {
        "ratio": ratio_BT,
        "ppo_kl": -log_ratio_BT,
        "approx_kl": torch.expm1(log_ratio_BT) - log_ratio_BT,
    }
    return stats | {name: column_BT.detach().to(ratio_BT.dtype) for name, column_BT in columns_BT.items()}


def _clips(cut_BT: Tensor, log_ratio_BT: Tensor) -> dict[str, Tensor]:
    """clip_fraction: tokens that a bound of the ratio cuts; _low: those below 1, _high: those above."""
    return {
        "clip_fraction": cut_BT,
        "clip_fraction_low": cut_BT & (log_ratio_BT < 0),
        "clip_fraction_high": cut_BT & (log_ratio_BT > 0),
    }


@register_policy_loss("vanilla")
def vanilla(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> TokenLoss:
    """PPO's clipped objective, with separate bounds (clip-higher) and a floor for negative advantages (dual
    clip).

    With r the ratio and A the advantage: -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -c
    A. clip_fraction_lower: tokens that the floor cuts.
    Sources: PPO (2017), equation 7; DAPO (2025), equation 10; dual clip: "Mastering Complex Control in MOBA
    Games" (2020).
    """
    log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    ratio_BT = log_ratio_BT.exp()
    plain_BT = -advantage_BT * ratio_BT
    clipped_BT = -advantage_BT * ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    bounded_BT = torch.maximum(plain_BT, clipped_BT)
    floor_BT = -advantage_BT * clip_ratio_c
    negative_BT = advantage_BT < 0
    loss_BT = torch.where(negative_BT, torch.minimum(bounded_BT, floor_BT), bounded_BT)
    clips = _clips(clipped_BT > plain_BT, log_ratio_BT)
    beyond_floor_BT = negative_BT & (bounded_BT > floor_BT)
    return TokenLoss(loss_BT, _stats(log_ratio_BT, **clips, clip_fraction_lower=beyond_floor_BT))


@register_policy_loss("gspo")
def gspo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLoss:
    """Clipped objective of the row's length-normalised likelihood ratio (the geometric mean over its tokens).

    The token form: each token has the row's ratio s as value and s times the gradient of its own log-prob, so
    that advantages may differ within a row; where they do not, it is the form of the row. Typical bounds are
    about 3e-4 and 4e-4. Source: "Group Sequence Policy Optimization" (2025), equations 5, 7 and 13 to 15.
    """
    log_ratio_BT = log_prob_BT - old_log_prob_BT
    sequence_BT = _row_ratio(log_ratio_BT, mask_BT)
    ratio_BT = _by_token(sequence_BT, log_prob_BT)
    plain_BT = -advantage_BT * ratio_BT
    clipped_BT = -advantage_BT * ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    clips = _clips(clipped_BT > plain_BT, sequence_BT.log())
    stats = _stats(_log_ratio(log_prob_BT, old_log_prob_BT), **clips, sequence_ratio=sequence_BT)
    return TokenLoss(torch.maximum(plain_BT, clipped_BT), stats)


@register_policy_loss("gmpo", "geo_mean")
def gmpo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLoss:
    """Geometric mean over a row of token ratios, each clipped against the sign of the advantage, times the
    advantage.

    Advantage and sign are those of the row: of the mean over its tokens, as published. Each token has the
    gradient of its own ratio. The bounds are in log space: clip_ratio_low = clip_ratio_high = 0.4 is the
    paper's (e^-0.4, e^0.4). Source: "Geometric-Mean Policy Optimization" (2025), equation 4.
    """
    log_ratio_BT = log_prob_BT - old_log_prob_BT
    bounded_BT = log_ratio_BT.clamp(-clip_ratio_low, clip_ratio_high)
    advantage_B1 = masked_row_mean(advantage_BT, mask_BT)[:, None]
    sign_BT = advantage_B1.sign().expand_as(advantage_BT)
    kept_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, sign_BT * bounded_BT)
    ratio_BT = _by_token(_row_ratio(kept_BT, mask_BT), kept_BT)
    loss_BT = -advantage_B1 * ratio_BT
    cut_BT = (sign_BT != 0) & (sign_BT * bounded_BT < sign_BT * log_ratio_BT)
    bounded_log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    return TokenLoss(loss_BT, _stats(bounded_log_ratio_BT, **_clips(cut_BT, log_ratio_BT)))


@register_policy_loss("cispo")
def cispo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLoss:
    """REINFORCE with a clipped importance weight that takes no gradient, so that no token loses its own.

    Source: "MiniMax-M1" (2025), equations 4 and 5.
    """
    log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    ratio_BT = log_ratio_BT.detach().exp()
    weight_BT = ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    stats = _stats(log_ratio_BT, **_clips(weight_BT != ratio_BT, log_ratio_BT))
    return TokenLoss(-weight_BT * advantage_BT * log_prob_BT, stats)


@register_policy_loss("sapo")
def sapo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> TokenLoss:
    """A soft gate on the ratio instead of a clip: -A * 4 / tau * sigmoid(tau (r - 1)), tau by the sign of A.

    At r = 1 its gradient is that of the plain objective. Source: "Soft Adaptive Policy Optimization" (2025),
    equation 5.
    """
    log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    tau_BT = torch.full_like(advantage_BT, tau_neg).masked_fill(advantage_BT > 0, tau_pos)
    gate_BT = torch.sigmoid(tau_BT * torch.expm1(log_ratio_BT)) * 4 / tau_BT
    return TokenLoss(-gate_BT * advantage_BT, _stats(log_ratio_BT))


@register_policy_loss("gpg")
def gpg(log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> TokenLoss:
    """Plain policy gradient, -A log pi: no ratio and no clip. Source: "GPG: Group Policy Gradient" (2025),
    equation 7."""
    return TokenLoss(-advantage_BT * log_prob_BT, _stats(_log_ratio(log_prob_BT, old_log_prob_BT)))


@register_policy_loss("cpgd")
def cpgd(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    policy_drift_coeff: float,
) -> TokenLoss:
    """Clipped log ratio times advantage, and a penalty on the drift from the old policy.

    -min(log r A, clip(log r, log(1 - low), log(1 + high)) A) + policy_drift_coeff * (r - 1 - log r), the last
    term being the k3 estimate of KL(old || policy) on the old policy's samples.
    Source: "CPGD: Clipped Policy Gradient Optimization with Policy Drift" (2025), section 3.
    """
    log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    bounded_BT = log_ratio_BT.clamp(math.log1p(-clip_ratio_low), math.log1p(clip_ratio_high))
    plain_BT, clipped_BT = -advantage_BT * log_ratio_BT, -advantage_BT * bounded_BT
    drift_BT = torch.expm1(log_ratio_BT) - log_ratio_BT
    loss_BT = torch.maximum(plain_BT, clipped_BT) + policy_drift_coeff * drift_BT
    return TokenLoss(loss_BT, _stats(log_ratio_BT, **_clips(clipped_BT > plain_BT, log_ratio_BT)))


@register_policy_loss("clip_cov")
def clip_cov(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    picked_BT: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> TokenLoss:
    """PPO's clipped objective, without gradient for the picked tokens of high covariance.

    picked_BT: see pick_tokens. Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning
    Language Models" (2025), equations 13 and 14.
    """
    log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    ratio_BT = log_ratio_BT.exp()
    plain_BT = -advantage_BT * ratio_BT
    clipped_BT = -advantage_BT * ratio_BT.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss_BT = torch.where(picked_BT, 0, torch.maximum(plain_BT, clipped_BT))
    clips = _clips(clipped_BT > plain_BT, log_ratio_BT)
    return TokenLoss(loss_BT, _stats(log_ratio_BT, **clips, picked=picked_BT))


@register_policy_loss("kl_cov")
def kl_cov(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    picked_BT: Tensor,
    ppo_kl_coef: float,
) -> TokenLoss:
    """-r A, and for the picked tokens of high covariance ppo_kl_coef * |log r| on top.

    picked_BT: see pick_tokens. Source: as clip_cov, equations 15 and 16.
    """
    log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    penalty_BT = torch.where(picked_BT, ppo_kl_coef * log_ratio_BT.abs(), 0)
    return TokenLoss(-advantage_BT * log_ratio_BT.exp() + penalty_BT, _stats(log_ratio_BT, picked=picked_BT))


def _in_trust_region(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    divergence_BT: Tensor,
    bounds: tuple[float, float],
    ratio_cap: float,
) -> TokenLoss:
    """-min(r, ratio_cap) A log pi, without gradient of the weight and 0 outside the region.

    A token is outside if it is further from the old policy than its bound, and A would move it further away.
    bounds: of tokens that became less likely, and of those that became more likely.
    """
    log_ratio_BT = _log_ratio(log_prob_BT.detach(), old_log_prob_BT)
    rises_BT, falls_BT = (log_ratio_BT > 0) & (advantage_BT > 0), (log_ratio_BT < 0) & (advantage_BT < 0)
    low, high = bounds
    cut_BT = (falls_BT & (divergence_BT > low)) | (rises_BT & (divergence_BT > high))
    ratio_BT = log_ratio_BT.exp()
    weight_BT = torch.where(cut_BT, 0, ratio_BT.clamp(max=ratio_cap))
    clips = _clips(cut_BT, log_ratio_BT) | {"clip_fraction_lower": ~cut_BT & (ratio_BT > ratio_cap)}
    stats = _stats(log_ratio_BT, **clips, divergence=divergence_BT)
    return TokenLoss(-weight_BT * advantage_BT * log_prob_BT, stats)


@register_policy_loss("dppo_tv")
def dppo_tv(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_divergence_low: float,
    clip_divergence_high: float,
    ratio_cap: float,
) -> TokenLoss:
    """REINFORCE with a capped importance weight, without tokens outside a trust region of total variation.

    The divergence is that between (sampled token, all others) under both policies: |pi - pi_old| of the
    token; a ratio bound cuts rare tokens too early and frequent ones too late. clip_fraction_lower: tokens
    whose ratio the cap cuts. Source: DPPO, "Rethinking the Trust Region in LLM Reinforcement Learning"
    (2026), the binary approximation; section 5.4 for the cap.
    """
    divergence_BT = (log_prob_BT.detach().exp() - old_log_prob_BT.exp()).abs()
    bounds = (clip_divergence_low, clip_divergence_high)
    return _in_trust_region(log_prob_BT, old_log_prob_BT, advantage_BT, divergence_BT, bounds, ratio_cap)


@register_policy_loss("dppo_kl")
def dppo_kl(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_divergence_low: float,
    clip_divergence_high: float,
    ratio_cap: float,
) -> TokenLoss:
    """The same with a trust region of KL(old || policy), in nats.

    The divergence is that between (sampled token, all others) under both policies. Source: as dppo_tv.
    """
    log_ratio_BT = _log_ratio(log_prob_BT.detach(), old_log_prob_BT)
    old_BT, new_BT = old_log_prob_BT.double().exp(), log_prob_BT.detach().double().exp()
    rest_BT = (1 - old_BT).clamp(min=0)
    others_BT = torch.xlogy(rest_BT, rest_BT / (1 - new_BT).clamp(min=1e-12))
    divergence_BT = (others_BT - old_BT * log_ratio_BT).to(log_prob_BT.dtype)
    bounds = (clip_divergence_low, clip_divergence_high)
    return _in_trust_region(log_prob_BT, old_log_prob_BT, advantage_BT, divergence_BT, bounds, ratio_cap)


@register_policy_loss("dro")
def dro(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    dro_beta: float,
) -> TokenLoss:
    """Policy gradient with a quadratic penalty on the log ratio: -A log pi + dro_beta / 2 * (log r)^2.

    The advantage takes the place of the reward less the paper's value. The square is that of each token's log
    ratio, as trainers of language models have it; the paper squares that of the whole response.
    Source: Richemond et al., "Offline Regularised Reinforcement Learning for Large Language Models Alignment"
    (2024); "Kimi k1.5" (2025), policy optimization.
    """
    log_ratio_BT = _log_ratio(log_prob_BT, old_log_prob_BT)
    penalty_BT = 0.5 * dro_beta * log_ratio_BT**2
    return TokenLoss(penalty_BT - advantage_BT * log_prob_BT, _stats(log_ratio_BT))


@register_policy_loss("vespo")
def vespo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    vespo_k_pos: float,
    vespo_k_neg: float,
    vespo_lambda_pos: float,
    vespo_lambda_neg: float,
) -> TokenLoss:
    """REINFORCE with a smooth weight W^k exp(lambda (1 - W)) of the row, which takes no gradient.

    W is the product of the row's ratios, not normalised by its length; its log is held within (log 1e-8, 20),
    as published code has it. k and lambda are those of A's sign (0 counts as positive). The weight is 1 at
    W = 1, largest at W = k / lambda, and vanishes on both sides.
    Source: Shen et al., "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM
    Training" (2026), the kernel W^c1 exp(c2 (1 - W)).
    """
    log_ratio_BT = _log_ratio(log_prob_BT.detach(), old_log_prob_BT)
    log_weight_B1 = log_ratio_BT.sum(-1, keepdim=True).clamp(MIN_LOG_ROW_RATIO, MAX_LOG_RATIO)
    falls_BT = advantage_BT < 0
    k_BT = torch.full_like(advantage_BT, vespo_k_pos).masked_fill(falls_BT, vespo_k_neg)
    lambda_BT = torch.full_like(advantage_BT, vespo_lambda_pos).masked_fill(falls_BT, vespo_lambda_neg)
    weight_BT = (k_BT * log_weight_B1 - lambda_BT * torch.expm1(log_weight_B1)).exp()
    stats = _stats(log_ratio_BT, sequence_weight=weight_BT)
    return TokenLoss(-weight_BT * advantage_BT * log_prob_BT, stats)


@register_policy_loss("sft")
def sft(log_prob_BT: Tensor, old_log_prob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> TokenLoss:
    """The negative log-likelihood of each token, in nats: supervised fine-tuning on responses of the data.

    Neither the old log-probs nor the advantages have a part in it.
    """
    return TokenLoss(-log_prob_BT, {})
