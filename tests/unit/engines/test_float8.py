"""Products in FP8 are those of their recipe: by hand in float64, and torchao's."""

import dataclasses

import float8_reference as reference
import pytest
import torch
from dist_harness import run_interpreted
from torch import nn

from siirl.engines.train.fsdp.float8 import FP8, Float8Linear, Float8Product, rounded, use_float8
from siirl.errors import NotSupportedError

CPU = torch.device("cpu")


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of sizes from 1e-6 to 1e6, one of zeros, and some with numbers at the ends of a scale."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw) * torch.logspace(-6, 6, shape[0])[:, None]
    x[1] = 0.0
    x[2, 0], x[2, 1:] = 448.0, x[2, 1:].clamp(-400, 400)
    x[3, 0], x[3, 1:] = -448.0 * 2**-5, x[3, 1:].clamp(-10, 10)
    x[4] *= torch.logspace(-9, 0, shape[1])  # down to numbers that FP8 has fewer digits for, or none
    return x


def test_a_number_is_the_nearest_of_the_256():
    every = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    every = every[every.isfinite()].unique()
    middles = (every[1:] + every[:-1]) / 2
    values = torch.cat([every, middles, middles + 1e-4, middles - 1e-4]).clamp(-448, 448).float()
    expected = [reference.rounded_number(value) for value in values.double().tolist()]
    found, scale = rounded(torch.cat([values, torch.tensor([448.0])])[None])
    assert float(scale) == 1.0
    assert found[0, :-1].double().tolist() == expected


def test_rows_keep_three_digits_under_a_scale_of_their_own():
    x = rows(40, 48)
    found, scale = rounded(x)
    torch.testing.assert_close(found.double() * scale.double(), reference.rounded_rows(x), rtol=1e-12, atol=0)
    largest = found.double().abs().amax(-1)
    assert ((largest == 448) | (x.abs().amax(-1) == 0)).all()
    kept = x.abs() > 2**-5 * x.abs().amax(-1, keepdim=True)
    lost = (found.double() * scale.double() - x).abs() / x.abs()
    assert lost[kept].max() <= 2**-4


def test_what_a_row_becomes_does_not_depend_on_the_others():
    x = rows(40, 48)
    whole, alone = rounded(x)[0], torch.cat([rounded(x[i : i + 1])[0] for i in range(len(x))])
    assert torch.equal(whole.float(), alone.float())


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_products_and_gradients_are_those_by_hand(tokens):
    draw = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(size, 64, generator=draw) for size in (tokens, 48))
    weight *= torch.logspace(-2, 2, 48)[:, None]
    grad = torch.randn(tokens, 48, generator=draw)
    results = []
    for product in (Float8Product, reference._Product):
        mine, its = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = product.apply(mine, its)
        out.backward(grad)
        results.append((out.detach(), mine.grad, its.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    plain = x @ weight.t()
    assert 0.001 < (results[0][0] - plain).norm() / plain.norm() < 0.06, "three digits each, no more"


def test_numbers_that_are_none_do_not_become_some():
    weight = torch.randn(32, 32)
    for value in (torch.inf, -torch.inf, torch.nan):
        x = torch.randn(4, 32)
        x[2, 5] = value
        out = Float8Product.apply(x, weight)
        assert not out[2].isfinite().any()
        assert out[[0, 1, 3]].isfinite().all()


def test_torchao_computes_the_same():
    """But for the gradient of the input: its recipe rounds a weight by one scale there."""
    pytest.importorskip("torchao", reason="pip install torchao")
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Theirs

    recipe = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    draw = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*size, generator=draw) for size in ((37, 64), (48, 64), (37, 48)))
    results = []
    for made in ("ours", "theirs"):
        layer = nn.Linear(64, 48, bias=False)
        layer.weight.data = weight.clone()
        if made == "ours":
            use_float8([nn.Sequential(layer)], CPU)
        else:
            as_ours = {"emulate": True, "round_scales_to_power_of_2": False}
            layer = Theirs.from_float(layer, dataclasses.replace(recipe, **as_ours))
        mine = x.clone().requires_grad_()
        out = layer(mine)
        out.backward(grad)
        results.append((out.detach(), mine.grad, layer.weight.grad))
    (out, grad_x, grad_weight), (its_out, its_grad_x, its_grad_weight) = results
    torch.testing.assert_close(out, its_out, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad_weight, its_grad_weight, rtol=1e-6, atol=1e-6)
    assert (grad_x - its_grad_x).norm() / its_grad_x.norm() < 0.08


def test_layers_keep_their_names_weights_and_bias():
    block = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 16, bias=False))
    before = {name: param for name, param in block.named_parameters()}
    plain = block[0](torch.zeros(1, 32))
    use_float8([block], CPU)
    assert all(param is before[name] for name, param in block.named_parameters())
    assert [type(layer) for layer in block] == [Float8Linear, nn.LayerNorm, Float8Linear]
    assert torch.equal(block[0](torch.zeros(1, 32)), plain), "the bias is added as it is"
    assert block(torch.randn(2, 3, 32)).shape == (2, 3, 16)


def test_sides_that_are_no_multiples_of_16_are_refused():
    with pytest.raises(NotSupportedError, match=r"float8=True: a linear layer has a side of 24; .*of 16"):
        use_float8([nn.Linear(32, 24)], CPU)
    with pytest.raises(NotSupportedError, match="no plain linear layers"):
        use_float8([nn.LayerNorm(32)], CPU)


def test_the_kernel_rounds_as_the_formula_does():
    pytest.importorskip("triton")
    run_interpreted("float8_kernel")
