"""The Ray launcher on a cluster of two machines, both of them this one: a real job, and the ways to fail.

One process runs this file: `ray stop`, with which a launch script ends, ends every cluster of a machine. The
script's test comes first, and waits for those of tests/chaos.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from amended_runs import ACTOR, Told, check_same
from fixtures_tiny import make_tiny_model_dir
from held_ports import held_port
from job_harness import Finished, Inputs, overrides
from launch_jobs import ROOT, environment, make_job, wait_until_dead
from ray_lock import cluster_here, ray_to_ourselves

from siirl.config import from_dict
from siirl.errors import ConfigError, PlacementError
from siirl.launch.job import Job
from siirl.launch.ray import RayTrainer
from siirl.runs.audit import audit

pytestmark = [pytest.mark.timeout(300), pytest.mark.real_starts]
SCRIPT = ROOT / "examples" / "run_qwen3-0.6b-1gpu.sh"
AGAIN = ("trainer.max_restarts=1", "ray_init.wait_s=30")
TWO = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "ray_init.wait_s=1", "trainer.max_restarts=0")


def run_script(env: dict[str, str], rank: int, arguments: list[str], log: Path) -> subprocess.Popen:
    with log.open("wb") as output:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=env | {"PET_NODE_RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_machines_run_a_script_and_end_together(tmp_path):
    with ray_to_ourselves(alone=True), held_port() as port:
        run_on_two_machines(tmp_path, str(port))


def run_on_two_machines(tmp_path, port):
    inputs = Inputs.make(tmp_path / "inputs")
    own = {"PET_NNODES": "2", "MASTER_ADDR": "localhost", "RAY_PORT": port, "OMP_NUM_THREADS": "1"}
    env = environment() | own | {"PYTHON": sys.executable, "NODE_WAIT_S": "200"}
    settings = ["trainer.nnodes=2", "trainer.total_training_steps=1", "trainer.val_before_train=False"]
    arguments = overrides(inputs, tmp_path / "out", *settings)
    logs = [tmp_path / f"machine_{rank}.log" for rank in range(2)]
    worker = run_script(env, 1, arguments, logs[1])
    head = run_script(env, 0, arguments, logs[0])
    try:
        assert head.wait(300) == 0, logs[0].read_text()
        assert worker.wait(60) == 0, logs[1].read_text()
    finally:
        head.kill()
        worker.kill()
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 1
    assert (tmp_path / "out" / "logs" / "rank_1.log").is_file()
    assert "has ended" in logs[1].read_text()


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """A home directory for each machine: what lies in one of them is on that machine only."""
    return [tmp_path_factory.mktemp(f"home_{index}") for index in range(2)]


@pytest.fixture(scope="module")
def cluster(homes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with cluster_here() as cluster:
            for home in homes:
                cluster.add_node(num_cpus=2, include_dashboard=False, env_vars={"HOME": str(home)})
            yield cluster


@pytest.fixture(scope="module")
def connection(cluster):
    """This process is a driver, so that a launch need not be a process of its own."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def launch(job: Job) -> int:
    return RayTrainer(job, from_dict(job.config)).run()


def nothing_is_reserved() -> bool:
    import ray

    end = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 4 and time.monotonic() < end:
        time.sleep(0.1)
    return ray.available_resources().get("CPU") == 4


def start(cluster, folder: Path, entry: str) -> tuple[subprocess.Popen, list[int]]:
    """A launcher in a process of its own, and the pids that its workers tell."""
    path = folder / "job.json"
    path.write_text(make_job(folder, entry, *TWO, f"ray_init.address={cluster.address}").to_json())
    launcher = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "ray_driver.py"), str(path)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [folder / "out" / f"pids_{rank}.txt" for rank in range(2)]
    end = time.monotonic() + 120
    while not all(file.exists() for file in files):
        assert time.monotonic() < end and launcher.poll() is None, "the workers did not start"
        time.sleep(0.1)
    return launcher, [int(pid) for file in files for pid in file.read_text().split()]


