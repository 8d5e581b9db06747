"""The main job through its launchers: what shows only as it runs, torchrun, a damaged checkpoint, SIGTERM."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fixtures_tiny import arithmetic_rows, write_parquet
from job_harness import Inputs, overrides

from siirl.runs.run_state import read_run

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 3:
        raise RuntimeError("no score for this one")
    return sum(character.isdigit() for character in solution_str) / 8
"""
IDLE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.1)
    return sum(character.isdigit() for character in solution_str) / 8
"""
"""A run that mostly waits leaves the processors to what is started beside it."""
MAIN = [sys.executable, "-m", "siirl.main_dag"]
QUICK = ["trainer.val_before_train=False", "trainer.export_hf=False", "trainer.total_training_steps=1"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def failing_reward(tmp_path_factory):
    """One sample in 32 raises, whatever the response."""
    file = tmp_path_factory.mktemp("reward") / "failing_reward.py"
    file.write_text(FAILING)
    return f"custom_reward_function.path={file}"


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=250, cwd=cwd)


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def damage(checkpoint: Path) -> None:
    """Change one byte in the largest file."""
    file = max(
        (path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def test_a_prompt_above_the_limit_ends_the_run_with_its_row_and_the_fix(inputs, tmp_path):
    rows = arithmetic_rows(32)
    rows[5]["prompt"][0]["content"] = "9" * 100
    file = write_parquet(tmp_path / "long.parquet", rows)
    done = run([*MAIN, *overrides(inputs, tmp_path / "out", *QUICK, f"data.train_files={file}")])
    assert done.returncode == 2, done.stderr
    assert f"{file}, row 5: the prompt has 10" in done.stderr
    assert (
        "data.max_prompt_length is 32" in done.stderr and "data.truncation=left|right|middle" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_reward_that_raises_ends_the_run_and_names_sample_source_and_function(
    inputs, failing_reward, tmp_path
):
    all_rows = ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    done = run([*MAIN, *overrides(inputs, tmp_path / "out", *QUICK, *all_rows, failing_reward)])
    assert done.returncode == 1
    for fragment in (
        "compute_score of ",
        "failing_reward.py",
        "sample_index 3 ",
        "data_source 'arithmetic'",
        "no score for this one",
        "custom_reward_function.on_error=zero",
    ):
        assert fragment in done.stderr, done.stderr
    state = read_run(tmp_path / "out")
    assert (state.status, state.starts, state.total_steps) == ("failed", 1, 1)
    awaits = "rank 0, step 1, calculate_advantages: RewardError: reward function compute_score of "
    assert state.cause.startswith(awaits), state.cause


@pytest.mark.slow
def test_failed_rewards_count_as_zero_if_asked_and_a_damaged_checkpoint_is_passed_over(
    inputs, failing_reward, tmp_path
):
    settings = [*QUICK, failing_reward, "custom_reward_function.on_error=zero", "trainer.save_freq=1"]
    arguments = overrides(inputs, tmp_path, *settings)
    model = os.path.relpath(inputs.model, tmp_path)
    relative = [*overrides(inputs, Path("."), *settings), f"actor_rollout_ref.model.path={model}"]
    done = run([*MAIN, *relative, "trainer.total_training_steps=4"], tmp_path)  # 32 prompts: each once
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    for place in (
        f"all output is below {tmp_path}",
        f"building agent_0.actor (fsdp): {inputs.model}",
        f"building agent_0.rollout (hf): {inputs.model}",
        f" {tmp_path}/metrics.jsonl",
        f" {tmp_path}/checkpoints/global_step_4",
    ):
        assert place in said, said
    assert sum(line.get("reward/failed", 0) for line in metrics(tmp_path)) == 4  # rollout.n samples
    again = run([*MAIN, *arguments, "trainer.total_training_steps=4"])
    assert again.returncode == 0, again.stderr
    assert (
        "nothing is left to train: the run ends after step 4. To go on, raise" in again.stdout + again.stderr
    )
    damage(tmp_path / "checkpoints" / "global_step_4")
    done = run([*MAIN, *arguments, "trainer.total_training_steps=5"])
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "checkpoint of step 4 is not used" in said and "Falling back" in said
    assert "resumed from" in said and "global_step_3 (step 3 of 5)" in said
    assert [line["step"] for line in metrics(tmp_path)][-2:] == [4, 5]
    saved = sorted((tmp_path / "checkpoints").glob("global_step_?"), reverse=True)
    for checkpoint in saved:
        damage(checkpoint)
    done = run([*MAIN, *arguments, "trainer.total_training_steps=6"])
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert all(f"{checkpoint.name}: {checkpoint} is corrupted: " in done.stderr for checkpoint in saved)
    assert "trainer.resume_mode=disable trainer.overwrite=true" in done.stderr


def test_torchrun_starts_the_same_job(inputs, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = overrides(inputs, tmp_path, "trainer.val_before_train=False", "trainer.total_training_steps=1")
    follows = [one for one in settings if "nnodes" not in one and "n_gpus_per_node" not in one]
    done = run([*torchrun, "-m", "siirl.main_dag", *follows])
    assert done.returncode == 0, done.stderr
    assert "starting 2 workers" in done.stdout
    assert metrics(tmp_path)[-1]["step"] == 1
    assert (read_run(tmp_path).status, read_run(tmp_path).total_steps) == ("ended", 1)
    assert (tmp_path / "hf_model" / "model.safetensors").is_file()
    assert (tmp_path / "hf_model" / "tokenizer.json").is_file()
    assert (tmp_path / "reward_curve.png").stat().st_size > 10_000


@pytest.mark.slow
def test_workers_do_not_meet_on_an_address_of_the_internet(inputs, tmp_path):
    """A network of its own, in which this machine has such an address."""
    net = "ip link set lo up && ip address add 8.8.8.8/32 dev lo && exec "
    alone = ["unshare", "--net", "--map-root-user", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*alone, net + "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--master-addr=8.8.8.8"]
    settings = overrides(inputs, tmp_path, "trainer.val_before_train=False", "trainer.nnodes=2")
    first, second = (
        shlex.join([*torchrun, f"--node-rank={rank}", "-m", "siirl.main_dag", *settings]) for rank in (0, 1)
    )
    done = run([*alone, f"{net} sh -c {shlex.quote(f'{second} & {first}')}"])
    assert done.returncode and "listen on 8.8.8.8, an address of the internet" in done.stderr, done.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


def test_sigterm_ends_a_running_job_within_30_s_and_leaves_no_process_and_no_second_run_joins_it(
    inputs, tmp_path
):
    (tmp_path / "idle_reward.py").write_text(IDLE)
    settings = [
        f"custom_reward_function.path={tmp_path / 'idle_reward.py'}",
        "trainer.val_before_train=False",
        "trainer.total_training_steps=100000",
        "trainer.n_gpus_per_node=2",
    ]
    log_path = tmp_path / "console"
    with log_path.open("wb") as log:
        job = subprocess.Popen(
            [*MAIN, *overrides(inputs, tmp_path / "out", *settings)],
            env=environment(),
            stdout=log,
            stderr=log,
        )
    try:
        wait_for_steps(job, tmp_path / "out" / "metrics.jsonl", log_path)
        second = run([*MAIN, *overrides(inputs, tmp_path / "out", *settings)])
        assert second.returncode == 2, second.stderr
        assert f"{tmp_path / 'out'} is in use by a run (process {job.pid} on " in second.stderr
        state = read_run(tmp_path / "out")
        assert (state.status, state.pid, state.total_steps) == ("running", job.pid, 100000)
        assert state.step >= 1 and [rank.rank for rank in state.ranks] == [0, 1]
        assert min(rank.step for rank in state.ranks) >= state.step and state.left_s
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) >= 2 + 2, "2 ranks and their reward workers"
        start_s = time.monotonic()
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 128 + signal.SIGTERM
        assert time.monotonic() - start_s < 30
    finally:
        job.kill()
        job.wait()
    assert [child for child in children if is_running(child)] == []
    assert "stopped by SIGTERM" in log_path.read_text()
    state = read_run(tmp_path / "out")
    assert state.status == "interrupted" and state.cause.startswith("stopped by SIGTERM in step "), state


def wait_for_steps(job: subprocess.Popen, path: Path, log_path: Path) -> None:
    deadline = time.monotonic() + 200
    while not (path.is_file() and path.read_text().count("\n") >= 2):
        assert job.poll() is None and time.monotonic() < deadline, log_path.read_text()
        time.sleep(0.1)


def is_running(process: psutil.Process) -> bool:
    """Reused pids do not count, nor does a process that has ended and that nobody has reaped yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
