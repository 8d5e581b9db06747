"""What the workers of the launch tests run instead of a training: one function for each way to end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from siirl.dag_worker.boundary import Boundary
from siirl.errors import DataError, WorkerError
from siirl.observe.amendments import is_asked
from siirl.observe.heartbeat import current_heartbeat
from siirl.observe.position import PositionFile


def _enter(job, rank, node, step):
    PositionFile(job.position_path(rank)).set(step, node)


def finish(cfg, plan, rank, world_size, device, job):
    """All ranks add up their ranks; rank 0 prints what it was given."""
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if rank == 0:
        threads = torch.get_num_threads()
        print(f"sum={total.item():.0f} dag={plan.dag_id} seed={cfg.trainer.seed} {device} threads={threads}")
        print(f"tty={sys.stdout.isatty()} note={job.extra['note']}")
    local = f"local rank {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}"
    notes = " ".join(f"{name}={os.environ.get(name)}" for name in ("NOTE", "HF_NOTE"))
    print(f"rank {rank} was here, {local}, {notes}", file=sys.stderr)


def raise_on_rank_1(cfg, plan, rank, world_size, device, job):
    """Rank 1 raises in step 3; the others wait for it in a collective."""
    _enter(job, rank, "actor_train", 3)
    dist.barrier()
    if rank == 1:
        raise ZeroDivisionError("the loss fell off")
    dist.all_reduce(torch.zeros(1))


def raise_with_place(cfg, plan, rank, world_size, device, job):
    """The error itself says where it was, and has a cause."""
    _enter(job, rank, "somewhere", 1)
    if rank == 1:
        error = WorkerError("node failed")
        error.node, error.step = "function_reward", 9
        raise error from KeyError("answer")
    dist.barrier()


def user_error(cfg, plan, rank, world_size, device, job):
    raise WorkerError("wrapped") from DataError("train.parquet has no column 'prompt'. Add it.")


def killed_on_rank_1(cfg, plan, rank, world_size, device, job):
    """Rank 1 is killed as by the OOM killer."""
    _enter(job, rank, "rollout_actor", 7)
    print(f"rank {rank} before the kill", flush=True)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def killed_twice(cfg, plan, rank, world_size, device, job):
    """All ranks are killed, then rank 1; then rank 0 finds a mistake of the user."""
    number = len(list(Path(job.output_dir, "attempts").glob("*")))
    _enter(job, rank, "rollout_actor", 7)
    print(f"rank {rank}, attempt {number}", flush=True)
    time.sleep(0.5)  # what a killed worker wrote is copied by others
    if number == 0 or (number, rank) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2 and rank == 0:
        raise DataError("the third time it is the user's fault")
    dist.barrier()


def stopped_once(cfg, plan, rank, world_size, device, job):
    """In the first attempt, rank 1 is stopped; the others wait for it."""
    _enter(job, rank, "reshard", 5)
    dist.barrier()
    if rank == 1 and not Path(job.output_dir, "attempts").exists():
        Path(job.output_dir, "moment").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)
        _enter(job, rank, "actor_train", 5)  # it goes on to show its stacks: no news of where it stopped
    dist.barrier()


def stuck_once(cfg, plan, rank, world_size, device, job):
    """In the first attempt, rank 1 does not come out of a rollout in which it has been before."""
    heart = current_heartbeat()
    for step in range(1, 4):
        heart.begin_part(step, "step")
        for number, node in enumerate(("rollout", "actor_train")):
            heart.enter(node, (number, 0, number))
            _enter(job, rank, node, step)
            if (rank, step, number) == (1, 3, 0) and not Path(job.output_dir, "attempts").exists():
                Path(job.output_dir, "moment").write_text(str(time.time()))
                time.sleep(300)
            if number == 1:
                dist.barrier()


def exit_silently(cfg, plan, rank, world_size, device, job):
    if rank == 1:
        os._exit(17)
    time.sleep(120)


def time_out(cfg, plan, rank, world_size, device, job):
    """Rank 1 is stuck; rank 0 waits for it until the deadline."""
    _enter(job, rank, "reshard", 4)
    if rank == 1:
        time.sleep(120)
    dist.all_reduce(torch.zeros(1))


def _tell(job, rank, *pids):
    aside = Path(job.output_dir) / f"pids_{rank}.tmp"
    aside.write_text(" ".join(map(str, pids)))
    os.replace(aside, aside.with_suffix(".txt"))


def wait_stubbornly(cfg, plan, rank, world_size, device, job):
    """Ignores SIGTERM, and has a child of its own that does so too; tells both pids."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal,time; signal.signal(15,1); time.sleep(300)"]
    )
    _tell(job, rank, os.getpid(), child.pid)
    time.sleep(300)


def wait_politely(cfg, plan, rank, world_size, device, job):
    _tell(job, rank, os.getpid())
    time.sleep(300)


def save_when_asked(cfg, plan, rank, world_size, device, job):
    """Ranks in step 3 until they are asked for a checkpoint, which is then there; as Training does it."""
    _enter(job, rank, "actor_train", 3)
    between_steps = Boundary(job.output_path, rank, dist.group.WORLD)
    _tell(job, rank, os.getpid())
    while not between_steps.is_asked():
        time.sleep(0.05)
    if rank == 0:
        (job.output_path / "checkpoints" / "global_step_3").mkdir(parents=True)


def end_when_asked(cfg, plan, rank, world_size, device, job):
    """Ranks in their last step, after which nobody looks whether something is asked."""
    _enter(job, rank, "actor_train", 3)
    _tell(job, rank, os.getpid())
    while not is_asked(job.output_path):
        time.sleep(0.05)
    dist.barrier()


def wait_for_each_other(cfg, plan, rank, world_size, device, job):
    """A rank fails as soon as its peer is gone."""
    _tell(job, rank, os.getpid())
    for _ in range(3000):
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.1)
