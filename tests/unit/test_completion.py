"""What the shell completes: asked as argcomplete's side in the shell asks."""

import os
import subprocess
import sys

import pytest
import yaml

from siirl.completion import settings, values
from siirl.config.root import all_keys
from siirl.config.values import check_available, convert

ROLLOUT = "actor_rollout_ref.rollout"


def completed(line: str, tmp_path) -> set[str]:
    answer = tmp_path / "answer"
    env = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    done = subprocess.run([sys.executable, "-m", "siirl.cli"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {word.strip() for word in answer.read_text().split("\n") if word.strip()}


@pytest.mark.heavy
def test_commands_options_keys_and_values(tmp_path):
    assert {"run", "check", "plan", "view", "resume"} <= completed("siirl ", tmp_path)
    assert completed("siirl plan --dr", tmp_path) == {"--draw"}
    assert completed(f"siirl run {ROLLOUT}.max_la", tmp_path) == {f"{ROLLOUT}.max_lag="}
    assert {f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name=hf"} <= completed(
        f"siirl check {ROLLOUT}.name=", tmp_path
    )


def test_keys_begin_as_they_are_written():
    assert settings("trainer.prog") == ["trainer.progress="] and settings("+trainer.prog") == [
        "+trainer.progress="
    ]
    assert settings("no.such.key") == settings("no.such.key=") == []
    assert len(settings("")) == len(all_keys())
    assert settings("trainer.val_only=t") == ["trainer.val_only=true"]


def test_every_value_that_is_offered_is_one_that_its_key_takes():
    offered = [(key, value) for key in all_keys().values() for value in values(key)]
    assert len(offered) > 200
    for key, value in offered:
        check_available(key, convert(key, yaml.safe_load(value)))
