"""`siirl migrate` of a script that names a YAML file of settings, in the layout of verl's repository."""

from pathlib import Path

import pytest

from siirl.cli import main
from siirl.migrate.foreign_files import read_source, translate_source

SCRIPT = """#!/usr/bin/env bash
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/examples/turns/config"
python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" --config-name='turns_grpo' \\
  algorithm.adv_estimator=grpo data.train_batch_size=64 "$@"
"""
TURNS = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - common/lengths
  - sampler@actor_rollout_ref.rollout: warm
  - optional more: null
  - _self_

data:
  max_response_length: 777
  train_batch_size: 9
  val_batch_size: ${data.train_batch_size}
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}
  rollout:
    name: vllm
    multi_turn: {enable: false}
"""
FILES = {
    "examples/turns/run.sh": SCRIPT,
    "examples/turns/config/turns_grpo.yaml": TURNS,
    "examples/turns/config/common/lengths.yaml": "# @package _global_\n"
    "data: {max_prompt_length: 111, max_response_length: 1}\n",
    "verl/trainer/config/sampler/warm.yaml": "defaults: [base]\ntemperature: 0.7\n",
    "verl/trainer/config/sampler/base.yaml": "temperature: 0.1\ntop_p: 0.9\n",
}
ROLLOUT = "actor_rollout_ref.rollout"


def tree(folder: Path, **changed: str | None) -> Path:
    """verl's repository, with a script; its path. changed: a file's stem -> another text, or None."""
    for name, text in FILES.items():
        text = changed.get(Path(name).stem, text)
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder / "examples" / "turns" / "run.sh"


def written(script: Path, *settings: str) -> dict[str, str]:
    found = translate_source(read_source(script, {}, settings))
    assert found.options == []
    return {setting.name: setting.value for setting in found.written()}


def test_the_settings_of_the_file_and_of_those_that_it_names_are_taken_in_hydras_order(tmp_path):
    found = written(tree(tmp_path))
    assert found["data.max_prompt_length"] == "111", "of a file for all keys"
    assert found["data.max_response_length"] == "777", "_self_ comes last"
    assert (found[f"{ROLLOUT}.temperature"], found[f"{ROLLOUT}.top_p"]) == ("0.7", "0.9"), "of a group"
    assert f"{ROLLOUT}.name" not in found, "siirl's default, too"


def test_the_command_line_counts_before_the_file_also_in_what_follows_from_it(tmp_path):
    found = written(tree(tmp_path), "data.max_prompt_length=5")
    assert found["data.train_batch_size"] == "64" and found["data.max_prompt_length"] == "5"
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == "64"


def test_a_file_that_names_others_behind_itself_gives_way_to_them(tmp_path):
    moved = TURNS.replace("  - _self_\n", "").replace("defaults:\n", "defaults:\n  - _self_\n")
    assert written(tree(tmp_path, turns_grpo=moved))["data.max_response_length"] == "1"


def test_a_preset_of_megatron_that_the_file_names_is_the_strategy(tmp_path):
    text = TURNS.replace("- ppo_trainer", "- ppo_megatron_trainer")
    assert written(tree(tmp_path, turns_grpo=text))["actor_rollout_ref.actor.strategy"] == "megatron"


@pytest.mark.parametrize(
    ("gone", "named"),
    [("turns_grpo", "examples/turns/config/turns_grpo.yaml"), ("warm", "sampler/warm.yaml, which")],
)
def test_a_file_that_is_not_there_is_named_and_the_command_says_that_it_does_without(
    tmp_path, gone, named, capsys
):
    assert main(["migrate", str(tree(tmp_path, **{gone: None}))]) == 1
    out = capsys.readouterr().out
    cannot = out.partition("# not supported")[2].partition("SETTINGS")[0]
    assert named in cannot and "name the script where it lies in its repository" in cannot


def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, capsys):
    assert main(["migrate", str(tree(tmp_path, turns_grpo="- a\n- b\n"))]) == 2
    assert "turns_grpo.yaml holds no mapping of keys" in capsys.readouterr().err


def test_a_file_that_names_itself_ends(tmp_path):
    script = tree(tmp_path, turns_grpo=TURNS.replace("common/lengths", "turns_grpo"))
    assert any("turns_grpo.yaml, which" in name for name in read_source(script, {}, ()).missing)


def test_a_trainers_own_file_needs_no_folder(tmp_path):
    own = SCRIPT.replace("turns_grpo", "ppo_megatron_trainer.yaml")
    found = translate_source(read_source(tree(tmp_path, run=own), {}, ()))
    assert not [setting for setting in found.of("impossible") if "yaml" in setting.there]
    assert any(setting.name.endswith("actor.strategy") for setting in found.written())
