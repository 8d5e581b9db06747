"""Linear layers of one input are one product: the same numbers, and no copy of their weights is kept."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, fx, nn

from siirl.engines.train.layer_compiler import compile_layer, merge_linears

WIDTH = 16


def products(graph: fx.Graph) -> int:
    return sum(node.target is F.linear for node in graph.nodes)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [param.grad for param in (*model.parameters(), x) if param.grad is not None]


def compared(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Products of a model before merging and after it; its outputs and gradients are the same."""
    counts: list[int] = []

    def merged(module: fx.GraphModule, inputs: list) -> fx.GraphModule:
        counts.append(products(module.graph))
        merge_linears(module)
        counts.append(products(module.graph))
        return module

    expected = model(x)
    expected.square().sum().backward()
    grads = [grad.clone() for grad in gradients(model, x)]
    for leaf in (*model.parameters(), x):
        leaf.grad = None
    torch._dynamo.reset()
    found = torch.compile(model.forward, backend=merged, dynamic=True)(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(model, x), grads, rtol=1e-12, atol=1e-12)
    assert len(counts) == 2, "one graph"
    return counts[0], counts[1]


class Heads(nn.Module):
    """Linear layers of these widths that read one input; their outputs one behind the other."""

    def __init__(self, *widths: int, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width, bias=bias) for width in widths).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x).sin() for layer in self.layers], dim=-1)


class Gated(Heads):
    """A second product reads what the first ones give."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        return third(first(x).relu() * second(x))


class Written(Heads):
    """The input is written between two products, which do not read the same."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = x.clone()
        before = first(x)
        x.mul_(2.0)
        return before + second(x)


class Added(Heads):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = x.clone()
        before = first(x)
        flat = x.view(-1)
        flat += 1.0
        return before + second(x)


class WithoutGradient(Heads):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        with torch.no_grad():
            still = first(x)
        return still + second(x)


def half_biased() -> nn.Module:
    model = Heads(16, 8, 8, 4, bias=True)
    for layer in model.layers[:2]:
        layer.bias = None
    return model


def half_frozen() -> nn.Module:
    model = Heads(16, 8, 8, 4)
    model.layers[:2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        (Heads(16, 8, 8), 3, 1),
        (Heads(16, 8, 8, bias=True), 3, 1),
        (Heads(48, 48, 16), 3, 1),
        (Heads(48, 48), 2, 2),
        (Heads(8), 1, 1),
        (half_biased(), 4, 2),
        (half_frozen(), 4, 2),
        (Gated(16, 16, 16), 3, 2),
        (Written(16, 16).requires_grad_(False), 2, 2),
        (Added(16, 16).requires_grad_(False), 2, 2),
        (WithoutGradient(16, 16), 2, 2),
    ],
    ids=["qkv", "with_bias", "one_narrow", "wide", "alone", "half_biased", "half_frozen", "gated", "written",
         "added", "without_gradient"],
)  # fmt: skip
def test_layers_of_one_input_are_one_product_with_the_same_numbers(model, before, after):
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert compared(model, x) == (before, after)


def test_a_product_of_computed_weights_stays_one_of_its_own():
    class Tied(Heads):
        def forward(self, x: Tensor) -> Tensor:
            first, second = self.layers
            return F.linear(x, first.weight * 2.0) + second(x)

    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    assert compared(Tied(16, 16), x) == (2, 2)


def test_adapters_of_frozen_layers_are_merged_among_themselves():
    from peft import LoraConfig, inject_adapter_in_model

    model = Heads(16, 8, 8)
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "1", "2"]), model).double()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert compared(model, x) == (9, 5), "one of the weights, one of the adapters' A, each B by itself"


def test_weights_are_joined_again_in_the_backward_pass_instead_of_kept():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: list):
        graphs.append(module.graph)
        return make_boxed_func(module)

    compiler = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )

    def backend(module: fx.GraphModule, inputs: list):
        merge_linears(module)
        return compiler(module, inputs)

    torch._dynamo.reset()
    model = Heads(16, 8, 8)
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.compile(model.forward, backend=backend, dynamic=True)(x).sum().backward()
    forward, backward = graphs
    aten = torch.ops.aten
    assert [node.target for node in forward.nodes].count(aten.mm.default) == 1
    assert [node.target for node in backward.nodes].count(aten.mm.default) == 2
    joined = [(32, WIDTH), (WIDTH, 32)]
    assert not [node for node in backward.nodes if node.op == "placeholder" and shape_of(node) in joined]
    assert [shape_of(node) for node in backward.nodes if node.target is aten.cat.default].count(
        joined[0]
    ) == 1


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def test_outputs_are_compiled_as_they_lie_in_memory_and_turned_back(monkeypatch):
    def heads(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(1, -1, 4, WIDTH // 4).transpose(1, 2).sin(), x.cos()

    inner: list[tuple[int, ...]] = []

    def compile_fx(module: fx.GraphModule, inputs: list):
        def run(*args):
            outputs = module(*args)
            inner.extend(tuple(output.shape) for output in outputs if output.is_contiguous())
            return outputs

        return run

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    x = torch.randn(5, WIDTH, requires_grad=True)
    found = torch.compile(heads, backend=compile_layer, dynamic=True)(x)
    assert inner == [(1, 5, 4, WIDTH // 4), (5, WIDTH)], "contiguous, so that their gradients come so"
    torch.testing.assert_close(found, heads(x), rtol=0, atol=0)
