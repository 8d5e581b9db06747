"""The way of a new user: siirl new, check, run, resume, eval, chat; each by the command that is typed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from job_harness import Finished
from script_python import script_python

from siirl.runs.run_state import read_run

pytestmark = pytest.mark.timeout(400)
SIIRL = [sys.executable, "-m", "siirl.cli"]
SHORT = [
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=2",
]


def told(command, folder, **more) -> subprocess.CompletedProcess[str]:
    own = {"SIIRL": f"{script_python()} -m siirl.cli", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | own, **more)


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


def test_a_score_that_repeats_what_the_environment_gave_is_warned_of(project):
    twice = project / "twice.py"
    twice.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(message['reward'] for message in extra_info['conversation'])\n"
    )
    done = told(["./run.sh", "--check", f"custom_reward_function.path={twice}"], project)
    assert done.returncode == 0 and "it counts twice. Return what the environment does not" in done.stderr
    assert "counts twice" not in told(["./run.sh", "--check"], project).stderr


def test_a_run_that_only_its_environment_rewards_shows_what_it_gets_everywhere(project):
    """Without a reward node, rows need no column for it; what is shown is what advantages are made of."""
    for name in ("train", "test"):
        rows = pq.read_table(project / "inputs" / f"{name}.parquet").drop_columns("reward_model")
        pq.write_table(rows.slice(0, 40), project / "inputs" / f"{name}_bare.parquet")
    lines = (project / "workflow.yaml").read_text().splitlines()
    kept = "\n".join(line for line in lines if "node_id: reward" not in line)
    (project / "alone.yaml").write_text(kept.replace("dependencies: [reward]", "dependencies: [room]"))
    code = (project / "environment.py").read_text()
    (project / "any_word.py").write_text(code.replace("said.split()[:1] == [self.answer]", "True"))
    keys = ["dag.workflow_path=alone.yaml", "custom_reward_function.path=null", "trainer.output_dir=alone"]
    keys += [
        f"data.{split}_files=inputs/{name}_bare.parquet"
        for split, name in (("train", "train"), ("val", "test"))
    ]
    keys += ["dag.node_config.room.env_path=any_word.py:TwoTries", "trainer.total_training_steps=1"]
    keys += [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.save_freq=-1",
    ]
    out = said(["./run.sh", *keys], project)
    assert "validation reward  1.000 (step 0) -> 1.000 (step 1)" in out
    assert "training reward    1.000 (step 1)" in out
    folder = project / "alone"
    (line,) = (line for line in Finished.read(folder).lines if line["step"] == 1)
    assert line["reward/total"] == line["val/reward/mean"] == line["val/larger/reward/mean"] == 1.0
    assert "reward/score" not in line and line["reward/zero_std_groups"] == 1.0
    assert "agent 0" in (folder / "conversations" / "step_1.html").read_text()
    rows = (folder / "rollouts" / "validation" / "step_1.jsonl").read_text().splitlines()
    assert [json.loads(row)["rewards"] for row in rows] == [{"agent 0": 1.0}] * 8
    listed = said([*SIIRL, "ls", "alone"], project)
    assert re.search(r"1/1 +validation +1\.000 +1\.000 @0", listed), listed
    best = said([*SIIRL, "compare", "alone", "alone"], project)
    assert re.search(r"reward/total +1\.0000 +1\.0000 +1\.0000 @1", best), best


TWO_FUNCTIONS = """
def right(data_source, solution_str, ground_truth, extra_info):
    return 1.0


def form(data_source, solution_str, ground_truth, extra_info):
    return 0.5
"""


@pytest.mark.slow
def test_two_reward_functions_with_weights_have_a_curve_each_wherever_rewards_are_shown(project):
    (project / "two.py").write_text(TWO_FUNCTIONS)
    pq.write_table(pq.read_table(project / "inputs/test.parquet").slice(0, 4), project / "inputs/few.parquet")
    keys = ["custom_reward_function.path=two.py", "custom_reward_function.weights={right:1,form:0.2}"]
    keys += [
        *SHORT,
        "trainer.total_training_steps=1",
        "trainer.output_dir=two",
        "data.val_files=inputs/few.parquet",
    ]
    keys += ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    out = said(["./run.sh", *keys], project)
    head, row = (line.split("  ") for line in out.splitlines() if re.match(r" +step | +1/1 ", line))
    shown = dict(zip(*([cell.strip() for cell in line if cell.strip()] for line in (head, row)), strict=True))
    assert [shown[name] for name in ("right", "form", "val right", "val form")] == ["1.000", "0.500"] * 2, (
        shown
    )
    (line,) = Finished.read(project / "two").lines
    for where in ("reward", "val/reward"):
        assert (line[f"{where}/part/right"], line[f"{where}/part/form"]) == (1.0, 0.5)
        assert line[f"{where}/own"] == pytest.approx(1.1), "and they add up by their weights"
    assert re.search(
        r"1/1 +validation +\S+ \(right 1\.000, form 0\.500\) ", said([*SIIRL, "ls", "two"], project)
    )
    watched = said([*SIIRL, "watch", "--once", "two"], project)
    assert "  form 0.500, best 0.500 @1" in watched and "form 0.500, val right 1.000" in watched, watched
    best = said([*SIIRL, "compare", "two", "two"], project)
    assert re.search(r"val/reward/part/form +0\.5000 +0\.5000 +0\.5000 @1", best), best


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
    explicit = json.loads((trained / "job.json").read_text())["config"]["explicit"]
    assert "data.train_batch_size" in explicit and "actor_rollout_ref.actor.clip_ratio_low" not in explicit
    assert not (trained.parent / "outputs").exists()
    assert [line["step"] for line in Finished.read(trained).lines] == [1, 2, 3]
    for line in Finished.read(trained).lines:
        assert line["reward/total"] == pytest.approx(line["reward/own"] + line["reward/env"], abs=1e-6)
        assert line["reward/score"] == pytest.approx(line["reward/own"], abs=1e-6) and line["reward/own"] > 0


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
