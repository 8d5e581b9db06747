"""torch's profiler over the nodes of a step: operators, kernels and allocations, beside what spans measure.

A trace of torch has a clock and a size of its own: some hundred bytes for each operator, so it is for single
steps. `StepProfile` is of one rank, and of the thread that runs its instructions.
"""

import gzip
import logging
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)
PROFILE_DIR = "profile"
TRACE_END = ".pt.trace.json.gz"
"""How TensorBoard and others know a trace of torch."""
MOST_ALLOCATIONS = 100_000
"""In a snapshot: those that came last."""


@dataclass(frozen=True)
class Details:
    """What a trace says of operators besides their times."""

    shapes: bool = False
    memory: bool = False
    stack: bool = False


class StepProfile:
    """Records some steps of one rank. Files: step_N_rank_R[_NODE[_K]].pt.trace.json.gz, K of the K-th time.

    No communication; `begin_step` and `end_step` enclose a step, and nothing is recorded outside.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        steps: Collection[int],
        device: torch.device,
        nodes: Collection[str] | None = None,
        details: Details = Details(),
    ):
        """nodes: those of which each gets a trace of its own; None: the step gets one."""
        self._folder, self._rank, self._steps, self._nodes = folder, rank, frozenset(steps), nodes
        on_gpu = device.type == "cuda"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._details = details
        self._step: int | None = None
        self._running: profile | None = None
        self._ended: list[tuple[str, profile]] = []

    def begin_step(self, step: int) -> None:
        """Record this step, if it is one of those."""
        self._step = step if step in self._steps else None
        if self._step is not None and self._nodes is None:
            self._start()

    @contextmanager
    def recorded(self, name: str, node: str | None) -> Iterator[None]:
        """Record an instruction, if it is asked for. name: of its span; node: that it serves, if any."""
        nodes = self._nodes
        if self._step is None or nodes is None or (name not in nodes and node not in nodes):
            yield
            return
        self._start()
        try:
            yield
        finally:
            self._stop(f"_{name}" if name in nodes else f"_{node}_{name}")

    def range(self, name: str) -> AbstractContextManager[Any]:
        """An interval in the trace, if one is being recorded."""
        return nullcontext() if self._running is None else record_function(name)

    def end_step(self) -> None:
        """Write what was recorded of the step; where that cannot be, say so and go on."""
        if self._running is not None:
            self._stop("")
        times: Counter[str] = Counter()
        for part, done in self._ended:
            times[part] += 1
            part += f"_{times[part]}" if times[part] > 1 else ""
            path = self._folder / f"step_{self._step}_rank_{self._rank}{part}{TRACE_END}"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                _write(done, path)
            except (OSError, RuntimeError) as error:
                log.warning("%s is not written, and the run goes on: %s", path, error)
        self._ended, self._step = [], None

    def _start(self) -> None:
        self._running = profile(
            activities=self._activities,
            record_shapes=self._details.shapes,
            profile_memory=self._details.memory,
            with_stack=self._details.stack,
        )
        self._running.start()

    def _stop(self, part: str) -> None:
        assert self._running is not None
        self._running.stop()
        self._ended.append((part, self._running))
        self._running = None


class MemorySnapshot:
    """Records what a GPU's allocator does in some steps, with who asked it; for pytorch.org/memory_viz.

    The same interface as `StepProfile`: of the whole step, in step_N_rank_R.pickle.
    """

    def __init__(self, folder: Path, rank: int, steps: Collection[int]):
        self._folder, self._rank, self._steps = folder, rank, frozenset(steps)
        self._step: int | None = None

    def begin_step(self, step: int) -> None:
        """Record this step, if it is one of those."""
        self._step = step if step in self._steps else None
        if self._step is not None:
            torch.cuda.memory._record_memory_history(
                stacks="python", max_entries=MOST_ALLOCATIONS, clear_history=True
            )

    def recorded(self, name: str, node: str | None) -> AbstractContextManager[None]:
        """Nothing of its own: a snapshot is of the whole step."""
        return nullcontext()

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Nothing: a snapshot has no intervals."""
        return nullcontext()

    def end_step(self) -> None:
        """Write what was recorded of the step; where that cannot be, say so and go on."""
        if self._step is None:
            return
        path = self._folder / f"step_{self._step}_rank_{self._rank}.pickle"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError as error:
            log.warning("%s is not written, and the run goes on: %s", path, error)
        torch.cuda.memory._record_memory_history(enabled=None)
        self._step = None


def _write(done: profile, path: Path) -> None:
    """The trace of a profile, packed: beside its place first, so that a file is whole or not there."""
    plain, packed = path.with_name(f".{path.name}.json"), path.with_name(f".{path.name}")
    try:
        done.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(packed, path)
    finally:
        for leftover in (plain, packed):
            leftover.unlink(missing_ok=True)
