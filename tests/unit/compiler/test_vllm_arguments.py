"""What vLLM's engine is given: arguments past siirl's keys, and guesses of tokens."""

import json

import pytest
import torch
from plan_cases import config
from transformers import Qwen3Config

from siirl.compiler.checks.vllm_checks import NOT_GIVEN
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import effect_warnings
from siirl.config.checks import check_config
from siirl.engines.rollout.vllm.arguments import engine_arguments, engine_environment
from siirl.errors import ConfigError, NotSupportedError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
VISION = {"model_type": "qwen3_vl", "text_config": QWEN3}
GUESSES = f"{ROLLOUT}.speculative_tokens=3"


def checked(folder, *keys, **model):
    """A run of a model, as `siirl check` sees it."""
    (folder / "config.json").write_text(json.dumps(model or QWEN3))
    words = (f"actor_rollout_ref.model.path={folder}", f"{ROLLOUT}.name=vllm", "trainer.device=cuda")
    cfg = config(*words, *keys)
    check_config(cfg)
    compile_plan(load_dag(cfg), cfg, 2)
    return cfg


@pytest.mark.parametrize("name", NOT_GIVEN)
def test_arguments_that_siirl_sets_or_relies_on_cannot_be_given(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.vllm\.{name}: .*(Set|Remove) "):
        checked(tmp_path, f"{ROLLOUT}.engine_kwargs.vllm={{{name}: 1}}")


@pytest.mark.parametrize(
    ("keys", "model", "words"),
    [
        (("data.dataset_type=vlm",), VISION, "for a model that sees images"),
        ((f"{ACTOR}.router_replay.mode=R3",), EXPERTS, "with actor.router_replay.mode=R3"),
    ],
    ids=["images", "experts"],
)
def test_guesses_that_were_not_seen_are_refused(tmp_path, keys, model, words):
    checked(tmp_path, *keys, **model)
    with pytest.raises(NotSupportedError, match=f"speculative_tokens=3 {words}.*Set it to 0"):
        checked(tmp_path, GUESSES, *keys, **model)


@pytest.mark.parametrize(
    "keys", [(), (f"{ROLLOUT}.max_lag=1",), (f"{ROLLOUT}.tensor_model_parallel_size=2",)], ids=str
)
def test_guesses_are_what_vllm_is_asked_for(tmp_path, keys):
    cfg = checked(tmp_path, GUESSES, *keys)
    assert not [line for line in effect_warnings(cfg) if "speculative" in line]
    here = torch.device("cuda", 0)
    given = engine_arguments(cfg, str(tmp_path), Qwen3Config(), 1, here)["speculative_config"]
    assert given["method"] == "ngram" and given["num_speculative_tokens"] == 3
    assert engine_environment(1, here, ["0"], guesses=True)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in engine_environment(1, here, ["0"])
    assert "speculative_config" not in engine_arguments(config(), str(tmp_path), Qwen3Config(), 1, here)


def test_an_engine_without_guesses_is_said_to_make_none(tmp_path):
    cfg = checked(tmp_path, GUESSES, f"{ROLLOUT}.name=hf")
    assert [line for line in effect_warnings(cfg) if "speculative_tokens" in line]