def test_the_main_job_runs_on_two_machines(cluster, tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    settings = ["trainer.nnodes=2", "trainer.total_training_steps=1", "trainer.val_before_train=False"]
    done = subprocess.run(
        [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, tmp_path / "out", *settings)],
        env=environment() | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 1
    assert (tmp_path / "out" / "hf_model" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "logs" / "rank_1.log").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_two_machines_is_amended_as_if_it_were_resumed_so_on_one(cluster, tmp_path, monkeypatch):
    """What its machines lack takes an amendment back, as what fails in a first step does."""
    where = (f"ray_init.address={cluster.address}", "trainer.launcher=ray", "trainer.nnodes=2")
    told, lr = Told(tmp_path, *where), f"{ACTOR}.optim.lr=0.003"
    with told.run() as job:
        with monkeypatch.context() as patch:
            patch.setenv("HOME", str(tmp_path))
            (tmp_path / "mine.py").write_text(told.inputs.reward.read_text())
            code, said = told.amend(job, "custom_reward_function.path=~/mine.py", holds_again=True)
        assert code == 1 and "amended after step 1" in said, said
        assert "taken back, the run goes on as it was: on " in said and "no such file" in said, said
        assert "other settings" not in said, said
        code, said = told.amend(job, lr)
        assert code == 0 and "amended after step 2" in said and "step 3 is done" in said, said
    here = ("trainer.launcher=local", "trainer.nnodes=1", "trainer.n_gpus_per_node=2")
    check_same(Finished.read(told.out), told.by_hand(2, lr, *here))
    lines, holds = audit(told.out)
    assert holds and any(line.startswith("amended after step 2: ") for line in lines), "\n".join(lines)


def test_killed_workers_are_named_and_started_again_as_often_as_is_allowed(connection, tmp_path, capfd):
    assert launch(make_job(tmp_path, "killed_on_rank_1", *TWO, *AGAIN)) == 1
    errors = capfd.readouterr().err
    named = r"rank 1 on \S+, in node 'rollout_actor', step 7: killed by SIGKILL"
    assert re.search(f"attempt 1 failed: {named}", errors) and len(re.findall(named, errors)) == 2, errors
    assert "out-of-memory killer" in errors and "| rank 1 before the kill" in errors
    assert nothing_is_reserved()


@pytest.mark.slow
def test_killed_workers_are_started_again_until_a_user_error_ends_the_run(connection, tmp_path, capfd):
    again = ("trainer.max_restarts=5", "ray_init.wait_s=30")
    assert launch(make_job(tmp_path, "killed_twice", *TWO, *again)) == 2
    errors = capfd.readouterr().err
    assert "attempt 1 failed: rank " in errors and "attempt 2 failed: rank 1 on " in errors
    assert "attempt 3" not in errors and errors.endswith(": the third time it is the user's fault\n"), errors
    for number in (1, 2):
        for rank in (0, 1):
            kept = tmp_path / "out" / "attempts" / str(number) / "logs" / f"rank_{rank}.log"
            assert f"rank {rank}, attempt {number - 1}" in kept.read_text()
    assert nothing_is_reserved()


@pytest.mark.slow  # who counts as stopped or stuck has unit tests, without Ray (test_ray_health.py)
@pytest.mark.parametrize(
    ("entry", "where", "why"),
    [
        ("stopped_once", "node 'reshard', step 5", "it was stopped by a signal (process state T)"),
        ("stuck_once", "node 'rollout', step 3", "it has been in 'step/rollout' for"),
    ],
)
def test_a_worker_that_lives_but_does_not_go_on_is_named_within_30_s_and_the_run_starts_again(
    connection, tmp_path, capfd, entry, where, why
):
    assert launch(make_job(tmp_path, entry, *TWO, *AGAIN, "trainer.stuck_s=4")) == 0
    errors, out = capfd.readouterr().err, tmp_path / "out"
    assert re.search(rf"attempt 1 failed: rank 1 on \S+, in {where}: {re.escape(why)}", errors), errors
    assert f"  | {' ' * 2}File" in errors and f"in {entry}" in errors, "its stack"
    (attempt,) = map(json.loads, (out / "attempts.jsonl").read_text().splitlines())
    assert 0 < attempt["ended_s"] - float((out / "moment").read_text()) < 30
    assert "launch_entries.py" in (out / "attempts" / "1" / "logs" / "rank_0.log").read_text(), "who waited"
    assert nothing_is_reserved()


SMALLER = {
    "machines": ("trainer.nnodes=3", r"needs 3 machine\(s\).*it has 2, of which 2 will do"),
    "CPUs": (
        "trainer.n_gpus_per_node=3",
        r"3 logical CPUs each .*of which 0.*2 logical CPUs: too few logical",
    ),
    "CPUs of workers": ("ray_init.cpus_per_worker=3", r"3 logical CPUs each \(ray_init.cpus_per_worker=3\)"),
    "GPUs": (
        "trainer.device=cuda",
        r"1 GPUs and 1 logical CPUs each .* 0 GPUs, 2 logical CPUs: too few GPUs",
    ),
}


@pytest.mark.parametrize("what", SMALLER)
def test_a_cluster_smaller_than_asked_is_named_with_its_numbers(connection, tmp_path, what):
    setting, pattern = SMALLER[what]
    settings = [*TWO, "ray_init.wait_s=0", setting]
    with pytest.raises(PlacementError, match=f"(?s)smaller than asked.*{pattern}"):
        launch(make_job(tmp_path, "finish", *settings))


def test_devices_that_another_job_holds_are_named(connection, tmp_path):
    from ray.util import placement_group, remove_placement_group

    other = placement_group([{"CPU": 2}])
    assert other.wait(30)
    try:
        with pytest.raises(PlacementError, match=r"(?s)but not free: .*free now: 2 of 4 CPUs.*ray status"):
            launch(make_job(tmp_path, "finish", *TWO))
    finally:
        remove_placement_group(other)
    assert nothing_is_reserved()


def test_a_model_that_one_machine_lacks_is_named_with_the_machine(connection, homes, tmp_path):
    make_tiny_model_dir(homes[0] / "model")
    job = real_plan(tmp_path, "~/model")
    with pytest.raises(ConfigError) as caught:
        launch(job)
    message = str(caught.value)
    assert re.match(r"on \S+ \([\d.]+\): .*model directory", message), message
    assert str(homes[1] / "model") in message and str(homes[0]) not in message and "does not exist" in message
    assert nothing_is_reserved()


@pytest.mark.parametrize(
    "when",
    [
        "start an actor",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("check its files", "start a worker")),
    ],
)
def test_a_machine_that_is_lost_before_the_workers_run_is_named_and_the_run_starts_again(
    cluster, connection, homes, tmp_path, capfd, monkeypatch, when
):
    def lose_one():
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        cluster.add_node(num_cpus=2, env_vars={"HOME": str(homes[1])})

    lost = once(monkeypatch, when, lose_one)
    assert launch(make_job(tmp_path, "finish", *TWO, *AGAIN)) == 0 and lost
    errors = capfd.readouterr().err
    named = r"attempt 1 failed: rank 1 on \S+, in before its first node: its machine .* left the Ray cluster"
    assert re.search(named, errors) and "installed" not in errors, errors
    (attempt,) = map(json.loads, (tmp_path / "out" / "attempts.jsonl").read_text().splitlines())
    assert attempt["rank"] == 1 and attempt["next"] == "the start"
    assert nothing_is_reserved()


