"""`siirl check` accepts compiled layers where they were compared."""

import json

import pytest

from siirl.compiler.checks.model_checks import check_trained_model
from siirl.config import load_config
from siirl.errors import NotSupportedError
from siirl.findings import refuse
from siirl.models.families import family_of, types_with

COMPILED = types_with(lambda row: row.compiled)

KEY = "actor_rollout_ref.model.compile_layers=True"


def said(folder, kind: str, *keys: str) -> str:
    """What `siirl check` says of the actor's model."""
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    path = f"actor_rollout_ref.model.path={folder}"
    cfg = load_config(
        [KEY, path, "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.name=hf", *keys]
    )
    try:
        refuse(check_trained_model(cfg, "actor", "the model"))
    except NotSupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", COMPILED)
def test_these_types_are_compiled(tmp_path, kind):
    seeing = ["data.dataset_type=vlm"] if family_of(kind).sees_images else []
    assert said(tmp_path, kind, *seeing) == ""


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("mixtral", [], "compared with nothing"),
        ("qwen3", ["actor_rollout_ref.model.use_liger=True"], "Liger's kernels"),
        ("qwen3", ["actor_rollout_ref.actor.strategy=megatron"], "only layers under fsdp"),
        ("qwen3", ["actor_rollout_ref.actor.fsdp_config.float8=True"], "not seen together"),
    ],
)
def test_what_was_not_seen_is_refused_with_the_fix(tmp_path, kind, keys, reason):
    problem = said(tmp_path, kind, *keys)
    assert reason in problem and "compile_layers=false" in problem
