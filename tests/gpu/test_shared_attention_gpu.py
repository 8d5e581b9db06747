"""Rows that share a prompt, by the variable-length kernels: attention and gradients as of each row alone."""

from dataclasses import replace

import gathered_keys_kernels
import pytest
import torch
from packed_attention_cases import alone, bounds_of, drawn_forest, forest_bounds, rows_alone
from torch import nn
from transformers import AttentionInterface

from siirl.engines.train.attention.attention_kernels import attention_by
from siirl.engines.train.attention.shared_attention import join_
from siirl.engines.train.packed import sequence_bounds
from siirl.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["torch", "flash_attn_4"])
def attention(request):
    """Packed attention by each kernels that there are."""
    try:
        return AttentionInterface()[attention_by(request.param)]
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[0.0, 100.0], ids=["two calls", "one call"])
def calls(request, monkeypatch):
    """Rows that share prompts attend in so many calls of a kernel."""
    monkeypatch.setattr(sequence_bounds, "MOST_GATHERED", request.param)


FORESTS = [
    ([1, 1], [[1, 1], [1]], [1]),
    ([3, 2], [[0], [4]], []),
    ([256, 130], [[300, 1, 129], [64, 257]], [200]),
    ([700], [[5, 1, 90, 3, 128, 2]], []),
    *(drawn_forest(seed, 40) for seed in range(8)),
]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("forest", FORESTS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 64), (4, 2, 128)])
def test_shared_prompts_in_bf16_are_near_to_the_definition(attention, forest, heads):
    bounds = on_cuda(forest_bounds(*forest))
    draw = torch.Generator("cuda").manual_seed(len(bounds.padded_index))
    shapes = [(1, num, len(bounds.padded_index), heads[2]) for num in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, generator=draw, device="cuda") for shape in shapes]
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    out, _ = attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.125)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = rows_alone(*exact, *forest, 0.125)
    assert_near(out, inputs, expected, exact, draw)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("seed", range(4))
def test_shared_prompts_of_one_product_in_bf16_are_near_to_the_definition(attention, seed):
    """Heads of a token lie side by side, those of queries, keys and values in one piece of memory."""
    forest = drawn_forest(seed, 40)
    bounds = on_cuda(forest_bounds(*forest))
    draw = torch.Generator("cuda").manual_seed(seed)
    shape = (len(bounds.padded_index), 4 + 2 + 2, 128)
    product = torch.randn(shape, generator=draw, device="cuda").bfloat16().requires_grad_()
    inputs = [x.transpose(0, 1).unsqueeze(0) for x in product.split([4, 2, 2], 1)]
    out, _ = attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.125)
    exact = product.detach().double().requires_grad_()
    heads = [x.transpose(0, 1).unsqueeze(0) for x in exact.split([4, 2, 2], 1)]
    assert_near(out, [product], rows_alone(*heads, *forest, 0.125), [exact], draw)


@pytest.mark.usefixtures("calls")
def test_shared_prompts_without_a_gradient_of_their_own_are_near_to_the_definition(attention):
    """As a pass that scores computes them, and with a segment of fillers behind."""
    forest = ([130, 20], [[40, 7], [200]], [33, 5])
    bounds = on_cuda(forest_bounds(*forest[:2], forest[2][:1]))
    bounds = sequence_bounds.with_segment(bounds, forest[2][1])
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, num, len(bounds.padded_index), 128) for num in (8, 2, 2)]
    inputs = [torch.randn(shape, generator=draw, device="cuda").bfloat16() for shape in shapes]
    with torch.inference_mode():
        out, _ = attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.1)
    expected = rows_alone(*(x.double() for x in inputs), *forest, 0.1)
    assert (out - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "size"), [(8, 128), (3, 80), (1, 256)])
def test_keys_are_gathered_and_their_gradients_added_up_as_torch_does(dtype, heads, size, monkeypatch):
    monkeypatch.setattr(sequence_bounds, "MOST_GATHERED", 100.0)
    for forest in FORESTS:
        gathered_keys_kernels.compare(forest, heads, size, dtype, "cuda")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [None, 17])
