"""A copy of an engine's weights in host memory, for a process that takes the place of a lost one."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from siirl.engines.weights.shared_buffer import SharedBuffer
from siirl.errors import RolloutError

log = logging.getLogger(__name__)

MAX_RESTARTS = "actor_rollout_ref.rollout.max_engine_restarts"
"""The key; at 0 no weights are kept."""
PIECE_BYTES = 32 << 20
"""Copied to the host at a time: what an engine samples meanwhile goes the same way."""


class KeptWeights:
    """Memory for all weights of an engine, taken at the first update.

    It is filled from its begin to its end, in the order in which weights come: at once, or in the background
    after the update, from bytes that stay where they are until that is done.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """device: where weights come from. For a GPU pages are locked: it copies beside what else it does."""
        self._size, self._locks = size, device.type == "cuda"
        self._buffer: SharedBuffer | None = None
        self._is_locked = False
        self._filled = 0
        self._copier = ThreadPoolExecutor(1, "keep-weights")
        self._due: list[Callable[[], None]] = []
        self._running: list[Future] = []

    @property
    def buffer(self) -> SharedBuffer:
        """RolloutError if the host has no room for it."""
        if self._buffer is None:
            try:
                self._buffer = SharedBuffer(self._size, torch.device("cpu"))
            except OSError as error:
                raise RolloutError(
                    f"{error}: it keeps the weights for an engine that is started again. Set "
                    f"{MAX_RESTARTS}=0, and none is."
                ) from error
            if self._locks:
                self._lock(self._buffer.data)
        return self._buffer

    def restart(self) -> None:
        """What is kept is about to be replaced. RolloutError if the host has no room for it."""
        self._due.clear()
        self.wait()
        self._filled = 0
        _ = self.buffer

    def reserve(self, size: int) -> int:
        """The first byte of a place for `size` bytes."""
        begin, self._filled = self._filled, self._filled + size
        return begin

    def copying(self, begin: int, data: Tensor) -> Future:
        """Copy bytes there, beside what this thread and its stream of the device do."""
        copying = self._copier.submit(_copy_aside, self.buffer.data[begin : begin + len(data)], data)
        self._running.append(copying)
        return copying

    def copy_later(self, begin: int, data: Tensor) -> None:
        """Copy bytes there, which stay where they are, as of `fill_later`."""
        self.fill_later(partial(_copy_aside, self.buffer.data[begin : begin + len(data)], data))

    def fill_later(self, fill: Callable[[], None]) -> None:
        """What `fill` writes is missing until it has run: by `start`, or when somebody waits for it."""
        self._due.append(fill)

    def start(self) -> None:
        """Begin with what is missing, in the background."""
        due, self._due = self._due, []
        self._running += [self._copier.submit(fill) for fill in due]

    def wait(self) -> None:
        """Until nothing is missing and nothing is being copied."""
        self.start()
        while self._running:
            self._running.pop(0).result()

    def close(self) -> None:
        """Free it. Idempotent."""
        self._due.clear()
        self._copier.shutdown()
        if self._buffer is not None:
            if self._is_locked:
                torch.cuda.cudart().cudaHostUnregister(self._buffer.data.data_ptr())
                self._is_locked = False
            self._buffer.close()

    def _lock(self, data: Tensor) -> None:
        """Lock the pages, by which the device copies into them several times as fast."""
        try:
            code = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)
        except RuntimeError as error:
            code = error
        self._is_locked = str(code) in ("0", "cudaError.success") or code == 0
        if not self._is_locked:
            log.warning("the memory that keeps the weights could not be locked (%s): copies are slow", code)


def _copy_aside(target: Tensor, source: Tensor) -> None:
    """Copy what is complete, on a stream of its own."""
    if not source.is_cuda:
        target.copy_(source)
        return
    with torch.cuda.device(source.device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for begin in range(0, len(source), PIECE_BYTES):
                end = begin + PIECE_BYTES
                target[begin:end].copy_(source[begin:end], non_blocking=True)
        stream.synchronize()
