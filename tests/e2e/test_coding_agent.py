"""Agents that mend repositories in sandboxes, by the example's one command: rewarded by their tests."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_harness import ROOT

from siirl.sandbox.box import strongest_isolation

AGENT_PYTHON = Path(os.environ.get("AGENT_PYTHON", Path(sys.prefix) / "mini-swe-agent/bin/python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(strongest_isolation().mode == "process", reason="no namespaces here"),
]


def run(folder: Path, *keys: str, **env: str) -> list[dict[str, float]]:
    """Run examples/coding/run.sh; the metrics of each step."""
    places = {"CODING_DIR": str(folder), "PYTHON": sys.executable, "AGENT_PYTHON": str(AGENT_PYTHON)}
    command = ["bash", str(ROOT / "examples/coding/run.sh"), "trainer.val_before_train=False", *keys]
    ended = subprocess.run(command, env={**os.environ, **places, **env}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [one.get("metrics", one) for one in map(json.loads, lines)]


def test_an_agent_that_says_commands_is_rewarded_by_the_tests_of_its_task(tmp_path):
    steps = run(tmp_path, "trainer.total_training_steps=2", "trainer.test_freq=-1", AGENT="shell")
    assert [step["interaction/episodes"] for step in steps] == [32, 32]
    assert [step["interaction/failed"] for step in steps] == [0, 0]
    assert all(step["interaction/env_done"] == 1 for step in steps)


@pytest.mark.skipif(not AGENT_PYTHON.exists(), reason=f"make setup makes {AGENT_PYTHON}")
@pytest.mark.timeout(1800)
def test_mini_swe_agent_learns_to_mend_repositories(tmp_path):
    steps = run(tmp_path, "trainer.test_freq=-1")
    rewards = [step["interaction/env_reward"] for step in steps]
    assert all(step["interaction/failed"] == 0 for step in steps)
    assert sum(rewards[-10:]) / 10 > 0.4 > 2 * sum(rewards[:5]) / 5, rewards


def test_every_solution_of_the_example_mends_its_repository_and_nothing_else_does(tmp_path):
    from siirl.agents.task_run import TaskRun
    from siirl.data.data_files import list_files, open_rows

    importlib.import_module("examples.coding.prepare").write(tmp_path)
    (rows,) = list_files(str(tmp_path / "tasks"))
    found = open_rows(rows).read(["extra_info"]).to_pylist()
    assert len(found) == 20
    for row in found:
        run = TaskRun(row, {"time_s": 20})
        assert run.score() == 0.0
        run.solve()
        assert run.score() == 1.0
        run.close()
