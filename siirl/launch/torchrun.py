"""Which launcher a run uses, and the run of one rank inside a process that torchrun started."""

import os
from collections.abc import Mapping
from typing import Literal

from siirl.config import Config
from siirl.errors import ConfigError
from siirl.launch.job import Job
from siirl.launch.worker import Place, run_rank

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def choose_launcher(cfg: Config, env: Mapping[str, str] = os.environ) -> Literal["local", "torchrun"]:
    """The launcher of this run: trainer.launcher, where auto is torchrun in a process that torchrun started.

    ConfigError: torchrun was asked for outside of it, or the local launcher for several machines.
    """
    wanted = cfg.trainer.launcher
    missing = [name for name in _TORCHRUN_VARIABLES if name not in env]
    if wanted == "torchrun" or (wanted == "auto" and not missing):
        if missing:
            raise ConfigError(
                f"trainer.launcher=torchrun, but {', '.join(missing)} are not set: this process was not "
                "started by torchrun. Start it as `torchrun --nproc-per-node N -m siirl.main_dag ...`, or "
                "set trainer.launcher=local."
            )
        return "torchrun"
    if cfg.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes={cfg.trainer.nnodes}: the local launcher starts processes on one machine "
            "only. Start one `torchrun --nnodes ... -m siirl.main_dag ...` on each machine, or set "
            "trainer.nnodes=1."
        )
    return "local"


def is_first_process(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for the run: rank 0 under torchrun, and any process outside of it."""
    return env.get("RANK", "0") == "0"


def run_torchrun(job: Job, env: Mapping[str, str] = os.environ) -> int:
    """Run this rank of the job, in this process. ConfigError: torchrun's world is not the plan's."""
    place = Place.from_env(env)
    if place.world_size != job.world_size:
        raise ConfigError(
            f"torchrun started {place.world_size} processes, but trainer.nnodes * trainer.n_gpus_per_node = "
            f"{job.world_size}: the plan is made for exactly that many. Set trainer.nnodes and "
            "trainer.n_gpus_per_node to torchrun's --nnodes and --nproc-per-node."
        )
    if place.rank == 0:
        job.prepare()
    return run_rank(job, place)
