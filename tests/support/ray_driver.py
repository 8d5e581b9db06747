"""Launches a job file on a Ray cluster: what the Ray tests run as a process of its own."""

import sys
from pathlib import Path

from siirl.command_line import user_errors
from siirl.config import from_dict
from siirl.launch.job import Job
from siirl.launch.ray import RayTrainer

if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    with user_errors() as outcome:
        outcome.code = RayTrainer(job, from_dict(job.config)).run()
    assert "torch" not in sys.modules
    sys.exit(outcome.code)
