"""Runs untrusted Python: `run_code` a single program, `Box` one after another, `Boxes` several at once.

The caller's process never runs a program and shares no memory with it. It talks to a launcher process
(launcher.py), which shuts itself in and forks a confined child for each run; see isolation.py for what holds.
"""

import atexit
import functools
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from siirl.errors import SandboxError
from siirl.sandbox import frames
from siirl.sandbox.isolation import MODES, Isolation, readable_by_all, readable_paths, site_packages
from siirl.sandbox.limits import STARVES, Limits, Result, Status

log = logging.getLogger(__name__)
LAUNCHER = Path(__file__).with_name("launcher.py")
STARTUP_S = 30.0
PATIENCE_S = 15.0  # the launcher ends a run at its limit; this much later it must have said so
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "2",  # on many cores, glibc would reserve more address space than the limit
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Job:
    """One program to run once."""

    code: str
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def run_code(
    code: str, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
) -> Result:
    """Run a Python program with `stdin`, in a folder that holds `files` (relative name -> text).

    Blocks until no process of the program is left: some STARVES times limits.time_s at most. SandboxError
    if the sandbox itself does not work; whatever the program does is a Result.
    """
    with Box() as box:
        return box.run(code, stdin, files, limits)


class Boxes:
    """Up to `most` sandboxes, each started when it is first needed and kept, for callers in any thread.

    A box has a thread of its own, since it ends with the thread that started it. Use them as a context, or
    close them; they are closed at the end of the process, too.
    """

    def __init__(self, most: int):
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="sandbox")
        self._own = threading.local()
        self._started: list[Box] = []
        self._starting = threading.Lock()
        atexit.register(self.close)

    def __enter__(self) -> "Boxes":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, job: Job, limits: Limits | None = None) -> Future[Result]:
        """Run a program as soon as a sandbox is free. The future raises what Box.run does."""
        return self._threads.submit(self._run, job, limits)

    def close(self) -> None:
        """End the sandboxes; waits for the programs that run, those that wait are cancelled."""
        atexit.unregister(self.close)
        self._threads.shutdown(cancel_futures=True)
        while self._started:
            self._started.pop().close()

    def _run(self, job: Job, limits: Limits | None) -> Result:
        if not hasattr(self._own, "box"):
            with self._starting:  # the first one finds out which isolation works
                self._own.box = Box()
                self._started.append(self._own.box)
        return self._own.box.run(job.code, job.stdin, job.files, limits)


