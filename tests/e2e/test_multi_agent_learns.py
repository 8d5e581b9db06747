"""The examples with numbers: each runs by the script, and the team learns what one agent cannot."""

import importlib

import pytest
from job_harness import ROOT, Finished, run_example, run_job

BOUND = 7 / 12  # the best that can be known of the larger of two numbers below 6 from one of them
ACCURACY = {
    "solver_verifier": "agent_1/val/numbers/accuracy/mean",
    "debate": "agent_0/val/numbers/accuracy/mean",
}


def load(name: str):
    return importlib.import_module(f"examples.multi_agent.{name}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ACCURACY)
def test_a_team_learns_to_answer_what_each_of_its_agents_knows_half_of(tmp_path, name):
    run_example(tmp_path, name)
    team = Finished.read(tmp_path / "numbers_0" / name).values(ACCURACY[name])
    assert team[0] < 0.3 and team[-1] > 0.75, team


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_agent_alone_gets_no_further_than_half_of_the_question_allows(tmp_path):
    run_example(tmp_path, "solver_verifier", "alone")
    alone = Finished.read(tmp_path / "numbers_0" / "alone").values("val/numbers/accuracy/mean")
    assert alone[0] < 0.3 < alone[-1] and max(alone) < BOUND + 1e-6, alone


def quick(name: str, tmp_path, monkeypatch, *changes: str) -> Finished:
    """An example's job by the keys of its script, made smaller, on one process; numbers below 4."""
    prepare = load("prepare")
    prepare.write(prepare.numbers(4), tmp_path / "numbers_0", 320, seed=0)
    words = run_example(tmp_path, name, *changes, "trainer.logger=[]", python="echo").split()
    assert words[:2] == ["-m", "siirl.main_dag"], words
    monkeypatch.chdir(ROOT)
    return run_job(1, words[2:], deadline_s=180)


@pytest.mark.slow
def test_debaters_of_one_policy_learn_to_read_each_other(tmp_path, monkeypatch):
    changes = ["trainer.total_training_steps=15", "trainer.test_freq=15"]
    changes += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    finished = quick("debate", tmp_path, monkeypatch, *changes)
    untrained, trained = finished.values(ACCURACY["debate"])
    assert untrained < 0.4 and trained > 0.75, (untrained, trained)  # 5/8 is the bound of one agent
    assert finished.values("agent_0/interaction/turns") == [2] * 15


def test_the_solver_and_the_verifier_run_by_the_keys_of_their_script(tmp_path, monkeypatch):
    small = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    small += ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    finished = quick("solver_verifier", tmp_path, monkeypatch, *small)
    for agent in (0, 1):
        assert len(finished.values(f"agent_{agent}/reward/score")) == 2
        assert finished.weights(f"agent_{agent}.actor")
    assert finished.values("agent_0/interaction/turns") == [2, 2]


@pytest.mark.parametrize(
    ("name", "agent", "said", "score"),
    [
        ("solver_verifier", 0, "3 5", 1.0),
        ("solver_verifier", 0, "3 3", 0.5),
        ("solver_verifier", 0, "9 5", 0.5),
        ("solver_verifier", 1, "9 5", 1.0),
        ("solver_verifier", 1, "3 3", 0.0),
        ("debate", 0, "3 5 5 5", 1.0),
        ("debate", 1, "3 5 5 5", 1.0),
        ("debate", 0, "5 5 5 5", 0.75),
        ("debate", 1, "3 3 5 5", 0.75),
        ("debate", 0, "3 5 5 3", 0.5),
        ("debate", 1, "3 3 5 3", 0.0),
    ],
)
def test_each_agent_is_paid_for_its_own_part_and_for_that_of_the_team(name, agent, said, score):
    conversation = [{"agent": None, "content": "larger of 3 ?"}]
    conversation += [{"agent": turn % 2, "content": word} for turn, word in enumerate(said.split())]
    info = {"numbers": [3, 5], "agent": agent, "conversation": conversation}
    assert load(name).compute_score("numbers", said.split()[-1], "5", info)["score"] == score
