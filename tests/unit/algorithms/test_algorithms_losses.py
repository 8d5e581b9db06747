"""Policy and value losses, values and gradients, against published packages and formulas of papers."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trl_losses import trl_loss

from siirl.algorithms.aggregate import aggregate_loss
from siirl.algorithms.policy_losses import POLICY_LOSSES, compute_policy_loss
from siirl.algorithms.preference_losses import clipped_value_loss
from siirl.config.algorithm_table import LOSSES
from siirl.errors import ConfigError

OPTIONS = {
    "clip_ratio_low": 0.15,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.6,
    "tau_pos": 1.0,
    "tau_neg": 1.25,  # exact in fp32, in which TRL holds it
    "policy_drift_coeff": 0.4,
    "clip_divergence_low": 0.1,
    "clip_divergence_high": 0.07,
    "ratio_cap": 1.9,
    "ppo_kl_coef": 0.7,
    "dro_beta": 0.8,
    "vespo_k_pos": 2.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_pos": 3.0,
    "vespo_lambda_neg": 2.0,
}
B, T = 8, 7
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Ratios beyond all bounds, advantages of both signs and 0, holes in the mask, one untrained row."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(B, T, generator=generator, dtype=torch.float64) - 0.02
    shift = 0.6 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    advantage = torch.randn(B, 1, generator=generator, dtype=torch.float64).expand(B, T).clone()
    advantage[2] = 0
    mask = torch.rand(B, T, generator=generator) < 0.8
    mask[5] = False
    picked = torch.rand(B, T, generator=generator) < 0.3
    log_prob = (old + shift).clamp(max=-1e-3)
    return {"log_prob": log_prob, "old": old, "advantage": advantage, "mask": mask, "picked": picked}


def ours(name: str, b: dict[str, Tensor], mode: str = "token-mean", **options) -> tuple[Tensor, Tensor]:
    log_prob = b["log_prob"].clone().requires_grad_()
    options = {**OPTIONS, "picked_BT": b["picked"], **options}
    token = compute_policy_loss(name, log_prob, b["old"], b["advantage"], b["mask"], options)
    mask = b["mask"]
    loss = aggregate_loss(token.loss_BT, mask, mode, float(mask.sum()), float(mask.any(-1).sum()), 32)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


def scalar_loss(name: str, lp: Tensor, old: float, adv: float, picked: bool) -> Tensor:
    """The loss of one token, as its paper writes it."""
    low, high, c = OPTIONS["clip_ratio_low"], OPTIONS["clip_ratio_high"], OPTIONS["clip_ratio_c"]
    r = torch.exp(lp - old)
    held = min(max(r, 1 - low), 1 + high)
    if name == "vanilla":
        objective = min(r * adv, held * adv)
        return -(max(objective, c * adv) if adv < 0 else objective)
    if name == "clip_cov":
        return 0 * lp if picked else -min(r * adv, held * adv)
    if name == "kl_cov":
        return -r * adv + (OPTIONS["ppo_kl_coef"] * abs(lp - old) if picked else 0)
    if name == "cispo":
        return -adv * lp * (held.item() if isinstance(held, Tensor) else held)
    if name == "sapo":
        tau = OPTIONS["tau_pos"] if adv > 0 else OPTIONS["tau_neg"]
        return -adv * 4 / tau / (1 + torch.exp(-tau * (r - 1)))
    if name == "gpg":
        return -adv * lp
    if name == "dro":
        return -adv * lp + OPTIONS["dro_beta"] * (lp - old) ** 2 / 2
    if name == "cpgd":
        held_log = min(max(lp - old, math.log(1 - low)), math.log(1 + high))
        return -min((lp - old) * adv, held_log * adv) + OPTIONS["policy_drift_coeff"] * (r - 1 - (lp - old))
    p, q = math.exp(lp.item()), math.exp(old)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    divergence = abs(p - q) if name == "dppo_tv" else kl
    outside = (adv > 0 and p > q and divergence > OPTIONS["clip_divergence_high"]) or (
        adv < 0 and p < q and divergence > OPTIONS["clip_divergence_low"]
    )
    return -adv * lp * (0.0 if outside else min(r.item(), OPTIONS["ratio_cap"]))


def row_loss(name: str, lp: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    """The loss of one row of trained tokens, for losses of the whole sequence."""
    low, high, a = OPTIONS["clip_ratio_low"], OPTIONS["clip_ratio_high"], float(adv[0])
    if name == "gspo":
        s = torch.exp((lp - old).mean())
        return -min(s * a, min(max(s, 1 - low), 1 + high) * a)
    product = torch.ones((), dtype=torch.float64)
    for x, y in zip(lp, old, strict=True):
        r = torch.exp(x - y)
        held = min(max(r, math.exp(-low)), math.exp(high))
        product = product * (min(r, held) if a > 0 else max(r, held))
    return -(product ** (1 / len(lp))) * a


SEQUENCE_LOSSES = ("gspo", "gmpo", "geo_mean")
TOKEN_LOSSES = (
    "vanilla",
    "cispo",
    "sapo",
    "gpg",
    "cpgd",
    "dro",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
)


def test_every_registered_loss_is_proven_here():
    assert set(POLICY_LOSSES.names()) == {*SEQUENCE_LOSSES, *TOKEN_LOSSES, "vespo", "sft"}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_supervised_fine_tuning_is_the_cross_entropy_of_the_tokens_whatever_they_are_worth(mode):
    b = batch()
    loss, grad = ours("sft", b, mode)
    other, same = ours("sft", b | {"advantage": -b["advantage"], "old": b["old"] * 2}, mode)
    assert loss == other and torch.equal(grad, same)
    mask, rows = b["mask"], b["mask"].any(-1)
    per_row = -(b["log_prob"] * mask).sum(-1)
    want = {
        "token-mean": per_row.sum() / mask.sum(),
        "seq-mean-token-mean": (per_row / mask.sum(-1).clamp(min=1)).sum() / rows.sum(),
        "seq-mean-token-sum": per_row.sum() / rows.sum(),
    }
    torch.testing.assert_close(loss, want[mode], **CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_vespo_weighs_each_token_by_the_likelihood_ratio_of_its_row(seed):
    """Advantages of both signs within a row; one row far off, whose weight is at the bound of its ratio."""
    b = with_token_credit(seed)
    b["log_prob"][1] = b["old"][1] - 15
    log_prob = b["log_prob"].clone().requires_grad_()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in range(B):
        places = [t for t in range(T) if b["mask"][i, t]]
        ratio = math.exp(
            max(sum(float(b["log_prob"][i, t] - b["old"][i, t]) for t in places), math.log(1e-8))
        )
        for t in places:
            positive = float(b["advantage"][i, t]) >= 0
            k, rate = (2.0, 3.0) if positive else (3.0, 2.0)
            weight = ratio**k * math.exp(rate * (1 - ratio))
            total, count = total - weight * b["advantage"][i, t] * log_prob[i, t], count + 1
    want = total / count
    loss, grad = ours("vespo", b)
    torch.testing.assert_close(loss, want.detach(), **CLOSE)
    torch.testing.assert_close(grad, torch.autograd.grad(want, log_prob)[0], **CLOSE)


def test_the_weight_of_vespo_is_largest_at_k_over_lambda_and_vanishes_on_both_sides():
    def weight(ratio: float, advantage: float) -> float:
        row = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
        given = (row, torch.zeros_like(row), torch.full_like(row, advantage), torch.ones_like(row).bool())
        return float(compute_policy_loss("vespo", *given, OPTIONS).stats["sequence_weight"])

    for advantage, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        assert weight(1.0, advantage) == pytest.approx(1.0)
        assert weight(peak, advantage) > max(weight(peak * x, advantage) for x in (0.9, 1.1)), advantage
        assert weight(1e-6, advantage) < 1e-9 > weight(1e6, advantage)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_token_loss_equals_its_paper_in_value_and_gradient(name, seed):
    b = batch(seed)
    log_prob = b["log_prob"].clone().requires_grad_()
    places = b["mask"].nonzero().tolist()
    terms = [
        scalar_loss(
            name,
            log_prob[i, t],
            b["old"][i, t].item(),
            b["advantage"][i, t].item(),
            bool(b["picked"][i, t]),
        )
        for i, t in places
    ]
    want = sum(terms) / len(terms)
    loss, grad = ours(name, b)
    torch.testing.assert_close(loss, want.detach(), **CLOSE)
    torch.testing.assert_close(grad, torch.autograd.grad(want, log_prob)[0], **CLOSE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_a_sequence_loss_equals_its_paper_in_value_and_gradient(name, seed):
    b = batch(seed)
    log_prob = b["log_prob"].clone().requires_grad_()
    rows = [i for i in range(B) if b["mask"][i].any()]
    keep = [b["mask"][i] for i in rows]
    terms = [
        row_loss(name, log_prob[i][m], b["old"][i][m], b["advantage"][i][m])
        for i, m in zip(rows, keep, strict=True)
    ]
    want = sum(terms) / len(terms)
    loss, grad = ours(name, b, LOSSES[name].paper_mode)
    torch.testing.assert_close(loss, want.detach(), **CLOSE)
    torch.testing.assert_close(grad, torch.autograd.grad(want, log_prob)[0], **CLOSE)


def with_token_credit(seed: int) -> dict[str, Tensor]:
    """The batch with advantages that differ from token to token."""
    b, generator = batch(seed), torch.Generator().manual_seed(seed + 100)
    return b | {"advantage": torch.randn(B, T, generator=generator, dtype=torch.float64)}


def gspo_token(lp: Tensor, old: Tensor, adv: Tensor, weight: Tensor) -> Tensor:
    """The loss of a row by the GSPO paper's equations 13 and 14; weight: a further factor of each token."""
    low, high = OPTIONS["clip_ratio_low"], OPTIONS["clip_ratio_high"]
    row = torch.exp((lp - old).mean()).item()
    terms = []
    for t in range(len(lp)):
        s = row * torch.exp(lp[t]) / torch.exp(lp[t]).item()
        held = min(max(s, 1 - low), 1 + high)
        terms.append(-min(s * adv[t], held * adv[t]) * weight[t])
    return sum(terms) / len(terms)


