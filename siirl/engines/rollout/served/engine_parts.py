"""The processes that an engine starts: was one of them lost? Imports no engine."""

import contextlib
import re
import time
from pathlib import Path

import psutil

TITLES = ("VLLM::", "sglang::")
"""What the names of the processes of vLLM and SGLang begin with."""
CORE = "VLLM::EngineCore"
STOPPED_S, SILENT_S = 5.0, 5.0
"""A process is lost when it has been stopped, or gone without a word of the engine's, for so long."""


class EngineParts:
    """The processes below that of an engine, as far as they have been seen.

    One that is gone was lost, unless it, or another of its kind, has logged an error before: the engine
    then ends them all, and says why. Errors count for nothing if vLLM says that a signal ended a worker:
    those that talked to it log that they cannot.
    """

    def __init__(self, pid: int, log_path: Path, log_offset: int) -> None:
        self._pid = pid
        self._log_path, self._log_offset = log_path, log_offset
        self._names: dict[psutil.Process, str] = {}
        self._since_s: dict[tuple[psutil.Process, str], float] = {}

    def find(self) -> None:
        """Look for those that there are now. While an engine starts, they come one by one."""
        self._names |= find_parts(self._pid)

    def trouble(self) -> str:
        """What keeps the engine from going on, if one has been stopped or gone for a while; else ""."""
        now_s = time.monotonic()
        for process, name in self._names.items():
            state = _state(process)
            if state == "alive":
                self._since_s.pop((process, "stopped"), None)
                continue
            since_s = self._since_s.setdefault((process, state), now_s)
            if state == "stopped" and now_s - since_s > STOPPED_S:
                return f"its process {name} (pid {process.pid}) is there: stopped by signal (state T)"
            if state == "gone" and now_s - since_s > SILENT_S and (lost := self.lost()):
                return lost
        return ""

    def lost(self) -> str:
        """Which of them ended, and did not say why; "" if none did, or another has."""
        gone = {name: process.pid for process, name in self._names.items() if _state(process) == "gone"}
        if not gone:
            return ""
        text = self._log()
        said = {name for process, name in self._names.items() if f"pid={process.pid}) ERROR" in text}
        code = re.search(r"died unexpectedly \(exit code: -(\d+)\)", text)
        if said - {CORE} and not code:
            return ""
        silent = {name: pid for name, pid in gone.items() if name not in said}
        workers = {name: pid for name, pid in silent.items() if name != CORE}
        culprits = workers if CORE in said else {CORE: silent[CORE]} if CORE in silent else workers
        if not culprits:
            return ""
        named = " or ".join(f"{name} (pid {pid})" for name, pid in sorted(culprits.items()))
        how = f"signal {code[1]}" if code else "signal, or it crashed"
        return f"its process {named} is gone: killed by {how}"

    def _log(self) -> str:
        with contextlib.suppress(OSError), self._log_path.open("rb") as file:
            file.seek(self._log_offset)
            return file.read().decode(errors="replace")
        return ""


def find_parts(pid: int) -> dict[psutil.Process, str]:
    """The processes below that of an engine which it needs, and their names."""
    found: dict[psutil.Process, str] = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = (process.cmdline() or [""])[0].strip()
                if title.startswith(TITLES):
                    found[process] = title
    return found


def _state(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        status = process.status() if process.is_running() else psutil.STATUS_ZOMBIE
        if status == psutil.STATUS_STOPPED:
            return "stopped"
        return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else "alive"
    return "gone"
