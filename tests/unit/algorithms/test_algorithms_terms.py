"""KL, aggregation, reward shaping, statistics and rollout correction."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from siirl.algorithms.aggregate import aggregate_loss, masked_row_mean, prompt_shares
from siirl.algorithms.full_kl import linear_full_kl
from siirl.algorithms.groups import is_varied
from siirl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKl,
    kl_controller,
    kl_estimate,
    kl_in_reward,
    straight_through,
)
from siirl.algorithms.policy_losses import POLICY_LOSSES, compute_policy_loss
from siirl.algorithms.rewards import overlong_penalty, score_to_token_reward
from siirl.algorithms.rollout_correction import (
    accepted_rows,
    correction_stats,
    importance_ratio,
    masked_weight,
    truncated_weight,
)
from siirl.algorithms.stats import (
    advantage_stats,
    explained_variance,
    explained_variance_sums,
    group_stats,
    length_stats,
)
from siirl.config.actor import KL_TYPES
from siirl.config.algorithm_table import AGGREGATIONS
from siirl.errors import ConfigError

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
OPTIONS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 2.0,
    "tau_pos": 1.0,
    "tau_neg": 1.1,
    "policy_drift_coeff": 0.1,
    "clip_divergence_low": 0.05,
    "clip_divergence_high": 0.08,
    "ratio_cap": 1.5,
    "ppo_kl_coef": 0.3,
    "dro_beta": 0.2,
    "vespo_k_pos": 2.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_pos": 3.0,
    "vespo_lambda_neg": 2.0,
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def two_policies() -> tuple[Tensor, Tensor]:
    """Logits of a policy (with gradient) and of a reference, over 6 tokens."""
    return randn(6).requires_grad_(), randn(6, seed=1)


def exact_kl(p: Tensor, q: Tensor) -> Tensor:
    p, q = p.softmax(-1), q.softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


@pytest.mark.parametrize("name", ["k1", "k3", "k3_exact", "kl"])
def test_k1_and_k3_have_the_kl_as_their_expectation(name):
    policy, reference = two_policies()
    estimates = kl_estimate(name, policy.log_softmax(-1), reference.log_softmax(-1))
    expectation = (policy.softmax(-1) * estimates).sum()
    torch.testing.assert_close(expectation, exact_kl(policy, reference), **CLOSE)


@pytest.mark.parametrize(
    "name", ["kl+", "k1+", "abs+", "mse+", "k2+", "k3+", "k3_exact+", "low_var_kl+", "k2"]
)
def test_the_straight_through_gradient_is_that_of_the_kl_in_expectation(name):
    policy, reference = two_policies()
    estimates = kl_estimate(name, policy.log_softmax(-1), reference.log_softmax(-1))
    got = torch.autograd.grad((policy.softmax(-1).detach() * estimates).sum(), policy)[0]
    want = torch.autograd.grad(exact_kl(policy, reference), policy)[0]
    torch.testing.assert_close(got, want, **CLOSE)
    plain = kl_estimate(name.removesuffix("+"), policy.log_softmax(-1), reference.log_softmax(-1))
    torch.testing.assert_close(estimates, plain, **CLOSE)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_kl_estimate_follows_its_formula(name):
    formulas = {
        "kl": lambda d: d,
        "abs": abs,
        "mse": lambda d: d * d / 2,
        "k3": lambda d: min(math.exp(-max(-20.0, min(20.0, d))) - 1 + max(-20.0, min(20.0, d)), 10.0),
        "k3_exact": lambda d: math.exp(-d) - 1 + d,
    }
    formula = formulas[{"k1": "kl", "k2": "mse", "low_var_kl": "k3"}.get(name, name)]
    for difference in (-30.0, -3.0, -1e-3, 0.0, 0.5, 4.0, 40.0):
        ref = torch.tensor([-2.0], dtype=torch.float64)
        got = kl_estimate(name, ref + difference, ref)
        assert math.isclose(got.item(), formula(difference), rel_tol=1e-9, abs_tol=1e-12)


def test_the_configuration_offers_the_estimators_that_exist():
    assert set(KL_TYPES) == set(KL_ESTIMATORS)


@pytest.mark.parametrize("name", ["k3", "low_var_kl"])
def test_k3_is_bounded_as_scripts_of_siirl_and_verl_expect_it(name):
    far = torch.tensor([-200.0], requires_grad=True)
    kl = kl_estimate(name, far, torch.zeros(1))
    assert kl.item() == 10.0 and torch.autograd.grad(kl.sum(), far)[0].item() == 0.0
    in_reward, _ = kl_in_reward(
        torch.zeros(1, 1), far[None], torch.zeros(1, 1), torch.ones(1, 1), kl_penalty=name, kl_coef=0.1
    )
    assert in_reward.item() == pytest.approx(-1.0)
    assert kl_estimate("k3_exact", far, torch.zeros(1)).isinf()


def both_logits(seed: int = 0) -> tuple[Tensor, ...]:
    """Hidden states and output heads of a policy (with gradient) and of its reference, of other widths."""
    policy = randn(23, 6, seed=seed).requires_grad_(), randn(19, 6, seed=seed + 1).requires_grad_()
    return *policy, randn(23, 5, seed=seed + 2), randn(19, 5, seed=seed + 3)


@pytest.mark.parametrize(("chunk", "cap"), [(1, None), (7, 1.5), (23, None), (100, 1.5)])
def test_the_full_kl_has_the_value_and_gradient_of_all_logits(chunk, cap):
    hidden, weight, ref_hidden, ref_weight = both_logits()
    mix = torch.linspace(-1, 2, 23, dtype=torch.float64)
    got = linear_full_kl(hidden, weight, ref_hidden, ref_weight, 0.7, chunk=chunk, cap=cap)
    full = [hidden @ weight.t(), ref_hidden @ ref_weight.t()]
    want = exact_kl(*((x if cap is None else cap * torch.tanh(x / cap)) / 0.7 for x in full))
    torch.testing.assert_close(got, want, **CLOSE)
    got_grads = torch.autograd.grad((mix * got).sum(), (hidden, weight))
    want_grads = torch.autograd.grad((mix * want).sum(), (hidden, weight))
    torch.testing.assert_close(got_grads, want_grads, **CLOSE)


def test_the_full_kl_of_bf16_inputs_is_exact_beyond_their_rounding():
    inputs = [x.detach().bfloat16() for x in both_logits()]
    got = linear_full_kl(*inputs, 1.0, chunk=8)
    logits = [(a @ b.t()).double() for a, b in (inputs[:2], inputs[2:])]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact_kl(*logits), rtol=1e-4, atol=1e-5)
    same = linear_full_kl(inputs[0], inputs[1], inputs[0], inputs[1], 1.0)
    assert (same == 0).all()
    empty = linear_full_kl(inputs[0][:0], inputs[1], inputs[2][:0], inputs[3], 1.0)
    assert empty.shape == (0,)


def test_k2_takes_the_place_of_the_gradient_only():
    log_prob, ref = randn(5).requires_grad_(), randn(5, seed=1)
    kl = straight_through(3.0 * log_prob, log_prob, ref)
    torch.testing.assert_close(kl, 3.0 * log_prob)
    torch.testing.assert_close(torch.autograd.grad(kl.sum(), log_prob)[0], (log_prob - ref).detach())


def test_an_unknown_kl_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="KL estimator 'k4' is not known: known are kl, k1"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))


def test_kl_in_reward_is_taken_at_trained_tokens_only():
    reward, log_prob, ref = torch.zeros(1, 3), torch.tensor([[-1.0, -2.0, -3.0]]), torch.full((1, 3), -1.5)
    mask = torch.tensor([[True, False, True]])
    got, kl = kl_in_reward(reward, log_prob, ref, mask, kl_penalty="k1", kl_coef=0.1)
    torch.testing.assert_close(kl, torch.tensor([[0.5, 0.0, -1.5]]))
    torch.testing.assert_close(got, torch.tensor([[-0.05, 0.0, 0.15]]))


def test_the_adaptive_controller_moves_towards_its_target_and_resumes():
    controller = kl_controller("adaptive", 0.1, 0.05, 1000)
    controller.update(0.055, 100)  # 10% above the target
    assert math.isclose(controller.coef, 0.1 * (1 + 0.1 * 100 / 1000))
    before = controller.coef
    controller.update(5.0, 100)  # bounded at 20%
    assert math.isclose(controller.coef, before * 1.02)
    controller.update(0.0, 100)
    assert math.isclose(controller.coef, before * 1.02 * 0.98)
    controller.update(float("nan"), 100)
    resumed = AdaptiveKl(1.0, 0.05, 1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == controller.coef
    fixed = kl_controller("fixed", 0.3, 0.05, 1000)
    fixed.update(5.0, 100)
    assert fixed.coef == 0.3


@pytest.mark.parametrize(
    ("kind", "target", "horizon"), [("adaptive", 0.0, 10), ("adaptive", 0.1, 0), ("fix", 0.1, 10)]
)
def test_a_controller_that_cannot_work_is_refused(kind, target, horizon):
    with pytest.raises(ConfigError, match=r"algorithm\.kl_ctrl"):
        kl_controller(kind, 0.1, target, horizon)


def test_each_aggregation_follows_its_formula():
    loss = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    want = {
        "token-mean": 7 / 3,
        "seq-mean-token-sum": 7 / 2,
        "seq-mean-token-mean": (1.5 + 4) / 2,
        "seq-mean-token-sum-norm": 7 / 2 / 10,
    }
    assert {*want, "prompt-mean"} == set(AGGREGATIONS)  # tests/unit/algorithms/test_policy_loss_terms.py
    for mode, value in want.items():
        assert math.isclose(aggregate_loss(loss, mask, mode, 3, 2, 10).item(), value)
    with pytest.raises(ConfigError, match="loss_agg_mode='mean' is not known"):
        aggregate_loss(loss, mask, "mean", 3, 2, 10)


def test_garbage_at_untrained_tokens_does_not_reach_loss_or_gradient():
    loss = torch.tensor([[1.0, math.nan], [math.inf, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    for mode in AGGREGATIONS:
        total = aggregate_loss(loss, mask, mode, 2, 2, 4, torch.tensor([0.5, 0.5]))
        grad = torch.autograd.grad(total, loss)[0]
        assert total.isfinite() and grad.isfinite().all() and (grad[~mask] == 0).all()


@st.composite
def splits(draw):
    rows = draw(st.integers(1, 7))
    order = draw(st.permutations(range(rows)))
    cuts = sorted(draw(st.sets(st.integers(1, rows), max_size=3)))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)], draw(st.integers(0, 10**6))


@given(splits(), st.sampled_from(AGGREGATIONS), st.sampled_from(POLICY_LOSSES.names()))
@settings(max_examples=80, deadline=None)
def test_loss_and_gradient_do_not_depend_on_how_rows_are_split(split, mode, name):
    parts, seed = split
    rows, width = sum(map(len, parts)), 5
    generator = torch.Generator().manual_seed(seed)
    old, shift, advantage = -torch.rand(3, rows, width, generator=generator, dtype=torch.float64)
    log_prob, advantage = (old - shift - 0.5).requires_grad_(), advantage + 0.5
    mask = torch.rand(rows, width, generator=generator) < 0.6
    picked = torch.rand(rows, width, generator=generator) < 0.3
    num_tokens, num_rows = float(mask.sum()), float(mask.any(-1).sum())
    prompt = torch.arange(rows) // 3
    prompt_share = prompt_shares(torch.zeros(3).index_add_(0, prompt, mask.sum(-1).float()), prompt)

    def share(index: list[int]) -> Tensor:
        options = {**OPTIONS, "picked_BT": picked[index]}
        token = compute_policy_loss(name, log_prob[index], old[index], advantage[index], mask[index], options)
        entropy = log_prob[index].exp()
        sizes = (num_tokens, num_rows, 16, prompt_share[index])
        return aggregate_loss(token.loss_BT - 0.01 * entropy, mask[index], mode, *sizes)

    whole = share(list(range(rows)))
    want = torch.autograd.grad(whole, log_prob)[0]
    total = sum(share(list(part)) for part in parts)
    torch.testing.assert_close(total, whole, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(total, log_prob)[0], want, **CLOSE)


def test_the_score_lands_on_the_last_response_token():
    reward = score_to_token_reward(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([3, 1, 0]), 3)
    assert reward.tolist() == [[0, 0, 1], [-2, 0, 0], [0, 0, 0]]
    assert score_to_token_reward(torch.zeros(0), torch.zeros(0, dtype=torch.long), 4).shape == (0, 4)


def test_the_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([0, 80, 85, 90, 100, 120])
    got = overlong_penalty(lengths, 100, 20, 2.0)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -0.5, -1.0, -2.0, -2.0]))


def test_groups_that_do_not_vary_are_found_in_any_order():
    score, ids = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.5, 0.2]), torch.tensor([9, -1, 4, 9, 4, -1])
    assert is_varied(score, ids).tolist() == [False, True, False, False, False, True]
    assert group_stats(score, ids).values() == {"zero_std_groups": pytest.approx(2 / 3)}
    assert group_stats(score[:0], ids[:0]).values() == {}


def test_statistics_of_parts_merge_to_those_of_the_whole():
    advantage, mask = randn(6, 4), randn(6, 4, seed=1) > 0
    whole, parts = advantage_stats(advantage, mask), advantage_stats(advantage[:1], mask[:1])
    parts.merge(advantage_stats(advantage[1:], mask[1:]))
    parts.merge(advantage_stats(advantage[:0], mask[:0]))
    kept = advantage[mask].tolist()
    got = parts.values()
    assert got == pytest.approx(whole.values())
    assert math.sqrt(got["square_mean"] - got["mean"] ** 2) == pytest.approx(statistics.pstdev(kept))
    assert (got["max"], got["min"]) == (max(kept), min(kept))


def test_an_advantage_that_is_the_rounding_of_a_kl_is_no_signal():
    """Equal scores less a KL of equal policies differ by the layout of the ranks, about 1e-9."""
    advantage, mask = torch.tensor([[0.5, -3e-9, 2e-9, 0.0]]), torch.ones(1, 4)
    assert advantage_stats(advantage, mask).values()["signal"] == 0.25


def test_lengths_are_told_apart_by_outcome():
    got = length_stats(torch.tensor([10, 20, 60]), torch.tensor([1.0, 0.0, -1.0])).values()
    assert got == {"length_success": 10.0, "length_failure": 40.0}


def test_explained_variance_adds_up_over_ranks():
    return_, noise, mask = randn(8, 5), randn(8, 5, seed=1), torch.ones(8, 5, dtype=torch.bool)
    value = return_ + 0.3 * noise
    sums = sum(explained_variance_sums(value[i::2], return_[i::2], mask[i::2]) for i in range(2))
    want = 1 - (0.3 * noise).var(correction=0) / return_.var(correction=0)
    assert explained_variance(sums) == pytest.approx(want.item())
    assert explained_variance(explained_variance_sums(value, value, mask)) == pytest.approx(1.0)
    assert explained_variance(explained_variance_sums(value, torch.ones_like(value), mask)) == 0.0
    assert explained_variance(explained_variance_sums(value[:0], value[:0], mask[:0])) == 0.0


RATIOS = [[0.5, 2.0, 8.0], [1.0, 0.25, 1.0]]
MASK = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("level", "want"),
    [
        ("token", [[0.5, 2.0, 1.0], [1.0, 0.25, 1.0]]),
        ("sequence", [[1.0, 1.0, 1.0], [0.25, 0.25, 0.25]]),
        ("geometric", [[1.0, 1.0, 1.0], [0.25 ** (1 / 3)] * 3]),
    ],
)
def test_the_importance_ratio_is_taken_at_its_level(level, want):
    got = importance_ratio(torch.tensor(RATIOS).log(), MASK, level)
    torch.testing.assert_close(got, torch.tensor(want))


@pytest.mark.parametrize("junk", [math.nan, math.inf, 7.0])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_what_stands_at_tokens_that_are_not_trained_moves_no_ratio_or_mean(level, junk):
    mask = torch.tensor([[True, False, True], [False, False, False]])
    log_ratio = torch.tensor([[0.3, junk, -0.1], [junk, junk, junk]])
    got = importance_ratio(log_ratio, mask, level)
    clean = importance_ratio(log_ratio.masked_fill(~mask, 0), mask, level)
    torch.testing.assert_close(got, clean)
    assert got[~mask].tolist() == [1.0] * 4 and not got[mask].eq(1).any()
    torch.testing.assert_close(masked_row_mean(log_ratio, mask), torch.tensor([0.1, 0.0]))


def test_weights_are_truncated_or_masked_at_their_bounds():
    log_ratio = torch.tensor(RATIOS).log().requires_grad_()
    truncated = truncated_weight(log_ratio, MASK, level="token", cap=1.5)
    torch.testing.assert_close(truncated, torch.tensor([[0.5, 1.5, 1.0], [1.0, 0.25, 1.0]]))
    masked = masked_weight(log_ratio, MASK, level="token", low=0.4, high=1.5)
    torch.testing.assert_close(masked, torch.tensor([[0.5, 0.0, 1.0], [1.0, 0.0, 1.0]]))
    assert not truncated.requires_grad and not masked.requires_grad
    stats = correction_stats(log_ratio.detach(), masked, MASK).read().values()
    assert stats["masked"] == pytest.approx(2 / 5) and stats["weight"] == pytest.approx(2.5 / 5)
    assert stats["ratio"] == pytest.approx((0.5 + 2 + 1 + 0.25 + 1) / 5)
    assert stats["kl_k1"] == pytest.approx(-math.log(0.25) / 5)


def test_rows_are_rejected_by_their_statistic():
    log_ratio = torch.tensor(RATIOS).log()
    bounds = {"low": 0.6, "high": 1.5}
    assert accepted_rows(log_ratio, MASK, level="sequence", **bounds).tolist() == [True, False]
    assert accepted_rows(log_ratio, MASK, level="geometric", **bounds).tolist() == [True, True]
    assert accepted_rows(log_ratio, MASK, level="token", **bounds).tolist() == [False, False]
    assert accepted_rows(log_ratio, torch.zeros_like(MASK), level="token", **bounds).all()


def test_a_hopeless_mismatch_stays_finite():
    log_ratio = torch.tensor([[500.0, -500.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert importance_ratio(log_ratio, mask, "token").isfinite().all()
    stats = correction_stats(log_ratio, torch.ones(1, 2), mask).read().values()
    assert all(map(math.isfinite, stats.values()))
