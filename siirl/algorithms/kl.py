"""Estimates of KL(policy || reference) from sampled tokens, and the controllers of its coefficient.

Legend: B rows on this rank, T response tokens. The KL over the whole vocabulary is in full_kl.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from siirl.algorithms.aggregate import trained_only
from siirl.errors import ConfigError

MAX_LOG_RATIO = 20.0  # exp of it is finite in fp32, bf16 and fp16 accumulations alike


def kl_k1(log_prob_BT: Tensor, ref_log_prob_BT: Tensor) -> Tensor:
    """Per-token k1 estimate, log ratio: unbiased, may be negative; as a loss its expected gradient is 0."""
    return log_prob_BT - ref_log_prob_BT


LEAST_SLOPED = 0.01
"""Nats within which the slope of the absolute log ratio rises from -1 to 1."""


def kl_abs(log_prob_BT: Tensor, ref_log_prob_BT: Tensor) -> Tensor:
    """Absolute log ratio per token, in nats: a distance, not an estimate of KL.

    Its gradient is that of Huber's function: within LEAST_SLOPED nats it is proportional to the log ratio.
    The sign of a log ratio that is rounding, as that to a reference of the same weights, would be noise.
    Source: Huber, "Robust Estimation of a Location Parameter" (1964).
    """
    log_ratio_BT = log_prob_BT - ref_log_prob_BT
    slope_BT = (log_ratio_BT.detach() / LEAST_SLOPED).clamp(-1, 1)
    return log_ratio_BT.detach().abs() + slope_BT * (log_ratio_BT - log_ratio_BT.detach())


def kl_k2(log_prob_BT: Tensor, ref_log_prob_BT: Tensor) -> Tensor:
    """Per-token k2 estimate, half the squared log ratio: biased, but its gradient is an unbiased gradient of
    KL."""
    return 0.5 * (log_prob_BT - ref_log_prob_BT) ** 2


def kl_k3(log_prob_BT: Tensor, ref_log_prob_BT: Tensor) -> Tensor:
    """Per-token k3 estimate as siiRL and verl train with it: log ratio within 20 nats, estimate at most 10.

    No gradient beyond the bounds; within them unbiased and non-negative.
    """
    log_ratio_BT = (ref_log_prob_BT - log_prob_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(log_ratio_BT) - log_ratio_BT).clamp(max=10.0)


def kl_k3_exact(log_prob_BT: Tensor, ref_log_prob_BT: Tensor) -> Tensor:
    """Per-token k3 estimate without bounds: overflows where the log ratio passes 88 nats in fp32."""
    log_ratio_BT = ref_log_prob_BT - log_prob_BT
    return torch.expm1(log_ratio_BT) - log_ratio_BT


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl_k1,
    "k1": kl_k1,
    "abs": kl_abs,
    "mse": kl_k2,
    "k2": kl_k2,
    "k3": kl_k3,
    "low_var_kl": kl_k3,
    "k3_exact": kl_k3_exact,
}


def kl_estimate(name: str, log_prob_BT: Tensor, ref_log_prob_BT: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats, shape [B, T], with gradient; not masked.

    A name ending in "+" keeps the estimate's value and takes the gradient of k2, which is unbiased for the
    gradient of KL (that of k1 is 0 in expectation, that of k3 is the gradient of the reverse KL). No
    communication.
    Sources: Schulman, "Approximating KL divergence" (2020); "Rethinking KL Regularization in RLHF" (2025).
    """
    estimator = KL_ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None:
        raise ConfigError(
            f"KL estimator {name!r} is not known: known are {', '.join(KL_ESTIMATORS)}, "
            f"each also with a '+' at the end (its value with the gradient of k2)."
        )
    kl_BT = estimator(log_prob_BT, ref_log_prob_BT)
    return straight_through(kl_BT, log_prob_BT, ref_log_prob_BT) if name.endswith("+") else kl_BT


def straight_through(kl_BT: Tensor, log_prob_BT: Tensor, ref_log_prob_BT: Tensor) -> Tensor:
    """The values of kl_BT with the gradient of k2."""
    k2_BT = kl_k2(log_prob_BT, ref_log_prob_BT)
    return kl_BT.detach() + (k2_BT - k2_BT.detach())


def policy_ratio(log_prob_BT: Tensor, old_log_prob_BT: Tensor) -> Tensor:
    """Policy over old policy at each token, with gradient: the weight of a KL of tokens of the old one.

    A KL estimate times this has the KL of the current policy as its expectation, and the gradient of that:
    the ratio's own gradient is what a plain estimate lacks.
    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), unbiased KL estimate.
    """
    return (log_prob_BT - old_log_prob_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_in_reward(
    reward_BT: Tensor,
    log_prob_BT: Tensor,
    ref_log_prob_BT: Tensor,
    mask_BT: Tensor,
    *,
    kl_penalty: str,
    kl_coef: float,
) -> tuple[Tensor, Tensor]:
    """Reward less kl_coef times the KL estimate at each trained token: (reward_BT, kl_BT), both without
    gradient.

    kl_BT is zero where the mask is. Source: "Fine-Tuning Language Models from Human Preferences" (2019),
    equation 2.
    """
    log_prob_BT = trained_only(log_prob_BT.detach(), mask_BT)
    kl_BT = kl_estimate(kl_penalty, log_prob_BT, trained_only(ref_log_prob_BT, mask_BT))
    return reward_BT - kl_coef * kl_BT, kl_BT


@dataclass
class FixedKl:
    """A KL coefficient that stays as it is."""

    coef: float

    def update(self, kl: float, num_steps: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        """{"coef": ...}"""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the configured coefficient: it may have been changed on purpose between two runs."""


@dataclass
class AdaptiveKl:
    """A KL coefficient that moves in proportion to the relative distance of the measured KL from a target.

    Source: Ziegler et al. (2019), section 2.2.
    """

    coef: float
    target: float
    """Nats per token."""
    horizon: float
    """In samples."""

    def update(self, kl: float, num_steps: int) -> None:
        """Adjust after a step: kl is its mean KL over the whole batch (the same on all ranks), num_steps its
        rows."""
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """{"coef": ...}, so that a resumed run goes on with the coefficient it had."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the coefficient from a checkpoint."""
        self.coef = state["coef"]


KlController = FixedKl | AdaptiveKl


def kl_controller(
    kind: Literal["fixed", "adaptive"], kl_coef: float, target_kl: float, horizon: float
) -> KlController:
    """The controller that `algorithm.kl_ctrl` describes. ConfigError for another kind or sizes that cannot
    work."""
    if kind == "fixed":
        return FixedKl(kl_coef)
    if kind != "adaptive":
        raise ConfigError(f"algorithm.kl_ctrl.type={kind!r} is not known: known are fixed, adaptive.")
    if target_kl <= 0 or horizon <= 0:
        raise ConfigError(
            f"algorithm.kl_ctrl: target_kl={target_kl} and horizon={horizon} must be positive: the adaptive "
            f"controller divides by both. Set them, or type=fixed."
        )
    return AdaptiveKl(kl_coef, target_kl, horizon)
