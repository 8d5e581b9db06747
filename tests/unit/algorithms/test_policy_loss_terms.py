"""What the actor's loss has besides its policy loss: masks, weights of the KL, rejection, means over prompts.

Through make_loss_fn, in float64, against TRL's trainer and against sums written token by token.
"""

import functools
import itertools
import math
import random
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from trl_losses import trl_loss

from siirl.algorithms.aggregate import aggregate_loss, prompt_shares
from siirl.algorithms.kl import kl_estimate, policy_ratio
from siirl.algorithms.rollout_correction import Correction, correction_weights, off_policy_negatives
from siirl.algorithms.token_picks import high_entropy
from siirl.config import Config, load_config, with_overrides
from siirl.config.actor import ROW_DIVERGENCES
from siirl.config.checks import check_config
from siirl.engines.train.base import BatchCounts, TokenOutputs
from siirl.errors import ConfigError
from siirl.nodes.policy_loss import make_loss_fn

ACTOR = "actor_rollout_ref.actor"
B, T = 8, 7
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@functools.cache
def base_config() -> Config:
    return load_config([])


def config(**keys: object) -> Config:
    """Of a run with several mini-batches, clip ratios of TRL's stub and no dual clip."""
    given = {
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 0.3,
        "clip_ratio_c": 1e9,
        "ppo_mini_batch_size": 8,
    } | keys
    return with_overrides(base_config(), {f"{ACTOR}.{name}": value for name, value in given.items()})


def batch(seed: int) -> dict[str, Tensor]:
    """Rows near and far from the policy that sampled them, advantages of both signs, holes, an empty row."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    old = -0.2 - 2 * torch.rand(B, T, generator=draw, dtype=torch.float64)
    found = {"old": old, "log_prob": (old + 0.3 * randn(B, 1) + 0.3 * randn(B, T)).clamp(max=-1e-3)}
    found |= {"rollout": old + 0.2 * randn(B, T), "advantage": randn(B, 1).expand(B, T).clone()}
    found |= {"ref": old + 0.1, "mask": torch.rand(B, T, generator=draw) < 0.8}
    entropy = torch.rand(B, T, generator=draw).double()
    entropy[0] = entropy[1]  # tokens of equal entropy
    found["mask"][5] = False
    found["advantage"][2] = 0
    return found | {"entropy": entropy}


def ours(b: dict[str, Tensor], cfg: Config, **columns: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Value, gradient of log_prob, and metrics."""
    log_prob = b["log_prob"].clone().requires_grad_()
    rows = {"response_mask": b["mask"], "advantage": b["advantage"], "old_log_prob": b["old"]}
    rows |= {"rollout_log_prob": b["rollout"], "ref_log_prob": b["ref"]} | columns
    counts = BatchCounts(float(b["mask"].sum()), float(b["mask"].any(-1).sum()), 32)
    outputs = TokenOutputs(log_prob_BT=log_prob, entropy_BT=b["entropy"])
    loss, metrics = make_loss_fn(cfg)(outputs, TensorDict(rows, batch_size=[B]), counts)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0], metrics.read().values()


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(3))
def test_off_policy_sequence_masking_equals_trl(seed):
    b = batch(seed)
    b["advantage"][:2] = -0.7  # a row that has left its policy, and one that has not
    b["log_prob"][0], b["log_prob"][1] = b["rollout"][0] - 1, b["rollout"][1]
    given = {"sampling_per_token_logps": b["rollout"]}
    want = trl_loss(b, "bnpo", given, off_policy_mask_threshold=0.1)
    loss, grad, metrics = ours(b, config(opsm_delta=0.1))
    torch.testing.assert_close((loss, grad), want, **CLOSE)
    assert 0 < metrics["opsm_masked"] < 1 and loss != ours(b, config())[0]


