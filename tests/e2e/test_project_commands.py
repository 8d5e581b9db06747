"""The way of a new user: siirl new, check, run, resume, eval, chat; each by the command that is typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_harness import Finished

from siirl.runs.run_state import read_run

pytestmark = pytest.mark.timeout(400)
SIIRL = [sys.executable, "-m", "siirl.cli"]
ENVIRONMENT = os.environ | {"SIIRL": " ".join(SIIRL), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
SHORT = [
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=2",
]


def told(command, folder, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, **more)


def said(command, folder, **more) -> str:
    done = told(command, folder, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user") / "mine"
    assert "./run.sh --check" in said([*SIIRL, "new", str(folder)], folder.parent)
    said([sys.executable, "prepare.py"], folder)
    return folder


def test_a_new_project_passes_its_own_check_and_its_test(project):
    assert "ok: DAG 'two_tries'" in said(["./run.sh", "--check"], project)
    assert "2 passed" in said([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], project)
    assert told([*SIIRL, "new", str(project)], project).returncode == 2, "nothing is overwritten"


@pytest.fixture(scope="module")
def trained(project):
    """Two steps, and a third by `siirl resume` from another folder, where the run has been moved to."""
    said(["./run.sh", *SHORT], project)
    (project / "outputs").rename(project / "moved")
    done = told([*SIIRL, "resume", "mine/moved"], project.parent)
    assert done.returncode == 2 and "has ended, at step 2 of 2" in done.stderr
    said([*SIIRL, "resume", "mine/moved", "trainer.total_training_steps=3"], project.parent)
    return project / "moved"


@pytest.mark.slow
def test_a_run_goes_on_by_its_own_keys_in_the_folder_where_it_is_now(trained):
    state = read_run(trained)
    assert (state.status, state.step, state.total_steps, state.starts) == ("ended", 3, 3, 2)
    assert (trained / "checkpoints" / "global_step_3").is_dir()
    assert not (trained.parent / "outputs").exists()
    assert [line["step"] for line in Finished.read(trained).lines] == [1, 2, 3]


@pytest.mark.slow
def test_a_checkpoint_and_its_exported_model_evaluate_to_what_the_run_validated(trained):
    wanted = Finished.read(trained).values("val/reward/mean")[-1]
    for what, more in (("moved", []), ("moved/hf_model", [])):
        found = json.loads(said([*SIIRL, "eval", what, "--right", "0.5", "--json", *more], trained.parent))
        (result,) = found["results"]
        assert result["reward"] == pytest.approx(wanted, abs=1e-6), what
        assert found["metrics"]["val/reward/mean"] == pytest.approx(wanted, abs=1e-6)
        assert (result["prompts"], result["responses"]) == (100, 100)
        rows = Path(found["output"], "responses", f"step_{3 if what == 'moved' else 0}.jsonl").read_text()
        scores = [next(iter(json.loads(line)["rewards"].values())) for line in rows.splitlines()]
        assert result["pass_at"] == {"1": pytest.approx(sum(score >= 0.5 for score in scores) / 100)}
    assert read_run(trained).step == 3, "the run itself is as it was"


@pytest.mark.slow
def test_the_agent_of_a_run_answers_in_a_chat_what_it_answers_in_a_validation(trained):
    rows = (trained / "rollouts" / "validation" / "step_3.jsonl").read_text().splitlines()
    messages = json.loads(rows[0])["messages"]
    prompt = next(message["content"] for message in messages if message["agent"] is None)
    answer = next(message["content"] for message in messages if message["agent"] == 0)
    command = [*SIIRL, "chat", "moved", "--temperature", "0", "--max-tokens", "1", "--agent", "player"]
    out = said(command, trained.parent, input=f"{prompt}\n/agent nobody\n/quit\n")
    assert out.splitlines()[0] == f"agent_0: {answer.strip()}"
    assert "nobody is called 'nobody' here. There is: agent_0, player, agent_0.actor." in out
