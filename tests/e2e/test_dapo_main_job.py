"""Dynamic sampling through the main job: on any number of ranks, with leftovers in checkpoints, exhausted."""

import json
import shutil
from collections import Counter

import pytest
import torch
from dist_harness import WorkerFailure
from job_harness import Inputs, audited, overrides, run_job

from siirl.compiler.compile import TEMPLATES

COIN = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for an even number of digits: about half of all pairs of random responses score alike."""
    return {"score": float(sum(c.isdigit() for c in solution_str) % 2 == 0), "acc": len(solution_str) % 2}
'''
DAPO = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=score",
    "data.gen_batch_size=5",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
)
LAG = (
    *("actor_rollout_ref.rollout.max_lag=2", "actor_rollout_ref.rollout.surplus=1.5"),
    *("data.max_response_length=64", "actor_rollout_ref.rollout.stop_token_ids=[5,6,7,8]"),
)
COMPARED = (
    "data/arithmetic/not_varied",
    "reward/score",
    "actor/loss",
    "actor/grad_norm",
    "sampling/groups_left",
    "sampling/rounds",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    made.reward.write_text(COIN)
    return made


@pytest.fixture(scope="module")
def one_rank(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("one")
    return run_job(1, overrides(inputs, output, *DAPO, "trainer.save_freq=1", "trainer.ledger=rows"))


def test_the_batch_is_full_of_groups_that_vary(one_rank):
    assert one_rank.values("reward/zero_std_groups") == [0.0] * 3
    assert all(0 < share < 1 for share in one_rank.values("sampling/groups_varied"))
    assert max(one_rank.values("sampling/rounds")) > 2
    told = audited(one_rank)
    assert any("all responses of its prompt score alike (algorithm.filter_groups)" in line for line in told)
    assert max(one_rank.values("sampling/groups_left")) > 0, "no step of this test leaves groups over"
    assert one_rank.values("reward/score") == [0.5] * 3
    read, left = sum(one_rank.values("data/arithmetic/prompts")), one_rank.values("sampling/groups_left")[-1]
    assert sum(one_rank.values("data/arithmetic/not_varied")) == 2 * (read - left - 3 * 8) > 0


CHECK = '''
import torch


def same_rows(ctx, rows):
    """Log-probs of rollout and trainer, from two layouts, are those of the same rows.

    Only rows of the newest weights: groups left over were sampled before the last updates, two a step.
    """
    mask = rows["response_mask"].bool()
    fresh_B = ((rows["weight_version"] == 2 * (ctx.step - 1)) | ~mask).all(1)
    mask &= fresh_B[:, None]
    torch.testing.assert_close(rows["old_log_prob"][mask], rows["rollout_log_prob"][mask], atol=1e-3, rtol=0)
    ctx.metrics.sum("checked/rows", int(fresh_B.sum()))
    return rows.select()
'''
CHECK_NODE = """
  - node_id: check
    node_type: COMPUTE
    dependencies: [calculate_advantages, actor_old_log_prob]
    executable_ref: FILE:same_rows
    reads: [response_mask, rollout_log_prob, old_log_prob, weight_version]
    writes: []
