"""Rollouts on SGLang: what is refused and why, what goes, and what the engine is started with."""

import importlib.metadata
import json

import pytest
import torch
from plan_cases import config
from transformers import Qwen3Config

from siirl.compiler.backends import ROLLOUT_BACKENDS
from siirl.compiler.backends.rollouts import NOT_GIVEN, sglang_version
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import effect_warnings
from siirl.config.checks import check_config
from siirl.engines.rollout.sglang.sglang_rollout import engine_arguments, engine_environment
from siirl.errors import ConfigError, NotSupportedError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
VISION = {"model_type": "qwen3_vl", "text_config": QWEN3}
REPLAY, LAG = f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.max_lag=1"


def checked(folder, *keys, **model):
    """A run of a model, as `siirl check` sees it."""
    (folder / "config.json").write_text(json.dumps(model or QWEN3))
    words = (f"actor_rollout_ref.model.path={folder}", f"{ROLLOUT}.name=sglang", "trainer.device=cuda")
    cfg = config(*words, *keys)
    check_config(cfg)
    return cfg, compile_plan(load_dag(cfg), cfg, 2)[0]


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (LAG,),
        ("actor_rollout_ref.model.lora_rank=8",),
        (f"{ACTOR}.strategy=megatron",),
        (f"{ROLLOUT}.max_log_prob_diff=0.1",),
        (f"{ROLLOUT}.engine_kwargs.sglang={{attention_backend: triton}}",),
    ],
)
def test_these_go_with_sglang(tmp_path, keys):
    cfg, plan = checked(tmp_path, *keys)
    (model,) = (model for model in plan.models.values() if model.is_rollout)
    assert model.backend == "sglang" and model.dims.dp == 2
    assert not [line for line in effect_warnings(cfg) if "sglang" in line]


@pytest.mark.parametrize(
    ("keys", "model", "words"),
    [
        (
            (f"{ROLLOUT}.tensor_model_parallel_size=2",),
            QWEN3,
            "tensor_model_parallel_size=2 with rollout.name=sglang: an SGLang engine of several GPUs",
        ),
        ((), QWEN3 | {"quantization_config": {"quant_method": "fp8"}}, "plain numbers beside such files"),
        ((), EXPERTS, "a qwen3_moe with rollout.name=sglang: .*seen of qwen3 only.*name=vllm, or .*name=hf"),
        ((), {**QWEN3, "model_type": "qwen2"}, "a qwen2 with rollout.name=sglang"),
        (("data.dataset_type=vlm",), VISION, "sglang"),
        ((REPLAY,), EXPERTS, "sglang"),
    ],
    ids=["tp", "quantised", "experts", "qwen2", "images", "replay"],
)
def test_what_was_not_seen_with_sglang_is_refused_with_the_fix(tmp_path, keys, model, words):
    with pytest.raises(NotSupportedError, match=f"(?s)not supported yet: .*{words}"):
        checked(tmp_path, *keys, **model)


@pytest.mark.parametrize("name", NOT_GIVEN)
def test_arguments_that_siirl_sets_or_relies_on_cannot_be_given(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.sglang\.{name}: "):
        checked(tmp_path, f"{ROLLOUT}.engine_kwargs.sglang={{{name}: 1}}")


def test_vllms_arguments_and_its_fp8_have_no_effect_on_sglang(tmp_path):
    keys = (f"{ROLLOUT}.engine_kwargs.vllm={{block_size: 32}}", f"{ROLLOUT}.quantization=fp8")
    cfg, _ = checked(tmp_path, *keys, f"{ROLLOUT}.max_log_prob_diff=0.1")
    said = [line for line in effect_warnings(cfg) if line.endswith(f"{ROLLOUT}.name is sglang.")]
    assert len(said) == 2


def test_sglang_must_be_there_in_the_version_that_siirl_knows(monkeypatch):
    installed = {}

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"not installed.*siirl\[sglang\]"):
        ROLLOUT_BACKENDS["sglang"].packages(config(), "rollout")
    installed["sglang"] = "0.5.16"
    with pytest.raises(ConfigError, match=r"0\.5\.16 is installed, siirl works with 0\.5\.17"):
        ROLLOUT_BACKENDS["sglang"].packages(config(), "rollout")
    installed["sglang"] = "0.5.17"
    assert sglang_version() == "0.5.17"


def test_keys_become_arguments_of_the_engine(tmp_path):
    cfg, _ = checked(
        tmp_path,
        f"{ROLLOUT}.dtype=float16",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        f"{ROLLOUT}.max_num_seqs=7",
        f"{ROLLOUT}.max_num_batched_tokens=512",
        f"{ROLLOUT}.max_model_len=128",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        f"{ROLLOUT}.enforce_eager=False",
        f"{ROLLOUT}.free_cache_engine=False",
        f"{ROLLOUT}.engine_kwargs.sglang={{attention_backend: triton, page_size: 4}}",
    )
    got = engine_arguments(cfg, "folder", Qwen3Config(), torch.device("cuda"))
    expected = {
        "model_path": "folder",
        "dtype": "float16",
        "mem_fraction_static": 0.3,
        "max_running_requests": 7,
        "chunked_prefill_size": 512,
        "context_length": 130,
        "disable_cuda_graph": False,
        "enable_memory_saver": False,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "attention_backend": "triton",
        "page_size": 4,
    }
    assert {name: got[name] for name in expected} == expected
    on_cpu = engine_arguments(cfg, "folder", Qwen3Config(), torch.device("cpu"))
    assert on_cpu["disable_cuda_graph"] and not {"mem_fraction_static", "enable_memory_saver"} & set(on_cpu)
    assert on_cpu["max_total_tokens"] >= 7 * 130


def test_an_engine_sees_the_gpu_of_its_rank_alone_and_what_the_user_sets_goes_first(monkeypatch):
    found = engine_environment(torch.device("cuda", 3), ["5"])
    assert found["CUDA_VISIBLE_DEVICES"] == "5"
    (wish,) = set(found) & {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"}
    monkeypatch.setenv(wish, "1")
    assert wish not in engine_environment(torch.device("cuda", 3), ["5"])
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment(torch.device("cpu"), [])
