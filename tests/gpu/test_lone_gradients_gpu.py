"""What adds gradients up on one GPU gives what torch's operations give, bit for bit."""

import pytest
import torch

from siirl.engines.train.fsdp.fsdp_engine import _added

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = ((1,), (4096,), (4097,), (0, 3), (151, 64), (3, 5, 7))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("given", "dtype"), [(BF16, FP32), (FP32, FP32), (BF16, BF16), (FP16, FP32)])
@pytest.mark.parametrize("turned", [False, True])
def test_sums_are_those_of_torch(shape, given, dtype, turned):
    torch.manual_seed(len(shape))
    total = expected = None
    for _ in range(4):
        grad = torch.randn(shape, device="cuda").to(given)
        grad = grad.transpose(0, -1) if turned else grad
        expected = grad.to(dtype, copy=True) if expected is None else expected + grad
        total = _added(total, grad, dtype)
        assert total.dtype == dtype and torch.equal(total, expected)
