"""Options that go on to AdamW and to recomputation are checked before a run, as the engine checks them."""

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
        (f"{RECOMPUTED}={{reentrant: true}}", r"has reentrant: it takes use_reentrant"),
        (f"{RECOMPUTED}={{determinism_check: yes please}}", r"determinism_check=yes please is no value"),
    ],
)
def test_options_that_the_engine_refuses_are_refused_before_it_is_built(key, words):
    with pytest.raises(UserError, match=words):
        check(key)


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
