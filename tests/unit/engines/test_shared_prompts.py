"""Decode steps that read a prompt once: the kernels, interpreted, on random batches and within vLLM."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from siirl.engines.rollout.vllm.arguments import ATTENTION_BACKEND, SHARED_PROMPTS

SUPPORT = Path(__file__).resolve().parents[2] / "support"


def run_interpreted(*words):
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, *words], env=env, cwd=SUPPORT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("share", ["0.15", pytest.param("1.0", marks=pytest.mark.slow)])
def test_two_parts_are_one_for_every_batch(share):
    pytest.importorskip("triton")
    run_interpreted("shared_prompt_cases.py", share)


def test_within_vllm_two_parts_are_one():
    pytest.importorskip("triton")
    pytest.importorskip("vllm")
    run_interpreted("shared_prompt_vllm.py")


def test_vllm_finds_the_backend_where_an_engine_is_made():
    pytest.importorskip("siirl.engines.rollout.vllm.native")
    from vllm.config import AttentionConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    found = AttentionBackendEnum[ATTENTION_BACKEND].get_class()
    assert f"{found.__module__}.{found.__qualname__}" == SHARED_PROMPTS
    assert "attention_backend" in {field.name for field in dataclasses.fields(EngineArgs)}
    assert AttentionConfig(backend=ATTENTION_BACKEND).backend is AttentionBackendEnum[ATTENTION_BACKEND]


def test_flash_attention_takes_what_the_second_part_is_asked_with():
    function = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func
    asked = ("out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "block_table", "causal")
    asked += ("scheduler_metadata", "num_splits", "return_softmax_lse")
    assert set(asked) <= inspect.signature(function).parameters.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("FlashAttention", 2), ("decode_context_parallel_size", 2), ("a sliding window", (4095, 0))],
)
def test_what_was_not_held_against_one_part_is_refused_when_an_engine_starts(name, value):
    native = pytest.importorskip("siirl.engines.rollout.vllm.native_prefixes")
    from siirl.errors import NotSupportedError

    native._refuse((name, 3, 3))
    with pytest.raises(NotSupportedError, match=rf"share_prompts_in_decode: {name} is .*Set it to False"):
        native._refuse((name, value, 3))
