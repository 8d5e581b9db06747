"""What a Megatron model needs to be installed is said before the launch."""

import importlib.util

import pytest
from fixtures_tiny import make_tiny_model_dir
from plan_cases import config

from siirl.errors import ConfigError, DataError
from siirl.launch.preflight import check_packages
from siirl.model_files.directory import check_model_files

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("package", ["megatron.core", "mbridge"])
def test_a_package_that_a_model_needs_is_named_before_the_launch(monkeypatch, package):
    find = importlib.util.find_spec
    hidden = package.partition(".")[0]
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name.partition(".")[0] == hidden else find(name, *more),
    )
    cfg = config(f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.use_mbridge=True")
    with pytest.raises(ConfigError, match=rf"{hidden}.*pip install 'siirl\[megatron\]'"):
        check_packages(cfg, "actor")
    check_packages(config(), "actor")


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
