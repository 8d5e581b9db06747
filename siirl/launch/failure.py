"""What a failing worker leaves behind, and how the launcher finds the first cause. No torch.

When one rank dies, its peers fail too, within milliseconds, in whatever collective they wait: their errors
say only that a peer went away. The choice below puts such secondary errors last.
"""

import dataclasses
import errno
import json
import os
import resource
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from siirl.disk import REFUSALS
from siirl.errors import DeadlineError, RequestError, RewardError, UserError
from siirl.guarded_files import write_whole
from siirl.launch.job import Job
from siirl.observe.logs import last_lines
from siirl.observe.position import Position, read_position
from siirl.observe.printable import first_line, printable

UNRECORDED = 74
"""Exit code of a worker that ends by a user error, and could not leave a record of it (EX_IOERR)."""
_PEER_LOSS_TYPES = {
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "DistQueueEmptyError",
    "PeerError",
}
_PEER_LOSS_PHRASES = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "connection was likely closed",
    "timed out waiting",
    "wait timeout",
    "connect timeout",
    "socket error",
    "nccl communicator was aborted",
    "remote process exited",
)
_MACHINE_ERRNOS = (errno.EIO, errno.ESTALE, errno.ENODEV)
_MACHINE_PHRASES = (
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "unspecified launch failure",
    "device is lost",
    "fallen off the bus",
    "nccl error: unhandled system error",
    "nccl error: unhandled cuda error",
    ": killed by sig",
    ": stopped by sig",
    "is silent: no heartbeat",
)
"""Words of errors after which the same job may well go on; the last ones: of a process that is lost."""


_NO_THREAD = "can't start new thread"
_NO_MEMORY = ("defaultcpuallocator: can't allocate", "std::bad_alloc")
"""Words of errors of Python and of torch on a host that gives no thread, or no memory."""


@dataclass(frozen=True)
class Failure:
    """The exception that ended a worker."""

    rank: int
    host: str
    node: str | None
    """What it ran."""
    step: int | None
    error: str
    user_error: bool
    """The user's input is wrong, and `error` is a message for them."""
    secondary: bool
    """It only says that a peer went away or was waited for too long."""
    time_s: float
    """When, by the clock of its machine."""
    traceback: str
    """Where it was raised; of a reward function of the user's, its own lines alone."""
    machine_fault: bool = False
    """A device or disk broke, a process that the worker needs was killed, or a client's request failed."""


def describe_exception(error: BaseException, rank: int, position: Position | None) -> Failure:
    """The failure record of an exception; its `node` and `step` attributes go before the position."""
    chain = list(_causes(error))
    node = next((value for link in chain if (value := getattr(link, "node", None)) is not None), None)
    step = next((value for link in chain if (value := getattr(link, "step", None)) is not None), None)
    frames = next((link.frames for link in chain if isinstance(link, RewardError) and link.frames), "")
    own = f"The reward function's own lines (most recent call last):\n{frames}" if frames else ""
    users = [link for link in chain if isinstance(link, UserError)]
    scores = any(isinstance(link, RewardError) for link in chain)  # what reward code lost is no peer
    shown = users[-1] if users else error
    disk = next((link for link in chain if isinstance(link, OSError) and link.errno in REFUSALS), None)
    if disk is not None and not users:
        shown = UserError(
            f"nothing more can be written: {disk}. Free space, or have it take files again; with "
            "trainer.save_freq the same command goes on from the last checkpoint."
        )
        users = [shown]
    elif not users and (limits := _limits_met(chain)):
        shown = UserError(
            f"the system gives no more memory, threads or processes ({type(error).__name__}: {error}), and "
            f"this run may have only so much: {', '.join(limits)}. Raise the limit, or run less at once "
            "(trainer.n_gpus_per_node, reward_model.num_workers, OMP_NUM_THREADS)."
        )
        users = [shown]
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        node=str(node) if node is not None else position and position.node,
        step=step if isinstance(step, int) else position and position.step,
        error=printable(str(shown) if users else f"{type(shown).__name__}: {shown}"),
        user_error=bool(users),
        secondary=not scores and any(_is_peer_loss(link) for link in chain),
        time_s=time.time(),
        traceback=printable(own or "".join(traceback.format_exception(error))),
        machine_fault=not scores and any(_is_machine_fault(link) for link in chain),
    )


