"""What vLLM's engine is given: arguments past siirl's keys."""

import json

import pytest
from plan_cases import config

from siirl.compiler.backends.vllm import NOT_GIVEN
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config.checks import check_config
from siirl.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
VISION = {"model_type": "qwen3_vl", "text_config": QWEN3}


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
