"""Where vLLM is not let read a prompt once for its responses."""

import json

import pytest
import torch
from plan_cases import config
from transformers import Qwen3Config

from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import effect_warnings
from siirl.config.checks import check_config
from siirl.engines.rollout.vllm.arguments import ATTENTION_BACKEND
from siirl.engines.rollout.vllm.vllm_rollout import VLLMRollout
from siirl.errors import NotSupportedError
from siirl.models.families import types_with

ROLLOUT = "actor_rollout_ref.rollout"
SHARES = f"{ROLLOUT}.share_prompts_in_decode=True"
KWARGS = f"{ROLLOUT}.engine_kwargs.vllm"
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def checked(folder, *keys, **model):
    """A run of a model, as `siirl check` sees it."""
    (folder / "config.json").write_text(json.dumps(QWEN3 | model))
    words = (f"actor_rollout_ref.model.path={folder}", f"{ROLLOUT}.name=vllm", "trainer.device=cuda")
    cfg = config(*words, *keys)
    check_config(cfg)
    return cfg, compile_plan(load_dag(cfg), cfg, 2)[0]


@pytest.mark.parametrize("kind", types_with(lambda row: row.vllm.shares_prompts))
def test_models_of_plain_attention_are_taken(tmp_path, kind):
    cfg, _ = checked(tmp_path, SHARES, model_type=kind, num_experts=8, sliding_window=None)
    assert not [line for line in effect_warnings(cfg) if "share_prompts" in line]


@pytest.mark.parametrize(
    ("keys", "model", "words"),
    [
        (("trainer.device=cpu",), {}, "with trainer.device=cpu"),
        ((f"{KWARGS}={{enable_prefix_caching: false}}",), {}, "enable_prefix_caching=False"),
        ((f"{ROLLOUT}.speculative_tokens=2",), {}, "with speculative_tokens=2"),
        ((f"{KWARGS}={{attention_backend: TRITON_ATTN}}",), {}, "engine_kwargs.vllm.attention_backend"),
        ((f"{ROLLOUT}.dtype=float32",), {}, "with dtype=float32"),
        ((), {"model_type": "gemma3_text"}, "for a gemma3_text"),
        ((), {"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ((), {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding window"),
    ],
    ids=str,
)
def test_where_it_would_do_nothing_or_was_not_seen_it_is_refused(tmp_path, keys, model, words):
    checked(tmp_path, *keys, **model)
    with pytest.raises(NotSupportedError, match=f"share_prompts_in_decode .*{words}.*Set it to False"):
        checked(tmp_path, SHARES, *keys, **model)


@pytest.mark.parametrize("shares", [False, True])
def test_vllm_is_asked_for_the_backend(tmp_path, shares):
    cfg, plan = checked(tmp_path, *[SHARES] * shares)
    model = next(one for one in plan.models.values() if one.generates)
    engine = object.__new__(VLLMRollout)
    engine._cfg, engine._device = cfg, torch.device("cuda", 0)
    given = engine.engine_arguments(model, Qwen3Config(), 1)
    assert given.get("attention_backend") == (ATTENTION_BACKEND if shares else None)


def test_another_engine_is_said_to_share_nothing(tmp_path):
    cfg, _ = checked(tmp_path, SHARES, f"{ROLLOUT}.name=hf")
    assert [line for line in effect_warnings(cfg) if "share_prompts_in_decode" in line]
