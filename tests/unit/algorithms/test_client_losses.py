"""The sums that clients ask for, and their gradients, are those of the protocol's own words."""

import math

import pytest
import torch

from siirl.algorithms.client_losses import CLIENT_LOSSES

LP = (-2.0, -0.5, -3.0, -1.0)
Q = (-1.0, -1.0, -3.0, -1.2)
A = (1.5, -2.0, 0.5, 0.0)


def cases():
    """Loss, options, sum and its derivative by each log-prob, computed by hand with math alone."""
    ratio = [math.exp(lp - q) for lp, q in zip(LP, Q, strict=True)]
    both = list(zip(LP, Q, A, ratio, strict=True))
    yield "cross_entropy", {}, -sum(lp * a for lp, _, a, _ in both), [-a for a in A]
    yield "importance_sampling", {}, -sum(r * a for *_, a, r in both), [-r * a for *_, a, r in both]
    low, high = 0.8, 1.2
    clipped = [min(max(r, low), high) for r in ratio]
    total = -sum(min(r * a, c * a) for (*_, a, r), c in zip(both, clipped, strict=True))
    slopes = [-r * a if r * a <= c * a else 0.0 for (*_, a, r), c in zip(both, clipped, strict=True)]
    yield "ppo", {}, total, slopes
    clipped = [min(max(r, 0.5), 1.1) for r in ratio]
    total = -sum(c * lp * a for (lp, _, a, _), c in zip(both, clipped, strict=True))
    slopes = [-c * a for (_, _, a, _), c in zip(both, clipped, strict=True)]
    yield "cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, total, slopes
    total = -sum(lp * a - 0.15 * (lp - q) ** 2 for lp, q, a, _ in both)
    yield "dro", {"beta": 0.3}, total, [-(a - 0.3 * (lp - q)) for lp, q, a, _ in both]


@pytest.mark.parametrize(
    ("name", "options", "total", "slopes"), list(cases()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_loss_is_the_sum_of_the_protocol_and_so_is_its_gradient(name, options, total, slopes):
    loss = CLIENT_LOSSES[name]
    log_prob = torch.tensor(LP, dtype=torch.float64, requires_grad=True)
    given = {"weights": A, "advantages": A, "logprobs": Q}
    inputs = {key: torch.tensor(given[key], dtype=torch.float64) for key in loss.inputs}
    found = loss.sum_of(log_prob, inputs, loss.options | options)
    found.backward()
    assert found.item() == pytest.approx(total, abs=1e-12)
    assert log_prob.grad.tolist() == pytest.approx(slopes, abs=1e-12)


def test_each_loss_is_tried():
    assert {name for name, *_ in cases()} == CLIENT_LOSSES.keys()
