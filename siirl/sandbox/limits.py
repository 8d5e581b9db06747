"""What a sandboxed program may use, and what came of it. Pure data."""

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

Status = Literal["ok", "failed", "timeout", "output", "starved"]

SLEEPS = 3.0
"""Times Limits.time_s in which a run may run or sleep: what waits for a file or a clock uses no processor."""
STARVES = 10.0
"""Times Limits.time_s of wall time after which a run that did not get its time is given up."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one run.

    time_s: processor time; other limits of time follow from it (SLEEPS, STARVES). memory_bytes: address space
    of each process. file_bytes: one file, and where namespaces are available all files together. processes:
    processes and threads together (1 in mode "process"; see isolation.py). output_bytes: stdout and stderr
    together. open_files: descriptors.
    """

    time_s: float = 10.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = 32 * MIB
    processes: int = 8
    output_bytes: int = MIB
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value <= 0:
                raise ValueError(f"sandbox limit {name}={value}: it must be above 0.")


@dataclass(frozen=True)
class Result:
    """What came of a run.

    status: "ok" (it ended with exit code 0), "failed" (another exit code, or a signal), "timeout" (killed for
    its time), "output" (killed because it wrote too much), "starved" (killed, though this machine has not
    given it the time it may have: nobody knows what would have come of it). exit: the exit code, or minus the
    signal. stdout, stderr: what it wrote, up to the limit. time_s: wall time; cpu_s: processor time of its
    processes; own_s: time in which it ran or slept, which is wall time on an idle machine.
    """

    status: Status
    stdout: str
    stderr: str
    exit: int
    time_s: float
    cpu_s: float
    own_s: float
