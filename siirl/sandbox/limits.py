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
    """Bounds of one run."""

    time_s: float = 10.0
    """Processor time; other limits of time follow from it (SLEEPS, STARVES)."""
    memory_bytes: int = 1024 * MIB
    """Address space of each process."""
    file_bytes: int = 32 * MIB
    """One file, and where namespaces are available all files together."""
    processes: int = 8
    """Processes and threads together (1 in mode "process"; see isolation.py)."""
    output_bytes: int = MIB
    """stdout and stderr together."""
    open_files: int = 64
    """Descriptors."""

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value <= 0:
                raise ValueError(f"sandbox limit {name}={value}: it must be above 0.")


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    status: Status
    """ "ok" (it ended with exit code 0), "failed" (another exit code, or a signal), "timeout" (killed for
    its time), "output" (killed because it wrote too much), "starved" (killed, though this machine has not
    given it the time it may have: nobody knows what would have come of it)."""
    stdout: str
    """What it wrote, up to the limit."""
    stderr: str
    """The same."""
    exit: int
    """The exit code, or minus the signal."""
    time_s: float
    """Wall time."""
    cpu_s: float
    """Processor time of its processes."""
    own_s: float
    """Time in which it ran or slept, which is wall time on an idle machine."""
    cut: bool = False
    """It wrote more than is here."""
