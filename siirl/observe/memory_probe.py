"""Memory peaks: of each span on a GPU, of the process and step everywhere."""

import contextlib
import os
from pathlib import Path
from typing import Any, Protocol

from siirl.observe.metrics import Metrics
from siirl.spelling import GIB

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryMeter(Protocol):
    """Measures one process. Calls come from one thread; begin and end enclose an outermost span."""

    def begin_step(self) -> None:
        """Forget what the last step used."""
        ...

    def begin(self) -> None:
        """A span begins."""
        ...

    def end(self, name: str, traced: bool) -> dict[str, float]:
        """The span ends: what it used, for the trace if it is traced."""
        ...

    def sample(self) -> None:
        """Look at the whole device now."""
        ...

    def metrics(self) -> Metrics:
        """What the step used so far."""
        ...


class HostMemory:
    """Resident memory of this process; its peak since begin_step where Linux lets us reset it, else since
    the start of the process. Some 50 microseconds a step, and 10 a traced span."""

    def begin_step(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def begin(self) -> None:
        """Steps count, not spans."""

    def end(self, name: str, traced: bool) -> dict[str, float]:
        """Resident memory when a traced span ends; nothing else, or where /proc does not tell."""
        if not traced:
            return {}
        try:
            pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        except OSError:
            return {}
        return {"host_gib": round(pages * _PAGE_BYTES / GIB, 4)}

    def sample(self) -> None:
        """There is no device."""

    def metrics(self) -> Metrics:
        """memory/host_gib and memory/host_peak_gib; none where /proc does not tell."""
        out = Metrics()
        with contextlib.suppress(OSError):
            lines = Path("/proc/self/status").read_text().splitlines()
            kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Vm")}
            out.max("memory/host_gib", kib["VmRSS"] * 1024 / GIB)
            out.max("memory/host_peak_gib", kib["VmHWM"] * 1024 / GIB)
        return out


class DeviceMemory(HostMemory):
    """One CUDA device, and the host. Some 50 microseconds a span.

    peak: the most that this process's tensors took within the span; reserved: the same of its allocator;
    device: the most in use on the whole device, all processes together, as far as somebody looked (at the
    ends of spans, and where `sample` is called).
    """

    def __init__(self, device: Any):
        import torch

        torch.cuda.init()  # statistics cannot be reset before
        self._cuda, self._device = torch.cuda, device
        self._used = 0
        self._step: dict[str, float] = {}

    def begin_step(self) -> None:
        super().begin_step()
        self._step = {}

    def begin(self) -> None:
        self._cuda.reset_peak_memory_stats(self._device)
        self._used = 0
        self.sample()

    def end(self, name: str, traced: bool) -> dict[str, float]:
        self.sample()
        found = {
            "peak_gib": self._cuda.max_memory_allocated(self._device) / GIB,
            "reserved_gib": self._cuda.max_memory_reserved(self._device) / GIB,
            "device_gib": self._used / GIB,
        }
        for kind, gib in found.items():
            for key in (f"memory/{kind}", f"memory/{name}_{kind}"):
                self._step[key] = max(self._step.get(key, 0.0), gib)
        return found | super().end(name, traced)

    def sample(self) -> None:
        free, total = self._cuda.mem_get_info(self._device)
        self._used = max(self._used, total - free)

    def metrics(self) -> Metrics:
        """memory/peak_gib, reserved_gib and device_gib of the step, and memory/<span>_... of each span."""
        out = super().metrics()
        for name, gib in self._step.items():
            out.max(name, gib)
        return out
