"""FlashAttention 4 in the place of torch's kernels: what it is asked for, by stand-ins of its signatures.

The package itself runs on GPUs only: tests/gpu/test_shared_attention_gpu.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from flash_stand_ins import flash_four_backward, flash_four_forward
from packed_attention_cases import (
    HEADS,
    KV_HEADS,
    SIZE,
    bounds_of,
    drawn_forest,
    forest_bounds,
    rows_alone,
    sample,
)
from packed_attention_cases import alone as attention_of_row
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

from siirl.engines.train.attention.attention_kernels import attention_by, flash_kernels, state_kernels
from siirl.engines.train.attention.packed_attention import packed_attention
from siirl.engines.train.megatron import layers
from siirl.engines.train.packed import sequence_bounds
from siirl.errors import ConfigError


@pytest.fixture
def kernels(monkeypatch):
    """FlashFourKernels of a package that is these functions."""
    package = {
        name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    }
    package["flash_attn.cute.interface"]._flash_attn_fwd = flash_four_forward
    package["flash_attn.cute.interface"]._flash_attn_bwd = flash_four_backward
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "siirl.engines.train.attention.flash_four", raising=False)
    from siirl.engines.train.attention.flash_four import FlashFourKernels

    yield FlashFourKernels()
    monkeypatch.delitem(sys.modules, "siirl.engines.train.attention.flash_four", raising=False)


def packed(inputs):
    return [x[0].transpose(0, 1).contiguous().detach().requires_grad_() for x in inputs]


def compare(out, inputs, expected, exact):
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out * weights[0]).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), exact)
    torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference[0].transpose(0, 1), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("most", [0.0, 100.0], ids=["two calls", "one call"])
@pytest.mark.parametrize("seed", range(6))
def test_shared_prompts_are_the_definition(kernels, seed, most, monkeypatch):
    monkeypatch.setattr(sequence_bounds, "MOST_GATHERED", most)
    forest = drawn_forest(seed)
    bounds = forest_bounds(*forest)
    exact = [x.requires_grad_() for x in sample(len(bounds.padded_index), seed)]
    inputs = packed(exact)
    out = kernels.shared(*inputs, bounds, 0.3)
    compare(out, inputs, rows_alone(*exact, *forest, 0.3), exact)


def test_rows_that_share_nothing_are_the_definition(kernels):
    lengths = [5, 1, 9, 3]
    bounds = bounds_of(lengths)
    exact = [x.requires_grad_() for x in sample(sum(lengths))]
    inputs = packed(exact)
    out = kernels.alone(*inputs, bounds, 0.3, None)
    rows = zip(*(x.split(lengths, dim=2) for x in exact), strict=True)
    compare(out, inputs, torch.cat([attention_of_row(*row, 0.3, None) for row in rows], 1), exact)


def test_transformers_finds_it_under_its_name(kernels):
    name = attention_by("flash_attn_4")
    assert name != attention_by("torch")
    lengths = [4, 6]
    query, key, value = (x.float() for x in sample(sum(lengths)))
    found, _ = AttentionInterface()[name](
        nn.Module(), query, key, value, None, sequence_bounds=bounds_of(lengths), scaling=SIZE**-0.5
    )
    plain, _ = packed_attention(nn.Module(), query, key, value, None, sequence_bounds=bounds_of(lengths))
    torch.testing.assert_close(found, plain)


def test_a_model_is_built_with_it(kernels):
    """transformers takes some names of attention for packages that it then looks for."""
    config = Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_by("flash_attn_4"))
    assert model.config._attn_implementation == attention_by("flash_attn_4")


def test_memory_of_queries_keys_and_values_may_lie_anyhow(kernels):
    lengths = [5, 1, 9, 3]
    bounds = bounds_of(lengths)
    exact = [x.requires_grad_() for x in sample(sum(lengths))]
    rows = zip(*(x.split(lengths, dim=2) for x in exact), strict=True)
    expected = torch.cat([attention_of_row(*row, 0.3, None) for row in rows], 1)
    inputs = [x.detach().clone().requires_grad_() for x in exact]
    name = attention_by("flash_attn_4")
    out, _ = AttentionInterface()[name](nn.Module(), *inputs, None, sequence_bounds=bounds, scaling=0.3)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), exact)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("most", [0.0, 100.0], ids=["two calls", "one call"])
def test_queries_keys_and_values_of_shared_prompts_may_lie_in_one_product(kernels, most, monkeypatch):
    monkeypatch.setattr(sequence_bounds, "MOST_GATHERED", most)
    forest = drawn_forest(3)
    bounds = forest_bounds(*forest)
    exact = torch.cat(sample(len(bounds.padded_index), 3), 1).requires_grad_()
    product = exact[0].transpose(0, 1).contiguous().detach().requires_grad_()
    heads = [HEADS, KV_HEADS, KV_HEADS]
    out = kernels.shared(*product.split(heads, 1), bounds, 0.3)
    expected = rows_alone(*exact.split(heads, 1), *forest, 0.3)
    compare(out, [product], expected, [exact])


def test_megatrons_attention_runs_by_the_kernels_that_a_micro_batch_names(kernels, monkeypatch):
    config = SimpleNamespace(window_size=None, window_attn_skip_freq=None, rotary_interleaved=False)
    attention, flash = layers.PackedAttention(config, 1), flash_kernels("flash_attn_4")
    assert flash.takes_strides and flash_kernels("torch") is None
    heads, bounds = torch.zeros(3, 2, 4), bounds_of([3])
    for chosen in (flash, None):
        monkeypatch.setattr(layers, "packed_attention", spy := Spy(heads))
        attention.attended(heads, heads, heads, layers.PackedRows(bounds=bounds, flash=chosen))
        assert spy.flash is chosen


class Spy:
    """packed_attention that says what it was asked to run by."""

    def __init__(self, heads):
        self.heads = heads

    def __call__(self, *inputs, flash, **options):
        self.flash = flash
        return self.heads.unsqueeze(0), None


def test_a_package_that_is_not_there_is_a_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.delitem(sys.modules, "siirl.engines.train.attention.flash_four", raising=False)
    with pytest.raises(ConfigError, match=r"flash-attn-4 is not installed.*attention_kernels=torch"):
        attention_by("flash_attn_4")


TELLS = "import os\nprint('imported:', os.environ.get('FLA_CACHE_MODE'))"
ON_HOPPER = """
import causal_lms, torch
from types import SimpleNamespace
from siirl.engines.train import hf_model
from siirl.engines.weights.target import weights_of_directory
config, dtype = causal_lms.tiny_config("qwen3_5_text"), torch.float32
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: (9, 0)
"""
TRAINED = """
from siirl.errors import ConfigError
try:
    hf_model.build_skeleton(config, dtype, False, "lm", "fla")
