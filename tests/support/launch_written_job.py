"""`python -m launch_written_job JOB.json`: launches a job of the launch tests here, or below torchrun."""

import os
import sys
from pathlib import Path

from siirl.errors import UserError
from siirl.launch.job import Job
from siirl.launch.local import run_local
from siirl.launch.torchrun import run_torchrun

if __name__ == "__main__":
    try:
        below = "TORCHELASTIC_RUN_ID" in os.environ
        sys.exit((run_torchrun if below else run_local)(Job.read(Path(sys.argv[1]))))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
