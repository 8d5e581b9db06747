"""Killed with SIGKILL at random points, a run trains the prompts that it would have trained, each once."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from dist_harness import WorkerFailure
from job_harness import Inputs, overrides, run_job, work
from test_dapo_main_job import COIN, GAME, GAME_DAG
from test_lag_interaction_job import game

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROLLOUT = "actor_rollout_ref.rollout"
STEPS, BATCH, N, KILLS = 7, 4, 2, 3
SMALL = (
    "trainer.deadline_s=240",
    *(f"trainer.total_training_steps={STEPS}", f"data.train_batch_size={BATCH}", f"{ROLLOUT}.n={N}"),
    *(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.max_prompt_length=64",
        "trainer.export_hf=False",
    ),
    *("data.max_response_length=96", f"{ROLLOUT}.stop_token_ids=[5,6,7,8]", "trainer.val_before_train=False"),
)
SAMPLED_IN_ROUNDS = (
    *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"),
    "data.gen_batch_size=5",
)
ROW_FOR_EACH_TURN = (
    *("algorithm.credit.group_by=[task,turn]", "algorithm.credit.equal_weight=episode"),
    "actor_rollout_ref.actor.recompute_old_log_prob=False",
)
CASES = [
    *((kind, lag) for kind in ("responses", "responses in rounds", "episodes") for lag in (0, 1, 2)),
    ("episodes in rounds", 0),
]
"""In rounds: with dynamic sampling."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Of each kind: as many prompts as are trained; more of them in rounds, where some are dropped."""
    folder = tmp_path_factory.mktemp("inputs")
    made = {}
    for kind in dict(CASES):
        made[kind] = Inputs.make(folder / kind, rows=200 if "rounds" in kind else STEPS * BATCH)
        if "rounds" in kind:
            made[kind].reward.write_text(COIN)
    return made


def keys_of(kind: str, lag: int, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    keys = [*SMALL, f"trainer.rollout_data_dir={folder / 'rows'}", f"{ROLLOUT}.max_lag={lag}"]
    keys += SAMPLED_IN_ROUNDS if "rounds" in kind else ()
    if kind == "episodes in rounds":
        (folder / "game.py").write_text(GAME)
        (folder / "game.yaml").write_text(GAME_DAG.replace("CODE", str(folder / "game.py")))
        return [*keys, *ROW_FOR_EACH_TURN, f"dag.workflow_path={folder / 'game.yaml'}"]
    return keys + (game(folder) if kind == "episodes" else [])


def trained(folder: Path) -> Counter:
    """The prompts that were trained, by their number in the file, with how many rows of each; in rounds all
    that were scored."""
    files = (folder / "rows").glob("step_*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return Counter(row["sample_index"] for row in rows)


def killed(rank, world_size, arguments, output):
    """A worker that is killed as `kill.json` says: in which step, after which share of the time of one."""
    from siirl.dag_worker.training import Training

    how, train_step, began = (
        json.loads((Path(output).parent / "kill.json").read_text()),
        Training.train_step,
        [],
    )

    def times(training):
        began.append(time.monotonic())
        if training.step >= how["step"] and rank in how["ranks"]:
            step_s = began[-1] - began[-2] if len(began) > 1 else 0.5
            threading.Timer(how["share"] * step_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return train_step(training)

    Training.train_step = times
    work(rank, world_size, arguments, output)


@pytest.mark.parametrize(("kind", "lag"), CASES)
def test_a_run_that_is_killed_at_random_trains_the_prompts_of_one_that_is_not(inputs, tmp_path, kind, lag):
    """On two ranks. Which groups are dropped in rounds depends on the weights: so these are the same, too."""
    seed = random.randrange(2**32)
    rng, folder = random.Random(seed), tmp_path / "killed"
    save_freq, story = rng.randint(1, 2), []
    keys = [*keys_of(kind, lag, folder), f"trainer.save_freq={save_freq}", "trainer.overwrite=true"]
    arguments = overrides(inputs[kind], folder / "out", *keys)
    for step in sorted(rng.choices(range(1, STEPS - 1), k=KILLS)):
        how = {"step": step, "share": rng.random(), "ranks": rng.choice([[0], [1], [0, 1]])}
        (folder / "kill.json").write_text(json.dumps(how))
        story.append(how)
        with pytest.raises(WorkerFailure, match="exit code -9"):
            run_job(2, arguments, deadline_s=400, run=killed)
    resumed = run_job(2, arguments, deadline_s=400)
    case = f"seed {seed}, a checkpoint every {save_freq} steps, killed: {story}"
    found = trained(folder)
    if "rounds" in kind:
        whole = tmp_path / "whole"
        of_keys = overrides(inputs[kind], whole / "out", *keys_of(kind, lag, whole))
        undisturbed = run_job(2, of_keys, deadline_s=400)
        assert found == trained(whole) and len(found) >= STEPS * BATCH, case
        norms = [run.values("actor/grad_norm") for run in (resumed, undisturbed)]
        if kind == "episodes in rounds":  # which turns an engine reads together depends on the clock
            norms[1] = pytest.approx(norms[1], rel=1e-2)
        assert norms[0] == norms[1] and len(norms[0]) == STEPS, case
    else:
        assert found == dict.fromkeys(range(STEPS * BATCH), N), case
