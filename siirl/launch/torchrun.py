"""The run of one rank inside a process that torchrun started."""

import os
from collections.abc import Mapping

from siirl.config import Config
from siirl.errors import ConfigError
from siirl.launch.job import Job
from siirl.launch.log_sizes import LogSizes
from siirl.launch.memory_checkpoints import open_folder_of_agent
from siirl.launch.process import end_with_parent
from siirl.launch.scaled import with_machines
from siirl.launch.worker_entry import ProcessPlace, run_rank


def is_first_process(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for the run: rank 0 under torchrun, and any process outside of it."""
    return env.get("RANK", "0") == "0"


def is_first_on_machine(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process looks at its machine's files for the run: local rank 0 under torchrun."""
    return env.get("LOCAL_RANK", "0") == "0"


def with_machines_there(cfg: Config, env: Mapping[str, str] = os.environ) -> Config:
    """The configuration for the machines that torchrun has found, if the run may do with so many."""
    place, trainer = ProcessPlace.from_env(env), cfg.trainer
    nnodes = place.world_size // place.local_world_size
    if trainer.min_nnodes is None or not trainer.min_nnodes <= nnodes <= trainer.nnodes:
        return cfg
    return with_machines(cfg, nnodes)


def run_torchrun(job: Job, env: Mapping[str, str] = os.environ) -> int:
    """Run this rank of the job, in this process. ConfigError: torchrun's world is not the plan's."""
    place = ProcessPlace.from_env(env)
    if place.world_size != job.world_size:
        raise ConfigError(
            f"torchrun started {place.world_size} processes, but trainer.nnodes * trainer.n_gpus_per_node = "
            f"{job.world_size}: the plan is made for exactly that many. Set trainer.nnodes and "
            "trainer.n_gpus_per_node to torchrun's --nnodes and --nproc-per-node."
        )
    if job.memory_dir and place.local_rank == 0:
        open_folder_of_agent(job.memory_dir)
    end_with_parent()  # a killed torchrun tells its workers nothing: they would wait until a deadline
    if place.rank == 0:
        job.prepare()
    if place.local_rank == 0:
        LogSizes(job.log_dir).look_on()
    return run_rank(job, place)
