"""How much of the time kernels run on each GPU, as its driver says."""

import threading
import time
from collections.abc import Sequence
from typing import Any

EVERY_S = 0.2


class GpuUse:
    """Asks several times a second, from its start to `close`. Without GPUs or pynvml it knows nothing.

    The driver tells the share of its last sample period (at most a second) in which a kernel ran.
    """

    def __init__(self) -> None:
        self._told: list[list[tuple[float, float]]] = []  # of each GPU, when and its share
        self._ends = threading.Event()
        try:
            import pynvml

            pynvml.nvmlInit()
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception as error:  # noqa: BLE001 - of a library that may be absent
            print(f"nobody tells how busy GPUs are: {error!r}", flush=True)
            return
        self._told = [[] for _ in gpus]
        threading.Thread(target=self._ask, args=(pynvml, gpus), daemon=True).start()

    def shares(self, times: Sequence[tuple[float, float]]) -> dict[int, float]:
        """GPU -> its mean share within these times, each from one second of the day's clock to another."""
        found = {}
        for gpu, told in enumerate(self._told):
            within = [share for at, share in list(told) if any(begin <= at <= end for begin, end in times)]
            if within:
                found[gpu] = round(sum(within) / len(within), 3)
        return found

    def close(self) -> None:
        """Ask no more. Idempotent."""
        self._ends.set()

    def _ask(self, pynvml: Any, gpus: Sequence[Any]) -> None:
        while not self._ends.wait(EVERY_S):
            for gpu, told in zip(gpus, self._told, strict=True):
                told.append((time.time(), pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100))