class Box:
    """A sandbox that runs programs one after another, each in an empty folder. For one thread at a time.

    No process and no file of one program is there when the next one runs. Starting a box takes some 0.1 s of
    CPU time, a run about 10 ms. mode: one of isolation.MODES; the strongest that works if None. isolation:
    what holds the programs, known after the first run. The kernel kills the box with all that is in it when
    the thread that started it ends.

    kept: with folders at the top, such as /app, which lie below /tmp, what a program writes there or in /tmp
    stays for the next one, and output above the limit is dropped. Not in mode "process".
    """

    def __init__(self, mode: str | None = None, kept: tuple[str, ...] = ()):
        self.isolation: Isolation | None = None
        self._mode = mode or strongest_isolation().mode
        self._kept = kept
        assert not kept or self._mode != "process"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Box":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Run a program; see run_code. ValueError for a file name that leads out of the folder."""
        for name in files or {}:
            _check_name(name)
        limits = limits or Limits()
        if self._process is None:
            self._start()
        request = {
            "code": code,
            "stdin": stdin,
            "files": dict(files or {}),
            "limits": limits.__dict__,
            "environment": ENVIRONMENT,
            "site_packages": site_packages(),
        }
        self._control.settimeout(STARVES * limits.time_s + PATIENCE_S)
        try:
            frames.send(self._control, request)
            result = self._follow(limits)
        except (OSError, EOFError) as error:
            self.close()
            raise SandboxError(f"the sandbox ended in the middle of a run: {error!r}") from error
        if self._mode == "process":  # the others' files are in memory, and renewed
            for name in os.listdir(self._stage):
                _remove(os.path.join(self._stage, name))
        return result

    def close(self) -> None:
        """End the launcher and all that it started, and remove what is left of their files."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._control.close()  # the launcher ends by itself
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        _remove(self._stage)

    def _start(self) -> None:
        self._stage = tempfile.mkdtemp(prefix="siirl_box_")
        os.chmod(self._stage, 0o711)
        self._control, theirs = socket.socketpair()
        libraries = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", str(LAUNCHER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT | libraries,
                cwd="/",
                start_new_session=True,
            )
        setup = {
            "mode": self._mode,
            "stage": self._stage,
            "parent": os.getpid(),
            "readable": readable_paths(),
            "kept": self._kept,
            "readable_by_all": all(map(readable_by_all, [*site_packages(), os.path.dirname(os.__file__)])),
        }
        self._control.settimeout(STARTUP_S)
        answer: dict[str, Any]
        try:
            frames.send(self._control, setup)
            answer = frames.receive(self._control)
        except (OSError, EOFError) as error:
            answer = {"fatal": f"the launcher did not start: {error!r} {self._last_words()}"}
        if "fatal" in answer:
            self.close()
            raise SandboxError(f"a sandbox of mode {self._mode} cannot be made: {answer['fatal']}")
        if self._mode != "process":
            os.rmdir(self._stage)  # it has become the root of the launcher's own mounts
        self.isolation = Isolation(self._mode, answer["seccomp"], answer["landlock"])
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _follow(self, limits: Limits) -> Result:
        """Take in what the program writes until the launcher says that it has ended."""
        assert self._process is not None
        written: dict[Any, bytearray] = {self._process.stdout: bytearray(), self._process.stderr: bytearray()}
        room = limits.output_bytes
        stopped = False
        with selectors.DefaultSelector() as selector:
            for source in (*written, self._control):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = selector.select(STARVES * limits.time_s + PATIENCE_S)
                if not ready:
                    raise TimeoutError("the launcher does not answer")
                sources = [entry.fileobj for entry, _ in ready]
                for source in sources:
                    if source in written:
                        room -= _take(source, written[source], room)
                if room < 0 and not stopped and not self._kept:
                    frames.send(self._control, {"stop": "output"})
                    stopped = True
                if self._control in sources:
                    break
        outcome = frames.receive(self._control)
        for source, text in written.items():
            while (taken := _take(source, text, room)) > 0:
                room -= taken
        cut = room < 0
        out, err = (bytes(text).decode("utf-8", "replace") for text in written.values())
        status = "output" if cut and not self._kept else _status(outcome, limits)
        clocks = (outcome["time_s"], outcome["cpu_s"], outcome["own_s"])
        return Result(status, out, err, outcome["exit"], *clocks, cut)

    def _last_words(self) -> str:
        assert self._process is not None and self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        return (self._process.stderr.read() or b"").decode("utf-8", "replace")[-500:]


def _status(outcome: dict[str, Any], limits: Limits) -> Status:
    if outcome["reason"] in ("timeout", "starved"):
        return outcome["reason"]
    if outcome["exit"] == -signal.SIGXCPU:
        return "timeout"
    if outcome["exit"] == -signal.SIGKILL and outcome["cpu_s"] >= limits.time_s:
        return "timeout"
    return "ok" if outcome["exit"] == 0 else "failed"


def _take(pipe: Any, text: bytearray, room: int) -> int:
    """Read what is there, keep what there is room for; how many bytes came."""
    try:
        part = os.read(pipe.fileno(), 1 << 16)
    except BlockingIOError:
        return 0
    text += part[: max(0, room)]
    return len(part)


def _remove(folder: str) -> None:
    """Remove a folder, whatever a program has made of it."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # nested too deep, or folders made unreadable
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"file {name!r}: a sandbox takes names relative to its folder, without '..'.")


@functools.cache
def strongest_isolation() -> Isolation:
    """The strongest mode that works here, found out by trying, once.

    SandboxError if none does; what cannot be guaranteed is logged.
    """
    refusals = []
    for mode in MODES:
        if mode == "namespaces" and os.geteuid() != 0:  # nothing that a plain user could mend
            continue
        try:
            with Box(mode) as box:
                result = box.run("print(6 * 7)")
        except SandboxError as error:
            refusals.append(f"{mode}: {error}")
            continue
        if result.stdout == "42\n":
            assert box.isolation is not None
            found = replace(box.isolation, refused=tuple(refusals))
            for gap in found.gaps():
                log.warning("sandbox (mode %s): %s", found.mode, gap)
            return found
        refusals.append(f"{mode}: a trivial program ended with {result.exit}: {result.stderr[-500:]}")
    raise SandboxError(
        "no sandbox works on this machine: " + "; ".join(refusals) + ". Use a remote one "
        "(reward_model.sandbox_fusion.url)."
    )
