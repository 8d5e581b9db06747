"""Tokens of high covariance, and the weights of rollout correction in the actor's loss."""

import statistics

import pytest
import torch
from tensordict import TensorDict

from siirl.algorithms.rollout_correction import Correction, correction_weights
from siirl.algorithms.token_picks import TIE, high_entropy, pick_tokens, token_noise
from siirl.config import load_config
from siirl.config.checks import check_config
from siirl.engines.train.base import BatchCounts, TokenOutputs
from siirl.errors import ConfigError
from siirl.nodes.policy_loss import make_loss_fn, rollout_correction
from siirl.observe.metrics import derived_metrics

B, T = 6, 5
OPTIONS = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0, "kl_cov_ratio": 0.25}
ACTOR = "actor_rollout_ref.actor"


def tokens():
    generator = torch.Generator().manual_seed(4)
    log_prob = -2 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    advantage = torch.randn(B, 1, generator=generator, dtype=torch.float64).expand(B, T)
    mask = torch.rand(B, T, generator=generator) < 0.7
    return log_prob, advantage, mask, token_noise(torch.arange(B), T, 3)


def plain_picks(name, log_prob, advantage, mask, noise) -> set[tuple[int, int]]:
    """The same picks by sorting lists."""
    places = [(i, t) for i in range(B) for t in range(T) if mask[i, t]]
    mean_log_prob = statistics.fmean(float(log_prob[p]) for p in places)
    mean_advantage = statistics.fmean(float(advantage[p]) for p in places)
    covariance = {
        p: (float(log_prob[p]) - mean_log_prob) * (float(advantage[p]) - mean_advantage) for p in places
    }
    if name == "clip_cov":
        inside = [p for p in places if OPTIONS["clip_cov_lb"] < covariance[p] < OPTIONS["clip_cov_ub"]]
        num = max(1, int(OPTIONS["clip_cov_ratio"] * len(places)))
        return set(sorted(inside, key=lambda p: -float(noise[p]))[:num])
    return set(sorted(places, key=lambda p: -covariance[p])[: int(OPTIONS["kl_cov_ratio"] * len(places))])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_picks_are_those_of_the_paper_and_do_not_depend_on_ranks(name):
    log_prob, advantage, mask, noise = tokens()
    want = plain_picks(name, log_prob, advantage, mask, noise)
    whole = pick_tokens(name, log_prob, advantage, mask, noise, OPTIONS)
    assert set(map(tuple, whole.nonzero().tolist())) == want and len(want) >= 3

    parts = [slice(0, 1), slice(1, B)]
    sums, tops = [], []
    for part in parts:  # what each of two ranks would send
        args = (log_prob[part], advantage[part], mask[part], noise[part], OPTIONS)
        pick_tokens(name, *args, lambda x: sums.append(x) or x)
    total = sum(sums)
    for part in parts:
        args = (log_prob[part], advantage[part], mask[part], noise[part], OPTIONS)
        pick_tokens(name, *args, lambda x: total, lambda x: tops.append(x) or x)
    joined = [
        pick_tokens(
            name,
            log_prob[part],
            advantage[part],
            mask[part],
            noise[part],
            OPTIONS,
            lambda x: total,
            lambda x: torch.cat(tops),
        )
        for part in parts
    ]
    assert torch.equal(torch.cat(joined), whole)