except ConfigError as error:
    assert "fla-core" in str(error), error
"""
SAMPLED = """
model = SimpleNamespace(trust_remote_code=False)
policy = SimpleNamespace(rollout=SimpleNamespace(dtype="float32"), model=model)
weights_of_directory(config, SimpleNamespace(actor_rollout_ref=policy), False)
"""


@pytest.mark.parametrize("begins", [TRAINED, SAMPLED], ids=["trained", "sampled"])
def test_fla_hears_what_was_tuned_before_its_first_import(tmp_path, begins):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla/__init__.py").write_text(TELLS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLA_")}
    done = subprocess.run(
        [sys.executable, "-c", ON_HOPPER + begins],
        env=env | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "imported: default" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("version", "capability", "computes"),
    [("3.6.0", (9, 0), False), ("3.7.1", (9, 0), True), ("3.6.0", (8, 0), True)],
)
def test_kernels_that_a_gpu_would_compute_wrongly_are_refused(monkeypatch, version, capability, computes):
    ours = ModuleType("siirl.engines.train.attention.fla_kernels")
    triton = ModuleType("triton")
    triton.__version__ = version
    for module in (ours, triton):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("siirl.engines.train.attention.fla_kernels", ours, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("os.environ", env := {})
    if computes:
        assert state_kernels("fla") is ours
        folder = env.get("FLA_CONFIG_DIR")
        assert env == (
            {"FLA_CACHE_MODE": "default", "FLA_CONFIG_DIR": folder} if capability == (9, 0) else {}
        )
        for file in Path(folder).iterdir() if folder else ():
            read = json.loads(file.read_text())
            assert read["kernel_name"] == file.stem and file.suffix == ".json"
            assert read["default_config"].keys() == {"kwargs", "num_warps", "num_stages", "num_ctas"}
        monkeypatch.setattr("os.environ", env := {"FLA_CACHE_MODE": "disabled"})
        assert state_kernels("fla") is ours and env == {"FLA_CACHE_MODE": "disabled"}
        return
    with pytest.raises(ConfigError, match=r"needs Triton 3\.7\.1 or later, here is 3\.6\.0.*=torch"):
        state_kernels("fla")
