"""The examples of several agents: each runs by its script, and the team learns what one agent cannot."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_harness import run_job

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multi_agent" / "solver_verifier.sh"


def run(folder: Path, *arguments: str, python: str = sys.executable) -> str:
    environment = {
        "PYTHON": python,
        "PYTHONPATH": str(ROOT),
        "MULTI_AGENT_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", str(EXAMPLE), *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        timeout=870,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_policies_reach_together_what_one_of_them_cannot_alone(tmp_path):
    run(tmp_path)
    run(tmp_path, "alone")
    team = accuracies(tmp_path / "team", "agent_1/val/numbers/accuracy/mean")
    alone = accuracies(tmp_path / "alone", "val/numbers/accuracy/mean")
    assert team[0] < 0.2 and alone[0] < 0.2, (team, alone)
    assert max(team[-2:]) > 0.65, team
    assert max(alone) < 0.6, alone  # 0.55 is the best that can be known from one of the numbers


def test_the_workflow_of_the_solver_and_the_verifier_runs_by_the_keys_of_its_script(tmp_path, monkeypatch):
    prepare, example = load(ROOT / "examples/quickstart/prepare.py"), load(EXAMPLE.with_suffix(".py"))
    tokenizer = prepare.make_tokenizer()
    prepare.make_model(tokenizer).save_pretrained(tmp_path / "quickstart" / "model")
    tokenizer.save_pretrained(tmp_path / "quickstart" / "model")
    example.write(tmp_path / "data", 16)
    small = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    small += ["actor_rollout_ref.rollout.n=8", "trainer.total_training_steps=2", "trainer.test_freq=-1"]
    words = run(tmp_path, *small, "trainer.val_before_train=False", python="echo").split()
    assert words[:2] == ["-m", "siirl.main_dag"], words
    monkeypatch.chdir(ROOT)
    finished = run_job(1, [*words[2:], "trainer.logger=[]"])
    for agent in (0, 1):
        assert len(finished.values(f"agent_{agent}/reward/score")) == 2
        assert finished.weights(f"agent_{agent}.actor")
    assert finished.values("agent_0/interaction/turns") == [2, 2]


@pytest.mark.parametrize(
    ("agent", "proposal", "answer", "score"),
    [
        (0, "3", "7", 1.0),
        (0, "3", "3", 0.5),
        (0, "9", "7", 0.55),
        (0, "of", "of", 0.0),
        (1, "3", "7", 1.0),
        (1, "9", "7", 1.0),
        (1, "3", "3", 0.1),
        (1, "3", "larger of", 0.0),
    ],
)
def test_each_agent_is_paid_for_its_own_part_and_for_that_of_the_team(agent, proposal, answer, score):
    said = [{"node": None, "content": "larger of 3 ?"}]
    said += [{"node": "solver", "content": proposal}, {"node": "verifier", "content": answer}]
    info = {"numbers": [3, 7], "agent": agent, "conversation": said}
    own = (proposal, answer)[agent]
    assert load(EXAMPLE.with_suffix(".py")).compute_score("numbers", own, "7", info)["score"] == score
