"""Weights in a distributed checkpoint are looked for where they are read from."""

import pytest
from fixtures_tiny import make_tiny_model_dir
from plan_cases import config

from siirl.errors import DataError
from siirl.model_files.directory import check_model_files

ACTOR = "actor_rollout_ref.actor"


def test_weights_are_looked_for_where_they_are_read_from(tmp_path):
    model = make_tiny_model_dir(tmp_path / "model", weights=False)
    stored = tmp_path / "stored"
    cfg = config(
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron.use_dist_checkpointing=True",
        f"{ACTOR}.megatron.dist_checkpointing_path={stored}",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
    )
    with pytest.raises(DataError, match=r"dist_checkpointing_path=.*does not exist.*siirl convert"):
        check_model_files(cfg, "actor")
    stored.mkdir()
    with pytest.raises(DataError, match=r"has no \.metadata"):
        check_model_files(cfg, "actor")
    (stored / ".metadata").touch()
    check_model_files(cfg, "actor")
