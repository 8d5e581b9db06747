"""`python -m siirl...` without the seconds of its imports: a fork of a nursery, which has imported them.

`install` puts `ForkingPopen` in the place of `subprocess.Popen`. Where a process starts one of `MODULES` with
its own Python, that is asked of a nursery below it; all else, and what differs in more than `MAY_DIFFER`, is
started as ever. The new process is a child of who asked, with the descriptors, the session, the folder, the
variables and the command line that it would have, in /proc too. It starts others in the same way.

The mark `real_starts` of a test, or SIIRL_TEST_STARTS=real in tests/e2e, lets all of its starts import for
themselves. Which others did, and why, is in what SIIRL_TEST_CPU writes (cpu_seconds.py).
"""

import atexit
import contextlib
import ctypes
import fcntl
import io
import json
import logging
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MODULES: dict[str, str | None] = {
    "siirl.main_dag": "starts",
    "siirl.cli": "starts",
    "siirl.launch.machine_probes": None,
    "siirl.launch.worker_entry": "starts",
    "siirl.engines.rollout.served.server": "starts",
    "siirl.rewards.scoring_process": None,
    "torch.distributed.run": "starts",
    "launch_written_job": "starts",
    "multiprocessing.spawn": "starts",
    "prepare.py": "starts",
    **dict.fromkeys(("deepscaler.py", "gsm8k.py", "math.py")),  # of examples/data_preprocess
    **dict.fromkeys(("mcp_server.py", "fresh_vllm.py", "vllm_heads.py", "a test's own")),
    "pytest": "starts",
    "execnet": "orders",
}
"""That are forked, modules and scripts -> what a process below serves them with, if they start others."""
HAS_FEW_VARIABLES = frozenset({"mcp_server.py"})
"""Those that are given no others than they need, and read none as they are imported."""
TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
TEXTS = {
    "from multiprocessing.spawn import spawn_main": "multiprocessing.spawn",
    "import sys;exec(eval(sys.stdin.readline()))": "execnet",
    "# a fork": "a test's own",
}
"""How the code of a process begins that multiprocessing starts, as vLLM does those of several ranks, that of
a worker of pytest, and that of a test which imports as much as a rank."""
SERVICES: dict[str, Callable[[socket.socket], None]] = {}
"""What a nursery can serve with, see MODULES."""
MAY_DIFFER = frozenset(
    {
        "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TMPDIR",
        "PYTHON", "PYTHONPATH", "PYTHONUNBUFFERED", "PATH", "PWD", "OLDPWD", "SHLVL", "_", "SPT_NOENV",
        "COLUMNS", "LINES", "TERM", "NO_COLOR", "PYTORCH_NVML_BASED_CUDA_CHECK",
        "CUDA_DEVICE_MAX_CONNECTIONS", "LD_LIBRARY_PATH",  # imports of vLLM and Megatron leave them
        "LAZY_LEGACY_OP", "LD_PRELOAD", "NUMEXPR_MAX_THREADS",  # and an engine of vLLM these, see `preloaded`
        "DRY_RUN", "MODEL_PATH", "N_GPUS_PER_NODE", "NODE_WAIT_S", "OUTPUT_DIR", "SCRIPT", "SHARED", "SIIRL",
        "TEST_DATA_PATH", "TRAIN_DATA_PATH",  # of scripts, as those of examples/
        *(f"{path.name.upper()}_DIR" for path in Path(__file__).parents[2].glob("examples/*")),
        "GOMP_SPINCOUNT",  # read as torch is imported, and for threads that wait: a test's process has one
    }
)  # fmt: skip
MAY_DIFFER_FROM = (
    "_ARGCOMPLETE", "_MLFLOW_", "AITER_", "CHAOS_", "COMP_", "GLOO_", "GROUP_", "LOCAL_", "MASTER_", "NCCL_",
    "NVTE_", "PET_", "PYGAME_", "PYTEST_", "RAY_", "ROLE_", "SGLANG_", "SIIRL_", "SKYPILOT_", "SLURM_",
    "TORCHELASTIC_", "TILELANG_", "TORCHINDUCTOR_", "TORCH_GLOO_", "TORCH_NCCL_", "TRITON_", "VLLM_",
)  # fmt: skip
"""Variables that nothing reads as it is imported."""
PR_SET_CHILD_SUBREAPER = 36
HIGH = 600
"""No process of a test has so many descriptors: given ones wait above it for their places."""
LONGEST = 100_000
TITLE, PADDING = "siirl-test-nursery", 16_384
PYTHON = sys.executable
"""As it is, whatever a test has others start in its place."""
REAL, REAL_SPAWN = subprocess.Popen, multiprocessing.util.spawnv_passfds
_libc = ctypes.CDLL(None)