@pytest.mark.parametrize("seed", range(4))
def test_off_policy_sequence_masking_takes_out_negative_tokens_of_far_rows_only(seed):
    """Token by token, with advantages of both signs in a row; a row at the bound stays."""
    b, rng = batch(seed), random.Random(seed)
    b["advantage"] = torch.tensor(
        [[rng.gauss(0, 1) for _ in range(T)] for _ in range(B)], dtype=torch.float64
    )
    drift = [
        statistics.fmean(float(b["rollout"][i, t] - b["log_prob"][i, t]) for t in range(T) if b["mask"][i, t])
        if b["mask"][i].any()
        else 0.0
        for i in range(B)
    ]
    delta = sorted(abs(x) for x in drift)[B // 2]
    want = [
        [bool(b["mask"][i, t]) and float(b["advantage"][i, t]) < 0 and drift[i] > delta for t in range(T)]
        for i in range(B)
    ]
    columns = (b["log_prob"], b["rollout"], b["advantage"], b["mask"])
    got = off_policy_negatives(*columns, delta * (1 + 1e-12))
    assert got.tolist() == want
    rounding = torch.full_like(b["advantage"], -1e-9)
    assert not off_policy_negatives(b["log_prob"], b["rollout"], rounding, b["mask"], delta / 2).any()
    towards = b["rollout"] + 1.0  # rows that became likelier than when they were sampled stay, however far
    assert not off_policy_negatives(towards, b["rollout"], b["advantage"], b["mask"], 0.5).any()


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(3))
def test_the_weighted_kl_equals_trl(seed):
    b = batch(seed)
    want = trl_loss(b, "bnpo", {"ref_per_token_logps": b["ref"]}, beta=0.3, use_bias_correction_kl=True)
    keys = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3_exact"}
    loss, grad, _ = ours(b, config(**keys, kl_loss_weighted=True))
    torch.testing.assert_close((loss, grad), want, **CLOSE)
    assert not torch.allclose(grad, ours(b, config(**keys))[1])


@pytest.mark.parametrize("name", ["k1", "k3_exact"])
def test_the_weighted_kl_of_an_older_policys_tokens_has_value_and_gradient_of_the_kl(name):
    """In expectation over the whole vocabulary; k2 is not unbiased, with any weight."""
    draw = torch.Generator().manual_seed(0)
    policy, old, ref = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    policy = policy.requires_grad_()
    log_p, log_old, log_ref = (x.log_softmax(-1) for x in (policy, old, ref))
    weighted = kl_estimate(name, log_p, log_ref) * policy_ratio(log_p, log_old)
    got = (log_old.exp() * weighted).sum()
    want = (log_p.exp() * (log_p - log_ref)).sum()
    torch.testing.assert_close(got, want, **CLOSE)
    grads = [torch.autograd.grad(x, policy, retain_graph=True)[0] for x in (got, want)]
    torch.testing.assert_close(*grads, **CLOSE)


@pytest.mark.heavy
@pytest.mark.parametrize("share", [0.2, 0.5, 0.91])
@pytest.mark.parametrize("seed", range(2))
def test_the_mask_of_high_entropy_equals_trl(seed, share):
    b = batch(seed)
    want = trl_loss(b, "bnpo", top_entropy_quantile=share)
    kept = high_entropy(b["entropy"], b["mask"], share)
    loss, grad, _ = ours(b, config(top_entropy_quantile=share), high_entropy=kept)
    torch.testing.assert_close((loss, grad), want, **CLOSE)
    assert 0 < int(kept.sum()) < int(b["mask"].sum())


@pytest.mark.parametrize("seed", range(12))
def test_high_entropy_is_that_of_the_whole_mini_batch_on_any_ranks(seed):
    """Against a sorted list; rows dealt over ranks at random, one of which may be empty; equal entropies."""
    rng = random.Random(seed)
    rows, width, share = rng.randint(1, 9), rng.randint(1, 6), rng.choice([0.05, 0.2, 0.5, 0.8, 0.99])
    values = [
        rng.choice([0.0, 1e-30, 1e-7, 0.3, 0.3000001, 0.7, 5.0, rng.random()]) for _ in range(rows * width)
    ]
    entropy = torch.tensor(values).view(rows, width)
    mask = torch.tensor([rng.random() < 0.8 for _ in range(rows * width)]).view(rows, width)
    trained = sorted(entropy[mask].tolist())
    least = trained[math.ceil(round((1 - share) * (len(trained) - 1), 6))] if trained else 0.0
    want = mask & (entropy >= least)
    assert torch.equal(high_entropy(entropy, mask, share), want)
    owner, all_sum = torch.tensor([rng.randrange(3) for _ in range(rows)]), sum_over_threads(3)
    parts = [owner == rank for rank in range(3)]
    with ThreadPoolExecutor(3) as ranks:
        found = ranks.map(lambda part: high_entropy(entropy[part], mask[part], share, all_sum), parts)
        for part, got in zip(parts, found, strict=True):
            assert torch.equal(got, want[part])


