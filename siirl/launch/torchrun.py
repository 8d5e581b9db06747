"""The run of one rank inside a process that torchrun started."""

import os
import signal
import threading
import time
from collections.abc import Mapping

from siirl.errors import ConfigError
from siirl.launch.job import Job
from siirl.launch.worker import Place, run_rank

WATCH_S = 1.0


def is_first_process(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for the run: rank 0 under torchrun, and any process outside of it."""
    return env.get("RANK", "0") == "0"


def is_first_on_machine(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process looks at its machine's files for the run: local rank 0 under torchrun."""
    return env.get("LOCAL_RANK", "0") == "0"


def run_torchrun(job: Job, env: Mapping[str, str] = os.environ) -> int:
    """Run this rank of the job, in this process. ConfigError: torchrun's world is not the plan's."""
    place = Place.from_env(env)
    if place.world_size != job.world_size:
        raise ConfigError(
            f"torchrun started {place.world_size} processes, but trainer.nnodes * trainer.n_gpus_per_node = "
            f"{job.world_size}: the plan is made for exactly that many. Set trainer.nnodes and "
            "trainer.n_gpus_per_node to torchrun's --nnodes and --nproc-per-node."
        )
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="lifeline", daemon=True).start()
    if place.rank == 0:
        job.prepare()
    return run_rank(job, place)


def _end_with_parent(parent: int) -> None:
    """End this process and all that it started soon after torchrun is gone, even if it was killed.

    A killed torchrun tells its workers nothing: they would go on until their next wait passes its deadline.
    """
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