def test_rows_that_share_nothing_in_bf16_are_near_to_the_definition(attention, seed, window):
    draw = torch.Generator("cuda").manual_seed(seed)
    lengths = torch.randint(1, 300, (5,), generator=draw, device="cuda").tolist()
    bounds = bounds_of(lengths)
    bounds = replace(bounds, cu_seqlens=bounds.cu_seqlens.cuda(), padded_index=bounds.padded_index.cuda())
    shapes = [(1, num, sum(lengths), 128) for num in (8, 2, 2)]
    inputs = [
        torch.randn(shape, generator=draw, device="cuda").bfloat16().requires_grad_() for shape in shapes
    ]
    out, _ = attention(nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.1, sliding_window=window)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    rows = zip(*(x.split(lengths, dim=2) for x in exact), strict=True)
    assert_near(out, inputs, torch.cat([alone(*row, 0.1, window) for row in rows], 1), exact, draw)


def assert_near(out, inputs, expected, exact, draw):
    weights = torch.randn(out.shape, generator=draw, device="cuda").bfloat16()
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights.double()).sum(), exact)
    for mine, reference in zip((out, *ours), (expected, *theirs), strict=True):
        assert (mine - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 64), (37, 6, 80), (1000, 16, 128), (5, 3, 256)])
def test_two_parts_are_joined_as_one_softmax_over_both(dtype, tokens, heads, size):
    draw = torch.Generator().manual_seed(tokens)
    out, more = torch.randn(2, tokens, heads, size, generator=draw).to(dtype)
    lse, more_lse = torch.randn(2, heads, tokens, generator=draw) * 20
    joined = torch.logaddexp(lse.double(), more_lse.double())
    shares = [(part - joined).exp().t().unsqueeze(-1) for part in (lse.double(), more_lse.double())]
    expected = out.double() * shares[0] + more.double() * shares[1]
    around = torch.full((heads, tokens + 7), torch.nan).cuda()
    within = around[:, 4 : 4 + tokens]
    within.copy_(lse)
    ours = out.cuda()
    join_(ours, within, more.cuda(), more_lse.cuda())
    torch.testing.assert_close(ours.cpu().double(), expected.to(dtype).double(), atol=1e-6, rtol=2**-7)
    torch.testing.assert_close(within.cpu().double(), joined, atol=1e-5, rtol=1e-6)
    assert around[:, :4].isnan().all() and around[:, 4 + tokens :].isnan().all()


TIMED = ((256, 1024, 8), (256, 256, 8), (512, 512, 8), (1024, 1024, 8), (1024, 512, 8), (4096, 256, 8))


def test_one_call_takes_the_memory_of_its_copies_more_than_two(attention, monkeypatch):
    """And prints the times of a layer's attention, of about 33,000 tokens; 16 heads, 8 of keys.

    For each key that is gathered: its copy and its value's, the gradients of both, and what the kernels add
    these up in (fp32, or a gradient for each query head).
    """
    print("\nprompt + response, responses to it (keys of a token): forward us, backward us, peak in MiB")
    for prompt, response, samples in TIMED:
        prompts = max(1, round(33_000 / (prompt + samples * response)))
        lines, peaks = [], []
        for most in (0.0, 100.0):
            monkeypatch.setattr(sequence_bounds, "MOST_GATHERED", most)
            forest = [prompt] * prompts, [[response] * samples] * prompts, []
            bounds = on_cuda(forest_bounds(*forest))
            num_tokens = len(bounds.padded_index)
            product = torch.randn(num_tokens, 32, 128, device="cuda").bfloat16()
            q, k, v = (x.transpose(0, 1).unsqueeze(0).requires_grad_() for x in product.split([16, 8, 8], 1))

            def attend(q=q, k=k, v=v, bounds=bounds):
                return attention(nn.Module(), q, k, v, None, sequence_bounds=bounds, scaling=0.1)[0]

            out = attend()
            grad = torch.randn_like(out)

            def back(out=out, q=q, k=k, v=v, grad=grad):
                torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

            times = [time_us(attend), time_us(back)]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            back()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            lines.append(f"{times[0]:.0f}, {times[1]:.0f}, {peaks[-1] / 2**20:.0f}")
        keys = len(bounds.keys.index)
        kind = f"{prompt} + {response}, {samples} ({keys / num_tokens:.2f})"
        print(f"{kind}: two {lines[0]}; one {lines[1]}", flush=True)
        assert peaks[1] - peaks[0] <= 8 * 128 * (16 * keys - 8 * num_tokens)


def time_us(run, repeats=20) -> float:
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats


def on_cuda(bounds):
    shared = bounds.shared
    ends = {name: getattr(shared, name).cuda() for name in ("prompt_ends", "response_ends")}
    cu, index = bounds.cu_seqlens.cuda(), bounds.padded_index.cuda()
    return replace(bounds, cu_seqlens=cu, padded_index=index, shared=replace(shared, **ends))
