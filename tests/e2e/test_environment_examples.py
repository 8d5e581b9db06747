"""The examples in environments of other packages, by their scripts: a small run each, and what they learn."""

import importlib
import os
import sys
from pathlib import Path

import pytest
from job_harness import ROOT, Finished, run_example, run_job

SMALL = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=1"]
SMALL += ["trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.logger=[]"]
PACKAGES = {
    "reasoning_gym": "reasoning_gym",
    "lake": "gymnasium",
    "nim": "textarena",
    "guess": "openenv",
    "shop": "mcp",
}


def needs(name: str) -> None:
    package = PACKAGES[name]
    wanted = "openenv-core" if package == "openenv" else f"'siirl[{package.replace('_', '-')}]'"
    pytest.importorskip(package, reason=f"pip install {wanted}")


def quick(name: str, folder: Path, monkeypatch, *changes: str) -> Finished:
    """An example's job by the keys of its script, made smaller, on one process."""
    needs(name)
    importlib.import_module("examples.environments.prepare").write(name, folder / name)
    words = run_example(folder, name, *SMALL, *changes, example="environments", python="echo").split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    return run_job(1, words[2:], deadline_s=180)


def learnt(name: str, folder: Path) -> Finished:
    """The whole example."""
    needs(name)
    run_example(folder, name, example="environments", timeout_s=1700)
    return Finished.read(folder / name / "run")


@pytest.mark.slow
def test_answers_are_scored_by_reasoning_gym(tmp_path, monkeypatch):
    finished = quick("reasoning_gym", tmp_path, monkeypatch)
    (worth,) = finished.values("reward/reasoning_gym/leg_counting/mean")
    assert finished.values("reward/score") == [pytest.approx(worth, abs=1e-6)] and 0 <= worth < 0.5


def test_an_agent_walks_over_a_lake_of_gymnasium(tmp_path, monkeypatch):
    finished = quick("lake", tmp_path, monkeypatch)
    assert finished.values("interaction/episodes") == [16] and finished.values("interaction/failed") == [0]
    (turns,) = finished.values("interaction/turns")
    assert 2 <= turns <= 10


@pytest.mark.slow
def test_two_policies_play_a_game_of_textarena(tmp_path, monkeypatch):
    finished = quick("nim", tmp_path, monkeypatch)
    assert finished.values("agent_0/interaction/failed") == [0]
    won = finished.values("agent_0/interaction/turn_0/env_reward")  # by an illegal first move, mostly
    assert finished.values("agent_0/interaction/env_done") == [1] and -1 <= won[0] < 0
    assert all(finished.values(f"agent_{agent}/actor/grad_norm")[0] > 0 for agent in (0, 1))


def test_an_agent_asks_a_tool_of_an_mcp_server(tmp_path, monkeypatch):
    finished = quick("shop", tmp_path, monkeypatch, "actor_rollout_ref.rollout.n=16")
    assert finished.values("interaction/failed") == [0]
    assert finished.values("interaction/tool_calls")[0] > 0
    assert finished.values("actor/grad_norm")[0] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_agent_learns_in_an_environment_of_verifiers(tmp_path):
    """A quarter of the example's steps, of 256 episodes each."""
    if not (Path(sys.prefix) / "verifiers").exists():
        pytest.skip("make setup installs verifiers in an environment of its own")
    steps = "trainer.total_training_steps=20"
    run_example(tmp_path, "verifiers", steps, example="environments", timeout_s=1700)
    finished = Finished.read(tmp_path / "verifiers/run")
    worth = finished.values("val/interaction/env_reward")
    assert worth[0] < 0.2 and worth[-1] > 0.35, worth  # 0.64 is the most that there is
    assert set(finished.values("interaction/failed")) == {0}
    assert max(finished.values("actor/rollout_log_prob_diff_max")) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_learns_to_count_the_legs_of_an_animal(tmp_path):
    worth = learnt("reasoning_gym", tmp_path).values("val/reward/mean")
    assert worth[0] < 0.1 and worth[-1] > 0.8, worth


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_walker_finds_the_way_over_the_lake(tmp_path):
    worth = learnt("lake", tmp_path).values("val/interaction/env_reward")
    assert worth[0] < 0.2 and worth[-1] > 0.9, worth


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_policies_learn_a_game_and_how_to_beat_each_other(tmp_path):
    played = learnt("nim", tmp_path)
    turns = played.values("agent_0/interaction/turns")
    assert turns[0] < 1.6 and sum(turns[-40:]) / 40 > 2.2, turns  # an illegal move ends a game
    ahead = played.values("agent_0/interaction/first/env_reward")
    assert max(ahead) > 0.2 and min(ahead[10:]) < -0.2, ahead


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shopper_asks_and_says_what_the_tool_says(tmp_path):
    right = learnt("shop", tmp_path).values("val/shop/right/mean")
    assert right[0] < 0.1 and max(right[-3:]) > 0.8, right  # of 16 episodes, with prices that are drawn


def test_an_example_ends_where_its_server_does_not_begin(tmp_path):
    told = run_example(tmp_path, "guess", example="environments", python="echo", fails=True, timeout_s=60)
    assert "the server of the environment has ended" in told


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_guesser_learns_from_the_hints_of_an_openenv_server(tmp_path):
    worth = learnt("guess", tmp_path).values("val/interaction/env_reward")
    assert worth[0] < 0.2 and worth[-1] > 0.45, worth  # the best is 0.64