class Asks:
    """Where this process asks for starts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.real = False
        self.below: dict[int, socket.socket] = {}
        """Of a process, by its id: a fork has none of its own."""
        self.nursery = 0
        """The process that serves there."""
        self.imported: list[str] = []
        """Of each start of `MODULES` that was no fork: what stood in the way."""

    def lost(self, words: Sequence[str]) -> None:
        """Nobody serves there any more: the next time somebody else is asked."""

    def channel(self, words: Sequence[str]) -> socket.socket | None:
        return self.below.get(os.getpid())


class Nursery:
    """What a nursery has begun with."""

    environment: dict[str, str]
    path: list[str]
    arguments: tuple[int, int]
    variables: tuple[int, int]
    """Where in memory /proc has its command line and its environment from: the first and the last byte."""


asks = Asks()
base: Mapping[str, str] = {}


def install(environment: Mapping[str, str]) -> None:
    """From now on this process, whose nursery began with this environment, starts by forks."""
    global base
    base = dict(environment)
    if may_fork():
        subprocess.Popen = ForkingPopen
        multiprocessing.util.spawnv_passfds = spawn


def may_fork() -> bool:
    """Whether commands are forked here. Not beside GPUs: who has imported vLLM may hold one, and not fork."""
    return not asks.real and sys.platform == "linux" and not any(Path("/dev").glob("nvidia[0-9]*"))


class ForkingPopen(REAL):
    """A Popen whose process is forked where that is the same."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ):  # fmt: skip
        own = (executable, preexec_fn, startupinfo, gid, gids, uid)
        plain = close_fds and not shell and umask == -1 and process_group == -1 and own == (None,) * 6
        environment = {
            os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()
        }
        if plain and is_forked(args, environment):
            ends = (p2cread, c2pwrite, errwrite)
            order = {
                "args": [os.fsdecode(word) for word in args],
                "environment": environment,
                "cwd": os.fsdecode(cwd or os.getcwd()),
                "targets": [0, 1, 2, *pass_fds],
                "session": bool(start_new_session),
            }
            standard = [own if own != -1 else fd for fd, own in enumerate(ends)]
            pid = _ask(order, [*standard, *pass_fds])
            if pid is not None:
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
                return
        if not isinstance(args, str | bytes | os.PathLike) and _module(list(args)) in MODULES:
            asks.imported.append(_why_not(plain, environment))
        super()._execute_child(
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            start_new_session, process_group,
        )  # fmt: skip


def spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start a process of multiprocessing, as its function of this name does: by a fork if this is one."""
    words, environment = [os.fsdecode(word) for word in args], dict(os.environ)
    if os.getpid() in asks.below and is_forked(words, environment):
        order = {"args": words, "environment": environment, "cwd": os.getcwd(), "session": False}
        pid = _ask({**order, "targets": [0, 1, 2, *passfds]}, [0, 1, 2, *passfds])
        if pid is not None:
            return pid
    return REAL_SPAWN(path, args, passfds)


def is_forked(args: Any, environment: Mapping[str, str]) -> bool:
    """Whether a fork is the same as a start of this command line with this environment."""
    if asks.real or isinstance(args, str | bytes | os.PathLike):
        return False
    module = _module(list(args))
    return module in MODULES and (module in HAS_FEW_VARIABLES or fits(environment))


def _why_not(plain: bool, environment: Mapping[str, str]) -> str:
    """Why a start of `MODULES` is no fork."""
    if asks.real or not plain:
        return "a test wants it so" if asks.real else "options of the start"
    return f"variables {other}" if (other := others(environment)) else "nobody answered"


def fits(environment: Mapping[str, str]) -> bool:
    """Whether it is that of the nursery but for what nothing reads as it is imported."""
    return not others(environment)


def others(environment: Mapping[str, str]) -> list[str]:
    """The variables that stand in the way of a fork."""
    more = ["LD_PRELOAD"] if preloaded(environment) != preloaded(base) else []
    return in_the_way(environment, base) + more


def in_the_way(environment: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """The variables that differ, of those that something may read as it is imported."""
    changed = {name for name in {*environment, *before} if environment.get(name) != before.get(name)}
    return [name for name in changed - MAY_DIFFER if not name.startswith(MAY_DIFFER_FROM)]


def preloaded(environment: Mapping[str, str]) -> list[str]:
    """What lies below all libraries, but for the allocator and the threads that vLLM puts there for speed."""
    paths = environment.get("LD_PRELOAD", "").split(":")
    return [path for path in paths if path and not re.search("lib(tcmalloc|gomp|iomp)", path)]


def _module(words: list[Any]) -> Any:
    if words[:1] != [PYTHON]:
        return None
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    if rest[:1] == ["-c"]:
        return next((module for text, module in TEXTS.items() if rest[1].startswith(text)), None)
    if rest[:1] == ["-m"]:
        return rest[1]
    return os.path.basename(rest[0]) if rest else None


def _ask(order: Mapping[str, Any], given: Sequence[int]) -> int | None:
    """Have it forked as a child of this process: its id. None: it has to be started the other way."""
    message = json.dumps(order).encode()
    with asks.lock:
        channel = asks.channel(order["args"])
        if channel is None or len(message) > LONGEST:
            return None
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what is orphaned below is a child of this process
        try:
            socket.send_fds(channel, [message], list(given))
            answer = channel.recv(64)
        except OSError:
            answer = b""
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if not answer:
        asks.lost(order["args"])
    return int(answer) if answer else None


def serve_below(service: str = "starts") -> None:
    """Have a process below this one fork for it. While it has no threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        keep_only(theirs.fileno())
        SERVICES[service](theirs)
        os._exit(0)
    theirs.close()
    asks.below, asks.nursery = {os.getpid(): ours}, pid


def _end_below() -> None:
    """End the process that forks for this one, so that nothing of a command is left when it has ended."""
    if (ours := asks.below.pop(os.getpid(), None)) is not None:
        ours.close()
        os.kill(asks.nursery, signal.SIGKILL)
        os.waitpid(asks.nursery, 0)


