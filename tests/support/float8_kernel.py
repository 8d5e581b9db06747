"""The kernel that rounds rows to FP8, interpreted by Triton on a CPU.

Of numbers that FP8 has, under scales of all sizes: the interpreter's own rounding is wrong where it carries
(31.03 becomes 16), and that of a GPU is looked at there (tests/gpu/test_fp8_gpu.py).
"""

import torch

from siirl.engines.train import triton_kernels
from siirl.engines.train.fsdp import float8


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    every = torch.arange(256, dtype=torch.uint8).view(float8.FP8).float()
    every = every[every.isfinite() & (every.abs() >= 2**-6)]
    for dtype in (torch.float32, torch.bfloat16):
        for columns in (16, 48, 640):
            drawn = torch.randint(len(every), (41, columns), generator=draw)
            drawn[:, 0] = len(every) - 1  # 448
            x = (every[drawn] * torch.exp2(torch.arange(-20, 21))[:, None]).to(dtype)
            x[7], x[9, 0] = 0.0, 448.0
            for factor in (None, torch.full((columns,), 0.125)):
                ours, scale = triton_kernels.rounded_on_gpu(x, factor)
                theirs, expected = float8.rounded(x, factor)
                assert torch.equal(scale, expected), (dtype, columns)
                same = ours.float() == theirs.float()
                carried = theirs.float().abs() <= 2**-6  # numbers of fewer digits, which it rounds as well
                assert (same | carried).all(), (dtype, columns)
                assert same.float().mean() > 0.95
            x[3, 5] = torch.inf
            assert triton_kernels.rounded_on_gpu(x)[1].isinf().flatten().nonzero().tolist() == [[3]]
