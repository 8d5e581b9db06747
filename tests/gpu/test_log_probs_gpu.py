"""The Triton log-prob kernels against float64 arithmetic on the same bf16 or fp32 logits."""

import pytest
import torch

from siirl.algorithms.log_probs import linear_log_prob_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def reference(logits, target, temperature):
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("vocab", [24, 8192, 8193, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels_equal_float64(vocab, dtype, temperature):
    torch.manual_seed(vocab)
    logits = (torch.randn(37, vocab, device="cuda") * 4).to(dtype).requires_grad_()
    unit = torch.eye(37, device="cuda", dtype=dtype)  # the hidden states: it gives the logits to the last bit
    target = torch.randint(vocab, (37,), device="cuda")
    weight_1, weight_2 = torch.randn(37, device="cuda"), torch.randn(37, device="cuda")
    log_prob, entropy, _ = linear_log_prob_entropy(unit, logits.t(), target, temperature)
    (grad,) = torch.autograd.grad((log_prob * weight_1 + entropy * weight_2).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    want_log_prob, want_entropy = reference(exact, target, temperature)
    (want_grad,) = torch.autograd.grad((want_log_prob * weight_1 + want_entropy * weight_2).sum(), exact)
    torch.testing.assert_close(log_prob.double(), want_log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-4)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert (grad.double() - want_grad).norm() <= tolerance * want_grad.norm()


@pytest.mark.parametrize("kept_bytes", [0, 40_000, 1 << 30])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
def test_the_fused_head_equals_float64(dtype, tolerance, kept_bytes):
    torch.manual_seed(0)
    hidden = torch.randn(50, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(1000, (50,), device="cuda")
    log_prob, entropy, _ = linear_log_prob_entropy(
        hidden, weight, target, 0.9, chunk=16, kept_bytes=kept_bytes
    )
    got = torch.autograd.grad((log_prob + 0.1 * entropy).sum(), (hidden, weight))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    want_log_prob, want_entropy = reference(exact[0] @ exact[1].t(), target, 0.9)
    want = torch.autograd.grad((want_log_prob + 0.1 * want_entropy).sum(), exact)
    assert (log_prob.double() - want_log_prob).norm() <= tolerance * want_log_prob.norm()
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_gradient_of_low_precision_weights_is_added_up_in_fp32(chunk):
    """Of a thousand equal tokens, each of which is less than half of the sum's last bit in bf16."""
    hidden = torch.ones(1000, 16, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(32, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1000, dtype=torch.int64, device="cuda")
    log_prob, *_ = linear_log_prob_entropy(hidden, weight, target, 1.0, with_entropy=False, chunk=chunk)
    (grad,) = torch.autograd.grad(log_prob.sum(), weight)
    want = torch.full_like(grad, -1000 / 32)
    want[0] += 1000
    torch.testing.assert_close(grad, want, rtol=1e-2, atol=0)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -3e4]], device="cuda", requires_grad=True)
    unit, target = torch.eye(2, device="cuda"), torch.tensor([1, 2], device="cuda")
    log_prob, entropy, _ = linear_log_prob_entropy(unit, logits.t(), target, 1.0)
    (log_prob.sum() + entropy.sum()).backward()
    torch.testing.assert_close(log_prob.cpu(), torch.tensor([-2e4, -1.0986123]))
    torch.testing.assert_close(entropy.cpu(), torch.tensor([0.0, 1.0986123]))
    assert logits.grad.isfinite().all()