def sum_over_threads(num: int) -> Callable[[Tensor], Tensor]:
    """An all-reduce among threads."""
    barrier, sent = threading.Barrier(num), []

    def all_sum(totals: Tensor) -> Tensor:
        sent.append(totals)
        barrier.wait(60)
        total = sum(sent[-num:])
        barrier.wait(60)
        return total

    return all_sum


def divergence(log_ratio: list[float], how: str) -> float:
    reduce, _, kind = how.partition("_")
    values = [d * d / 2 if kind == "k2" else math.exp(d) - 1 - d for d in log_ratio]
    return {"max": max, "sum": math.fsum, "mean": statistics.fmean}[reduce](values) if values else 0.0


@pytest.mark.parametrize("how", ROW_DIVERGENCES)
@pytest.mark.parametrize("weight", ["none", "truncate", "filter"])
def test_rows_are_rejected_by_the_divergence_of_their_tokens(how, weight):
    b = batch(1)
    log_ratio, mask = 3 * (b["old"] - b["rollout"]), b["mask"]
    rows = [[float(log_ratio[i, t]) for t in range(T) if mask[i, t]] for i in range(B)]
    found = [divergence(row, how) for row in rows]
    bound = sorted(found)[B // 2]
    correction = Correction(weight, "token", 0.7, 1.4, reject=how, reject_divergence=bound * (1 + 1e-12))
    got = correction_weights(log_ratio, mask, correction)
    for i, t in itertools.product(range(B), range(T)):
        if mask[i, t]:
            ratio = math.exp(float(log_ratio[i, t]))
            own = {"none": 1.0, "truncate": min(ratio, 1.4), "filter": float(0.7 <= ratio <= 1.4)}[weight]
            assert float(got[i, t]) == pytest.approx(own if found[i] <= bound else 0.0, rel=1e-12), (i, t)
    assert 0 < sum(x <= bound for x in found) < B


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_filter_has_the_bounds_of_the_mask_without_its_ratio(level):
    b = batch(2)
    log_ratio = b["old"] - b["rollout"]
    kept, weighed = (
        correction_weights(log_ratio, b["mask"], Correction(weight, level, 0.95, 1.05))
        for weight in ("filter", "mask")
    )
    assert torch.equal(kept[b["mask"]], (weighed[b["mask"]] != 0).double())
    assert set(kept[b["mask"]].tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_prompts_count_alike_however_long_their_responses_are(seed):
    b, rng = batch(seed), random.Random(seed)
    prompt = torch.tensor([rng.randrange(4) for _ in range(B)])
    mask, loss = b["mask"], b["log_prob"]
    means = []
    for number in range(4):
        tokens = [float(loss[i, t]) for i in range(B) for t in range(T) if mask[i, t] and prompt[i] == number]
        means += [statistics.fmean(tokens)] if tokens else []
    tokens_P = torch.zeros(4).index_add_(0, prompt, mask.sum(-1).float())
    share = prompt_shares(tokens_P, prompt)
    got = aggregate_loss(loss, mask, "prompt-mean", 1, 1, 1, share)
    assert float(got) == pytest.approx(statistics.fmean(means), rel=1e-12)
    parts = [[0, 3], [1, 2, 7], [4, 5, 6]]
    split = sum(aggregate_loss(loss[p], mask[p], "prompt-mean", 1, 1, 1, share[p]) for p in parts)
    torch.testing.assert_close(split, got, **CLOSE)
    none = prompt_shares(torch.zeros(4), prompt)
    assert aggregate_loss(loss, torch.zeros_like(mask), "prompt-mean", 0, 0, 1, none) == 0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rollout_correction.reject": "mean_k3"}, "without a bound.*reject_divergence"),
        (
            {"use_kl_loss": True, "kl_loss_weighted": True, "kl_loss_type": "k3+"},
            r"the \+ takes the gradient",
        ),
        ({"use_kl_loss": True, "kl_loss_weighted": True, "kl_loss_type": "full"}, "no estimate"),
        ({"top_entropy_quantile": 0.2, "recompute_old_log_prob": False}, "recompute_old_log_prob=true"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(keys, words):
    data = {"data.train_files": ["a"], "data.val_files": ["a"]}
    fine = config(**{"rollout_correction.reject": "mean_k3", "rollout_correction.reject_divergence": 0.01})
    check_config(with_overrides(fine, data))
    with pytest.raises(ConfigError, match=words):
        check_config(with_overrides(config(**keys), data))
