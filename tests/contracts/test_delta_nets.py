"""Gated delta nets and Mamba-2 over packed rows are those of each row alone: in float64, longer than chunks,
shared."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import causal_lms
import fla_stand_in
import pytest
import torch
from dist_harness import run_workers
from some_cases import some
from state_rows import ROWS, alone, gradients, packed, rows_of

from siirl.config.common import ModelConfig
from siirl.engines.train import hf_model
from siirl.engines.train.adapters.lora import add_lora
from siirl.engines.train.attention import state_layers
from siirl.engines.train.attention.attention_kernels import state_kernels
from siirl.engines.train.attention.packed_attention import PACKED_ATTENTION
from siirl.engines.train.hf_model import compile_layers
from siirl.engines.train.language_model import PackedLanguageModel, model_flops, run_packed
from siirl.engines.train.packed.packing import pack_rows
from siirl.models.families import types_with

KINDS = types_with(lambda row: row.has_states)
NETS = types_with(lambda row: row.delta_nets)


def in_float64(kind: str) -> None:
    """Have transformers' code of a type compute in float64 where it asks for float32."""
    name = type(causal_lms.tiny_config(kind)).__module__.replace("configuration_", "modeling_")
    origin = importlib.util.find_spec(name).origin
    source = re.sub(r"torch\.float\b|torch\.float32", "torch.float64", Path(origin).read_text())
    sys.modules[name] = module = importlib.util.module_from_spec(importlib.util.find_spec(name))
    exec(compile(source.replace(".float()", ".double()"), origin, "exec"), module.__dict__)


def small_model(kind: str, attention: str, **sizes: object) -> torch.nn.Module:
    """Whose states decay slowly and whose weights are large, so that a leak would show."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = causal_lms.tiny_config(kind, max_position_embeddings=512, **sizes)
    config._experts_implementation = "eager"  # torch's grouped products have no float64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention)
    for name, param in model.named_parameters():
        if name.endswith("A_log"):
            param.data.uniform_(-4.0, 0.0)
        elif param.ndim > 1:
            param.data.normal_(std=0.3)
    return model


def distances(rank: int, world: int, kind: str) -> list[tuple[float, float]]:
    """Of log-probs, and of gradients relative to the largest of each tensor; the last without our kernels."""
    in_float64(kind)
    fla_stand_in.install()
    torch.set_num_threads(1)
    found, pins = [], state_layers._pin
    cases = [(ROWS["rows alone"], False), (ROWS["shared prompts"], False), (ROWS["shared prompts"], True)]
    by_fla = [("fla", ROWS["short rows"], share) for share in (False, True)]
    for kernels, rows, share in (("", *cases[0]), *by_fla, *(("torch", *case) for case in cases)):
        whole, ours = small_model(kind, "sdpa"), small_model(kind, PACKED_ATTENTION)
        if kernels:
            state_layers.pin_state_layers(ours, state_kernels(kernels))
        at = rows_of(*rows)
        want, got = alone(whole, at), packed(ours, at, share)
        theirs, own = gradients(whole, want), gradients(ours, got)
        gap = max(
            float((theirs[n] - own[n]).abs().max() / theirs[n].abs().max().clamp_min(1e-9)) for n in theirs
        )
        found.append((float((want - got).abs().max().detach()), gap))
        layers, parts = sum(hasattr(module, "A_log") for module in ours.modules()), 2 if share else 1
        calls = layers * (2 * parts + (kind in NETS)) if kernels == "fla" else 0
        assert len(fla_stand_in.CALLS) == calls
        fla_stand_in.CALLS.clear()
    assert pins.cache_info().currsize == 1
    return [*found[1:], found[0]]


@pytest.mark.parametrize("kind", some(KINDS, "qwen3_next", "granitemoehybrid"))
def test_packed_rows_and_shared_prompts_are_rows_alone_to_the_last_bits_of_float64(kind):
    *exact, leaking = run_workers(distances, 1, kind, deadline_s=100)[0]
    assert all(log_prob < 1e-12 and gradient < 1e-12 for log_prob, gradient in exact), exact
    assert leaking[0] > 0.01  # transformers' own way


def compiled_distances(rank: int, world: int, kind: str) -> list[tuple[float, float]]:
    """Of compiled layers by fla's kernels, rows alone and with shared prompts, as `distances`."""
    in_float64(kind)
    fla_stand_in.install()
    torch.set_num_threads(1)
    found = []
    whole, ours = small_model(kind, "sdpa"), small_model(kind, PACKED_ATTENTION)
    state_layers.pin_state_layers(ours, state_kernels("fla"))
    compile_layers(ours)
    for name in ("short rows", "shared prompts"):
        at = rows_of(*ROWS[name])
        want = alone(whole, at)
        theirs = gradients(whole, want)
        for share in (False, True):
            ours.zero_grad()
            got = packed(ours, at, share)
            own = gradients(ours, got)
            gap = max(float((theirs[n] - own[n]).abs().max() / theirs[n].abs().max()) for n in theirs)
            found.append((float((want - got).abs().max().detach()), gap))
            assert set(fla_stand_in.CALLS) == {"chunk_gated_delta_rule"}
        whole.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", types_with(lambda row: row.has_states and row.compiled))
