"""Log-probs and entropy from logits or hidden states, against torch's own softmax in float64."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
from torch import Tensor

from siirl.algorithms.log_probs import linear_log_prob_entropy

NUM_TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 23, 6, 19, 0.7


def reference(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    return log_p.gather(-1, target[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


@pytest.mark.parametrize("kept_bytes", [0, 1000, 1 << 30])
@pytest.mark.parametrize(("chunk", "cap"), [(1, None), (7, 1.5), (NUM_TOKENS, None), (100, 1.5)])
def test_hidden_states_give_the_values_and_gradients_of_full_logits(chunk, cap, kept_bytes):
    hidden, weight, target = inputs(torch.float64)
    log_prob, entropy, _ = linear_log_prob_entropy(
        hidden, weight, target, TEMPERATURE, chunk=chunk, kept_bytes=kept_bytes, cap=cap
    )
    mix = torch.linspace(-1, 1, NUM_TOKENS, dtype=torch.float64)
    got = torch.autograd.grad((mix * log_prob + mix.flip(0) * entropy).sum(), (hidden, weight))
    logits = hidden @ weight.t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    want_log_prob, want_entropy = reference(logits, target, TEMPERATURE)
    want = torch.autograd.grad((mix * want_log_prob + mix.flip(0) * want_entropy).sum(), (hidden, weight))
    torch.testing.assert_close(log_prob, want_log_prob, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-10, atol=1e-10)
    for got_grad, want_grad in zip(got, want, strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_sum_of_squared_probabilities_comes_with_them(chunk):
    hidden, weight, target = inputs(torch.float64)
    settings = {"chunk": chunk, "with_square": True}
    log_prob, entropy, square = linear_log_prob_entropy(hidden, weight, target, TEMPERATURE, **settings)
    want = (hidden @ weight.t() / TEMPERATURE).softmax(-1).square().sum(-1)
    torch.testing.assert_close(square, want.detach(), rtol=1e-12, atol=1e-12)
    assert not square.requires_grad and log_prob.requires_grad
    plain = linear_log_prob_entropy(hidden, weight, target, TEMPERATURE, chunk=chunk)
    assert torch.equal(plain[0], log_prob) and torch.equal(plain[1], entropy) and plain[2] is None


@pytest.mark.parametrize("with_square", [True, False])
def test_words_that_are_split_over_ranks_give_what_all_of_them_do(with_square):
    """Two ranks in two threads, which meet in the join."""
    hidden, weight, target = inputs(torch.float64)
    meet, said, first = Barrier(2), [None, None], VOCABULARY // 3

    def joining(rank, value, how):
        said[rank] = value.clone()
        meet.wait(30)
        parts = torch.stack(said)
        meet.wait(30)
        return parts.amax(0) if how == "max" else parts.sum(0)

    def run(rank):
        own = (weight[:first], target) if rank == 0 else (weight[first:], target - first)
        join = partial(joining, rank)
        return linear_log_prob_entropy(hidden, *own, TEMPERATURE, chunk=4, with_square=with_square, join=join)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    whole = linear_log_prob_entropy(hidden, weight, target, TEMPERATURE, with_square=True)
    for of_rank in found:
        for got, want in zip(of_rank[: 2 + with_square], whole, strict=False):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def of_logits(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Of logits that are what weights give to the hidden states of a unit matrix, to the last bit."""
    unit = torch.eye(len(logits), dtype=logits.dtype)
    return linear_log_prob_entropy(unit, logits.t(), target, temperature)[:2]


def test_bf16_logits_lose_nothing_beyond_their_own_rounding():
    hidden, weight, target = inputs(torch.float64, scale=8.0)
    logits = (hidden @ weight.t()).bfloat16()
    log_prob, entropy = of_logits(logits, target, 1.0)
    want_log_prob, want_entropy = reference(logits, target, 1.0)
    assert log_prob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_prob.double(), want_log_prob, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -3e4]], requires_grad=True)
    log_prob, entropy = of_logits(logits, torch.tensor([1, 2]), 1.0)
    (log_prob.sum() + entropy.sum()).backward()
    torch.testing.assert_close(log_prob, torch.tensor([-2e4, -1.0986123]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1.0986123]))
    assert logits.grad.isfinite().all()


def test_an_entropy_that_nobody_asked_for_changes_nothing():
    hidden, weight, target = inputs(torch.float32)
    log_prob, *_ = linear_log_prob_entropy(hidden, weight, target, 1.0)
    plain, none, _ = linear_log_prob_entropy(hidden, weight, target, 1.0, with_entropy=False)
    assert none is None
    torch.testing.assert_close(plain, log_prob)
    got = torch.autograd.grad(plain.sum(), (hidden, weight))
    want = torch.autograd.grad(log_prob.sum(), (hidden, weight))
    for got_grad, want_grad in zip(got, want, strict=True):
        torch.testing.assert_close(got_grad, want_grad)


def test_the_entropy_alone_can_be_trained():
    hidden, weight, target = inputs(torch.float64)
    got = torch.autograd.grad(linear_log_prob_entropy(hidden, weight, target, 2.0)[1].sum(), hidden)[0]
    want = torch.autograd.grad(reference(hidden @ weight.t(), target, 2.0)[1].sum(), hidden)[0]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, target = inputs(torch.float32)
    linear_log_prob_entropy(hidden, weight.detach(), target, 1.0)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_zero_tokens_give_zero_gradients():
    hidden, weight, target = inputs(torch.float32)
    log_prob, entropy, _ = linear_log_prob_entropy(hidden[:0], weight, target[:0], 1.0)
    (log_prob.sum() + entropy.sum()).backward()
    assert log_prob.shape == (0,) and weight.grad.abs().sum() == 0


def test_memory_is_bounded_by_the_chunk_in_forward_and_backward(monkeypatch):
    from siirl.algorithms import log_probs

    rows = []
    scaled = log_probs._scaled
    monkeypatch.setattr(log_probs, "_scaled", lambda logits, t: rows.append(len(logits)) or scaled(logits, t))
    hidden, weight, target = inputs(torch.float32)
    linear_log_prob_entropy(hidden, weight, target, 1.0, chunk=4)[0].sum().backward()
    assert max(rows) == 4 and sum(rows) == 2 * NUM_TOKENS
