"""What was answered outlives the server: commands and their answers, in a file of each training client.

An entry is written before its answer is given; a server that begins again carries out the commands of all
entries, which gives the same weights, moments, and sums of gradients: on CPUs to the bit. From time to time,
and when a state was loaded, a new file begins with the state itself. An entry that was cut off by the end of
the process was not answered, and counts nothing. That a machine's disk has it is not waited for. The model of
a file that is damaged before its end is lost, and the log says so.

On the worker's thread of the first rank; no communication.
"""

import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from torch import Tensor

from siirl.engines.train.base import AdamStep
from siirl.service.commands import (
    AdapterSpec,
    Command,
    CreateModel,
    Datum,
    ForwardBackward,
    OptimStep,
    Refused,
    Release,
    Sample,
)

log = logging.getLogger(__name__)
MOST_AGE_S = 30.0
"""Of a file, from which on the next step begins a new one."""
MOST_SHARE = 0.05
"""Of the time, that is spent on new files at most."""
LEAST_FREE_BYTES = 256 << 20
"""Of the disk; below, nothing is carried out that could not be kept."""
_HEAD, _SUM = struct.Struct("<QI"), struct.Struct("<I")
"""Bytes of an entry and their sum of Adler; the sum of these two."""


@dataclass
class Kept:
    """A training client's model, as its file has it."""

    model: str
    number: int = 0
    """Of its next command."""
    state: dict[str, Any] | None = None
    """What the file began with: spec, version, tensors."""
    commands: list[Command] = field(default_factory=list)
    """Those since then that change something, in their order."""
    answers: list[tuple[int, Any]] = field(default_factory=list)
    """Number of a command, and what it was answered."""


class Journal:
    """The files of all models in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._began: dict[str, tuple[float, float]] = {}
        """Of each model: when its file began, and how long that took."""
        self.lost: dict[str, str] = {}
        """Models whose file is not what it was: why."""
        self._answers: dict[str, list[tuple[int, Any]]] = {}

    def add(self, model: str, number: int, command: Command | None, answer: Any) -> bool:
        """Write an entry; whether it is time that `begin` writes the state. OSError: nothing is written.

        command: None for one that was not carried out.
        """
        file = self._file(model)
        self._write(file, {"number": number, "answer": _plain(answer), "command": _fields(command, answer)})
        self._answers.setdefault(model, []).append((number, answer))
        began_s, took_s = self._began.setdefault(model, (time.monotonic(), 0.0))
        is_step = isinstance(command, OptimStep) and not isinstance(answer, Exception)
        return is_step and time.monotonic() - began_s >= max(MOST_AGE_S, took_s / MOST_SHARE)

    def begin(self, model: str, spec: AdapterSpec, version: int, state: dict[str, Tensor]) -> None:
        """A new file, with a state and the answers since the last one began, in its place.

        OSError: the old one stays.
        """
        answers, start_s = self._answers.get(model, []), time.monotonic()
        number = answers[-1][0] + 1 if answers else 0
        tensors = {name: _array(one.numpy()) for name, one in state.items()}
        entry = {"spec": asdict(spec), "version": version, "tensors": tensors}
        aside = self._path(model).with_suffix(".new")
        try:
            with aside.open("wb", buffering=0) as file:
                kept = [(n, _plain(a)) for n, a in answers]
                self._write(file, {"state": entry, "number": number, "answers": kept})
            os.replace(aside, self._path(model))
        finally:
            aside.unlink(missing_ok=True)
            self._began[model] = time.monotonic(), time.monotonic() - start_s
        self._answers[model] = []
        if (old := self._files.pop(model, None)) is not None:
            old.close()

    def kept(self) -> list[Kept]:
        """What the files have, of models in the order of their names, but for those that are `lost`."""
        found = [self._read(path) for path in sorted(self._folder.glob("*.journal"))]
        return [one for one in found if one.model not in self.lost]

    def problem(self, command: Command) -> str | None:
        """Why a command is not carried out: its model is lost, or nothing could be kept of it."""
        if isinstance(command, Sample | Release):
            return None
        if (why := self.lost.get(command.model)) is not None:
            return f"{command.model} is lost: {why}. Go on from saved weights, in a new model"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (free := shutil.disk_usage(self._folder).free) < LEAST_FREE_BYTES:
            return f"the server's disk is full ({free >> 20} MiB are free): nothing was done"
        return None

    def forget(self, name: str) -> None:
        """A model, or those of a session, are gone."""
        for model in [model for model in self._files if model == name or model.startswith(f"{name}:")]:
            self._files.pop(model).close()
        for model in [model for model in self.lost if model == name or model.startswith(f"{name}:")]:
            del self.lost[model]
        for path in (self._path(name), *self._folder.glob(f"{name}:*.journal")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent."""
        while self._files:
            self._files.popitem()[1].close()

    def _path(self, model: str) -> Path:
        return self._folder / f"{model}.journal"

    def _file(self, model: str) -> BinaryIO:
        if model not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._files[model] = self._path(model).open("ab", buffering=0)
        return self._files[model]

    def _write(self, file: BinaryIO, entry: dict[str, Any]) -> None:
        """An entry whole, or nothing of it: an OSError, as of a full disk, leaves the file as it was."""
        data, before = msgspec.msgpack.encode(entry), file.tell()
        head = _HEAD.pack(len(data), zlib.adler32(data))
        left = memoryview(head + _SUM.pack(zlib.adler32(head)) + data)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(before)
            raise

    def _read(self, path: Path) -> Kept:
        """What was cut off at the end goes. A file that is damaged is kept under another name."""
        found, whole = Kept(path.name.removesuffix(".journal")), 0
        try:
            whole = self._read_entries(path, found)
        except (ValueError, KeyError, TypeError) as error:
            kept = path.with_suffix(".damaged")
            os.replace(path, kept)
            self.lost[found.model] = f"what the server had kept of it is damaged ({error})"
            log.error("%s is lost: %s, %s", found.model, kept, error)
            return found
        os.truncate(path, whole)
        self._answers[found.model] = list(found.answers)
        return found

    def _read_entries(self, path: Path, found: Kept) -> int:
        """How many bytes of the file are whole entries, which are then in `found`. ValueError."""
        whole = 0
        with path.open("rb") as file:
            for entry in _entries(file):
                whole = file.tell()
                found.number = entry["number"] + ("state" not in entry)
                if "state" in entry:
                    found.state = {**entry["state"], "tensors": _tensors(entry["state"]["tensors"])}
                    found.answers = [(number, _answer(one)) for number, one in entry["answers"]]
                else:
                    found.answers.append((entry["number"], _answer(entry["answer"])))
                    if entry["command"] is not None:
                        found.commands.append(_command(entry["command"]))
        return whole


