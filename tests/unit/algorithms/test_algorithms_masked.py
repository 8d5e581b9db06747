"""What stands at tokens that are not trained changes nothing: inf and NaN in any input of any loss."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.advantages import ADVANTAGES, compute_advantage
from siirl.algorithms.kl import KL_ESTIMATORS, kl_in_reward
from siirl.algorithms.policy_losses import POLICY_LOSSES
from siirl.algorithms.rollout_correction import Correction, correction_stats, correction_weights
from siirl.algorithms.stats import advantage_stats, explained_variance_sums
from siirl.algorithms.token_picks import pick_tokens
from siirl.config import Config, load_config, with_overrides
from siirl.config.algorithm_table import LOSSES
from siirl.config.root import all_keys
from siirl.engines.train.base import BatchCounts, TokenOutputs
from siirl.nodes.policy_loss import make_loss_fn, policy_loss_options
from siirl.nodes.value_model import make_value_loss_fn

pytestmark = pytest.mark.heavy

ACTOR = "actor_rollout_ref.actor"
B, T = 5, 6
GARBAGE = (math.inf, -math.inf, math.nan)
OUTPUTS = ("log_prob", "entropy", "full_kl", "value")
COLUMNS = ("old_log_prob", "rollout_log_prob", "ref_log_prob", "advantage", "return_", "value")
KL_TYPES = all_keys()[f"{ACTOR}.kl_loss_type"].rule.choices
WEIGHTS = all_keys()[f"{ACTOR}.rollout_correction.weight"].rule.choices
LEVELS = all_keys()[f"{ACTOR}.rollout_correction.level"].rule.choices
REJECTS = all_keys()[f"{ACTOR}.rollout_correction.reject"].rule.choices


def randn(seed: int) -> Tensor:
    return torch.randn(B, T, generator=torch.Generator().manual_seed(seed))


def mask() -> Tensor:
    """With holes, and a row without any trained token."""
    mask_BT = randn(0) > -0.4
    mask_BT[3] = False
    return mask_BT


@functools.cache
def base_config() -> Config:
    return load_config([])


def inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the model says and what the batch holds, all of it finite."""
    old = -0.2 - randn(1).abs()
    outputs = {"log_prob": old + 0.3 * randn(2), "entropy": randn(3).abs(), "full_kl": randn(4).abs()}
    outputs["value"] = randn(5)
    columns = {"old_log_prob": old, "rollout_log_prob": old + 0.2 * randn(6), "advantage": randn(8)}
    columns |= {"ref_log_prob": old + 0.5 * randn(7), "return_": randn(9), "value": randn(10)}
    return outputs, columns


def spoiled(columns: dict[str, Tensor], names: tuple[str, ...], garbage: float) -> dict[str, Tensor]:
    return {
        name: torch.where(mask(), value, garbage) if name in names else value
        for name, value in columns.items()
    }


def loss_and_gradients(loss_fn: Any, names: tuple[str, ...], garbage: float) -> tuple[Any, ...]:
    """The loss, the gradients of what the model says, and the metrics, with garbage in some of the inputs."""
    outputs, columns = inputs()
    outputs, columns = spoiled(outputs, names, garbage), spoiled(columns, names, garbage)
    leaves = {name: value.clone().requires_grad_() for name, value in outputs.items()}
    rows = TensorDict(columns | {"response_mask": mask(), "picked": randn(11) > 0}, batch_size=[B])
    counts = BatchCounts(float(mask().sum()), float(mask().any(-1).sum()), T)
    loss, metrics = loss_fn(TokenOutputs(**{f"{k}_BT": v for k, v in leaves.items()}), rows, counts)
    loss.backward()
    grads = {name: leaf.grad if leaf.grad is not None else torch.zeros(B, T) for name, leaf in leaves.items()}
    return loss.detach(), grads, metrics.read().values()


def check(loss_fn: Any, used: tuple[str, ...]) -> None:
    """NaN in each input, and all garbage in all at once, gives loss, gradients, metrics of the clean ones."""
    want_loss, want, want_metrics = loss_and_gradients(loss_fn, (), 0.0)
    assert any(grad.any() for grad in want.values())
    assert not any(grad[~mask()].any() for grad in want.values())
    each = [((name,), math.nan) for name in used]
    for names, garbage in (*each, *((used, garbage) for garbage in GARBAGE)):
        loss, grads, metrics = loss_and_gradients(loss_fn, names, garbage)
        torch.testing.assert_close(loss, want_loss, rtol=0, atol=0)
        torch.testing.assert_close(grads, want, rtol=0, atol=0)
        assert metrics == want_metrics, (names, garbage)


def actor_loss(begins: bool = False, **keys: Any) -> Any:
    cfg = with_overrides(base_config(), {f"{ACTOR}.{name}": x for name, x in keys.items()})
    return make_loss_fn(cfg, begins=begins)


USED = tuple(name for name in (*OUTPUTS, *COLUMNS) if name not in ("return_", "value"))


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_no_policy_loss_sees_what_is_not_trained(name):
    check(actor_loss(**{"policy_loss.loss_mode": name, "entropy_coeff": 0.1}), USED)


@pytest.mark.parametrize("name", KL_TYPES)
def test_no_kl_of_the_loss_sees_what_is_not_trained(name):
    check(actor_loss(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=name), USED)


PAIRS = [
    pytest.param(weight, reject, marks=[pytest.mark.slow] * (number % len(WEIGHTS) != WEIGHTS.index(weight)))
    for number, reject in enumerate(REJECTS)
    for weight in WEIGHTS
]
"""Each weight with each way to reject; each of either is in one that is quick."""


