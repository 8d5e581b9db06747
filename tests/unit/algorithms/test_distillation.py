"""Divergences from teachers: TRL's, with the gradient; of the likeliest words, mixtures, sampled tokens."""

import math

import pytest
import torch

from siirl.algorithms.distillation import divergence, mixture, sampled_reverse_kl, span_sums
from siirl.algorithms.top_log_probs import WordShard, linear_log_probs_of, linear_top_log_probs

KINDS = [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("name", "beta"), KINDS)
@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_divergences_and_their_gradients_are_those_of_trl(name, beta, chunk):
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    student, teacher = logits(3, 5, 11, seed=1, dtype=torch.float32), logits(3, 5, 11, dtype=torch.float32)
    student.requires_grad_()
    labels = torch.where(torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) < 0.3, -100, 1)
    want = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=0.7)
    (want_grad,) = torch.autograd.grad(want, student)
    log_p, log_q = ((x / 0.7).log_softmax(-1) for x in (student, teacher))
    found = divergence(log_p, log_q, name, beta, whole=True, chunk=chunk)
    mask = labels != -100
    loss = found[mask].sum() / mask.sum()
    (grad,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(loss, want, **CLOSE)
    torch.testing.assert_close(grad, want_grad, **CLOSE)


@pytest.mark.parametrize(("name", "beta"), KINDS)
def test_all_words_but_the_likeliest_count_as_one(name, beta):
    log_p, log_q = (logits(2, 3, 9, seed=seed).log_softmax(-1) for seed in (1, 2))
    ids = log_q.topk(4).indices
    found = divergence(log_p.gather(-1, ids), log_q.gather(-1, ids), name, beta, whole=False)

    def merged(log_prob: torch.Tensor) -> torch.Tensor:
        known = log_prob.gather(-1, ids)
        return torch.cat([known, (1 - known.exp().sum(-1, keepdim=True)).log()], -1)

    want = divergence(merged(log_p), merged(log_q), name, beta, whole=True)
    torch.testing.assert_close(found, want, **CLOSE)
    exact = divergence(log_p, log_q, name, beta, whole=True)
    assert bool((found <= exact + 1e-9).all()) and bool((found > 0).all())  # coarser words differ less
    every = log_q.topk(9).indices
    all_but_rounding = divergence(log_p.gather(-1, every), log_q.gather(-1, every), name, beta, whole=False)
    torch.testing.assert_close(all_but_rounding, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_a_policy_that_is_its_teacher_has_nothing_to_learn(name):
    x = logits(1, 2, 7).requires_grad_()
    log_p = x.log_softmax(-1)
    ids = log_p.topk(3).indices
    for whole, chosen in ((True, log_p), (False, log_p.gather(-1, ids))):
        found = divergence(chosen, chosen.detach(), name, 0.5, whole=whole)
        (grad,) = torch.autograd.grad(found.sum(), x, retain_graph=True)
        assert float(found.detach().abs().max()) < 1e-9 and float(grad.abs().max()) < 1e-9


def test_tokens_without_a_distribution_stay_finite():
    zero = torch.zeros(1, 2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(divergence(zero, zero.detach(), "jsd", 0.5, whole=False).sum(), zero)
    assert bool(grad.isfinite().all())
    assert divergence(torch.zeros(0, 3, 4), torch.zeros(0, 3, 4), "jsd", 0.5, whole=True).shape == (0, 3)


@pytest.mark.parametrize("lag", [0.0, 0.5])
def test_sampled_tokens_give_the_kl_and_its_gradient_in_the_mean_whoever_sampled_them(lag):
    x, log_q = logits(6, seed=3).requires_grad_(), logits(6, seed=4).log_softmax(-1)
    log_p = x.log_softmax(-1)
    log_old = (x + lag * logits(6, seed=5)).log_softmax(-1).detach()
    loss = (log_old.exp() * sampled_reverse_kl(log_p[:, None], log_old[:, None], log_q[:, None])[:, 0]).sum()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    want = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grad, torch.autograd.grad(want, x)[0])


def test_teachers_are_mixed_by_weight_and_those_of_weight_0_do_not_count():
    log_q = logits(3, 2, 4, 5).log_softmax(-1)
    weight = torch.tensor([[1.0, 0.0], [3.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    log_q[2] = torch.nan
    found = mixture(log_q, weight)
    torch.testing.assert_close(found[0].exp(), 0.25 * log_q[0, 0].exp() + 0.75 * log_q[1, 0].exp())
    torch.testing.assert_close(found[1], log_q[1, 1])
    torch.testing.assert_close(mixture(log_q[..., 0], weight), found[..., 0])


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("which", ["some", "all"])
def test_log_probs_of_words_and_their_gradients_are_those_of_a_softmax(which, cap):
    hidden, weight = logits(7, 4).requires_grad_(), logits(10, 4, seed=1).requires_grad_()
    ids = torch.randint(0, 10, (7, 3), generator=torch.Generator().manual_seed(5))
    ids[0, 1] = ids[0, 0]
    full = hidden @ weight.t()
    want = ((full if cap is None else cap * torch.tanh(full / cap)) / 0.7).log_softmax(-1)
    want = want.gather(1, ids) if which == "some" else want
    found = linear_log_probs_of(hidden, weight, ids if which == "some" else None, 0.7, chunk=3, cap=cap)
    torch.testing.assert_close(found, want)
    slope = logits(*want.shape, seed=6)
    grads = [torch.autograd.grad((value * slope).sum(), (hidden, weight)) for value in (found, want)]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize(("top_k", "cap"), [(1, None), (3, 1.5), (10, None), (64, 1.5)])
def test_the_likeliest_words_come_with_their_log_probs(top_k, cap):
    hidden, weight = logits(7, 4), logits(10, 4, seed=1)
    value, ids = linear_top_log_probs(hidden, weight, top_k, 0.7, chunk=2, cap=cap)
    full = hidden @ weight.t()
    want = (
        ((full if cap is None else cap * torch.tanh(full / cap)) / 0.7).log_softmax(-1).topk(min(top_k, 10))
    )
    torch.testing.assert_close(value, want.values)
    assert torch.equal(ids, want.indices)


def test_a_shard_of_the_words_gives_its_own():
    """One of two ranks: what it hands to be joined is what it has, at the places of its words."""
    hidden, weight = logits(3, 4), logits(4, 4, seed=1)
    joined = []
    shard = WordShard(first=6, total=10, index=1, count=2)

    def join(value: torch.Tensor, how: str) -> torch.Tensor:
        joined.append((how, value.clone()))
        return value

    linear_top_log_probs(hidden, weight, 5, 1.0, shard=shard, join=join)
    kind, found = joined[-1]
    assert kind == "sum" and found.shape == (2, 3, 2, 5) and bool((found[:, :, 0] == 0).all())
    assert bool((found[0, :, 1, 4] == -math.inf).all())  # it has four words, and five are asked for
    assert set(found[1, :, 1, :4].flatten().tolist()) == {6.0, 7.0, 8.0, 9.0}


def test_values_of_a_span_are_added_up_at_its_last_token():
    span = torch.tensor([[2, 2, 3, 0, 7, 7, 7], [0, 0, 0, 0, 0, 0, 0]])
    value = torch.arange(14, dtype=torch.float64).view(2, 7).requires_grad_()
    found = span_sums(value, span)
    want = [[0, 0 + 1, 2, 0, 0, 0, 4 + 5 + 6], [0] * 7]
    assert found.tolist() == want
    (grad,) = torch.autograd.grad((found * torch.arange(1.0, 8.0)).sum(), value)
    assert grad.tolist() == [[2, 2, 3, 0, 7, 7, 7], [0] * 7], "tokens in no span have no gradient"


def test_spans_of_single_tokens_are_the_loss_of_one_tokenizer_to_the_bit():
    """Its gradient, too, in float64."""
    each = torch.arange(1, 7).expand(4, -1)
    log_p, old, log_q = (logits(4, 6, 9, seed=seed).log_softmax(-1)[..., 0] for seed in (1, 2, 3))
    losses = []
    for reduced in (lambda x: x, lambda x: span_sums(x, each)):
        one = log_p.clone().requires_grad_()
        loss = sampled_reverse_kl(reduced(one), reduced(old), log_q)
        losses.append((loss, torch.autograd.grad(loss.sum(), one)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_the_loss_of_a_span_is_the_kl_of_its_text():
    """A policy writes two letters of three as two tokens, a teacher as one of nine. Over all texts, as likely
    as the policy writes them, the mean of the loss is KL(policy || teacher) of texts; its gradient, too."""
    first, then, teacher = logits(3, seed=1), logits(3, 3, seed=2), logits(9, seed=3)
    first.requires_grad_(), then.requires_grad_()
    # of both tokens of each text
    log_p_AB = torch.stack([first.log_softmax(-1)[:, None].expand(3, 3), then.log_softmax(-1)], -1)
    text_9, log_q_9 = log_p_AB.sum(-1).flatten(), teacher.log_softmax(-1)
    kl = (text_9.exp() * (text_9 - log_q_9)).sum()
    want = torch.autograd.grad(kl, (first, then), retain_graph=True)
    token_92 = log_p_AB.view(9, 2)
    span = torch.full((9, 2), 2)
    teacher_92 = torch.stack([torch.zeros(9), log_q_9], -1)
    of_spans = (span_sums(token_92, span), span_sums(token_92.detach(), span))
    loss_92 = sampled_reverse_kl(*of_spans, teacher_92)
    mean = (text_9.detach().exp() * loss_92.sum(-1)).sum()
    torch.testing.assert_close(mean, kl, rtol=1e-12, atol=1e-12)
    for found, exact in zip(torch.autograd.grad(mean, (first, then)), want, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
