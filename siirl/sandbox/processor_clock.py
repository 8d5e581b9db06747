"""What time a sandboxed run has had: a busy machine, or one that stands still, uses none of it up.

Imported by the sandbox's launcher: standard library only.
"""

import contextlib
import os
import time

from siirl.sandbox.limits import SLEEPS, STARVES

TICK_S = 0.1  # between two looks at the clocks of a run
COUNT_S = 1.0  # between two looks at all processes of a run that takes longer than it should
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
CPU_CLOCK = 2  # of a process, all its threads; source: CPUCLOCK_SCHED in the kernel's posix-timers_types.h


class RunClock:
    """Clocks of a run, for the process that has just started its first process and waits for it.

    time_s: the processor time that it may have. proc: a descriptor of /proc as it was mounted before the
    sandbox had namespaces of its own. The time that a process waits for a processor is read there, for the
    first process of a run: one that waits for others of the run counts as asleep. Where the kernel does not
    tell, own_s is processor time alone.
    """

    def __init__(self, pid: int, proc: int, time_s: float):
        self.cpu_s = self.own_s = 0.0
        self._pid, self._proc, self._time_s = pid, proc, time_s
        self._reaped_s = self._passed_s = self._waited_s = 0.0
        self._start = self._last = time.monotonic()
        self._count_at = self._start + time_s
        self._stopped = False
        self._threads = _folder_of_threads(pid, proc)

    def close(self) -> None:
        if self._threads is not None:
            os.close(self._threads)

    @property
    def wall_s(self) -> float:
        """Since its start."""
        return time.monotonic() - self._start

    def tick(self, reaped_s: float, stopped: bool, ended: bool) -> None:
        """Look at the clocks. reaped_s: processor time of processes that ended since the last look; stopped:
        whether the first process is stopped by a signal; ended: whether it has ended."""
        now = time.monotonic()
        # A look that comes late was itself kept waiting: at most two ticks are held against the run.
        if not (stopped and self._stopped):
            self._passed_s += min(now - self._last, 2 * TICK_S)
        self._last, self._stopped = now, stopped
        self._reaped_s += reaped_s
        alive_s = 0.0 if ended else _processor_time(self._pid)
        if (
            now >= self._count_at and not ended
        ):  # it may have started processes, which are in each other's way
            self._count_at = now + COUNT_S
            alive_s = max(alive_s, _processor_time_of_children(self._proc))
        self.cpu_s = max(self.cpu_s, self._reaped_s + alive_s)
        if self._threads is not None and not ended:
            self._waited_s = max(self._waited_s, _waited(self._threads))
        self.own_s = max(self.cpu_s, self._passed_s - self._waited_s if self._threads is not None else 0.0)

    def verdict(self) -> str | None:
        """Why the run ends now; None: it goes on."""
        if self.cpu_s > self._time_s or self.own_s > SLEEPS * self._time_s:
            return "timeout"
        return "starved" if self.wall_s > STARVES * self._time_s else None


def _folder_of_threads(pid: int, proc: int) -> int | None:
    """A descriptor of /proc/PID/task, None if the kernel does not tell what threads wait for.

    The process has another number there than among its own.
    """
    try:
        descriptor = os.pidfd_open(pid)
        try:
            lines = _read(proc, f"self/fdinfo/{descriptor}").splitlines()
        finally:
            os.close(descriptor)
        number = next(line.split()[1] for line in lines if line.startswith("Pid:"))
        _read(proc, f"{number}/schedstat")
        return os.open(f"{number}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except (OSError, StopIteration):
        return None


def _waited(threads: int) -> float:
    """How long threads that could run have waited for a processor, the longest of them.

    Source: /proc/PID/schedstat in the kernel's Documentation/scheduler/sched-stats.rst, in nanoseconds.
    """
    longest = 0
    with contextlib.suppress(OSError):  # of threads that end meanwhile
        for name in os.listdir(threads):
            longest = max(longest, int(_read(threads, f"{name}/schedstat").split()[1]))
    return longest / 1e9


def _read(folder: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)) as file:
        return file.read()


def _processor_time(pid: int) -> float:
    """Of a living process, by its number among the caller's. Source: clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime((~pid << 3) | CPU_CLOCK)
    except OSError:
        return 0.0


def _processor_time_of_children(proc: int) -> float:
    """Of the caller's children that live, and theirs, in seconds. Source: proc(5), /proc/PID/stat."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir(proc)):
        with contextlib.suppress(OSError):
            fields = _read(proc, f"{name}/stat").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(name))
            used[int(name)] = int(fields[11]) + int(fields[12])
    found = [int(os.readlink("self", dir_fd=proc))]
    for pid in found:
        found += children.get(pid, [])
    return sum(used.get(pid, 0) for pid in found[1:]) / CLOCK_TICKS
