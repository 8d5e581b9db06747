"""The kernels that gather keys and values, join parts of attention and add gradients up, against torch.

Interpreted by Triton on a CPU, or on the device that is named.
"""

from dataclasses import replace

import torch
from packed_attention_cases import drawn_forest, forest_bounds

from siirl.engines.train import triton_kernels
from siirl.engines.train.packed import sequence_bounds

ROUNDING = {
    ("cpu", torch.float32): 1e-6,
    ("cuda", torch.float32): 1e-6,
    ("cpu", torch.float16): 2**-11,
    ("cuda", torch.float16): 2**-11,
    ("cpu", torch.bfloat16): 2**-7,  # the interpreter cuts digits off
    ("cuda", torch.bfloat16): 2**-8,
}
FORESTS = [
    ([1, 1], [[1, 1], [1]], [1]),
    ([3, 2], [[0], [4]], []),
    ([9], [[2] * 20], [5]),
    *map(drawn_forest, range(4)),
]


def compare(forest, heads: int, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Of keys that lie head by head, and values that are a part of a wider product."""
    bounds = forest_bounds(*forest)
    bounds = replace(
        bounds, cu_seqlens=bounds.cu_seqlens.to(device), padded_index=bounds.padded_index.to(device)
    )
    keys, num_tokens = bounds.keys, len(bounds.padded_index)
    draw = torch.Generator().manual_seed(heads)
    by_head = torch.randn(heads, num_tokens, size, generator=draw).to(device, dtype)
    product = torch.randn(num_tokens, 2 * heads + 1, size, generator=draw).to(device, dtype)
    k, v = by_head.transpose(0, 1), product[:, 1 : heads + 1]
    for mine, x in zip(triton_kernels.gathered(k, v, keys), (k, v), strict=True):
        assert torch.equal(mine, x[keys.index]) and mine.is_contiguous()
    grads = torch.randn(2, len(keys.index), heads, size, generator=draw).to(device, dtype)
    runs = [triton_kernels.added_up(*grads, k, v, keys) for _ in range(2)]
    for mine, again, grad, x in zip(*runs, grads, (k, v), strict=True):
        exact = torch.zeros(x.shape, dtype=torch.float64, device=device)
        exact.index_add_(0, keys.index, grad.double())
        torch.testing.assert_close(mine.double(), exact, rtol=ROUNDING[device, dtype], atol=1e-5)
        assert torch.equal(mine, again) and mine.stride() == torch.empty_like(x).stride()


def compare_joined(dtype: torch.dtype) -> None:
    """Two parts of attention whose softmax has normalisers that are far apart, for some rows."""
    draw = torch.Generator().manual_seed(0)
    parts_PRHD = torch.randn(2, 37, 3, 24, generator=draw).to(dtype)
    lse_PHR = torch.randn(2, 3, 37, generator=draw) * torch.tensor([1.0, 10.0, 200.0])[:, None]
    share_PRH = lse_PHR.double().softmax(0).transpose(1, 2)
    out, lse = parts_PRHD[0].clone(), lse_PHR[0].clone()
    triton_kernels.join_(out, lse, parts_PRHD[1], lse_PHR[1])
    exact = (parts_PRHD.double() * share_PRH[..., None]).sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=ROUNDING["cpu", dtype], atol=1e-4)
    torch.testing.assert_close(lse.double(), lse_PHR.double().logsumexp(0), rtol=1e-6, atol=1e-5)


def compare_added(dtype: torch.dtype) -> None:
    """Gradients in bfloat16, of which the first one begins the sum."""
    first, second = torch.randn(2, 1500, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = triton_kernels.added(None, first, dtype)
    assert total.dtype == dtype and torch.equal(total, first.to(dtype))
    assert triton_kernels.added(total, second, dtype) is total
    exact = first.double() + second.double()
    torch.testing.assert_close(total.double(), exact, rtol=ROUNDING["cpu", dtype], atol=1e-6)


def main(device: str = "cpu") -> None:
    sequence_bounds.MOST_GATHERED = 100.0
    for forest in FORESTS:
        for heads, size in ((2, 8), (3, 80), (1, 128)):
            compare(forest, heads, size, torch.float32, device)
    compare(FORESTS[-1], 8, 64, torch.float16, device)
    compare(FORESTS[-1], 8, 64, torch.bfloat16, device)
    for dtype in (torch.float32, torch.bfloat16):
        compare_joined(dtype)
        compare_added(dtype)
