"""Where metrics and sampled texts go: one protocol, and the files that every run has. See also loggers.py."""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from siirl.guarded_files import json_lines, replaced
from siirl.observe.metrics import with_older_names
from siirl.observe.printable import printable
from siirl.observe.step_files import StepFiles

log = logging.getLogger(__name__)
Rows = Sequence[Mapping[str, Any]]


class Sink(Protocol):
    """A destination. Rank 0 alone has sinks; calls come from one thread, with steps that do not fall."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a step."""
        ...

    def text(self, step: int, name: str, rows: Rows) -> None:
        """Record samples: `name` is "train" or "validation"; each row has e.g. prompt, response, score."""
        ...

    def close(self) -> None:
        """Write what is pending. The sink is not used afterwards."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What the destinations want to know of a run."""

    output_dir: Path
    project: str
    experiment: str
    total_steps: int

    first_step: int
    """The step that it goes on from; 0: it starts anew."""

    config: dict[str, Any]
    sample_dirs: Mapping[str, Path]
    """Kind of samples ("train", "validation") -> folder, where it is not the default one."""

    progress: str = "bar"
    """trainer.progress."""

    prometheus_address: str = ""
    """trainer.prometheus_address."""

    prometheus_token_env: str | None = None
    """trainer.prometheus_token_env."""

    samples_bytes: float | None = None
    """trainer.samples_gib."""

    tensorboard_bytes: float | None = None
    """trainer.tensorboard_gib."""


class Sinks:
    """All sinks of a run as one; each gets metrics under their older names, too."""

    def __init__(self, sinks: Sequence[Sink]):
        self.sinks = list(sinks)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        values = with_older_names(values)
        for sink in self.sinks:
            sink.log(step, values)

    def text(self, step: int, name: str, rows: Rows) -> None:
        for sink in self.sinks:
            sink.text(step, name, rows)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class JsonlSink:
    """One JSON object per call: step, time_s (since the epoch), metric: number, ...; NaN and inf are null.

    first_step: the step that the run goes on from; lines of later steps, which it repeats, are removed, and
    what a killed run wrote of a line. 0: the file starts anew. None: nothing is removed. If the file is
    removed or replaced while it is written, all lines so far are written anew.
    """

    def __init__(self, path: Path, first_step: int | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        if first_step is not None:
            with replaced(path) as aside, aside.open("w") as kept:
                for record in json_lines(path) if first_step else ():
                    if record.get("step", 0) <= first_step:
                        kept.write(json.dumps(record) + "\n")
        self._path, self._file = path, path.open("a+")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        if not _is_at(self._file, self._path):
            self._write_anew()
        self._file.write(json.dumps({"step": step, "time_s": round(time.time(), 3), **numbers}) + "\n")
        self._file.flush()

    def text(self, step: int, name: str, rows: Rows) -> None:
        """Samples have files of their own."""

    def close(self) -> None:
        if not _is_at(self._file, self._path):
            self._write_anew()
        self._file.close()

    def _write_anew(self) -> None:
        """What was written is still in the open file, though no folder has it."""
        log.warning("%s was removed while the run goes on: it is written anew", self._path)
        self._file.seek(0)
        with replaced(self._path) as aside, self._file as lost, aside.open("w") as kept:
            shutil.copyfileobj(lost, kept)
        self._file = self._path.open("a+")


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is still the one that lies there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def last_step(path: Path) -> int:
    """Of a metrics file; 0 without any."""
    *_, last = {}, *json_lines(path)
    return int(last.get("step", 0))


class SampleSink:
    """Sampled rows as files to read (step_N.txt) and to parse (step_N.jsonl), in a folder for each kind.

    dirs: folders that somebody named, where all are kept. most_bytes: what those in any other take at most.
    """

    def __init__(self, output_dir: Path, dirs: Mapping[str, Path], most_bytes: float | None = None):
        self._output_dir = output_dir
        self._dirs = dirs
        self._files = StepFiles(most_bytes)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers go elsewhere."""

    def text(self, step: int, name: str, rows: Rows) -> None:
        folder = self._dirs.get(name, self._output_dir / "rollouts" / name)
        folder.mkdir(parents=True, exist_ok=True)
        lines, text = folder / f"step_{step}.jsonl", folder / f"step_{step}.txt"
        write_json_lines(lines, [{"step": step, **row} for row in rows])
        text.write_text(samples_text(rows), encoding="utf-8")
        if name not in self._dirs:
            self._files.added(lines, text)

    def close(self) -> None:
        """Nothing is pending."""


def write_json_lines(path: Path, rows: Rows) -> None:
    """A file of a JSON object for each row; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    # half a surrogate pair becomes its JSON escape, which reads back as what it was
    path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def samples_text(rows: Rows) -> str:
    """Samples for a reader: short values on the head line of a row, texts indented below.

    Lists and mappings are left out: they are for programs, which read the JSON lines. Characters that a
    terminal would obey are written as escapes.
    """
    blocks = []
    for index, row in enumerate(rows):
        texts = {key: printable(value) for key, value in row.items() if isinstance(value, str)}
        head = [
            f"{key}={_short(value)}"
            for key, value in row.items()
            if key not in texts and not isinstance(value, list | dict)
        ]
        body = [
            f"  {key}:\n" + "".join(f"    {line}\n" for line in text.splitlines())
            for key, text in texts.items()
        ]
        blocks.append(f"[{index}] {'  '.join(head)}\n{''.join(body)}")
    return printable("\n".join(blocks))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
