"""What runs on the machines of a Ray cluster: an actor for each device, which keeps one worker process there.

The worker is a process of its own and not the actor: it may hang, be killed or crash, and the actor can still
say so. It ends when its actor is gone, through the same pipe that ties workers to the local launcher. No ray
and no torch are imported here.
"""

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from siirl.config import from_dict
from siirl.deadline import Deadline
from siirl.errors import UserError
from siirl.launch.failure import Death, death_of, oom_kill_count
from siirl.launch.health import Process, look_at
from siirl.launch.job import Job
from siirl.launch.log_sizes import MOST_BYTES, LogSizes
from siirl.launch.output_relay import OutputSource
from siirl.launch.process import (
    WATCH_S,
    Worker,
    end_all,
    end_with_parent,
    lifeline,
    start_worker,
    worker_environment,
)
from siirl.launch.ray_cluster import CutOff
from siirl.launch.rendezvous import STORE_FD, open_socket
from siirl.launch.run_folder import held
from siirl.launch.run_record import is_recorded, open_folder
from siirl.observe.heartbeat import FD_VARIABLE as HEARTBEAT
from siirl.observe.heartbeat import Beat, heartbeat_file, read_beat
from siirl.observe.position import Position, read_position

REPLY_BYTES = 1 << 20
READ_EVERY_S = 0.1
COPY_GRACE_S = 3.0
FORWARDED = (
    *("CUDA_", "GLOO_", "HF_", "HYDRA_", "MKL_", "MLFLOW_", "MODELSCOPE_", "NCCL_", "OMP_", "PYTHON"),
    *("PYTORCH_", "SGLANG_", "SIIRL_", "SWANLAB_", "TENSORBOARD_", "TERM", "TOKENIZERS_", "TORCH_"),
    *("TORCHINDUCTOR_", "TRANSFORMERS_", "TRITON_", "UCX_", "VLLM_", "WANDB_"),
)
NOT_FORWARDED = (
    "CUDA_VISIBLE_DEVICES",
    "PYTHONHOME",
    HEARTBEAT,
    "SIIRL_LIFELINE_FD",
    STORE_FD,
)


@dataclass(frozen=True)
class Host:
    """What an actor says of itself."""

    name: str
    pid: int
    gpus: tuple[str, ...]
    """Its devices, as CUDA_VISIBLE_DEVICES names them."""


@dataclass(frozen=True)
class Launch:
    """What an actor must know to start its worker."""

    job: str
    """Job.to_json(), because machines may share no files."""
    rank: int
    master_addr: str
    master_port: int
    gpus: tuple[str, ...]
    """All devices of the run on this machine, by local rank."""
    env: Mapping[str, str]
    """Variables of the one who started the run."""
    cwd: str
    """Its directory, entered if it exists here."""
    window_size: bytes = b""
    """Of its terminal, empty if it has none."""
    head: str = ""
    """host:port of the head of the cluster; empty: nobody looks whether this machine is cut off from it."""


@dataclass(frozen=True)
class Reply:
    """What is new of a worker."""

    output: bytes
    position: Position | None
    ended: int | None = None
    """Its exit status, once all its output has been fetched."""
    death: Death | None = None
    beat: Beat | None = None
    """Its last heartbeat."""
    process: Process | None = None
    """What the kernel says of it."""


