"""What a sandboxed program may use, and what came of it. Pure data."""

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

Status = Literal["ok", "failed", "timeout", "output"]


@dataclass(frozen=True)
class Limits:
    """Bounds of one run.

    time_s: wall and CPU time. memory_bytes: address space of each process. file_bytes: one file, and where
    namespaces are available all files together. processes: processes and threads together (1 in mode
    "process"; see isolation.py). output_bytes: stdout and stderr together. open_files: descriptors.
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
    its time), "output" (killed because it wrote too much). exit: the exit code, or minus the signal. stdout,
    stderr: what it wrote, up to the limit. time_s: wall time; cpu_s: CPU time of its processes.
    """

    status: Status
    stdout: str
    stderr: str
    exit: int
    time_s: float
    cpu_s: float
