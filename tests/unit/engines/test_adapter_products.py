"""LoRA on linear layers in one pass over each output: against peft's own layers, in the types of a run."""

import pytest
import torch
import torch.nn.functional as F
from causal_lms import tiny_config
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from siirl.config.common import ModelConfig
from siirl.engines.train.adapters.lora import add_lora
from siirl.engines.train.layer_compiler import merge_linears

IDS = torch.arange(48).view(2, 24) % 50


def adapted(dtype, products):
    """A model with biases and adapters that are not zero, by our products or by peft's layers."""
    torch.manual_seed(3)
    hf = AutoModelForCausalLM.from_config(tiny_config("qwen2"), dtype=torch.float64)
    add_lora(hf, ModelConfig(path="unused", lora_rank=4, lora_alpha=10), 0)
    for name, param in hf.named_parameters():
        if ".lora_" in name or name.endswith("bias"):
            param.data.normal_(0, 0.2)
    for module in [] if products else hf.modules():
        if hasattr(module, "lora_A"):
            module.__class__ = type(module).__base__
    return hf.to(dtype)


def test_a_compiled_layer_scales_what_is_small_and_merges_products_of_one_input():
    """The sum that torch's compiler is given: nothing is written in place, and no graph breaks."""
    hf, graphs = adapted(torch.float64, products=True), []

    def noted(module, inputs):
        merge_linears(module)
        graphs.append(module)
        return module

    expected, exact = gradients(adapted(torch.float64, products=False))
    mlp = hf.model.layers[0].mlp
    mlp.compile(backend=noted, fullgraph=True)
    logits, found = gradients(hf)
    assert distance(logits, expected) < 1e-11
    assert all(distance(found[name], exact[name]) < 1e-11 for name in exact)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(F.linear) < 9, "gate and up, and their A, read one input"
    assert "addmm_" not in str(graph.graph)


def gradients(hf, checkpoints=False):
    if checkpoints:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        hf.train()
    logits = hf(IDS, use_cache=False).logits
    logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)[:, :, 7].sum().backward()
    return logits.detach(), {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}


def distance(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_outputs_and_gradients_are_those_of_pefts_layers(dtype, bar, checkpoints):
    expected, exact = gradients(adapted(torch.float64, products=False))
    logits, found = gradients(adapted(dtype, products=True), checkpoints)
    assert found.keys() == exact.keys() and len(found) == 2 * 2 * 7, "A and B of two layers"
    assert distance(logits, expected) < bar
    for name, gradient in found.items():
        assert distance(gradient, exact[name]) < bar, name


def test_in_bf16_a_layer_is_nearer_to_the_truth_than_pefts():
    errors = {}
    for products in (True, False):
        truth, found = (of_a_layer(dtype, products) for dtype in (torch.float64, torch.bfloat16))
        errors[products] = [distance(one, other) for one, other in zip(found, truth, strict=True)]
    for ours, pefts in zip(errors[True], errors[False], strict=True):
        assert ours < 1.2 * pefts
    assert errors[True][0] < 0.9 * errors[False][0], "the output is rounded once"


def of_a_layer(dtype, products):
    """Output and gradients of a layer with biases, of the same numbers in bf16."""
    layer = adapted(torch.bfloat16, products).to(dtype).model.layers[0].self_attn.q_proj
    draw = torch.Generator().manual_seed(1)
    x, grad = (
        torch.randn(512, size, generator=draw).bfloat16().to(dtype)
        for size in (layer.in_features, layer.out_features)
    )
    out = layer(x.requires_grad_())
    matrices = layer.lora_A.default.weight, layer.lora_B.default.weight
    return [out.detach(), *torch.autograd.grad(out, (x, *matrices), grad)]


def passes(products):
    """Operators of a forward and backward pass that touch something of an output's size."""
    hf = adapted(torch.float32, products)
    layer, x = hf.model.layers[0].mlp.up_proj, torch.randn(40, hf.config.hidden_size, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        layer(x).sum().backward()
    large = {40 * hf.config.hidden_size, 40 * hf.config.intermediate_size}
    names = ("aten::mul", "aten::add", "aten::mm", "aten::addmm", "aten::addmm_", "aten::add_")
    return [
        event.name
        for event in profiler.events()
        if event.name in names and any(len(s) == 2 and s[0] * s[1] in large for s in event.input_shapes)
    ]


def test_no_pass_over_an_output_or_an_inputs_gradient_is_left_for_the_adapter():
    def elementwise(found):
        return [name for name in found if name in ("aten::mul", "aten::add", "aten::add_")]

    ours, pefts = passes(products=True), passes(products=False)
    assert not elementwise(ours), ours
    assert len(elementwise(pefts)) >= 3, (
        "what there was to save: scaled, added, and both once more for gradients"
    )
