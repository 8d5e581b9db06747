"""One's own task in six keys on the command line, and six settings from Python: data, reward, model."""

import json
import os
import re
import subprocess
import sys

import pytest
from fixtures_tiny import make_tiny_model_dir
from launch_jobs import environment

import siirl
from siirl import main_dag
from siirl.cli import main

MOST = 6
SIX = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.jsonl",
    "data.train_batch_size=4",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.name=hf",  # on a GPU, vLLM is the default
    "custom_reward_function.path=my_reward.py",
]
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float("1" in solution_str)
"""


ROLLOUT = "{node_id: player, node_type: MODEL_INFERENCE, node_role: ROLLOUT}"
SCORED_BY = {
    "its environment": """
  - node_id: room
    node_type: ENV_INTERACT
    dependencies: [player]
    loop: {to: player, max_turns: 2}
    config: {env_path: "own.py:Room"}
""",
    "a function of its own": """
  - node_id: room
    node_type: COMPUTE
    node_role: REWARD
    executable_ref: own.py:score
    reads: [response_length]
    writes: [score]
    dependencies: [player]
""",
}
OWN = """
class Room:
    def reset(self, task, seed):
        return ""

    def step(self, actions):
        return "", 0.0, True, {}


def score(context, rows):
    return rows
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A folder with a model that says a token or two, rows of prompts alone, and a reward."""
    make_tiny_model_dir(tmp_path / "model", vocab=16, max_positions=1100)
    (tmp_path / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, *range(6, 16)]})
    )
    rows = [json.dumps({"prompt": f"{number}{number}"}) for number in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "my_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return tmp_path


def test_check_and_plan_take_six_keys_and_one_process_on_a_cpu(task, capsys):
    assert len(SIX) <= MOST
    assert main(["check", *SIX]) == 0
    said = capsys.readouterr().out
    assert "on 1 ranks" in said and "rows (own 4)" in said, said
    cfg = siirl.load_config(SIX)
    siirl.check(cfg)
    assert not (task / "outputs").exists()


@pytest.mark.parametrize("forgotten", SIX)
def test_what_is_forgotten_of_them_is_asked_for_by_name(task, forgotten, capsys):
    name = forgotten.partition("=")[0]
    code = main(["check", *(key for key in SIX if key != forgotten)])
    told = capsys.readouterr()
    needed = {"data.train_files", "data.train_batch_size", "actor_rollout_ref.model.path"}
    assert (code == 2 and name in told.err) if name in needed else "deepseek" not in told.err + told.out
    assert "gsm8k/" not in told.err + told.out


@pytest.mark.parametrize("by", SCORED_BY)
def test_a_workflow_without_a_scorer_asks_for_no_source_and_no_right_answer(task, capsys, by):
    ends = """
  - {node_id: advantage, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [room]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantage]}
"""
    (task / "own.py").write_text(OWN)
    (task / "own.yaml").write_text(f"dag_id: own\nnodes:\n  - {ROLLOUT}{SCORED_BY[by]}{ends.lstrip(chr(10))}")
    keys = [key for key in SIX if "reward" not in key]
    assert main(["check", *keys, "dag.workflow_path=own.yaml"]) == 0, capsys.readouterr().err
    assert "rows (no source 4)" in capsys.readouterr().out


def test_what_the_run_chose_is_not_told_as_set_by_the_user(task, monkeypatch):
    jobs = []
    monkeypatch.setattr(main_dag, "_launch", lambda launcher, job, cfg, plan: jobs.append(job) or 0)
    assert main(["run", *SIX]) == 0
    config = jobs[0].config
    assert set(config["explicit"]) == {key.partition("=")[0] for key in SIX}
    assert config["trainer"]["output_dir"].endswith(config["trainer"]["experiment_name"])
    assert config["trainer"]["experiment_name"].startswith("grpo_model_")


def test_keys_that_follow_others_do_so_when_the_run_is_started_again_by_its_file(task, monkeypatch, capsys):
    """run_config.yaml has all keys; what nobody set is not told, nor refused, as set by the user."""
    jobs = []
    monkeypatch.setattr(main_dag, "_launched", lambda launcher, job, cfg: jobs.append(job) or 0)
    assert main(["run", *SIX]) == 0
    written = f"{jobs[0].output_dir}/run_config.yaml"
    again = ["trainer.output_dir=again", "data.train_batch_size=2", "actor_rollout_ref.actor.clip_ratio=0.3"]
    assert main(["run", "--config-name", written, *again]) == 0, capsys.readouterr().err
    first, second = (job.config for job in jobs)
    typed = {key.partition("=")[0] for key in again}
    assert set(second["explicit"]) == set(first["explicit"]) | typed
    actor = second["actor_rollout_ref"]["actor"]
    assert (actor["ppo_mini_batch_size"], actor["clip_ratio_low"], actor["clip_ratio_high"]) == (2, 0.3, 0.3)
    text = (task / written).read_text()
    assert "ppo_mini_batch_size: null" in text
    (task / "changed.yaml").write_text(text.replace("ppo_mini_batch_size: null", "ppo_mini_batch_size: 1", 1))
    assert main(["run", "--config-name", "changed.yaml", "trainer.output_dir=changed"]) == 0
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in jobs[2].config["explicit"], (
        "a file may be changed"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_own_task_runs_with_six_keys_into_a_folder_of_its_own(task):
    script = (
        f"import siirl\nrun = siirl.train(siirl.load_config({SIX!r}))\nprint(run.metrics()['reward/score'])"
    )
    for words in (["-m", "siirl.main_dag", *SIX], ["-c", script]):
        command = [sys.executable, *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=380)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.match(rf"output: {task}/outputs/siirl/grpo_model_\d{{8}}-\d{{6}}\n", done.stdout), (
            done.stdout
        )
    folders = sorted((task / "outputs" / "siirl").iterdir())
    assert len(folders) == 2, "a run does not go on with, nor write into, the folder of another one"
    assert all(len((one / "metrics.jsonl").read_text().splitlines()) >= 30 for one in folders)
