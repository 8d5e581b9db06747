"""What gated delta nets and Mamba-2 take of memory: the estimate is near what a layer of transformers has."""

import importlib.util
import sys
import weakref

import causal_lms
import fla_stand_in
import pytest
import torch
from plan_cases import config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import H200
from siirl.compiler.cost.step_time import step_time
from siirl.compiler.memory.estimate import fsdp_lines, kept_beside_attention, kept_values, model_shape
from siirl.compiler.memory.phases import memory_lines
from siirl.data.rows import make_rows
from siirl.engines.train.attention.packed_attention import PACKED_ATTENTION
from siirl.engines.train.attention.state_layers import pin_state_layers
from siirl.engines.train.hf_model import keep_float32
from siirl.engines.train.packed.packing import pack_rows
from siirl.models.sizes import state_layers

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
    **{"linear_value_head_dim": 32, "vocab_size": 64, "max_position_embeddings": 1024},
}
OTHERS = (
    {},
    {"hidden_size": 384},
    {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    {"linear_value_head_dim": 128, "linear_key_head_dim": 128},
)
CENTERED = ("qwen3_5_text",)
"""Whose norms keep another copy in fp32 where nothing is fused."""
SCANS = {
    **{"hidden_size": 128, "intermediate_size": 96, "shared_intermediate_size": 192, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 0, "num_experts_per_tok": 0},
    **{"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 64, "max_position_embeddings": 1024, "layer_types": ["mamba", "attention"]},
}
OF_SCANS = (
    {},
    {"hidden_size": 256, "mamba_d_head": 64},
    {"mamba_d_state": 128},
    {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_chunk_size": 128},
    {"mamba_n_groups": 4, "mamba_d_state": 64},
    {"hidden_size": 256, "mamba_n_heads": 16, "mamba_chunk_size": 256, "mamba_d_state": 128},
)


def with_dtypes(table: tuple[dict[str, int], ...]) -> pytest.MarkDecorator:
    """Sizes in either dtype; every second one of these is quick."""
    pairs = [(sizes, dtype) for sizes in table for dtype in (torch.bfloat16, torch.float32)]
    often = {2 * at + at % 2 for at in range(len(table))}
    marks = [[pytest.mark.slow] * (at not in often) for at in range(len(pairs))]
    cases = [pytest.param(*pair, marks=mark, id=f"{pair}") for pair, mark in zip(pairs, marks, strict=True)]
    return pytest.mark.parametrize(("sizes", "dtype"), cases)


def rows_of(number: int, length: int):
    return make_rows(
        {
            "prompt_ids": torch.ones(number, length // 2, dtype=torch.int64),
            "response_ids": torch.ones(number, length // 2 + 1, dtype=torch.int64),
            "prompt_length": torch.full((number,), length // 2),
            "response_length": torch.full((number,), length // 2 + 1),
        }
    )


def kept_of(layer: nn.Module, model: nn.Module, dtype: torch.dtype, length: int = 256) -> float:
    """Values of a token that a layer keeps for its backward pass."""
    at = pack_rows(rows_of(3, length), torch.device("cpu"))
    tokens = at.input_ids.shape[1]
    own = {param.untyped_storage()._cdata for param in model.parameters()}
    kept, found = [], {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept.append(tensor)
            found[storage._cdata] = storage.nbytes()
        return tensor

    hidden = torch.randn(1, tokens, model.config.hidden_size, dtype=dtype, requires_grad=True)
    turn = model.model.rotary_emb
    turned = turn and turn(hidden, at.position_ids)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, position_embeddings=turned, attention_mask=None, sequence_bounds=at.bounds)
    return sum(found.values()) / tokens / dtype.itemsize


@pytest.fixture
def fla_kernels(monkeypatch):
    """siirl's, over functions that save what fla's do."""
    fla_stand_in.install(there := {}, saving=True)
    for name, module in there.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.find_spec("siirl.engines.train.attention.fla_kernels")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *(("qwen3_5_text", SIZES | sizes) for sizes in OTHERS),
        *(("granitemoehybrid", SCANS | sizes) for sizes in OF_SCANS),
    ],
)
def test_layers_by_fla_keep_what_is_estimated(kind, sizes, fla_kernels):
    from transformers import AutoModelForCausalLM

    made = causal_lms.tiny_config(kind, **sizes)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
    keep_float32(model)
    pin_state_layers(model, fla_kernels)
    shape = model_shape(made.to_dict())
    found, torchs = (
        kept_of(model.model.layers[0], model, torch.bfloat16),
        shape.nets.values(shape.nets.kept, 2),
    )
    beside = kept_beside_attention(shape, False) + 2 * made.hidden_size * (kind in CENTERED)
    assert found - beside == pytest.approx(shape.nets.kept_by_fla, rel=0.01)
    assert found - beside < torchs / 2


@with_dtypes(OTHERS)
def test_layers_keep_for_the_backward_pass_what_is_estimated(sizes, dtype):
    from transformers import AutoModelForCausalLM

    made = causal_lms.tiny_config("qwen3_5_text", **SIZES | sizes)
    model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    pin_state_layers(model)
    shape = model_shape(made.to_dict())
    net = kept_beside_attention(shape, False) + shape.nets.values(shape.nets.kept, dtype.itemsize)
    assert kept_of(model.model.layers[0], model, dtype) == pytest.approx(net, rel=0.15)
    attention = kept_of(model.model.layers[1], model, dtype)
    assert attention == pytest.approx(kept_values(shape, False), rel=0.25)


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that are there at once, of those that are made in it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.held:
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.held.values()))
        return made


@with_dtypes(OF_SCANS)
def test_layers_of_mamba2_have_of_a_token_what_is_estimated(sizes, dtype):
    """Rows of whole chunks: what is behind a row in its last one is no token's."""
    from transformers import AutoModelForCausalLM

    made = causal_lms.tiny_config("granitemoehybrid", **SCANS | sizes)
    model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    pin_state_layers(model)
    shape = model_shape(made.to_dict())
    scan, attention = (kept_of(layer, model, dtype, 510) for layer in model.model.layers)
    estimated = kept_beside_attention(shape, False) + shape.nets.values(shape.nets.kept, dtype.itemsize)
    assert scan == pytest.approx(estimated, rel=0.15)
    assert attention == pytest.approx(kept_values(shape, False), rel=0.25)
    at = pack_rows(rows_of(3, 510), torch.device("cpu"))
    hidden = torch.randn(1, at.input_ids.shape[1], made.hidden_size, dtype=dtype)
    with torch.no_grad(), LiveBytes() as live:
        model.model.layers[0](hidden, attention_mask=None, sequence_bounds=at.bounds)
    passing = 4 * shape.hidden + shape.nets.values(shape.nets.passing, dtype.itemsize)
    assert live.peak / hidden.shape[1] / dtype.itemsize == pytest.approx(passing, rel=0.15)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_parameters_of_mamba2_are_those_that_transformers_builds(experts, biased, tmp_path):
    from transformers import AutoModelForCausalLM

    biases = {"mamba_conv_bias": biased, "mamba_proj_bias": biased}
    sizes = SCANS | biases | {"num_local_experts": experts, "num_experts_per_tok": min(2, experts)}
    made = causal_lms.tiny_config("granitemoehybrid", **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    assert model_shape(made.to_dict()).params == sum(x.numel() for x in model.parameters())
    made.save_pretrained(tmp_path)
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.name=hf")
    time = step_time(*compile_plan(load_dag(cfg), cfg, 1), H200)
    assert any("layers with states" in line for line in time.assumed)


@pytest.mark.parametrize(
    ("values", "nets"),
    [
        ({}, 36),
        ({"num_hidden_layers": 10}, 8),
        ({"num_hidden_layers": 10, "full_attention_interval": 2}, 5),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}, 1),
    ],
)
def test_layers_that_are_not_listed_are_nets_as_transformers_builds_them(values, nets):
    from transformers import CONFIG_MAPPING

    raw = {"model_type": "qwen3_next", "num_hidden_layers": 48} | values
    assert state_layers(raw) == nets
    built = CONFIG_MAPPING["qwen3_next"](**{name: x for name, x in raw.items() if name != "model_type"})
    assert built.layer_types.count("linear_attention") == nets


def test_states_of_rows_are_counted_with_keys_and_values_of_the_other_layers(tmp_path):
    made = causal_lms.tiny_config("qwen3_5_text", **SIZES)
    made.save_pretrained(tmp_path)
    keys = ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.dtype=bfloat16")
    lengths = ("data.max_prompt_length=64", "data.max_response_length=64", "data.train_batch_size=8")
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}", *keys, *lengths)
    plan, configs = compile_plan(load_dag(cfg), cfg, 1)
    lines = {line.what: line for line in memory_lines(plan, configs)["agent_0.rollout"]}
    rows = 8 * cfg.actor_rollout_ref.rollout.n
    state = 4 * 32 * 32 + (2 * 2 * 32 + 4 * 32) * 4
    assert lines["KV cache"].num_bytes == rows * (2 * 2 * 32 * 128 * 2 + state * 4)


def test_what_a_net_keeps_is_held_of_one_layer_with_checkpointing_and_of_all_without(tmp_path):
    causal_lms.tiny_config("qwen3_5_text", **SIZES).save_pretrained(tmp_path)
    held = {}
    for again in (True, False):
        key = f"actor_rollout_ref.model.enable_gradient_checkpointing={again}"
        cfg = config(f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.name=hf", key)
        plan, _ = compile_plan(load_dag(cfg), cfg, 1)
        shape = model_shape(causal_lms.tiny_config("qwen3_5_text", **SIZES).to_dict())
        lines = fsdp_lines(plan.models["agent_0.actor"], cfg, shape, 4)
        held[again] = next(x.num_bytes for x in lines if x.what == "activations" and "update" in x.during)
    net = kept_beside_attention(shape, False) + shape.nets.values(shape.nets.kept, 2)
    assert held[False] / held[True] == pytest.approx(
        (net + kept_values(shape, False)) / (net + 2 * shape.hidden), rel=1e-3
    )