"""


def checked(folder, placed_apart: bool) -> str:
    """The template with a node declared last that looks whether columns of one row belong together.

    placed_apart: rollout and training on ranks of their own, and the filter across both.
    """
    text = (TEMPLATES / "dapo.yaml").read_text()
    if placed_apart:
        text = text.replace("node_role: ROLLOUT,", "node_role: ROLLOUT, placement: '0',")
        text = text.replace("node_role: ACTOR,", "node_role: ACTOR, placement: '1',")
        text = text.replace("node_role: ACTOR\n", "node_role: ACTOR\n    placement: '1'\n")
        text = text.replace("POSTPROCESS_SAMPLING\n", "POSTPROCESS_SAMPLING\n    placement: '0-1'\n")
    (folder / "check.py").write_text(CHECK)
    path = folder / "checked.yaml"
    path.write_text(text + CHECK_NODE.replace("FILE", str(folder / "check.py")))
    return f"dag.workflow_path={path}"


@pytest.mark.parametrize(
    "placed_apart",
    [pytest.param(False, marks=pytest.mark.slow, id="shared ranks"), pytest.param(True, id="apart")],
)
def test_dynamic_sampling_is_the_same_on_two_ranks(inputs, one_rank, tmp_path, placed_apart):
    two = run_job(2, overrides(inputs, tmp_path / "out", *DAPO, checked(tmp_path, placed_apart)))
    checked_rows = two.values("checked/rows")
    assert checked_rows[0] == 16 and min(checked_rows) > 0
    for name in COMPARED:
        assert len(two.values(name)) == 3, name
        assert two.values(name) == pytest.approx(one_rank.values(name), rel=1e-3, abs=1e-4), name
    dropped = "data/arithmetic/not_varied"
    assert two.values(dropped) == one_rank.values(dropped)


def resume_with_leftovers(run) -> tuple[int, tuple[str, str]]:
    """The first step of the run that left groups over, and the keys that go on from its checkpoint."""
    left = run.values("sampling/groups_left")
    step = next(step for step in (1, 2) if left[step - 1] > 0)
    checkpoint = run.output / "checkpoints" / f"global_step_{step}"
    return step, ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ledger"), [(1, "off"), (2, "rows")])
def test_leftover_groups_survive_a_checkpoint(inputs, one_rank, tmp_path, world_size, ledger):
    step, resume = resume_with_leftovers(one_rank)
    resumed = run_job(world_size, overrides(inputs, tmp_path, *DAPO, *resume, f"trainer.ledger={ledger}"))
    if ledger == "rows":
        audited(resumed)
    for name in COMPARED:
        assert resumed.values(name) == pytest.approx(one_rank.values(name)[step:], rel=1e-3, abs=1e-4), name


def test_groups_left_over_without_a_lag_are_refused_under_one(inputs, one_rank, tmp_path):
    _, resume = resume_with_leftovers(one_rank)
    with pytest.raises(WorkerFailure) as caught:
        run_job(1, overrides(inputs, tmp_path, *DAPO, *LAG, *resume, "trainer.resume_changed=true"))
    for words in ("left over in a run without staleness", "rollout.max_lag=2 bounds it", "max_lag=0"):
        assert words in str(caught.value)


def test_a_reward_that_never_varies_ends_the_run_with_the_numbers(inputs, tmp_path):
    constant = tmp_path / "constant.py"
    constant.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    more = (f"custom_reward_function.path={constant}", "algorithm.filter_groups.max_num_gen_batches=3")
    with pytest.raises(WorkerFailure) as caught:
        run_job(2, overrides(inputs, tmp_path / "out", *DAPO, *more))
    for words in ("of 15 prompts in 3 rounds only 0 have", "needs 8", "max_num_gen_batches"):
        assert words in str(caught.value)


NOTE = '''
import json
from pathlib import Path


def note(ctx, rows):
    """Writes down which prompts train in a step; each has two optimizer steps, so version 2k is of k + 1."""
    columns = rows["prompt_ids"].tolist(), rows["prompt_length"].tolist()
    prompts = [ids[-length:] for ids, length in zip(*columns)]
    path = Path(ctx.options["folder"]) / f"{ctx.step}_{rows['group_id'].min() if len(rows) else 'none'}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(prompts))
    versions = rows["weight_version"]
    ages = ctx.step - 1 - versions[versions >= 0] // 2
    assert ages.numel() == 0 or 0 <= ages.min() and ages.max() <= 2
    ctx.metrics.max("note/age", int(ages.max()) if len(rows) else 0)
    return rows.select()
'''
NOTE_NODE = """
  - node_id: note
    node_type: COMPUTE
    dependencies: [dynamic_sampling]
    executable_ref: CODE:note
    reads: [group_id, prompt_ids, prompt_length, weight_version]
    writes: []
    config: {folder: FOLDER}
