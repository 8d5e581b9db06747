"""Losses that clients ask for by name, as Tinker's API defines them: sums over tokens, never means.

A mask is no part of them: a token with weight or advantage 0 counts nothing. Source of the formulas:
docs/losses.mdx of the cookbook of Thinking Machines' Tinker; CISPO: MiniMax-M1 (2025), section 3.1; DRO:
Richemond et al., "Offline Regularised Reinforcement Learning" (2024). Legend: [B, T] tokens, [B, T, K] of
cross_entropy with K targets each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


@dataclass(frozen=True)
class ClientLoss:
    """What a loss takes, and how it is computed."""

    sum_of: Callable[[Tensor, Inputs, Options], Tensor]
    """(log-probs of the target tokens at temperature 1, inputs, options) -> the sum, a scalar."""
    inputs: tuple[str, ...]
    """Of each datum, besides target_tokens; of the log-probs' shape."""
    options: dict[str, float] = field(default_factory=dict)
    """Numbers of loss_fn_config, with their defaults."""


def _cross_entropy(log_prob: Tensor, inputs: Inputs, options: Options) -> Tensor:
    return -(log_prob * inputs["weights"]).sum()


def _ratio(log_prob: Tensor, inputs: Inputs) -> Tensor:
    return (log_prob - inputs["logprobs"]).exp()


def _importance_sampling(log_prob: Tensor, inputs: Inputs, options: Options) -> Tensor:
    return -(_ratio(log_prob, inputs) * inputs["advantages"]).sum()


def _clipped(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _ppo(log_prob: Tensor, inputs: Inputs, options: Options) -> Tensor:
    ratio, advantage = _ratio(log_prob, inputs), inputs["advantages"]
    return -(ratio * advantage).minimum(_clipped(ratio, options) * advantage).sum()


def _cispo(log_prob: Tensor, inputs: Inputs, options: Options) -> Tensor:
    weight = _clipped(_ratio(log_prob, inputs), options).detach()
    return -(weight * log_prob * inputs["advantages"]).sum()


def _dro(log_prob: Tensor, inputs: Inputs, options: Options) -> Tensor:
    away = log_prob - inputs["logprobs"]
    return -(log_prob * inputs["advantages"] - options["beta"] / 2 * away.square()).sum()


_POLICY = ("logprobs", "advantages")
CLIENT_LOSSES = {
    "cross_entropy": ClientLoss(_cross_entropy, ("weights",)),
    "importance_sampling": ClientLoss(_importance_sampling, _POLICY),
    "ppo": ClientLoss(_ppo, _POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": ClientLoss(_cispo, _POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": ClientLoss(_dro, _POLICY, {"beta": 0.05}),
}
"""By the name that a client asks for. Bounds are of the ratio itself, not of its distance from 1."""
