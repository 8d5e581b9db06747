"""`siirl doctor`: what this machine holds for a run, a line each, and what to do about what is missing.

Nothing heavy is imported here: torch is asked in processes of its own, which may hang or crash.
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from siirl.errors import ConfigError, SandboxError
from siirl.launch.devices import count_gpus
from siirl.launch.rendezvous import STORE_FD, open_socket
from siirl.observe.printable import printable
from siirl.spelling import GIB, size_text

PYTHONS = ((3, 11), (3, 12))
PROBES = ("-m", "siirl.launch.machine_probes")
PROBE_S = 120.0
"""Longest wait for a process that imports torch: cold disks and busy machines are slow."""
NUM_PORTS = 64
SHM_BYTES, FREE_BYTES, FULL_BYTES = GIB, 20 * GIB, GIB

Grade = Literal["ok", "warn", "bad", "open"]


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    grade: Grade
    """ok; warn: some runs would miss it; bad: no run works; open: somebody else could use it."""
    what: str
    found: str
    remedy: str = ""
    """What to do; "" where nothing is to be done."""

    def __str__(self) -> str:
        remedy = f". {self.remedy}" if self.remedy else ""
        return " ".join(printable(f"{self.grade:<5} {self.what + ':':<15} {self.found}{remedy}").split("\n"))


Check = Callable[[Path], Iterator[Line]]


def examine(output: Path) -> int:
    """Print a line for each check as it is done; 1 if one of them is bad, else 0. output: folder for runs."""
    worst: set[str] = set()
    for check in CHECKS:
        for line in check(output):
            print(line, flush=True)
            worst.add(line.grade)
    told = "something is missing without which no run works" if "bad" in worst else "runs can start here"
    print(f"{told}{', less what is marked warn' if worst >= {'warn'} and 'bad' not in worst else ''}.")
    return 1 if "bad" in worst else 0


def versions(_output: Path) -> Iterator[Line]:
    """Python and the packages that a run is made of, without importing them."""
    python = platform.python_version()
    known = sys.version_info[:2] in PYTHONS
    yield Line(
        "ok" if known else "bad",
        "python",
        python,
        "" if known else "siirl needs Python 3.11 or 3.12: make setup.",
    )
    for package in ("torch", "transformers", "ray"):
        version = _version(package)
        yield (
            Line("ok", package, version)
            if version
            else Line("bad", package, "is not installed", "Install it: pip install siirl.")
        )
    from siirl.compiler.backends.vllm import vllm_version

    try:
        yield Line("ok", "vllm", vllm_version())
    except ConfigError as error:
        yield Line("warn", "vllm", str(error).partition("rollout.name=vllm: ")[2] or str(error))
    megatron, bridge = _version("megatron-core"), _version("mbridge")
    if megatron and bridge:
        yield Line("ok", "megatron", f"megatron-core {megatron}, mbridge {bridge}")
    else:
        missing = "megatron-core" if not megatron else "mbridge"
        yield Line(
            "warn",
            "megatron",
            f"{missing} is not installed",
            "For strategy=megatron: pip install 'siirl[megatron]'.",
        )


def devices(_output: Path) -> Iterator[Line]:
    """GPUs as torch sees them, and the attention kernel of its own that packed rows take there."""
    offered = count_gpus(os.environ, Path("/dev"))
    try:
        told = _probe_torch()
    except _ProbeError as error:
        yield Line("bad", "devices", f"torch does not start: {error}", "Install torch anew for this machine.")
        return
    seen = told["devices"]
    if seen:
        each = ", ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in seen)
        yield Line("ok", "devices", f"{len(seen)} GPU(s): {each}")
    elif offered:
        why = "torch is built without CUDA" if told["cuda"] is None else "CUDA does not start"
        yield Line(
            "bad",
            "devices",
            f"{offered} GPU(s) are here, torch sees none: {why}",
            "Install a torch for CUDA, and see that nvidia-smi works.",
        )
    else:
        yield Line("ok", "devices", f"no GPU; {os.cpu_count()} processors (trainer.device=cpu)")
    flash = util.find_spec("flash_attn") is not None
    also = (
        f"flash-attn {_version('flash-attn') or ''} is there too".replace("  ", " ")
        if flash
        else "flash-attn is not needed"
    )
    if told["kernel"]:
        yield Line("ok", "attention", f"torch has its kernel for packed rows; {also}")
    else:
        yield Line(
            "warn" if not seen else "bad",
            "attention",
            f"this torch has no kernel for packed rows; {also}",
            "On GPUs: install torch 2.11 or later.",
        )


def shared_memory(_output: Path) -> Iterator[Line]:
    """Room in /dev/shm, through which NCCL and vLLM's processes talk."""
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        yield Line("warn", "shared memory", f"/dev/shm: {error.strerror}", "Mount a tmpfs there.")
        return
    if total >= SHM_BYTES:
        yield Line("ok", "shared memory", f"{size_text(total)} in /dev/shm")
    else:
        yield Line(
            "warn",
            "shared memory",
            f"{size_text(total)} in /dev/shm: little for NCCL and vLLM",
            "Start the container with --ipc=host or --shm-size=16g.",
        )


