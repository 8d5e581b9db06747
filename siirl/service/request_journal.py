"""What was answered outlives the server: commands and their answers, in a file of each training client.

An entry is written before its answer is given; a server that begins again carries out the commands of all
entries, which gives the same weights, moments, and sums of gradients: on CPUs to the bit. From time to time,
and when a state was loaded, a new file begins with the state itself. A thread writes it, under another name;
entries of meanwhile are in the old file, and come behind the state before the new one takes its place. An
entry that was cut off by the end of the process was not answered, and counts nothing. That a machine's disk
has it is not waited for. The model of a file that is damaged before its end is lost, and the log says so.

On the worker's thread of the first rank, but for `_NewFile.write`; no communication.
"""

import io
import logging
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
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


class _NewFile:
    """A file that begins with a state, until it takes the place of its model's.

    consumes: a copy of the state. produces: a file. waits for: the disk. unblocked by: it, `drop`.
    """

    def __init__(self, path: Path, state: Mapping[str, Tensor], head: dict[str, Any]) -> None:
        """head: what is to be kept besides the tensors."""
        self.path = path
        self.later: list[bytes] = []
        """Entries that the old file has got meanwhile."""
        self.answers: list[tuple[int, Any]] = []
        """What its model's commands were answered before."""
        self.took_s = 0.0
        self.error: OSError | None = None
        self._state, self._head = state, head
        self._is_dropped = False
        self._thread = threading.Thread(target=self.write, name="state of a model", daemon=True)

    def start(self) -> None:
        """Have a thread write it."""
        self._thread.start()

    @property
    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def write(self) -> None:
        """All of it; what goes wrong is `error`."""
        start_s = time.monotonic()
        try:
            with self.path.open("wb", buffering=0) as file:
                for name, one in self._state.items():
                    if self._is_dropped:
                        return
                    _write(file, _packed({"tensor": name, "values": _array(one.numpy())}))
                _write(file, _packed(self._head))
        except OSError as error:  # told by whoever waits for the file
            self.error = error
        finally:
            self._state, self.took_s = {}, time.monotonic() - start_s

    def drop(self) -> None:
        """It is not needed any more."""
        self._is_dropped = True
        if self._thread.ident is not None:
            self._thread.join()
        self.path.unlink(missing_ok=True)


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
        """Of each model, since its file began."""
        self._new: dict[str, _NewFile] = {}
        """The one that a thread writes, by its model."""

    def add(self, model: str, number: int, command: Command | None, answer: Any) -> bool:
        """Write an entry; whether it is time that `begin` writes the state. OSError: nothing is written.

        command: None for one that was not carried out.
        """
        entry = _packed({"number": number, "answer": _plain(answer), "command": _fields(command, answer)})
        _write(self._file(model), entry)
        self._answers.setdefault(model, []).append((number, answer))
        if model in self._new:
            self._new[model].later.append(entry)
        self._end_written()
        began_s, took_s = self._began.setdefault(model, (time.monotonic(), 0.0))
        is_step = isinstance(command, OptimStep) and not isinstance(answer, Exception) and not self._new
        return is_step and time.monotonic() - began_s >= max(MOST_AGE_S, took_s / MOST_SHARE)

    def begin(
        self, model: str, spec: AdapterSpec, version: int, state: Mapping[str, Tensor], at_once: bool = False
    ) -> None:
        """A new file, with a state and the answers since the last one began, takes the place of the old one
        when a thread has written it. state: nobody changes it.

        at_once: when this returns. OSError: the old one stays.
        """
        if (before := self._new.pop(model, None)) is not None:
            self._drop(model, before)
        answers = self._answers.pop(model, [])
        told = {"spec": asdict(spec), "version": version}
        kept = [(n, _plain(a)) for n, a in answers]
        head = {"state": told, "number": answers[-1][0] + 1 if answers else 0, "answers": kept}
        new = _NewFile(self._path(model).with_suffix(".new"), state, head)
        new.answers = answers
        if at_once:
            new.write()
            self._take(model, new)
        else:
            self._new[model] = new
            new.start()

    def _end_written(self) -> None:
        """Have the new file that a thread has written take its place; a full disk costs no more than that."""
        for model in [model for model, new in self._new.items() if new.is_written]:
            try:
                self._take(model, self._new.pop(model))
            except OSError:
                log.warning("the state of %s could not be written: later, again", model, exc_info=True)

    def _take(self, model: str, new: _NewFile) -> None:
        """It is the file of its model from now on. OSError: the old one stays."""
        try:
            if new.error is not None:
                raise new.error
            with new.path.open("ab", buffering=0) as file:
                for entry in new.later:
                    _write(file, entry)
            os.replace(new.path, self._path(model))
        except OSError:
            self._drop(model, new)
            raise
        finally:
            self._began[model] = time.monotonic(), new.took_s
        if (old := self._files.pop(model, None)) is not None:
            old.close()

    def _drop(self, model: str, new: _NewFile) -> None:
        """The old file stays that of its model."""
        new.drop()
        self._answers[model] = new.answers + self._answers.get(model, [])

    def kept(self) -> list[Kept]:
        """What the files have, of models in the order of their names, but for those that are `lost`."""
        for path in self._folder.glob("*.new"):  # an earlier server has ended amid it
            path.unlink()
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
        for held in (self._new, self._files, self.lost, self._answers, self._began):
            for model in [model for model in held if model == name or model.startswith(f"{name}:")]:
                one = held.pop(model)
                if isinstance(one, _NewFile):
                    one.drop()
                elif isinstance(one, io.IOBase):
                    one.close()
        for path in (self._path(name), *self._folder.glob(f"{name}:*.journal")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent. What was not written yet is in the old file."""
        while self._new:
            self._new.popitem()[1].drop()
        while self._files:
            self._files.popitem()[1].close()

    def _path(self, model: str) -> Path:
        return self._folder / f"{model}.journal"

    def _file(self, model: str) -> BinaryIO:
        if model not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._files[model] = self._path(model).open("ab", buffering=0)
        return self._files[model]

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
        whole, tensors = 0, dict[str, Tensor]()
        with path.open("rb") as file:
            for entry in _entries(file):
                whole = file.tell()
                if "tensor" in entry:
                    tensors[entry["tensor"]] = torch.from_numpy(_read_array(entry["values"]))
                    continue
                found.number = entry["number"] + ("state" not in entry)
                if "state" in entry:
                    found.state = {**entry["state"], "tensors": tensors}
                    found.answers = [(number, _answer(one)) for number, one in entry["answers"]]
                else:
                    found.answers.append((entry["number"], _answer(entry["answer"])))
                    if entry["command"] is not None:
                        found.commands.append(_command(entry["command"]))
        return whole


def _packed(entry: dict[str, Any]) -> bytes:
    """An entry as it stands in a file."""
    data = msgspec.msgpack.encode(entry)
    head = _HEAD.pack(len(data), zlib.adler32(data))
    return b"".join((head, _SUM.pack(zlib.adler32(head)), data))


def _write(file: BinaryIO, entry: bytes) -> None:
    """An entry whole, or nothing of it: an OSError, as of a full disk, leaves the file as it was."""
    before, left = file.tell(), memoryview(entry)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(before)
        raise


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