def forwarded_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that the workers on other machines need too: settings, not places."""
    return {
        name: value for name, value in env.items() if name.startswith(FORWARDED) and name not in NOT_FORWARDED
    }


class RankActor:
    """Keeps the worker process of one rank. Its methods are called by the driver, in several threads."""

    def __init__(self) -> None:
        end_with_parent()  # Ray's own processes need longer to notice that their raylet is gone
        self._held = contextlib.ExitStack()  # until this process ends
        self._server: socket.socket | None = None
        self._worker: Worker | None = None
        self._window: OutputSource | None = None
        self._oom_before = oom_kill_count()
        self._copier: threading.Thread | None = None
        nameless = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._output = self._held.enter_context(nameless)
        flags = fcntl.fcntl(self._output, fcntl.F_GETFL)
        fcntl.fcntl(self._output, fcntl.F_SETFL, flags | os.O_APPEND)
        self._forgotten = 0
        """Bytes of output that the driver has, and that are here no more."""

    def describe(self) -> Host:
        gpus = tuple(name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)
        return Host(socket.gethostname(), os.getpid(), gpus)

    def open_store(self, ip: str) -> int:
        """Open the rendezvous socket that rank 0's worker takes over; its port. Rank 0's actor only."""
        self._server = open_socket(ip)
        return self._server.getsockname()[1]

    def reach(self, address: str, port: int, timeout_s: float) -> str:
        """Why rank 0's rendezvous socket cannot be reached from here; empty if it can."""
        try:
            with socket.create_connection((address, port), timeout_s):
                return ""
        except OSError as error:
            return str(error)

    def check(self, launch: Launch, timeout_s: float) -> str:
        """Check this machine for the run, as its worker would see it; the user's mistake, empty if none."""
        done = subprocess.run(
            [sys.executable, "-m", "siirl.launch.preflight"],
            input=launch.job,
            env=_environment(launch),
            cwd=_directory(launch),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode == 0:
            return ""
        message = re.sub(r"^\w+Error: ", "", done.stderr.strip())
        return message or f"the check ended with exit code {done.returncode}"

    def claim(self, launch: Launch, command: list[str]) -> str:
        """Hold and open the folders that rank 0 writes on this machine; the user's mistake, empty if none.

        Where they are those of the driver, it has done so already. Rank 0's actor only.
        """
        job = Job.from_json(launch.job)
        cfg = from_dict(job.config)
        try:
            self._held.enter_context(held(cfg, job.run_id))
            if not is_recorded(job.output_path, job.run_id):
                open_folder(cfg, job.run_id, command)
        except UserError as error:
            return str(error)
        return ""

    def sees_folder_of(self, launch: Launch) -> bool:
        """Whether the output folder here is that of the launcher, which has just written its job there."""
        job = Job.from_json(launch.job)
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Job.read(job.output_path / "job.json").run_id == job.run_id
        return False

    def start(self, launch: Launch) -> None:
        """Start the worker. Records of an earlier run on this machine are removed."""
        job, rank = Job.from_json(launch.job), launch.rank
        for record in (job.error_path(rank), job.position_path(rank)):
            record.unlink(missing_ok=True)
        lifeline_fd = self._held.enter_context(lifeline())
        self._beats = self._held.enter_context(heartbeat_file(rank + 1))
        env = _environment(launch) | {"SIIRL_LIFELINE_FD": str(lifeline_fd), HEARTBEAT: str(self._beats)}
        fds = [lifeline_fd, self._beats]
        if self._server is not None:
            env[STORE_FD] = str(self._server.fileno())
            fds.append(self._server.fileno())
        output: int | IO[bytes] = self._output
        if launch.window_size:
            self._window = OutputSource(launch.window_size)
            output = self._window.worker_fd
        with tempfile.TemporaryFile("w+") as stdin:
            stdin.write(launch.job)
            stdin.seek(0)
            self._worker = start_worker(rank, "/dev/stdin", env, output, fds, stdin, _directory(launch))
        if self._server is not None:
            self._server.close()
        if self._window is not None:
            self._window.started()
            copy = self._window.copy_to
            self._copier = threading.Thread(target=copy, args=(self._output.write,), daemon=True)
            self._copier.start()
        self._job, self._logs = job, LogSizes(job.log_dir)
        self._cut_off = CutOff(launch.head)
        if launch.head:
            threading.Thread(target=self._end_when_cut_off, name="cut-off", daemon=True).start()

    def poll(self, offset: int, wait_s: float, window_size: bytes = b"") -> Reply:
        """What is new since byte `offset` of the worker's output; waits up to `wait_s` for something."""
        assert self._worker is not None
        self._cut_off.asked()
        rank, wait = self._worker.rank, Deadline(wait_s)
        self._logs.look()
        self._forget(offset)
        if self._window is not None:
            self._window.resize(window_size)
        while True:
            ended = self._worker.ended()
            if ended and self._copier is not None:
                self._copier.join(COPY_GRACE_S)
            output = os.pread(self._output.fileno(), REPLY_BYTES, offset - self._forgotten)
            if output or ended or wait.over:
                break
            time.sleep(READ_EVERY_S)
        position = read_position(self._job.position_path(rank))
        code = self._worker.returncode
        if not ended or code is None or output:
            beat, process = read_beat(self._beats, rank), look_at(self._worker.process.pid)
            return Reply(output, position, beat=beat, process=process)
        oom_kills = oom_kill_count() - self._oom_before
        return Reply(b"", position, code, death_of(self._job, rank, code, oom_kills) if code else None)

    def _forget(self, fetched: int) -> None:
        """Drop the output if there is much, and the driver has all of it; a line may be lost."""
        here = os.fstat(self._output.fileno()).st_size
        if here > MOST_BYTES and fetched == self._forgotten + here:
            os.ftruncate(self._output.fileno(), 0)
            self._forgotten = fetched

    def dump_stacks(self) -> None:
        """Have the worker write its Python stacks to its output."""
        if self._worker is not None:
            self._worker.dump_stacks()

    def hold(self) -> None:
        """The worker, and what it started, does nothing more until it is killed."""
        if self._worker is not None and not self._worker.ended():
            self._worker.signal_group(signal.SIGSTOP)

    def go_on_for_stacks(self) -> None:
        """A stopped worker goes on until it has written its stacks, and is killed."""
        if self._worker is not None and not self._worker.ended():
            self._worker.go_on_for_stacks()
        self.kill()

    def kill(self) -> None:
        """Kill the worker and what it started, without a word."""
        if self._worker is not None and not self._worker.ended():
            self._worker.signal_group(signal.SIGKILL)

    def stop(self) -> None:
        """End the worker and all that it started; returns when they are gone."""
        if self._worker is not None:
            end_all([self._worker])

    def _end_when_cut_off(self) -> None:
        """The run goes on elsewhere by then, or has ended. Ray's own processes need minutes to notice."""
        while not (why := self._cut_off.look()):
            time.sleep(WATCH_S)
        print(f"siirl: {why}: its worker ends", file=sys.stderr, flush=True)
        self.stop()
        leave()


def leave() -> None:
    """End this process as a kill does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _environment(launch: Launch) -> dict[str, str]:
    """This machine's environment, with the settings of the run and the place of the rank."""
    base = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray's choice
    base |= launch.env
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        base["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), base.get("PYTHONPATH")]))
    base["CUDA_VISIBLE_DEVICES"] = ",".join(launch.gpus)
    job = Job.from_json(launch.job)
    if job.world_size > job.local_world_size and (interface := interface_to(launch.master_addr)):
        base.setdefault("GLOO_SOCKET_IFNAME", interface)
    return worker_environment(job, launch.rank, launch.master_addr, launch.master_port, base)


def interface_to(address: str) -> str:
    """The network interface by which this machine reaches another; empty if that cannot be told.

    Gloo would take the one that the host name resolves to, which on many machines is the loopback.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(item.address == own for item in addresses):
                return name
    return ""


def _directory(launch: Launch) -> str | None:
    return launch.cwd if Path(launch.cwd).is_dir() else None