def _limits_met(chain: Sequence[BaseException]) -> list[str]:
    """The limits of this process that an error may come from: memory, threads or processes that it did not
    get, as the shell sets them: memory in KiB. [] for another error, and where nobody has set one.
    """
    texts = [str(link).lower() for link in chain if isinstance(link, RuntimeError)]
    threads = any(_NO_THREAD in text for text in texts)
    memory = any(
        isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        for link in chain
    )
    if not (threads or memory or any(phrase in text for text in texts for phrase in _NO_MEMORY)):
        return []
    kinds = [("`ulimit -v", resource.RLIMIT_AS, 1024), ("`ulimit -d", resource.RLIMIT_DATA, 1024)]
    kinds += [("`ulimit -u", resource.RLIMIT_NPROC, 1)] if threads and os.geteuid() else []
    found = [(name, resource.getrlimit(kind)[0], unit) for name, kind, unit in kinds]
    told = [f"{name} {most // unit}`" for name, most, unit in found if most != resource.RLIM_INFINITY]
    try:
        pids = Path("/sys/fs/cgroup/pids.max").read_text().strip() if threads else ""
    except OSError:
        pids = ""
    return told + ([f"pids.max {pids} of the cgroup"] if pids.isdecimal() else [])


def write_failure(path: Path, failure: Failure) -> bool:
    """Leave the record where the launcher looks for it, whole or not at all; False: the disk takes none."""
    try:
        write_whole(path, json.dumps(dataclasses.asdict(failure)))
    except OSError:
        return False
    return True


def read_failure(path: Path) -> Failure | None:
    try:
        return failure_in(path.read_bytes())
    except FileNotFoundError:
        return None


