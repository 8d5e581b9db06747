"""Draws of engines' samplers by seeds: what top-k and top-p keep, row by row, next to a plain reference."""

import itertools

import pytest
import torch
from sampling_reference import truncated

from siirl.engines.rollout.sampling import uniforms
from siirl.engines.rollout.served.draws import draw, keep_likeliest

ROWS, VOCAB = 6, 40
TOP_K = [1, 3, 7, VOCAB, 1 << 30, 5]
TOP_P = [0.9, 1.0, 0.6, 0.95, 1.0, 0.01]


def limits(with_k, with_p):
    top_k_B = torch.tensor(TOP_K, dtype=torch.int32) if with_k else None
    return top_k_B, torch.tensor(TOP_P) if with_p else None


def logits():
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))


def expected(row, with_k, with_p):
    """Token -> probability of a row, by the reference that goes token by token."""
    top_k = min(TOP_K[row], VOCAB) if with_k else -1
    return truncated(logits()[row].double().log_softmax(-1), top_k, TOP_P[row] if with_p else 1.0)


@pytest.mark.parametrize(("with_k", "with_p"), [(True, False), (False, True), (True, True)])
def test_each_row_keeps_the_tokens_of_its_own_limits(with_k, with_p):
    kept_BV = keep_likeliest(logits(), *limits(with_k, with_p))
    for row, kept_V in enumerate(kept_BV):
        wanted = expected(row, with_k, with_p)
        assert set(kept_V.isfinite().nonzero()[:, 0].tolist()) == wanted.keys()
        probs = kept_V.double().softmax(-1)
        assert all(float(probs[token]) == pytest.approx(p, abs=1e-6) for token, p in wanted.items())


def test_tokens_as_likely_as_the_last_one_are_kept():
    tied = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert keep_likeliest(tied, torch.tensor([2]), None).isfinite().tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(("with_k", "with_p"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_token_lies_where_its_seeds_number_does_and_its_log_prob_is_that_before_the_limits(with_k, with_p):
    temperatures = [1.0, 0.7, 1.3, 1.0, 0.5, 0.0]
    seeds, numbers = [3, -9, 1 << 50, 7, 7, 7], [0, 5, 99, 1, 2, 3]
    top_k_B, top_p_B = limits(with_k, with_p)
    token_B, log_prob_B = draw(
        logits(), torch.tensor(temperatures), torch.tensor(seeds), torch.tensor(numbers), top_k_B, top_p_B
    )
    for row, (token, temperature) in enumerate(zip(token_B.tolist(), temperatures, strict=True)):
        log_probs = (logits()[row].double() / (temperature or 1.0)).log_softmax(-1)
        assert float(log_prob_B[row]) == pytest.approx(float(log_probs[token]), abs=1e-5)
        if not temperature:
            assert token == int(log_probs.argmax())
            continue
        top_k = min(TOP_K[row], VOCAB) if with_k else -1
        probs = truncated(log_probs, top_k, TOP_P[row] if with_p else 1.0)
        uniform = float(uniforms([seeds[row] % (1 << 64)], 1, [numbers[row]])[0, 0])
        ordered = sorted(probs)
        below = itertools.accumulate(probs[one] for one in ordered)
        assert token == next(one for one, total in zip(ordered, below, strict=True) if total > uniform)