def serve(channel: socket.socket) -> None:
    """In a nursery: fork a process for each order until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(channel, LONGEST + 1, 250)
        except OSError:
            return
        if not message:
            return
        born, wait = os.pipe(), os.pipe()
        first = os.fork()
        if first == 0:
            if (pid := os.fork()) == 0:
                os.close(wait[1])
                os.read(wait[0], 1)  # until `first` is gone, and the parent is who asks
                become(json.loads(message), fds)
            os.write(born[1], str(pid).encode())
            os._exit(0)
        os.waitpid(first, 0)
        pid = os.read(born[0], 64)
        for fd in (*fds, *born, *wait):
            os.close(fd)
        with contextlib.suppress(OSError):
            channel.send(pid)


def keep_only(*kept: int) -> None:
    """Close all descriptors but these; the standard ones read and write nothing."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def be_a_nursery() -> None:
    """Remember what this process began with: a fork has the same where it is not told otherwise."""
    with contextlib.suppress(ImportError):
        __import__("setproctitle").getproctitle()  # it looks for the command line while it is where it was
    Nursery.environment = dict(os.environ)
    added = [os.path.dirname(__file__), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    Nursery.path = [path for path in sys.path if path not in added]
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    first, last, first_variable, last_variable = map(int, fields[45:49])
    Nursery.arguments, Nursery.variables = (first, last), (first_variable, last_variable)
    values = dict(os.environ)
    os.environ.clear()  # the C library has its own copies now, not in the memory that /proc shows
    os.environ.update(values)
    _show(Nursery.arguments, TITLE)
    atexit._clear()  # what packages do at the end of a process takes 0.2 s
    for at_end in (weakref.finalize._exitfunc, multiprocessing.util._exit_function, logging.shutdown):
        atexit.register(at_end)
    install(json.loads(os.environ.pop("SIIRL_TEST_BASE")))
    if (of_torchrun := sys.modules.get(TORCHRUN)) is not None:
        of_torchrun.Popen = subprocess.Popen  # type: ignore[attr-defined]  # it has taken it by name


def _show(where: tuple[int, int], *words: str) -> None:
    """Have /proc show these words there, as far as there is room."""
    room = where[1] - where[0]
    data = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
    ctypes.memmove(where[0], data.ljust(room, b"\0"), room)


def become(order: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Be the process of a command, to its end."""
    words, environment = order["args"], order["environment"]
    module = _module(words)
    if order["session"]:
        os.setsid()
    asks.below = {}
    if (service := MODULES[module]) is not None:
        serve_below(service)
    high = [_raised(fd) for fd in fds]
    asks.below = {pid: socket.socket(fileno=_raised(ours.detach())) for pid, ours in asks.below.items()}
    keep_only(*high, *(ours.fileno() for ours in asks.below.values()))
    for fd, target in zip(high, order["targets"], strict=True):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    _reset(words, environment, order["cwd"])
    _show(Nursery.arguments, *words)
    _show(Nursery.variables, *(f"{name}={value}" for name, value in environment.items()))
    _run(module, words)


def _raised(fd: int) -> int:
    """The same where it is in nobody's way."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)


def _reset(words: Sequence[str], environment: Mapping[str, str], cwd: str) -> None:
    """What a new process has anew."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    start = 2 if words[1] == "-u" else 1
    script = not words[start].startswith("-")
    sys.argv[:] = words[start:] if script else [words[start], *words[start + 2 :]]
    sys.orig_argv[:] = words
    first = os.path.dirname(os.path.abspath(words[start])) if script else cwd
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *Nursery.path]
    sys.path_importer_cache.clear()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        __import__("sitecustomize")
    _streams("-u" in words[:2] or bool(environment.get("PYTHONUNBUFFERED")))
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()
    if environment.get("OMP_NUM_THREADS", "").isdigit():
        threads = int(environment["OMP_NUM_THREADS"])
        sys.modules["torch"].set_num_threads(threads)
        sys.modules["siirl.parallel.host_threads"].SHARE_OF_CORES = threads  # it asks as it is imported


def _streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        before.reconfigure(line_buffering=True)  # handlers of logs hold it
        raw: Any = open(fd, "wb", 0, closefd=False)  # noqa: SIM115
        unbuffered = unbuffered or fd == 2
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            before.encoding,
            before.errors,
            line_buffering=raw.isatty() or fd == 2,
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(module: str, words: Sequence[str]) -> None:
    """Run a module as `python -m` does, or a text as `python -c` does, and end the process."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = __builtins__
    if named := "-m" in words[1:3]:
        sys.modules.pop(module, None)
    code, by_signal = 0, False
    try:
        if "-c" in words[1:3]:
            exec(words[words.index("-c") + 1], sys.modules["__main__"].__dict__)
        elif named:
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - the edge of the process
        by_signal, code = isinstance(error, KeyboardInterrupt), 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _end_below()
    if by_signal:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def order(channel: socket.socket, service: str, branch: str, end: int) -> None:
    """Have a nursery fork one that serves on a socket."""
    socket.send_fds(channel, [json.dumps({"service": service, "branch": branch}).encode()], [end])


def needs(words: Sequence[str]) -> str:
    """The branch of the nursery for a command line."""
    if words[3:4] == ["check"]:
        return ""
    return "vllm" if any("vllm" in word or word.endswith("served.server") for word in words) else ""
