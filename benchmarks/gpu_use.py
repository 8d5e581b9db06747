"""How much of the time kernels run on each GPU, as nvidia-smi says."""

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence

QUERY = ("--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")
EVERY_MS = 250


class GpuUse:
    """Asks several times a second, from its start to `close`; where there is no nvidia-smi it knows nothing.

    The driver tells the share of its last sample period (at most a second) in which a kernel ran.
    """

    def __init__(self) -> None:
        self._told: dict[int, list[tuple[float, float]]] = {}  # GPU -> when, and its share
        self._process: subprocess.Popen[str] | None = None
        if found := shutil.which("nvidia-smi"):
            words = [found, *QUERY, "-lms", str(EVERY_MS)]
            self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def shares(self, times: Sequence[tuple[float, float]]) -> dict[int, float]:
        """GPU -> its mean share within these times, each from one second of the day's clock to another."""
        found = {}
        for gpu, told in self._told.items():
            within = [share for at, share in list(told) if any(begin <= at <= end for begin, end in times)]
            if within:
                found[gpu] = round(sum(within) / len(within), 3)
        return found

    def close(self) -> None:
        """Ask no more. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # a line that was cut, or a GPU that does not tell
                gpu, percent = line.split(",")
                self._told.setdefault(int(gpu), []).append((time.time(), float(percent) / 100))
