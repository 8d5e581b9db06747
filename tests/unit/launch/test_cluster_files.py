"""examples/cluster: what each scheduler would start on its machines passes `siirl check`."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launch_jobs import ROOT
from test_launch_scripts import script_environment

pytestmark = pytest.mark.heavy
CLUSTER, SCRIPT = ROOT / "examples" / "cluster", "run_qwen3-8b-grpo-multinode.sh"


def tool(folder: Path, name: str, text: str) -> None:
    """A command of the scheduler's."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


def checked(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    return done.stdout


def test_slurm_starts_the_script_on_every_machine(tmp_path):
    """Under a srun that starts the tasks one after another, as Slurm starts them side by side."""
    tool(tmp_path, "scontrol", "printf 'node-a\\n'; sleep 0.2; seq -f 'node-%g' 2 100000\n")
    tool(
        tmp_path,
        "srun",
        'while [[ $1 == --* ]]; do echo "srun $1"; shift; done\n'
        'for id in 0 1; do SLURM_NODEID=$id "$@" || exit 1; done\n',
    )
    shown = 'echo "task $PET_NODE_RANK of $PET_NNODES, head $MASTER_ADDR"\n'
    shown += 'for word; do [[ $word != trainer.nnodes=* ]] || echo "$word"; done\n'
    env = script_environment(tmp_path, SCRIPT, DRY_RUN="1", SLURM_NNODES="2", SLURM_JOB_NODELIST="node-[a-b]")
    tool(tmp_path, "python", f'{shown}exec {env["PYTHON"]} "$@"\n')
    env |= {"PATH": f"{tmp_path}:{env['PATH']}", "PYTHON": str(tmp_path / "python")}
    command = ["bash", str(CLUSTER / "slurm.sbatch"), "trainer.total_epochs=1"]
    told = checked(command, env | {"SLURM_CPUS_ON_NODE": "96"})
    assert told.count("on 16 ranks") == 2 and "srun --cpus-per-task=96" in told
    assert all(f"task {rank} of 2, head node-a" in told for rank in (0, 1))
    ranged = checked(command, env | {"PET_NNODES": "1:2"})
    assert "task 1 of 1:2, head node-a" in ranged and "trainer.nnodes=1:2\n" in ranged
    assert "srun --kill-on-bad-exit=1" in told and "srun --no-kill" not in told
    assert "srun --no-kill" in ranged and "srun --kill-on-bad-exit" not in ranged
    options = [
        line for line in (CLUSTER / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH")
    ]
    for option in ("nodes=2", "ntasks-per-node=1", "open-mode=append", "requeue"):
        assert f"#SBATCH --{option}" in options


def test_skypilot_runs_the_script_on_every_machine(tmp_path):
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    mounts = {at: mount["mode"] for at, mount in task["file_mounts"].items()}
    assert mounts == {"/data": "MOUNT"} and task["envs"]["MODEL_PATH"].startswith("/data/")
    assert task["envs"]["OUTPUT_DIR"].startswith("/shared/"), "a bucket is no folder that machines share"
    env = task["envs"] | script_environment(tmp_path, SCRIPT, DRY_RUN="1")
    env |= {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": "1"}
    env |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    last = 'echo "rank $PET_NODE_RANK of $PET_NNODES, head $MASTER_ADDR"\n'
    told = checked(["bash", "-euc", task["run"] + last], env)
    assert "on 16 ranks" in told and "rank 1 of 2, head 10.0.0.1" in told


def test_kuberay_starts_the_main_job_on_as_many_gpus_as_its_cluster_has(tmp_path):
    job = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *settings = shlex.split(job["spec"]["entrypoint"])
    assert [program, *settings[:2]] == ["python", "-m", "siirl.main_dag"]
    env = script_environment(tmp_path, SCRIPT)
    model = f"actor_rollout_ref.model.path={env['MODEL_PATH']}"
    command = [sys.executable, "-m", "siirl.cli", "check", "--elsewhere", *settings[2:], model]
    recipe = (ROOT / "docker" / "Dockerfile.megatron").read_text()
    assert "'ray[default]'" in recipe  # `ray job submit`, and the server that it asks
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    uid = recipe.partition("--uid ")[2].split()[0]
    for pod in (job["spec"]["rayClusterSpec"]["headGroupSpec"], group):
        assert str(pod["template"]["spec"]["securityContext"]["fsGroup"]) == uid
    (container,) = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert f"on {gpus} ranks" in checked(command, os.environ | env)
