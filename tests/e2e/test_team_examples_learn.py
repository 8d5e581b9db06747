"""The examples with a world, a tool or a game: each learns by its script what one of its agents cannot."""

import importlib
from pathlib import Path

import pytest
from job_harness import ROOT, Finished, run_example, run_job

ROOMS_ALONE = (1 / 4 + 1 / 16) / 2  # doors that an actor opens who hears nothing
PRICE_ALONE = 1 / 6  # without the planner any thing may be meant, without the tool any price


def validated(folder: Path, name: str, metric: str) -> list[float]:
    run_example(folder, name, timeout_s=1700)
    return Finished.read(folder / f"{name}_0" / "team").values(metric)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_actor_opens_the_doors_that_the_reasoner_sees(tmp_path):
    opened = validated(tmp_path, "reasoner_actor", "agent_1/val/reasoner_actor/team/mean")
    assert opened[0] <= ROOMS_ALONE + 1e-6 and max(opened[-2:]) > 0.6, opened


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_planner_and_worker_find_the_price_by_the_tool(tmp_path):
    right = validated(tmp_path, "planner_worker", "agent_1/val/planner_worker/team/mean")
    assert right[0] <= PRICE_ALONE + 0.1 and max(right[-2:]) > 0.6, right


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_player_learns_the_right_moves_from_playing_itself(tmp_path):
    right = validated(tmp_path, "self_play", "agent_0/val/self_play/right/mean")
    assert right[0] < 0.5 and max(right[-2:]) > 0.8, right


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_candidates_of_a_turn_tell_what_as_many_episodes_do_not(tmp_path):
    right = {}
    for run in ("team", "alone"):
        more = ["alone"] * (run == "alone")
        run_example(tmp_path, "tree", *more, "trainer.total_training_steps=30")
        finished = Finished.read(tmp_path / "tree_0" / run)
        right[run] = finished.values("val/tree/right/mean")
        assert set(finished.values("interaction/episodes")) == {128}
    assert right["team"][-1] > 0.8 and max(right["alone"]) < 0.4, right


def exploited(run: Finished, first: int) -> float:
    """What the word that beats the player's policy best earns of it, on average over late validations."""
    earned = [
        [line[f"agent_0/val/against_{word}/earned/mean"] for word in ("rock", "paper", "scissors")]
        for line in run.lines
        if line["step"] >= first and "agent_0/val/against_rock/earned/mean" in line
    ]
    return -sum(map(min, earned)) / len(earned)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_league_learns_what_is_hard_to_exploit_where_plain_self_play_goes_in_circles(tmp_path):
    found = {}
    for run in ("team", "alone"):
        run_example(tmp_path, "league", *["alone"] * (run == "alone"))
        found[run] = exploited(Finished.read(tmp_path / "league_0" / run), 70)
    assert found["team"] < 0.4 and found["alone"] > found["team"] + 0.15, found


TURNS = {
    "reasoner_actor": (2, 4),
    "planner_worker": (2, 3),
    "self_play": (1, 8),
    "tree": (2, 2),
    "league": (2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TURNS)
def test_the_workflow_trains_by_the_keys_of_the_script(name, tmp_path, monkeypatch):
    prepare = importlib.import_module("examples.multi_agent.prepare")
    prepare.write(prepare.TASKS[name], tmp_path / f"{name}_0", 16, seed=0)
    small = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=1"]
    small += ["trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.logger=[]"]
    words = run_example(tmp_path, name, *small, python="echo").split()
    monkeypatch.chdir(ROOT)
    finished = run_job(1, words[2:], deadline_s=180)
    fewest, most = TURNS[name]
    alone = {"tree": [""], "self_play": ["agent_0/"], "league": ["agent_0/"]}
    who = alone.get(name, ["agent_0/", "agent_1/"])
    (turns,) = finished.values(f"{who[0]}interaction/turns")
    assert fewest <= turns <= most
    assert all(finished.values(f"{agent}actor/grad_norm")[0] > 0 for agent in who)
    if name == "reasoner_actor":
        assert finished.values("agent_1/critic/grad_norm")[0] > 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["reasoner"], ["unknown example reasoner", "planner_worker"]),
        (["self_play", "alone"], ["one policy"]),
        ([], ["name an example"]),
    ],
)
def test_other_names_are_refused_with_the_known_ones(tmp_path, arguments, words):
    refused = run_example(tmp_path, *arguments, fails=True)
    assert all(word in refused for word in words), refused


@pytest.mark.parametrize("name, hears", [("reasoner_actor", "actor"), ("planner_worker", "worker")])
def test_the_script_says_who_is_alone_and_takes_more_keys(tmp_path, name, hears):
    folder = tmp_path / f"{name}_0"
    folder.mkdir()
    (folder / "test.parquet").touch()
    words = run_example(tmp_path, name, "alone", "trainer.total_training_steps=2", python="echo").split()
    assert f"dag.node_config.{hears}.rollout.agent.pre_process_kwargs.others=False" in words
    assert words[-1] == "trainer.total_training_steps=2"
    assert f"dag.workflow_path=dag_templates/{name}.yaml" in words
