"""The kernels of experts against their definition, and a layer with them against one without.

Interpreted by Triton on a CPU, or on the device that is named.
"""

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from siirl.engines.train.experts import expert_kernels, hf_experts

ROUNDING = {
    ("cpu", torch.float32): 1e-5,
    ("cuda", torch.float32): 1e-5,
    ("cpu", torch.bfloat16): 2**-7,  # the interpreter cuts digits off
    ("cuda", torch.bfloat16): 2**-8,
}


def compare(ours, theirs, inputs, dtype: torch.dtype, device: str) -> None:
    """Two functions and their gradients, the second in float64: as near as one rounding."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    out, expected = ours(*inputs), theirs(*exact)
    assert out.dtype == dtype and out.is_contiguous()
    along = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = torch.autograd.grad((out * along).sum(), inputs)
    wanted = torch.autograd.grad((expected * along.double()).sum(), exact)
    for mine, reference, x in zip((out, *found), (expected, *wanted), (out, *inputs), strict=True):
        rounding = ROUNDING[device, mine.dtype]
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine.double(), reference, rtol=rounding, atol=rounding / 16)


def pairs(tokens: int, top: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Tokens to the places of their pairs and back; weights of their own type."""
    draw = torch.Generator().manual_seed(tokens + size)
    place_NK = torch.randperm(tokens * top, generator=draw).view(tokens, top).to(device)
    x_ND = torch.randn(tokens, size, generator=draw).to(device, dtype)

    def spread(x_ND):
        return torch.empty(tokens * top, size, dtype=x_ND.dtype, device=device).index_copy(
            0, place_NK.flatten(), x_ND.repeat_interleave(top, 0)
        )

    compare(lambda x: expert_kernels.Spread.apply(x, place_NK), spread, [x_ND], dtype, device)
    rows_SD = torch.randn(tokens * top, size, generator=draw).to(device, dtype)
    for of_weights in {dtype, torch.float32}:
        weight_NK = torch.rand(tokens, top, generator=draw).to(device, of_weights)
        compare(
            lambda rows, weight: expert_kernels.Collect.apply(rows, weight, place_NK),
            lambda rows, weight: (rows[place_NK] * weight[..., None]).sum(1),
            [rows_SD, weight_NK],
            dtype,
            device,
        )


def gates(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    both = (4 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size))).to(device, dtype)

    def plain(both):
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    compare(expert_kernels.GatedSilu.apply, plain, [both], dtype, device)


def idle(device: str) -> None:
    """Only experts without rows get zeros."""
    for counts in ((0, 3, 0, 0, 5), (1, 1), (0,), (4, 0)):
        grad = torch.randn(len(counts), 24, 1000, device=device)
        expected, ends_E = grad.clone(), torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
        expected[[place for place, count in enumerate(counts) if count == 0]] = 0.0
        expert_kernels.clear_idle_(grad, ends_E)
        assert torch.equal(grad, expected)


def layers(device: str) -> None:
    """A layer of experts with the kernels and without: outputs and all gradients."""
    config = Qwen3MoeConfig(
        hidden_size=48, moe_intermediate_size=40, num_experts=9, num_experts_per_tok=3, num_hidden_layers=1
    )
    config._experts_implementation = hf_experts.GROUPED_EXPERTS
    torch.manual_seed(0)
    layer = Qwen3MoeSparseMoeBlock(config).to(device)
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.2)
    x = torch.randn(1, 29, 48, device=device, requires_grad=True)
    along, found, used = torch.randn(1, 29, 48, device=device), {}, []
    choose = hf_experts._kernels
    for kernels in (None, expert_kernels):
        hf_experts._kernels = lambda x, kernels=kernels: used.append(kernels) or kernels
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        found[kernels] = [out, *torch.autograd.grad((out * along).sum(), [x, *layer.parameters()])]
    hf_experts._kernels = choose
    assert used.count(expert_kernels) == 2 and len(found[None]) == 5
    for mine, reference in zip(found[expert_kernels], found[None], strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
        assert reference.abs().max() > 0.1


def main(device: str = "cpu") -> None:
    expert_kernels.MOST_COLUMNS = expert_kernels.MOST_GATED = 64  # several blocks of a row
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in ((1, 1, 8), (13, 2, 100), (5, 8, 64)):
            pairs(*sizes, dtype, device)
        for sizes in ((1, 8), (7, 300), (0, 8)):
            gates(*sizes, dtype, device)
    idle(device)
    layers(device)