def failure_in(text: bytes) -> Failure | None:
    """The failure that is written so; None if none is."""
    try:
        return Failure(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Death:
    """A worker that ended badly."""

    rank: int
    returncode: int
    """Exit status; negative: the signal."""
    seen_s: float
    """When the launcher saw it."""
    failure: Failure | None
    """What it left behind."""
    position: Position | None
    """Where it was."""
    host: str = field(default_factory=socket.gethostname)
    lost: str = ""
    """Why nothing more is known of it, if its machine or what watched it there went away."""
    oom_kills: int = 0
    """Processes that the kernel's out-of-memory killer ended on its machine during the run."""

    @property
    def is_users(self) -> bool:
        """The user's input is wrong, or the disk full. The exit code says so where that takes no record."""
        return self.failure.user_error if self.failure else self.returncode == UNRECORDED

    @property
    def signal_name(self) -> str | None:
        if self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the likelier cause first. An abort may be a watchdog's reaction to a lost peer."""
        if self.lost:
            return (0, self.seen_s)
        if self.failure is None:
            killed = self.returncode < 0 and self.returncode != -signal.SIGABRT
            return (0 if killed else 1 if self.is_users else 2, self.seen_s)
        return (3 if self.failure.secondary else 1, self.failure.time_s)


def without_folder(job: Job) -> Death:
    """The end of a run whose output folder was removed or renamed."""
    error = (
        f"{job.output_path} was removed or renamed while the run wrote to it: what it makes would be lost, "
        "and another run could take its place. Put it back, and the same command goes on from its last "
        "checkpoint; or start another run (trainer.output_dir)."
    )
    failure = Failure(0, socket.gethostname(), None, None, error, True, False, time.time(), "")
    return Death(0, 1, time.time(), failure, None)


def first_cause(deaths: list[Death]) -> Death:
    """The death that most likely made the others follow."""
    return min(deaths, key=lambda death: (*death.order, death.rank))


def only_followers(deaths: list[Death]) -> bool:
    """Whether all only lost a peer or waited too long for one: the cause is not among them."""
    return all(death.order[0] == 3 for death in deaths)


def node_and_step(death: Death) -> tuple[str | None, int | None]:
    """Where the worker was when it ended."""
    place = death.failure or death.position
    return (place.node, place.step) if place else (None, None)


def report(death: Death, deaths: list[Death], log_path: Path, log_offset: int, what: str = "the run") -> str:
    """What the user reads: the first failing rank, its node and step, the cause, its last log lines."""
    failure, (node, step) = death.failure, node_and_step(death)
    where = f"node {node!r}, step {step}" if node is not None else "before its first node"
    host = failure.host if failure else death.host
    lines = [f"siirl: {what} failed: rank {death.rank} on {host}, in {where}: {one_line_cause(death)}"]
    if death.returncode == -signal.SIGKILL:
        lines.append(_oom_hint(death.oom_kills))
    if failure and failure.secondary:
        lines.append("  No rank reported an error of its own: a peer went away or did not answer in time.")
    # Rank 0 wrote its traceback to the console: of the user's own lines the same as of another rank.
    seen = [one.failure.traceback for one in (death, *deaths) if one.rank == 0 and one.failure]
    tail = [] if failure and failure.traceback in seen else last_lines(log_path, log_offset)
    if tail:
        lines += [f"  last lines of {log_path}:", *(f"  | {line}" for line in tail)]
    others = [f"rank {other.rank} ({one_line_cause(other)})" for other in deaths if other.rank != death.rank]
    if others:
        lines.append("  failed afterwards: " + "; ".join(others))
    return "\n".join(lines)


def short_cause(death: Death) -> str:
    """Where a rank ended, and why, in one line: rank 3, step 12, actor_train: killed by SIGKILL."""
    node, step = node_and_step(death)
    return cause_line(death.rank, step, node, one_line_cause(death))


def cause_line(rank: int, step: int | None, node: str | None, error: str) -> str:
    """Where a rank failed, and the first line of why."""
    where = [f"rank {rank}", *([f"step {step}"] if step else []), *([node] if node else [])]
    return printable(" ".join(f"{', '.join(where)}: {first_line(error)}".split()))


def death_of(job: Job, rank: int, returncode: int, oom_kills: int) -> Death:
    """The death of a worker of this machine, with the records that it left here."""
    failure, position = read_failure(job.error_path(rank)), read_position(job.position_path(rank))
    return Death(rank, returncode, time.time(), failure, position, oom_kills=oom_kills)


def oom_kill_count() -> int:
    """Processes that the kernel's out-of-memory killer has ended so far, on this host or in this cgroup."""
    total = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        try:
            fields = dict(line.split(None, 1) for line in path.read_text().splitlines())
            total = max(total, int(fields.get("oom_kill", 0)))
        except (OSError, ValueError):
            continue
    return total


def one_line_cause(death: Death) -> str:
    """Why the worker ended."""
    if death.lost:
        return death.lost
    if death.failure:
        return first_line(death.failure.error)
    if death.signal_name:
        return f"killed by {death.signal_name}"
    if death.is_users:
        return "an error of which the disk took no record: see what the rank said"
    return f"exit code {death.returncode}"


def _oom_hint(oom_kills: int) -> str:
    if oom_kills:
        return (
            f"  Out of memory: the kernel's OOM killer ended {oom_kills} process(es) during this run. "
            "Lower the micro-batch or batch sizes, or offload."
        )
    return (
        "  Often that is the out-of-memory killer, but its counters did not move: somebody may have sent it."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _is_machine_fault(error: BaseException) -> bool:
    if isinstance(error, RequestError) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _MACHINE_PHRASES)


def _is_peer_loss(error: BaseException) -> bool:
    if isinstance(error, DeadlineError) or type(error).__name__ in _PEER_LOSS_TYPES:
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(phrase in text for phrase in _PEER_LOSS_PHRASES)