def disk(output: Path) -> Iterator[Line]:
    """Room for what runs write, and the right to write it."""
    folder = output.absolute()
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"siirl")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Line(
            "bad",
            "disk",
            f"{folder} cannot be written: {error.strerror}",
            "Choose another folder (trainer.output_dir), or fix its permissions or free space.",
        )
        return
    grade: Grade = "ok" if free >= FREE_BYTES else "warn" if free >= FULL_BYTES else "bad"
    remedy = (
        "" if grade == "ok" else "Checkpoints need room: free some, or choose another trainer.output_dir."
    )
    yield Line(grade, "disk", f"{size_text(free)} free in {folder}", remedy)


def ports(_output: Path) -> Iterator[Line]:
    """Free ports on the loopback, as rendezvous and engines take them, and the name of this machine."""
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(NUM_PORTS):
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        except OSError as error:
            yield Line(
                "bad",
                "ports",
                f"not even {NUM_PORTS} are to be had on 127.0.0.1: {error.strerror}",
                "Look at `ulimit -n` and net.ipv4.ip_local_port_range.",
            )
        else:
            yield Line("ok", "ports", f"{NUM_PORTS} free on 127.0.0.1")
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        yield Line(
            "warn",
            "host name",
            f"{name!r} has no address: {error.strerror}",
            "Runs over several machines need one: name it in /etc/hosts.",
        )
    else:
        yield Line("ok", "host name", f"{name} is {address}")


def gloo(_output: Path) -> Iterator[Line]:
    """Two processes of this machine meet through gloo, as the ranks of a run do."""
    with open_socket("127.0.0.1") as server:
        port = server.getsockname()[1]
        both = [_start_gloo_probe(0, port, server.fileno()), _start_gloo_probe(1, port)]
    problem = ""
    try:
        for process in both:
            said = process.communicate(timeout=PROBE_S)[1]
            if process.returncode and not problem:
                problem = _last_words(said) or f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"no answer in {PROBE_S:g} s"
    finally:
        for process in both:
            process.kill()
            process.wait()
    if problem:
        yield Line(
            "bad",
            "gloo",
            f"two processes of this machine do not meet: {problem}",
            "Try GLOO_SOCKET_IFNAME=lo, and look for a firewall or a host name that leads elsewhere.",
        )
    else:
        yield Line("ok", "gloo", "two processes of this machine meet")


def sandbox(_output: Path) -> Iterator[Line]:
    """Which ways to shut in untrusted programs work: code rewards and Python tools need one."""
    from siirl.sandbox.box import Box
    from siirl.sandbox.isolation import MODES

    works, refused, gaps = [], [], []
    for mode in MODES:
        if mode == "namespaces" and os.geteuid() != 0:
            refused.append("namespaces: not root")
            continue
        try:
            with Box(mode) as box:
                answer = box.run("print(6 * 7)").stdout
                gaps = gaps or (box.isolation.gaps() if box.isolation and not works else [])
        except SandboxError as error:
            refused.append(f"{mode}: {error}")
            continue
        works += [mode] if answer == "42\n" else []
    if not works:
        yield Line(
            "warn",
            "sandbox",
            f"none works ({'; '.join(refused)})",
            "For code rewards use a remote one: reward_model.sandbox_fusion.url.",
        )
    else:
        lacks = f"; {works[0]}: {'; '.join(gaps)}" if gaps else ""
        remedy = "docs/security.md says what each mode needs." if gaps else ""
        yield Line("warn" if gaps else "ok", "sandbox", f"works: {', '.join(works)}{lacks}", remedy)


CHECKS: tuple[Check, ...] = (versions, devices, shared_memory, disk, ports, gloo, sandbox)


def _start_gloo_probe(rank: int, port: int, descriptor: int | None = None) -> subprocess.Popen[str]:
    """One of the two processes that meet at a port. descriptor: of its socket, which rank 0 takes over."""
    given = {} if descriptor is None else {STORE_FD: descriptor}
    return subprocess.Popen(
        [sys.executable, *PROBES, "gloo", str(rank), str(port), str(PROBE_S / 2)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment() | {name: str(fd) for name, fd in given.items()},
        pass_fds=list(given.values()),
    )


class _ProbeError(Exception):
    """torch could not be asked; the text says why."""


def _probe_torch() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, *PROBES, "torch"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            env=_environment(),
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise _ProbeError(f"no answer in {PROBE_S:g} s") from None
    except (ValueError, IndexError):
        raise _ProbeError(_last_words(done.stderr) or f"exit code {done.returncode}") from None


def _environment() -> dict[str, str]:
    """Processes that find this siirl from any folder, with one thread."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _last_words(text: str) -> str:
    lines = text.strip().splitlines()
    return printable(lines[-1]) if lines else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