"""


def noted(folder):
    """Step -> its prompts, with how many rows of each."""
    steps = {}
    for path in sorted(folder.iterdir()):
        of_step = steps.setdefault(int(path.stem.partition("_")[0]), Counter())
        of_step.update(tuple(prompt) for prompt in json.loads(path.read_text()))
    return steps


def run_noting(folder, made, name, *more):
    """A run of four steps with a lag, and what `note` has seen of it."""
    shutil.rmtree(folder / "seen", ignore_errors=True)
    (folder / "note.py").write_text(NOTE)
    node = NOTE_NODE.replace("CODE", str(folder / "note.py")).replace("FOLDER", str(folder / "seen"))
    (folder / "noting.yaml").write_text((TEMPLATES / "dapo.yaml").read_text() + node)
    keys = (f"dag.workflow_path={folder / 'noting.yaml'}", "trainer.total_training_steps=4", *more)
    return run_job(2, overrides(made, folder / name, *DAPO, *LAG, *keys)), noted(folder / "seen")


@pytest.mark.slow  # test_in_flight.py has it without the rest of a run, test_lag_job.py the resume
def test_dynamic_sampling_with_a_lag_trains_whole_batches_within_the_bound_and_resumes_exactly(tmp_path):
    """Responses with a long tail; from the checkpoint of step 2 the same prompts and weights come out."""
    made = Inputs.make(tmp_path / "inputs", rows=200)
    made.reward.write_text(COIN)
    whole, prompts = run_noting(tmp_path, made, "whole", "trainer.save_freq=2")
    checkpoint = whole.output / "checkpoints" / "global_step_2"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    resumed, again = run_noting(tmp_path, made, "resumed", *resume, "trainer.ledger=tokens")
    assert "not shown: steps 1 to 2, of which the ledger has nothing" in audited(resumed)
    assert [prompts[step].total() for step in (1, 2, 3, 4)] == [16] * 4
    assert again == {step: prompts[step] for step in (3, 4)}
    assert max(whole.values("note/age")) > 0 and max(whole.values("rollout/partial")) > 0
    assert max(whole.values("rollout/staleness_max")) <= 2 and min(whole.values("sampling/rounds")) > 1
    assert whole.values("sampling/groups_left") == whole.values("reward/zero_std_groups") == [0] * 4
    assert 0 <= whole.values("rollout/in_flight")[-1] < 5 < max(whole.values("rollout/in_flight"))
    ours, theirs = resumed.weights(), whole.weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


GAME = """
class Game:
    def reset(self, task, seed):
        return ""

    def step(self, actions):
        letters = sum(letter.isalpha() for letter in actions[0])
        return "again", letters / 8, letters % 2 == 0


def pre_process(messages, episode):
    \"\"\"Each turn is asked alone, and so is a row of its own.\"\"\"
    return [{"role": "user", "content": str(len(messages))}]
"""
GAME_DAG = """
dag_id: game
nodes:
  - {node_id: player, node_type: MODEL_INFERENCE, node_role: ROLLOUT, dependencies: [],
     agent_options: {process_path: CODE}}
  - {node_id: game, node_type: ENV_INTERACT, dependencies: [player], loop: {max_turns: 3},
     config: {env_path: "CODE:Game"}}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [game]}
  - {node_id: sampling, node_type: COMPUTE, node_role: POSTPROCESS_SAMPLING, dependencies: [reward]}
  - {node_id: advantage, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [sampling]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantage]}
"""


@pytest.mark.slow
def test_episodes_of_several_rows_are_sampled_in_rounds_on_any_number_of_ranks(inputs, tmp_path):
    """Episodes of one to three turns, a row each: groups have different numbers of rows."""
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "game.yaml").write_text(GAME_DAG.replace("CODE", str(tmp_path / "game.py")))
    more = (
        *DAPO,
        f"dag.workflow_path={tmp_path / 'game.yaml'}",
        "data.max_prompt_length=64",
        "algorithm.credit.group_by=[task,turn]",
        "algorithm.credit.equal_weight=episode",
        "actor_rollout_ref.actor.recompute_old_log_prob=False",
    )
    one, two = (run_job(n, overrides(inputs, tmp_path / f"out_{n}", *more)) for n in (1, 2))
    assert max(one.values("sampling/rounds")) > 1
    assert 1.2 < one.values("interaction/agent_0/rows")[0] < 2.9
    for name in (*COMPARED, "turn_1/reward", "turn_2/advantage"):
        assert one.values(name) == pytest.approx(two.values(name), abs=1e-4), name
