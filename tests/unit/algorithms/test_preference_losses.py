"""Losses of pairs equal a hand recursion in float64, value and gradient."""

import math

import pytest
import torch

from siirl.algorithms.preference_losses import bradley_terry, dpo

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_is_the_papers_sum_token_by_token_with_its_gradient(beta):
    generator = torch.Generator().manual_seed(1)
    log_prob, ref = (-torch.rand(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(5) < torch.tensor([5, 2, 3, 1])[:, None]
    ref[~mask] = torch.nan
    log_prob.requires_grad_()
    better, worse = torch.tensor([0, 3]), torch.tensor([2, 1])
    found = dpo(log_prob, ref, mask, better, worse, dpo_beta=beta)
    (grad,) = torch.autograd.grad(found.loss_P.sum(), log_prob)
    want = torch.zeros_like(grad)
    for place, (b, w) in enumerate([(0, 2), (3, 1)]):
        above = [sum(float(log_prob[r, t] - ref[r, t]) for t in range(5) if mask[r, t]) for r in (b, w)]
        margin = beta * (above[0] - above[1])
        assert float(found.loss_P[place]) == pytest.approx(-math.log(sigmoid(margin)), rel=1e-12)
        assert float(found.stats["reward_margin"][place]) == pytest.approx(margin, rel=1e-12)
        want[b] -= beta * sigmoid(-margin) * mask[b].double()
        want[w] += beta * sigmoid(-margin) * mask[w].double()
    torch.testing.assert_close(grad, want, **CLOSE)


def test_reward_models_learn_the_difference_of_scores():
    score = torch.tensor([1.0, -2.0, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    found = bradley_terry(score, torch.tensor([0, 2]), torch.tensor([1, 3]))
    (grad,) = torch.autograd.grad(found.loss_P.sum(), score)
    want = [-math.log(sigmoid(3.0)), math.log(2)]
    torch.testing.assert_close(found.loss_P.detach(), torch.tensor(want, dtype=torch.float64), **CLOSE)
    slopes = [-sigmoid(-3.0), sigmoid(-3.0), -0.5, 0.5]
    torch.testing.assert_close(grad, torch.tensor(slopes, dtype=torch.float64), **CLOSE)
    assert found.stats["reward_accuracy"].tolist() == [1, 0]


def test_far_margins_stay_finite():
    score = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry(score, torch.tensor([1]), torch.tensor([0])).loss_P
    (grad,) = torch.autograd.grad(loss.sum(), score)
    assert loss.tolist() == [2e4] and grad.tolist() == [1, -1]