@pytest.mark.slow
def test_a_machine_that_is_lost_as_its_actor_starts_and_stays_away_is_done_without(
    cluster, connection, homes, tmp_path, capfd, monkeypatch
):
    def lose_one():
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)

    lost = once(monkeypatch, "start an actor", lose_one)
    make_tiny_model_dir(tmp_path / "model")
    steps = ("trainer.total_training_steps=1", "trainer.val_before_train=False")
    try:
        assert (
            launch(real_plan(tmp_path, tmp_path / "model", *AGAIN, *steps, "trainer.nnodes=1:2")) == 0
            and lost
        )
    finally:
        cluster.add_node(num_cpus=2, env_vars={"HOME": str(homes[1])})
    errors = capfd.readouterr().err
    assert "the run does with 1 of 2 machines (1 rank)" in errors and "installed" not in errors, errors
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 1
    assert json.loads((tmp_path / "out" / "job.json").read_text())["world_size"] == 1


def once(monkeypatch, when: str, happens) -> list[str]:
    """`happens` is called as the launcher first waits for machines to do `when`; told in what is returned."""
    gather, happened = RayTrainer._gather, []

    def gathered(trainer, what, *of):
        if what == when and not happened:
            happened.append(what)
            happens()
        return gather(trainer, what, *of)

    monkeypatch.setattr(RayTrainer, "_gather", gathered)
    return happened


WITHOUT_SIIRL = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "siirl":
            raise ModuleNotFoundError("No module named 'siirl'")