def _entries(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Until one that was cut off. ValueError for one that is there and damaged."""
    whole = _HEAD.size + _SUM.size
    while len(head := file.read(whole)) == whole:
        size, check = _HEAD.unpack_from(head)
        data = file.read(size) if _SUM.pack(zlib.adler32(head[: _HEAD.size])) == head[_HEAD.size :] else b""
        if data and len(data) < size:
            return
        if zlib.adler32(data) != check:
            raise ValueError(f"an entry that ends at byte {file.tell()}")
        yield msgspec.msgpack.decode(data)


def _array(values: np.ndarray) -> list[Any]:
    return [values.dtype.str, values.shape, np.ascontiguousarray(values).tobytes()]


def _read_array(kept: Sequence[Any]) -> np.ndarray:
    kind, shape, data = kept
    return np.frombuffer(bytearray(data), kind).reshape(shape)


def _tensors(kept: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(_read_array(one)) for name, one in kept.items()}


def _plain(answer: Any) -> Any:
    """An answer of the desk as it is written."""
    if isinstance(answer, Exception):
        return {"refused": str(answer), "ours": not isinstance(answer, Refused)}
    return {"told": answer}


def _answer(plain: dict[str, Any]) -> Any:
    if "refused" in plain:
        return (RuntimeError if plain["ours"] else Refused)(plain["refused"])
    return plain["told"]


def _fields(command: Command | None, answer: Any) -> dict[str, Any] | None:
    """A command that changes something, as it is written."""
    if isinstance(answer, Exception) and not isinstance(command, OptimStep):  # a step drops the gradient
        return None
    match command:
        case CreateModel(model=model, spec=spec):
            return {"create": asdict(spec), "model": model}
        case ForwardBackward(forward_only=False):
            data = [
                (_array(np.asarray(one.tokens, np.int32)), {k: _array(x) for k, x in one.inputs.items()})
                for one in command.data
            ]
            options = dict(command.options)
            return {"data": data, "model": command.model, "loss": command.loss, "options": options}
        case OptimStep(model=model, adam=adam):
            return {"adam": asdict(adam), "model": model}
    return None


def _command(fields: dict[str, Any]) -> Command:
    model = fields["model"]
    if "create" in fields:
        return CreateModel(model, AdapterSpec(**fields["create"]))
    if "adam" in fields:
        return OptimStep(model, AdamStep(**fields["adam"]))
    data = [
        Datum(_read_array(tokens).tolist(), {name: _read_array(one) for name, one in inputs.items()})
        for tokens, inputs in fields["data"]
    ]
    return ForwardBackward(model, fields["loss"], fields["options"], data, False)
