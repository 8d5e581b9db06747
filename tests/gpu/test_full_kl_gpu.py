"""The KL over the whole vocabulary on a GPU: against float64, with a real vocabulary, in bounded memory."""

import pytest
import torch

from siirl.algorithms.full_kl import linear_full_kl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_TOKENS, HIDDEN, VOCABULARY, CHUNK = 2000, 256, 151_936, 128


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states and output head of a policy (with gradient), and those of its reference, nearby."""
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, device="cuda", generator=draw)
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", generator=draw) * 0.1
    ref_hidden = hidden + 0.2 * torch.randn(hidden.shape, device="cuda", generator=draw)
    return [tensor.to(dtype) for tensor in (hidden, weight, ref_hidden, weight)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 6e-2)])
def test_value_and_gradient_are_those_of_all_logits_in_bounded_memory(dtype, tolerance):
    """bf16 rounds the largest logits, about 8, by 0.016: 4% of the differences of 0.4 between both models."""
    hidden, weight, ref_hidden, ref_weight = inputs(dtype)
    exact = [tensor.double() for tensor in (hidden, weight, ref_hidden, ref_weight)]
    exact = [tensor.requires_grad_() for tensor in exact[:2]] + exact[2:]
    log_p, log_q = ((exact[i] @ exact[i + 1].t() / 0.8).log_softmax(-1) for i in (0, 2))
    want = (log_p.exp() * (log_p - log_q)).sum(-1)
    want_grads = torch.autograd.grad(want.sum(), exact[:2])
    want, want_grads = want.detach(), [grad.to(torch.float32) for grad in want_grads]
    del exact, log_p, log_q

    hidden.requires_grad_(), weight.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = linear_full_kl(hidden, weight, ref_hidden, ref_weight, 0.8, chunk=CHUNK)
    grads = torch.autograd.grad(got.sum(), (hidden, weight))
    room = 6 * 4 * CHUNK * VOCABULARY + 3 * 4 * weight.numel()
    assert torch.cuda.max_memory_allocated() - before < room < 4 * NUM_TOKENS * VOCABULARY * 2

    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    for grad, exact_grad in zip(grads, want_grads, strict=True):
        assert (grad.float() - exact_grad).norm() <= tolerance * exact_grad.norm()
