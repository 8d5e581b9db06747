"""Options of the optimizer and of recomputation are checked before a run, as the engine checks them."""

import json

import pytest
from plan_cases import config

from siirl.compiler.compile import compile_plan, load_dag
from siirl.errors import UserError

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ADAMW, RECOMPUTED = f"{ACTOR}.optim.override_optimizer_config", f"{MODEL}.gradient_checkpointing_kwargs"


def check(*keys: str) -> None:
    cfg = config(*keys)
    compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            f"{ADAMW}={{amsgrad: true}}",
            r"override_optimizer_config has amsgrad: it takes eps, fused, foreach",
        ),
        (f"{ADAMW}={{lr: 5}}", r"has lr: it takes"),
        (f"{ADAMW}={{eps: -1}}", r"eps=-1 is no value"),
        (f"{ADAMW}={{fused: maybe}}", r"fused=maybe is no value"),
        (f"{ADAMW}={{fused: true, foreach: true}}", r"two ways"),
        (f"{ADAMW}={{momentum: 0.9}}", r"has momentum: it takes eps, fused, foreach\. Remove"),
        (f"{RECOMPUTED}={{reentrant: true}}", r"has reentrant: it takes use_reentrant"),
        (f"{RECOMPUTED}={{determinism_check: yes please}}", r"determinism_check=yes please is no value"),
    ],
)
def test_options_that_the_engine_refuses_are_refused_before_it_is_built(key, words):
    with pytest.raises(UserError, match=words):
        check(key)


DENSE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("keys", "model", "words"),
    [
        ((f"{ADAMW}={{momentum: 1}}",), {}, r"momentum=1 is no value"),
        ((f"{ADAMW}={{ns_steps: 0}}",), {}, r"ns_steps=0 is no value"),
        ((f"{ADAMW}={{ns_dtype: float16}}",), {}, r"ns_dtype=float16 is no value"),
        (
            (f"{ADAMW}={{amsgrad: true}}",),
            {},
            r"amsgrad: it takes eps, fused, foreach, momentum, nesterov, ns_st",
        ),
        ((f"{MODEL}.lora_rank=4",), {}, r"optim.name=muon with lora_rank=4: .* Set it to adamw"),
        ((), {"model_type": "mixtral", "num_local_experts": 8}, r"name=muon with 8 experts in a layer"),
        ((), {"model_type": "qwen3_vl"}, r"name=muon with a qwen3_vl"),
        (
            (f"{ADAMW}={{momentum: 0.9, nesterov: false, ns_steps: 6, ns_dtype: bfloat16, eps: 1.0e-6}}",),
            {},
            "",
        ),
        ((), {}, ""),
    ],
)
def test_muon_is_refused_where_it_was_not_seen_to_train(tmp_path, keys, model, words):
    (tmp_path / "config.json").write_text(json.dumps(DENSE | model))
    asked = (f"{MODEL}.path={tmp_path}", f"{ACTOR}.optim.name=muon", *keys)
    if not words:
        return check(*asked)
    with pytest.raises(UserError, match=words):
        check(*asked)


@pytest.mark.parametrize(
    "keys",
    [
        (f"{ADAMW}={{eps: 1.0e-6, foreach: true}}",),
        (f"{RECOMPUTED}={{use_reentrant: false, debug: true}}",),
        (f"{RECOMPUTED}={{reentrant: true}}", f"{MODEL}.enable_gradient_checkpointing=false"),
        (f"{ADAMW}={{decoupled_weight_decay: true}}", f"{ACTOR}.strategy=megatron"),
    ],
)
def test_options_that_there_are_or_that_have_no_part_are_accepted(keys):
    check(*keys)
