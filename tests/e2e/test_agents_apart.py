"""Agents on ranks of their own: the same run, whoever's engine answers."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, audited, overrides, run_job, work

HERE = Path(__file__).parent
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(character.isdigit() for character in solution_str) / 8
"""
MODELS = ("ROLLOUT", "ACTOR")
ENDING = """
import os
import psutil

turns = 0

def server():
    for worker in psutil.Process(os.getppid()).children():
        if worker.environ().get("RANK") == "1":
            return worker

def post_process(text, episode):
    global turns
    turns += 1
    if turns == 40:
        ENDING
    return text
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_tiny_model_dir(
        tmp_path_factory.mktemp("other") / "model", family="llama", tie=False, vocab=80, init_std=0.2, seed=5
    )


def apart(inputs, other_model, folder, solver, verifier, *more, ending=""):
    """Arguments of the solver and verifier job, with the models of each on ranks of its own.

    ending: what the code around the verifier's turns does in the second step.
    """
    folder.mkdir()
    process = ""
    if ending:
        (folder / "process.py").write_text(ENDING.replace("ENDING", ending))
        process = f"agent_options: {{process_path: {folder / 'process.py'}}}, "
    (folder / "reward.py").write_text(REWARD)
    lines = []
    for line in (HERE / "solver_verifier.yaml").read_text().replace("MODEL_B", str(other_model)).splitlines():
        if "{node_id: verifier," in line:
            line = line.replace("{node_id", "{" + process + "node_id")
        if any(f"node_role: {role}" in line for role in MODELS):
            ranks = solver if "agent_group: 0" in line else verifier
            line = line.replace("node_id", f'placement: "{ranks}", node_id')
        lines.append(line)
    (folder / "dag.yaml").write_text("\n".join(lines))
    return overrides(
        inputs,
        folder / "out",
        f"dag.workflow_path={folder / 'dag.yaml'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "data.max_prompt_length=64",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        # AdamW divides by a gradient's size: with eps=1e-8 a weight whose gradient is rounding moves as far.
        "+actor_rollout_ref.actor.optim.override_optimizer_config={eps: 1e-4}",
        *more,
    )


@pytest.fixture(scope="module")
def beside(inputs, other_model, tmp_path_factory):
    """Both agents on one rank, each with an engine at hand."""
    folder = tmp_path_factory.mktemp("runs") / "beside"
    keys = ("trainer.save_freq=1", "trainer.ledger=rows")
    finished = run_job(1, apart(inputs, other_model, folder, "0", "0", *keys))
    audited(finished)
    return finished


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "solver", "verifier"),
    [(2, "0", "1"), (2, "0-1", "1"), (3, "0-1", "1-2"), (3, "0", "1-2")],
    ids=["apart", "fewer", "overlapping", "more"],
)
def test_agents_on_ranks_of_their_own_learn_what_they_learn_side_by_side(
    world_size, solver, verifier, beside, inputs, other_model, tmp_path
):
    finished = run_job(world_size, apart(inputs, other_model, tmp_path / "apart", solver, verifier))
    check_same(finished, beside)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "solver", "verifier"),
    [(2, "0-1", "0-1"), (2, "1", "0"), (3, "0-1", "1-2")],
    ids=["both on both", "apart", "overlapping"],
)
def test_two_agents_go_on_from_one_checkpoint_in_another_layout(
    world_size, solver, verifier, beside, inputs, other_model, tmp_path
):
    checkpoint = beside.output / "checkpoints" / "global_step_1"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    arguments = apart(inputs, other_model, tmp_path / "again", solver, verifier, *resume)
    finished = run_job(world_size, arguments)
    assert [line["step"] for line in finished.lines] == [2]
    for agent in (0, 1):
        name = f"agent_{agent}/reward/score"
        assert finished.values(name) == pytest.approx(beside.values(name)[1:])
    check_same(finished, beside)


def check_same(finished, beside):
    """Both agents have learnt the same."""
    for agent in (0, 1):
        assert min(finished.values(f"agent_{agent}/actor/grad_norm")) > 0
        expected = beside.weights(f"agent_{agent}.actor")
        found = finished.weights(f"agent_{agent}.actor")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


def work_in_shards(rank, world_size, arguments, output):
    """A worker of a run whose engines are of two ranks each, as with tensor parallelism; HF on every rank."""
    from siirl.compiler.backends import ROLLOUT_BACKENDS
    from siirl.compiler.backends.base import replicas
    from siirl.compiler.backends.vllm import VLLM

    class InShards(VLLM):
        checks = ()

        def dims(self, cfg, role, world):
            return replicas(world, 2)

    ROLLOUT_BACKENDS["hf"] = InShards(ROLLOUT_BACKENDS["hf"].engine)
    work(rank, world_size, arguments, output)


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "verifier"), [("0-3", "0-3"), ("0-1", "2-3")], ids=["beside", "apart"])
def test_agents_whose_engines_are_of_several_ranks_learn_the_same(
    solver, verifier, beside, inputs, other_model, tmp_path
):
    arguments = apart(inputs, other_model, tmp_path / "shards", solver, verifier)
    check_same(run_job(4, arguments, deadline_s=150, run=work_in_shards), beside)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ending", "code", "causes"),
    [
        (
            'raise ValueError("the user\'s code")',
            2,
            ["node 'verifier': ", " raised ValueError: the user's code (", "process.py, line 16)"],
        ),
        ("server().kill()", 1, ["rank 1 on HOST, in node 'serve', step 2: killed by SIGKILL"]),
    ],
    ids=["driver fails", "server dies"],
)
def test_a_rank_that_ends_in_an_interaction_ends_the_run_and_is_named(
    ending, code, causes, inputs, other_model, tmp_path
):
    arguments = apart(inputs, other_model, tmp_path / "apart", "0", "1", ending=ending)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "siirl.main_dag",
            *arguments,
            "trainer.n_gpus_per_node=2",
            "trainer.max_restarts=0",
        ],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code
    for cause in causes:
        assert cause.replace("HOST", socket.gethostname()) in done.stderr, done.stderr