def test_compiled_layers_with_states_are_rows_alone_to_the_last_bits_of_float64(kind):
    (exact,) = run_workers(compiled_distances, 1, kind, deadline_s=600)
    assert all(log_prob < 1e-12 and gradient < 1e-12 for log_prob, gradient in exact), exact


def graphs_of(rank: int, world: int, num_layers: int) -> list[int]:
    """Of compiled layers with adapters, by fla's kernels, which are not made code of: after rows of other
    lengths and prompts each."""
    fla_stand_in.install()
    torch.set_num_threads(1)
    hf_model.compile_layer = lambda module, inputs: module.forward
    kinds = ["linear_attention", "full_attention"] * (num_layers // 2)
    ours = small_model("qwen3_5_text", PACKED_ATTENTION, num_hidden_layers=num_layers, layer_types=kinds)
    state_layers.pin_state_layers(ours, state_kernels("fla"))
    add_lora(ours, ModelConfig(path="unused", lora_rank=4), 0)
    compile_layers(ours)
    found = []
    for share in (False, True):
        for name in ("short rows", "shared prompts"):
            packed(ours, rows_of(*ROWS[name]), share)
            found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found


def test_layers_with_states_are_compiled_once_however_many_they_are_and_whatever_rows_come():
    few, many = (run_workers(graphs_of, 1, num, deadline_s=100)[0] for num in (2, 6))
    assert 0 < few[0] == few[1] < few[2] == few[3] and few == many


def test_kernels_that_happen_to_be_installed_are_not_taken(monkeypatch):
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as with_fallback

    def fails(*args, **kwargs):
        raise RuntimeError("0 active drivers")

    module, there = types.ModuleType("modeling_of_tomorrow"), types.ModuleType("fast_kernels")
    monkeypatch.setitem(sys.modules, there.__name__, there)
    kind = state_layers.RULE
    names = (state_layers.CONVOLUTION, kind, *state_layers.KERNELS[kind])
    for name in names:
        setattr(there, name, fails)
        setattr(module, name, with_fallback(name, there.__name__)(lambda x: x + 1))
        with pytest.raises(RuntimeError):
            getattr(module, name)(1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    layer = type("Layer", (torch.nn.Module,), {"__module__": module.__name__, "A_log": None})
    state_layers.pin_state_layers(layer())
    assert [getattr(module, name)(1) for name in names] == [2] * 4


@pytest.mark.parametrize("kind", NETS)
def test_flops_count_states_of_each_token_and_pairs_where_layers_attend(kind):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(causal_lms.tiny_config(kind))
    one, two = (model_flops(model, [length], backward=False) for length in (100, 200))
    pairs = 4 * 4 * 8 * (200**2 / 2 - 2 * 100**2 / 2)  # of one layer: 4 heads of 8 features
    assert two - 2 * one == pytest.approx(pairs)
    net = model.model.layers[0].linear_attn
    weights = sum(p.numel() for name, p in net.named_parameters() if p.ndim > 1)
    net.requires_grad_(False)
    attending = model_flops(model, [100], backward=False)
    del model.model.layers[0].linear_attn
    assert attending - model_flops(model, [100], backward=False) == pytest.approx(2 * 100 * weights)
    model.config.layer_types = ["full_attention"] * 2
    states = one - 2 * 100 * weights - model_flops(model, [100], backward=False) + 4 * 4 * 8 * 100**2 / 2
    assert states == pytest.approx(7 * 4 * 8 * 8 * 100)


def test_log_probs_of_the_head_over_packed_rows_are_float32():
    rows = rows_of(*ROWS["shared prompts"])
    model = PackedLanguageModel(small_model(NETS[0], PACKED_ATTENTION).float())
    state_layers.pin_state_layers(model)
    found = run_packed(model, pack_rows(rows, torch.device("cpu"), share_prompts=True), 1.0, ("log_prob",))
    want = alone(small_model(NETS[0], "sdpa").float(), rows)
    inside = torch.arange(130) < rows["response_length"][:, None]
    assert float((found["log_prob"][inside] - want).abs().max().detach()) < 3e-5