sys.meta_path.insert(0, Without())
"""


def test_a_machine_without_siirl_is_named(cluster, connection, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_SIIRL)
    bare = cluster.add_node(num_cpus=3, env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(PlacementError, match="could not start an actor; siirl must be installed there"):
            launch(make_job(tmp_path, "finish", *TWO, "trainer.nnodes=1", "trainer.n_gpus_per_node=3"))
    finally:
        cluster.remove_node(bare, allow_graceful=False)
    assert nothing_is_reserved()


STOPS = {
    "Ctrl-C": ("wait_politely", signal.SIGINT, 130),
    "SIGTERM that workers ignore": ("wait_stubbornly", signal.SIGTERM, 143),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", STOPS)
def test_a_signal_ends_the_run_on_all_machines(cluster, connection, tmp_path, how):
    entry, number, code = STOPS[how]
    launcher, pids = start(cluster, tmp_path, entry)
    started = time.monotonic()
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == code and time.monotonic() - started < 30, errors
    assert f"stopped by {number.name}" in errors
    wait_until_dead(pids, 1)
    assert nothing_is_reserved()


@pytest.mark.slow
def test_workers_end_when_the_launcher_is_killed(cluster, connection, tmp_path):
    launcher, pids = start(cluster, tmp_path, "wait_stubbornly")
    launcher.kill()
    launcher.communicate()
    wait_until_dead(pids, 30)
    assert nothing_is_reserved()


@pytest.mark.slow
def test_a_killed_actor_ends_the_run_and_is_named(cluster, connection, tmp_path):
    launcher, pids = start(cluster, tmp_path, "wait_stubbornly")
    started = time.monotonic()
    psutil.Process(pids[2]).parent().kill()  # the actor of rank 1
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and time.monotonic() - started < 30, errors
    assert re.search(r"rank 1 on \S+, in before its first node: its actor died", errors), errors
    wait_until_dead(pids, 5)
    assert nothing_is_reserved()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["wait_stubbornly", "wait_for_each_other"])
def test_a_lost_machine_ends_the_run_and_is_named(cluster, connection, homes, tmp_path, entry):
    """Also where the other rank fails first, because its peer is gone."""
    launcher, pids = start(cluster, tmp_path, entry)
    started = time.monotonic()
    cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
    try:
        _, errors = launcher.communicate(timeout=60)
        assert launcher.returncode == 1 and time.monotonic() - started < 30, errors
        assert re.search(r"rank 1 on \S+, in .*: its (machine .* left the Ray cluster|actor died)", errors), (
            errors
        )
        wait_until_dead(pids, 5)
    finally:
        cluster.add_node(num_cpus=2, env_vars={"HOME": str(homes[1])})


@pytest.mark.slow
def test_a_users_mistake_found_by_a_worker_is_one_message(connection, tmp_path, capfd):
    assert launch(make_job(tmp_path, "user_error", *TWO)) == 2
    errors = capfd.readouterr().err
    assert re.search(
        r"^siirl: rank [01] on \S+: train\.parquet has no column 'prompt'\. Add it\.$", errors, re.M
    )
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_wait_past_the_deadline_shows_where_the_stuck_rank_is(connection, tmp_path, capfd):
    assert launch(make_job(tmp_path, "time_out", *TWO, "trainer.deadline_s=5")) == 1
    errors = capfd.readouterr().err
    assert re.search(r"rank 0 on \S+, in node 'reshard', step 4", errors), errors
    assert "in time_out" in (tmp_path / "out" / "logs" / "rank_1.log").read_text()


@pytest.mark.slow
def test_workers_get_settings_threads_and_a_terminal(cluster, tmp_path):
    """What the driver sets reaches the workers; a machine's cores are shared by its own workers."""
    job = make_job(
        tmp_path,
        "finish",
        *("trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"ray_init.address={cluster.address}"),
        *("+ray_init.env_vars.NOTE=7", "trainer.deadline_s=100"),
    )
    path = tmp_path / "job.json"
    path.write_text(job.to_json())
    ours, theirs = os.openpty()
    launcher = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "ray_driver.py"), str(path)],
        env=environment() | {"HF_NOTE": "8"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:
            break
    assert launcher.wait(60) == 0, seen
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"sum=6 dag=launch_test seed=1 cpu threads={threads}".encode() in seen
    assert b"tty=True" in seen and b"rank 1 was here" not in seen
    for rank in range(4):
        text = (tmp_path / "out" / "logs" / f"rank_{rank}.log").read_text()
        assert f"rank {rank} was here, local rank {rank % 2} of 2, NOTE=7 HF_NOTE=8" in text


def real_plan(folder: Path, model: str | Path, *more: str) -> Job:
    """The main job's plan on two machines, with a model that is looked for on each of them."""
    from siirl.compiler.compile import compile_plan, load_dag
    from siirl.config import load_config, to_dict

    inputs = Inputs.make(folder / "inputs")
    settings = [*TWO, f"actor_rollout_ref.model.path={model}", *more]
    cfg = load_config(overrides(inputs, folder / "out", *settings))
    plan, _ = compile_plan(load_dag(cfg), cfg, 2)
    return Job(to_dict(cfg), plan.to_json(), str(folder / "out"), 2, 1)