@pytest.mark.parametrize(("weight", "reject"), PAIRS)
def test_no_correction_sees_what_is_not_trained(weight, reject):
    for level in LEVELS:
        keys = {"weight": weight, "level": level, "reject": reject, "reject_divergence": 0.1}
        check(actor_loss(**{f"rollout_correction.{name}": value for name, value in keys.items()}), USED)
    log_ratio = randn(2)
    correction = Correction(weight=weight, reject=reject, reject_divergence=0.1)
    want = correction_weights(log_ratio, mask(), correction)[mask()]
    for garbage in GARBAGE:
        bad = torch.where(mask(), log_ratio, garbage)
        weights = correction_weights(bad, mask(), correction)
        assert weights.isfinite().all() and torch.equal(weights[mask()], want)
        stats = correction_stats(bad, weights, mask()).read().values()
        assert all(math.isfinite(value) for value in stats.values())


def test_the_value_loss_does_not_see_what_is_not_trained():
    check(make_value_loss_fn(base_config().critic), ("value", "return_"))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_kl_in_the_reward_sees_what_is_not_trained(name, garbage):
    _, columns = inputs()
    pairs = ((columns, columns), (spoiled(columns, COLUMNS, garbage), spoiled(columns, COLUMNS, garbage)))
    want, got = (
        kl_in_reward(
            torch.zeros(B, T), a["old_log_prob"], b["ref_log_prob"], mask(), kl_penalty=name, kl_coef=0.1
        )
        for a, b in pairs
    )
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.picks_tokens])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_pick_sees_what_is_not_trained(name, garbage):
    _, columns = inputs()
    options = policy_loss_options(base_config()) | {"clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2}
    options |= {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    want, got = (
        pick_tokens(name, x["old_log_prob"], x["advantage"], mask(), randn(12), options)
        for x in (columns, spoiled(columns, COLUMNS, garbage))
    )
    assert torch.equal(got, want) and want.any()


@pytest.mark.parametrize("name", ADVANTAGES.names())
@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_estimator_sees_values_of_what_is_not_trained(name, garbage):
    """The value of a token that is not trained is whatever a critic says; its reward is the environment's."""
    turn = torch.where(mask(), torch.arange(T).div(3, rounding_mode="floor").expand(B, T), -1)
    fields = {
        "reward": torch.zeros(B, T),
        "response_mask": mask(),
        "group_id": torch.tensor([0, 0, 1, 1, 1]),
        "baseline_score": torch.zeros(B),
        "old_log_prob": torch.full((B, T), -0.5),
        "old_prob_square": torch.full((B, T), 0.5),
        "turn_id": turn,
        "episode_id": torch.arange(B),
        "other_turns": torch.empty(0, 4, dtype=torch.float64),
        "reward_part": torch.arange(B).float()[:, None],
    }
    fields["reward"][:, -1] = torch.arange(B).float()
    config = base_config().algorithm
    names = ("norm_adv_by_std_in_grpo", "gamma", "lam", "weight_factor_in_cpgd")
    options = {key: getattr(config, key) for key in names} | {"gdpo_rewards": {"score": 1.0}}
    value = randn(13)
    want, got = (
        compute_advantage(name, fields | {"value": x}, options)
        for x in (value, torch.where(mask(), value, garbage))
    )
    assert want.advantage_BT.any()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    bad = torch.where(mask(), want.advantage_BT, garbage)
    assert advantage_stats(bad, mask()).values() == advantage_stats(want.advantage_BT, mask()).values()
    sums = (explained_variance_sums(x, bad, mask()) for x in (value, torch.where(mask(), value, garbage)))
    assert torch.equal(*sums)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_log_prob_distance_is_that_of_trainer_and_engine_or_not_there(recompute, steps, begins):
    """Never 0 because the engine is compared with itself; the first step's own are those of before it."""
    _, columns = inputs()
    loss_fn = actor_loss(begins, recompute_old_log_prob=recompute, ppo_mini_batch_size=128 // steps)
    _, _, metrics = loss_and_gradients(loss_fn, (), 0.0)
    outputs, _ = inputs()
    own = steps == 1 or (begins and not recompute)
    ours = outputs["log_prob"] if own else columns["old_log_prob"]
    want = (ours - columns["rollout_log_prob"])[mask()].abs()
    if steps > 1 and not recompute and not begins:
        assert "rollout_log_prob_diff" not in metrics and "rollout_log_prob_diff_max" not in metrics
    else:
        assert metrics["rollout_log_prob_diff"] == pytest.approx(float(want.mean()))
        assert metrics["rollout_log_prob_diff_max"] == pytest.approx(float(want.max()))


def test_a_loss_of_the_users_own_gets_nothing_of_what_is_not_trained():
    seen = SimpleNamespace()

    def own(log_prob_BT, old_log_prob_BT, advantage_BT, mask_BT):
        seen.columns = (log_prob_BT, old_log_prob_BT, advantage_BT)
        return POLICY_LOSSES.get("gpg").fn(log_prob_BT, old_log_prob_BT, advantage_BT, mask_BT)

    from siirl.algorithms.policy_losses import compute_policy_loss, register_policy_loss

    register_policy_loss("test_own")(own)
    try:
        bad = torch.where(mask(), randn(1), math.nan)
        compute_policy_loss("test_own", bad, bad, bad, mask(), {})
    finally:
        del POLICY_LOSSES._specs["test_own"]
    assert all((column[~mask()] == 0).all() for column in seen.columns)
