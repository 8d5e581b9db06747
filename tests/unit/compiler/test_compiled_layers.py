"""`siirl check` accepts compiled layers where they were compared."""

import pytest

from siirl.compiler.compiled_layers import COMPILED, why_not_compiled
from siirl.config import load_config

KEY = "actor_rollout_ref.model.compile_layers=True"


@pytest.mark.parametrize("kind", COMPILED)
def test_these_types_are_compiled(kind):
    cfg = load_config([KEY, "actor_rollout_ref.rollout.n=2"])
    assert why_not_compiled({"model_type": kind}, cfg, "actor") == ""


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("mixtral", [], "compared with nothing"),
        ("qwen3", ["actor_rollout_ref.model.use_liger=True"], "Liger's kernels"),
        ("qwen3", ["actor_rollout_ref.actor.strategy=megatron"], "only layers under fsdp"),
        ("qwen3", ["actor_rollout_ref.actor.fsdp_config.float8=True"], "not seen together"),
    ],
)
def test_what_was_not_seen_is_refused_with_the_fix(kind, keys, reason):
    cfg = load_config([KEY, "actor_rollout_ref.rollout.n=2", *keys])
    problem = why_not_compiled({"model_type": kind}, cfg, "actor")
    assert reason in problem and "compile_layers=false" in problem