def gmpo_token(lp: Tensor, old: Tensor, adv: Tensor, weight: Tensor) -> Tensor:
    """GMPO's gradient written out: each token's own, times the row's ratio and mean advantage."""
    low, high = OPTIONS["clip_ratio_low"], OPTIONS["clip_ratio_high"]
    kept, sign = [], float(adv.mean().sign())
    for t in range(len(lp)):
        d = lp[t] - old[t]
        kept.append(sign * min(sign * d, sign * min(max(d, -low), high)))
    kept = [torch.as_tensor(x, dtype=torch.float64) for x in kept]
    ratio = math.exp(sum(x.item() for x in kept) / len(kept))
    terms = [ratio * weight[t] * (1 + kept[t] - kept[t].item()) for t in range(len(lp))]
    return -adv.mean() * sum(terms) / len(terms)


def test_gmpo_gives_a_token_without_an_advantage_of_its_own_the_gradient_of_its_row():
    """Its sign was 0, so that it had no gradient, and at an advantage of 1e-9 all of it."""
    log_prob, mask = torch.full((1, 4), -1.0, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    grads = []
    for least in (0.0, 1e-9, -1e-9):
        leaf = log_prob.clone().requires_grad_()
        advantage = torch.tensor([[1.0, 1.0, 1.0, least]], dtype=torch.float64)
        compute_policy_loss("gmpo", leaf, log_prob, advantage, mask, OPTIONS).loss_BT.sum().backward()
        grads.append(leaf.grad)
    assert float(grads[0].abs().min()) > 0.5
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_sequence_loss_keeps_the_weight_of_each_token(name, seed):
    """Advantages by token (GSPO), and weights by token, as rollout correction has them (both)."""
    b = with_token_credit(seed)
    weight = torch.rand(B, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_prob = b["log_prob"].clone().requires_grad_()
    row = {"gspo": gspo_token, "gmpo": gmpo_token}[name]
    keep = [m for m in b["mask"] if m.any()]
    columns = [
        [x[m] for x, m in zip(col[b["mask"].any(-1)], keep, strict=True)]
        for col in (log_prob, b["old"], b["advantage"], weight)
    ]
    want = sum(row(*cells) for cells in zip(*columns, strict=True)) / len(keep)
    want_grad = torch.autograd.grad(want, log_prob)[0]
    leaf = b["log_prob"].clone().requires_grad_()
    token = compute_policy_loss(name, leaf, b["old"], b["advantage"], b["mask"], OPTIONS)
    loss = aggregate_loss(token.loss_BT * weight, b["mask"], "seq-mean-token-mean", 1.0, len(keep), 32)
    torch.testing.assert_close(loss, want, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], want_grad, **CLOSE)


def test_gspo_does_not_spread_the_credit_of_a_token_over_its_row():
    log_prob = torch.full((1, 4), -1.0, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([[1.0, -1.0, 0.5, 0.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    token = compute_policy_loss("gspo", log_prob, log_prob.detach(), advantage, mask, OPTIONS)
    grad = torch.autograd.grad(token.loss_BT.sum(), log_prob)[0]
    torch.testing.assert_close(grad, -advantage, **CLOSE)


def verl_dppo(b: dict[str, Tensor], divergence: Tensor, low: float, high: float, cap: float) -> Tensor:
    """verl's gradient of DPPO: -A min(r, cap) inside the region, by its bounds on what A moves away from."""
    p, q = b["log_prob"].exp(), b["old"].exp()
    inside = torch.where(b["advantage"] > 0, (divergence <= high) | (p <= q), (divergence <= low) | (p >= q))
    weight = (p / q).clamp(max=cap) * inside * b["mask"]
    return -b["advantage"] * weight / b["mask"].sum()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(("low", "high", "cap"), [(0.1, 0.1, 20.0), (0.02, 0.3, 20.0), (0.3, 0.02, 1.2)])
def test_dppo_has_the_gradient_of_verls_within_its_bounds_and_cap(name, low, high, cap):
    b = batch(4)
    b["old"][0, 0], b["log_prob"][0, 0], b["advantage"][0] = -14.0, -1.2, -0.7  # a ratio of 362,217
    b["mask"][0, 0] = True
    p, q = b["log_prob"].exp(), b["old"].exp()
    kl = q * (b["old"] - b["log_prob"]) + (1 - q) * torch.log((1 - q) / (1 - p))
    want = verl_dppo(b, (p - q).abs() if name == "dppo_tv" else kl, low, high, cap)
    _, grad = ours(name, b, clip_divergence_low=low, clip_divergence_high=high, ratio_cap=cap)
    torch.testing.assert_close(grad, want, **CLOSE)
    assert grad[0, 0] == pytest.approx(0.7 * cap / int(b["mask"].sum()))


TRL_CASES = {
    "clip-higher, token-mean": ("vanilla", "token-mean", {"clip_ratio_c": 1e9}, ("bnpo", {})),
    "dual clip": ("vanilla", "token-mean", {}, ("bnpo", {"delta": 1.6})),
    "row means": ("vanilla", "seq-mean-token-mean", {"clip_ratio_c": 1e9}, ("grpo", {})),
    "row sums": ("vanilla", "seq-mean-token-sum", {"clip_ratio_c": 1e9}, ("luspo", {})),
    "Dr.GRPO": ("vanilla", "seq-mean-token-sum-norm", {"clip_ratio_c": 1e9}, ("dr_grpo", {})),
    "sapo": ("sapo", "seq-mean-token-mean", {}, ("sapo", {})),
    "gspo": ("gspo", "seq-mean-token-mean", {}, ("grpo", {"importance_sampling_level": "sequence"})),
    "gmpo": ("gmpo", "seq-mean-token-mean", {}, ("gmpo", {})),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 1.0}, ("cispo", {"epsilon_high": 1.3})),
    "vespo": ("vespo", "token-mean", {}, ("vespo", {})),
}


@pytest.mark.parametrize("case", TRL_CASES)
@pytest.mark.heavy
def test_losses_and_aggregations_equal_trl(case):
    name, mode, options, (loss_type, settings) = TRL_CASES[case]
    b = {k: v[b_rows] for b_rows in [[i for i in range(B) if i != 5]] for k, v in batch().items()}
    loss, grad = ours(name, b, mode, **options)
    want_loss, want_grad = trl_loss(b, loss_type, **settings)
    torch.testing.assert_close(loss, want_loss, **CLOSE)
    torch.testing.assert_close(grad, want_grad, **CLOSE)


@pytest.mark.heavy
def test_the_clipped_objective_equals_torchrl():
    grpo = pytest.importorskip("torchrl.objectives.llm.grpo")
    b = batch()
    log_prob = b["log_prob"].clone().requires_grad_()
    stub = SimpleNamespace(_clip_bounds=(math.log(0.85), math.log(1.3)))
    want, _ = grpo.GRPOLoss._compute_policy_objective(stub, log_prob - b["old"], b["advantage"])
    want_grad = torch.autograd.grad(want[b["mask"]].mean(), log_prob)[0]
    loss, grad = ours("vanilla", b, clip_ratio_c=1e9)
    torch.testing.assert_close(loss, want[b["mask"]].mean().detach(), **CLOSE)
    torch.testing.assert_close(grad, want_grad, **CLOSE)


def test_clip_statistics_count_the_tokens_that_lose_their_gradient():
    b = batch()
    log_prob = b["log_prob"].clone().requires_grad_()
    token = compute_policy_loss("vanilla", log_prob, b["old"], b["advantage"], b["mask"], OPTIONS)
    grad = torch.autograd.grad(token.loss_BT.sum(), log_prob)[0]
    cut = (token.stats["clip_fraction"] + token.stats["clip_fraction_lower"]) > 0
    assert token.stats["clip_fraction"].sum() > 0 and token.stats["clip_fraction_lower"].sum() > 0
    assert torch.equal(cut, (grad == 0) & (b["advantage"] != 0) & b["mask"])
    assert not any(stat.requires_grad for stat in token.stats.values())


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES.names() if name != "sft"])
def test_on_policy_every_loss_has_the_policy_gradient(name):
    b = batch()
    b["old"], b["picked"] = b["log_prob"], torch.zeros_like(b["mask"])
    _, grad = ours(name, b, "seq-mean-token-mean")
    want = (
        -(b["advantage"] * b["mask"]) / b["mask"].sum(-1, keepdim=True).clamp(min=1) / b["mask"].any(-1).sum()
    )
    torch.testing.assert_close(grad, want, **CLOSE)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_extreme_ratios_and_untrained_rows_stay_finite(name):
    b = {k: v.float() if v.is_floating_point() else v for k, v in batch().items()}
    b["log_prob"][0, 0], b["old"][0, 0] = 0.0, -1e4
    b["log_prob"][1, 0], b["old"][1, 0] = -1e4, 0.0
    for mask in (b["mask"], torch.zeros_like(b["mask"]), b["mask"] | True):
        loss, grad = ours(name, b | {"mask": mask})
        assert loss.isfinite() and grad.isfinite().all()
    empty = {k: v[:0] for k, v in b.items()}
    loss, grad = ours(name, empty)
    assert loss == 0 and grad.shape == (0, T)


def test_an_unknown_loss_is_refused_with_the_known_names():
    with pytest.raises(
        ConfigError, match=r"loss_mode='vanila'.*known are vanilla, gspo.*Did you mean 'vanilla'"
    ):
        ours("vanila", batch())


def test_the_value_loss_takes_the_larger_of_plain_and_held_error():
    cases = [  # value, old value, return, loss, derivative
        (1.0, 1.0, 3.0, 2.0, -2.0),
        (2.5, 1.0, 3.0, 1.125, 0.0),  # held at 1.5: error 1.5
        (2.5, 1.0, 0.0, 3.125, 2.5),
        (-1.0, 1.0, 0.5, 1.125, -1.5),
        (0.8, 1.0, 0.0, 0.32, 0.8),
    ]
    value, old, return_, want, slope = torch.tensor(cases, dtype=torch.float64).T
    value = value.clone().requires_grad_()
    token = clipped_value_loss(value[None], old[None], return_[None], cliprange_value=0.5)
    torch.testing.assert_close(token.loss_BT[0].detach(), want)
    torch.testing.assert_close(torch.autograd.grad(token.loss_BT.sum(), value)[0], slope)
    assert token.stats["clip_fraction"].tolist() == [[0, 1, 0, 0, 0]]
