"""Tokens drawn by the Triton kernels against float64: on a GPU, or interpreted on a CPU."""

import random

import torch

from siirl.engines.rollout.sampling import uniforms
from siirl.engines.rollout.served.draw_triton import draw

ROWS = 24


def check_draws(vocab, dtype, device):
    """Each token is the first whose cumulative probability passes the number of its row; log-probs are exact.

    A number within rounding of the border between two tokens may give either.
    """
    rng = random.Random(vocab)
    torch.manual_seed(vocab)
    logits = (torch.randn(ROWS, vocab + 3, device=device) * 3).to(dtype)[:, :vocab]  # rows apart in memory
    for row in range(3, 6):  # nearly all of the mass is lost to -inf
        logits[row, torch.rand(vocab, device=device) < 0.9] = float("-inf")
        logits[row, rng.randrange(vocab)] = 0.0
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3] * (ROWS // 4), device=device)
    seeds = [rng.getrandbits(64) for _ in range(ROWS)]
    numbers = [rng.randrange(5000) for _ in range(ROWS)]
    signed = torch.tensor([seed - (seed >> 63 << 64) for seed in seeds], device=device)
    token, log_prob = draw(logits, temperature, signed, torch.tensor(numbers, device=device))
    greedy = temperature == 0
    scaled = logits.double() / temperature.double().masked_fill(greedy, 1.0)[:, None]
    exact = scaled.log_softmax(-1)
    assert (exact.gather(1, token[:, None])[:, 0] - log_prob).abs().max() < 1e-5
    assert torch.equal(token[greedy], scaled[greedy].argmax(-1))
    uniform = torch.from_numpy(uniforms(seeds, 1, numbers)[0]).to(device)
    until = exact.exp().cumsum(-1).gather(1, token[:, None])[:, 0]
    before = until - exact.gather(1, token[:, None])[:, 0].exp()
    drawn = ~greedy
    assert ((before - 1e-6 <= uniform) & (uniform <= until + 1e-6))[drawn].all()
    assert exact.gather(1, token[:, None]).isfinite().all()


def check_what_is_no_number():
    """Broken logits give a token of the vocabulary, and a log-prob that says so."""
    logits = torch.randn(3, 5000)
    logits[0, 7], logits[1, 9], logits[2] = float("nan"), float("inf"), float("-inf")
    token, log_prob = draw(logits, torch.ones(3), torch.arange(3), torch.arange(3))
    assert ((token >= 0) & (token < 5000)).all() and not log_prob.isfinite().any()


def main():
    """Interpreted, which takes long: vocabularies of less and of more than a program takes."""
    for vocab in (1, 4095, 4097):
        check_draws(vocab, torch.float32, "cpu")
    check_draws(9000, torch.bfloat16, "cpu")
    check_what_is_no_number()
