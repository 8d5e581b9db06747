"""The run of one rank inside a process that torchrun started."""

import os
from collections.abc import Mapping

from siirl.launch.job import Job, ProcessPlace
from siirl.launch.log_sizes import LogSizes
from siirl.launch.memory_checkpoints import open_folder_of_agent
from siirl.launch.process import end_with_parent
from siirl.launch.worker_entry import run_rank


def is_first_process(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process speaks for the run: rank 0 under torchrun, and any process outside of it."""
    return env.get("RANK", "0") == "0"


def is_first_on_machine(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process looks at its machine's files for the run: local rank 0 under torchrun."""
    return env.get("LOCAL_RANK", "0") == "0"


def run_torchrun(job: Job, env: Mapping[str, str] = os.environ) -> int:
    """Run this rank of the job, in this process, of as many as the plan has."""
    place = ProcessPlace.from_env(env)
    if job.memory_dir and place.local_rank == 0:
        open_folder_of_agent(job.memory_dir)
    end_with_parent()  # a killed torchrun tells its workers nothing: they would wait until a deadline
    if place.rank == 0:
        job.prepare()
    if place.local_rank == 0:
        LogSizes(job.log_dir).look_on()
    return run_rank(job, place)
