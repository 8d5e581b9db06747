"""The kernels that gather keys and values and add their gradients up, against torch.

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


def main(device: str = "cpu") -> None:
    sequence_bounds.MOST_GATHERED = 100.0
    for forest in FORESTS:
        for heads, size in ((2, 8), (3, 80), (1, 128)):
            compare(forest, heads, size, torch.float32, device)
    compare(FORESTS[-1], 8, 64, torch.float16, device)
    compare(FORESTS[-1], 8, 64, torch.bfloat16, device)