@pytest.mark.parametrize("seed", range(20))
def test_equal_tokens_are_all_in_or_all_out_however_they_round(seed):
    """First tokens of a prompt's samples have one log-prob and entropy, computed in other micro-batches."""
    draw = torch.Generator().manual_seed(seed)
    exact = (-3 * torch.rand(4, 1, T, generator=draw)).expand(4, 6, T).reshape(24, T)
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]).repeat(4)[:, None].expand(24, T)
    mask, noise = torch.ones(24, T, dtype=torch.bool), torch.zeros(24, T)
    found = []
    for _ in range(2):
        value = exact + 1e-6 * torch.randn(24, T, generator=draw)
        options = OPTIONS | {"kl_cov_ratio": 0.31}
        picked = pick_tokens("kl_cov", value, advantage, mask, noise, options, tie=TIE)
        found.append((picked, high_entropy(-value, mask, 0.37, tie=TIE)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and 0 < int(one.sum()) < 24 * T
    assert len(found[0][1].view(4, 6, T).unique(dim=1)[0]) == 1


def test_nothing_is_picked_where_nothing_qualifies():
    log_prob, advantage, mask, noise = tokens()
    far = OPTIONS | {"clip_cov_lb": 50.0, "clip_cov_ub": 60.0}
    assert not pick_tokens("clip_cov", log_prob, advantage, mask, noise, far).any()
    none = torch.zeros_like(mask)
    assert not pick_tokens("kl_cov", log_prob, advantage, none, noise, OPTIONS).any()
    empty = (log_prob[:0], advantage[:0], mask[:0], noise[:0], OPTIONS)
    assert pick_tokens("kl_cov", *empty).shape == (0, T)


def test_noise_is_uniform_and_follows_row_and_position_alone():
    noise = token_noise(torch.arange(400), 50, 1)
    assert noise.unique().numel() == 20_000 and noise.min() >= 0 and noise.max() < 1
    counts = torch.histc(noise, 10, 0, 1)
    assert (counts - 2000).abs().max() < 250
    assert torch.equal(token_noise(torch.tensor([7, 3]), 9, 1), noise[[7, 3], :9])
    assert not torch.equal(token_noise(torch.arange(400), 50, 2), noise)


def loss_and_metrics(*overrides: str):
    cfg = load_config(list(overrides))
    check_only = rollout_correction(cfg.actor_rollout_ref.actor)
    log_prob = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    rows = TensorDict(
        {
            "response_mask": torch.ones(2, 2, dtype=torch.bool),
            "advantage": torch.ones(2, 2),
            "old_log_prob": log_prob.detach(),
            "rollout_log_prob": torch.tensor([[-1.0, -1.0], [-2.0, -1.0]]),
        },
        batch_size=[2],
    )
    outputs = TokenOutputs(log_prob_BT=log_prob, entropy_BT=torch.zeros(2, 2))
    loss, metrics = make_loss_fn(cfg)(outputs, rows, BatchCounts(4, 2, 2))
    return check_only, loss.item(), metrics.read().values()


def test_corrections_weigh_the_policy_loss():
    e = 2.718281828459045
    cases = [
        ([], "none", -1.0),
        ([f"{ACTOR}.tis_imp_ratio_cap=2"], "truncate", -(3 + 2) / 4),
        (
            [f"{ACTOR}.rollout_correction.weight=truncate", f"{ACTOR}.rollout_correction.high=9"],
            "truncate",
            -(3 + e) / 4,
        ),
        ([f"{ACTOR}.rollout_correction.weight=mask"], "mask", -3 / 4),
        ([f"{ACTOR}.rollout_correction.reject=sequence"], "none", -2 / 4),
    ]
    for overrides, weight, want in cases:
        correction, loss, metrics = loss_and_metrics(*overrides)
        assert (correction.weight, loss) == (weight, pytest.approx(want)), overrides
        if overrides:
            assert metrics["rollout_correction/ratio"] == pytest.approx((3 + e) / 4)
            assert "rollout_correction/ess" in derived_metrics(metrics)
    _, _, metrics = loss_and_metrics(f"{ACTOR}.tis_imp_ratio_cap=2")
    assert derived_metrics(metrics)["rollout_correction/ess"] == pytest.approx(25 / 16 / (7 / 4))


def test_weights_of_a_rejected_row_are_zero():
    log_ratio = torch.tensor([[0.1, -0.1], [2.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    weight = correction_weights(log_ratio, mask, Correction("truncate", "token", high=1.05, reject="token"))
    torch.testing.assert_close(weight, torch.tensor([[1.05, 0.9048374], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tis_imp_ratio_cap=2", "recompute_old_log_prob=False"], "nothing to correct"),
        (["tis_imp_ratio_cap=2", "rollout_correction.weight=mask"], "short for the second"),
        (["rollout_correction.low=3"], "not below the upper bound"),
        (["policy_loss.loss_mode=kl_cov", "recompute_old_log_prob=False"], "the rollout engine's rounding"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides, words):
    cfg = load_config(
        ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=2"]
        + [f"{ACTOR}.{override}" for override in overrides]
    )
    with pytest.raises(ConfigError, match=words):
        check_config(cfg)


def test_derived_metrics_are_those_of_sums():
    assert derived_metrics({"a/mean": 1.0, "a/square_mean": 5.0, "b/square_mean": 2.0}) == {"a/std": 2.0}
