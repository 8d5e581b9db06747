"""The trace of a run: what every rank did when, in the Trace Event format that Perfetto and Chrome read.

Each rank appends to a file of its own, an event a line, so that the trace of a run that died is there too; an
interval that was open then has no end. `merge_trace` makes one file of them. Clocks are aligned when the
files are written (see siirl/dag_worker/observing.py), so that merging is joining lines.
"""

import gzip
import json
import logging
import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from siirl.errors import DataError
from siirl.guarded_files import replaced

log = logging.getLogger(__name__)
FEW_STEPS, EVERY_STEPS, FEW_BYTES = (1, 2, 3, 10, 20, 50), 100, 8 << 20
"""Where nobody says which steps are traced: these of an attempt and every so manieth one, as far as they have
room in a file of this size; what was written before makes room for them.
"""
TRACE_DIR, TRACE_FILE = "trace", "trace.json.gz"
_JSON = json.JSONEncoder(separators=(",", ":"), default=str)


class TraceFile:
    """One rank's events: a process of the trace, with a lane for each thread that says what it does.

    An event is one write of about 150 bytes, made at once: what a killed process was doing is on record.
    """

    def __init__(
        self, folder: Path, rank: int, label: str, zero_s: float, steps: Collection[int] | None = ()
    ):
        """label: shown as the name of the rank. zero_s: the moment of this process's time.perf_counter that
        counts as 0, the same on all ranks. steps: trace only these; empty: all; None: a few."""
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd: int | None = os.open(folder / f"rank_{rank}.jsonl", flags, 0o644)
        self._rank, self._zero_s, self._label = rank, zero_s, label
        self._steps = None if steps is None else frozenset(steps)
        self._begun, self._few = 0, False
        self._lanes: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._write_names()

    def begin_step(self) -> None:
        """A training step begins; all ranks say so, and come to the same answer whether it is one of few."""
        self._begun += 1
        self._few = self._begun in FEW_STEPS or self._begun % EVERY_STEPS == 0
        if not self._few or self._steps is not None or self._fd is None:
            return
        if os.fstat(self._fd).st_size > FEW_BYTES:
            os.ftruncate(self._fd, 0)
            self._write_names()

    def wants(self, step: int) -> bool:
        if self._steps is None:
            return self._few
        return not self._steps or step in self._steps

    def begin(self, name: str, at_s: float) -> None:
        """An interval of this thread begins; intervals nest."""
        self._write({"ph": "B", "name": name, "ts": self._us(at_s), "tid": self._lane()})

    def end(self, at_s: float, args: dict[str, Any]) -> None:
        """The interval of this thread that began last ends."""
        self._write({"ph": "E", "ts": self._us(at_s), "tid": self._lane(), "args": args})

    def complete(self, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        """An interval that is over."""
        dur = round((end_s - start_s) * 1e6, 1)
        event = {"ph": "X", "name": name, "ts": self._us(start_s), "dur": dur, "tid": self._lane()}
        event["args"] = args
        self._write(event)

    def close(self) -> None:
        """End the file; later events are dropped."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _us(self, at_s: float) -> float:
        return round((at_s - self._zero_s) * 1e6, 1)

    def _lane(self) -> int:
        ident = threading.get_ident()
        if ident not in self._lanes:
            lane = self._lanes[ident] = len(self._lanes)
            self._names[lane] = threading.current_thread().name if lane else "instructions"
            self._write_lane(lane, self._names[lane])
        return self._lanes[ident]

    def _write_names(self) -> None:
        self._write({"ph": "M", "name": "process_name", "args": {"name": self._label}})
        self._write({"ph": "M", "name": "process_sort_index", "args": {"sort_index": self._rank}})
        for lane, name in list(self._names.items()):
            self._write_lane(lane, name)

    def _write_lane(self, lane: int, name: str) -> None:
        self._write({"ph": "M", "name": "thread_name", "tid": lane, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        if self._fd is None:
            return
        event["pid"] = self._rank
        try:
            os.write(self._fd, _JSON.encode(event).encode() + b"\n")
        except OSError as error:
            log.warning("the trace ends here, and the run goes on: %s", error)
            self.close()


def merge_trace(output_dir: Path) -> Path:
    """Join what the ranks of a run have written so far into <output_dir>/trace.json.gz; returns its path.

    DataError if there is nothing. A last line that is cut off, as a killed process leaves it, is dropped.
    """
    files = sorted((output_dir / TRACE_DIR).glob("rank_*.jsonl"), key=lambda path: (len(path.name), path))
    if not files:
        raise DataError(
            f"{output_dir / TRACE_DIR} has no rank_*.jsonl: no traced run wrote there. Give the "
            "trainer.output_dir of a run that was not started with trainer.trace=false."
        )
    out = output_dir / TRACE_FILE
    with replaced(out) as aside, gzip.open(aside, "wt", compresslevel=4, encoding="utf-8") as merged:
        merged.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for file in files:
            for line in _whole_lines(file):
                merged.write(separator + line)
                separator = ",\n"
        merged.write("\n]}\n")
    return out


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("}\n"):
                yield line[:-1]
