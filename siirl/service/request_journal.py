"""What was answered outlives the server: commands and their answers, in a file of each training client.

An entry is written before its answer is given; a server that begins again carries out the commands of all
entries, which gives the same weights, moments, and sums of gradients: on CPUs to the bit. After MOST_STEPS
steps, and when a state was loaded, a new file begins with the state itself. An entry that was cut off by the
end of the process was not answered, and counts nothing. That a machine's disk has it is not waited for.

On the worker's thread of the first rank; no communication.
"""

import io
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

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
)

MOST_STEPS = 16
MOST_BYTES = 64 << 20
"""Of a file, from which on the next step begins a new one."""
_HEAD = struct.Struct("<QI")
"""Bytes of an entry, and their sum of Adler."""


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
        self._steps: dict[str, int] = {}
        self._answers: dict[str, list[tuple[int, Any]]] = {}

    def add(self, model: str, number: int, command: Command, answer: Any) -> bool:
        """Write an entry; whether it is time that `begin` writes the state."""
        file = self._file(model)
        self._write(file, {"number": number, "answer": _plain(answer), "command": _fields(command, answer)})
        self._answers.setdefault(model, []).append((number, answer))
        self._steps[model] = self._steps.get(model, 0) + isinstance(command, OptimStep)
        is_step = isinstance(command, OptimStep) and not isinstance(answer, Exception)
        return is_step and (self._steps[model] >= MOST_STEPS or file.tell() > MOST_BYTES)

    def begin(self, model: str, spec: AdapterSpec, version: int, state: dict[str, Tensor]) -> None:
        """A new file, with a state and the answers since the last one began, in its place."""
        answers = self._answers.pop(model, [])
        number = answers[-1][0] + 1 if answers else 0
        told = {"spec": asdict(spec), "version": version, "tensors": state}
        aside = self._path(model).with_suffix(".new")
        with aside.open("wb") as file:
            self._write(
                file, {"state": told, "number": number, "answers": [(n, _plain(a)) for n, a in answers]}
            )
        os.replace(aside, self._path(model))
        if (old := self._files.pop(model, None)) is not None:
            old.close()
        self._steps[model] = 0

    def kept(self) -> list[Kept]:
        """What the files have, of models in the order of their names."""
        return [self._read(path) for path in sorted(self._folder.glob("*.journal"))]

    def forget(self, name: str) -> None:
        """A model, or those of a session, are gone."""
        for model in [model for model in self._files if model == name or model.startswith(f"{name}:")]:
            self._files.pop(model).close()
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
            self._files[model] = self._path(model).open("ab")
        return self._files[model]

    def _write(self, file: BinaryIO, entry: dict[str, Any]) -> None:
        packed = io.BytesIO()
        torch.save(entry, packed)
        data = packed.getvalue()
        file.write(_HEAD.pack(len(data), zlib.adler32(data)) + data)
        file.flush()

    def _read(self, path: Path) -> Kept:
        """What was cut off at the end goes."""
        found, whole = Kept(path.name.removesuffix(".journal")), 0
        with path.open("rb") as file:
            for entry in _entries(file):
                whole = file.tell()
                found.number = entry["number"] + ("state" not in entry)
                if "state" in entry:
                    found.state = entry["state"]
                    found.answers = [(number, _answer(one)) for number, one in entry["answers"]]
                else:
                    found.answers.append((entry["number"], _answer(entry["answer"])))
                    if entry["command"] is not None:
                        found.commands.append(_command(entry["command"]))
        os.truncate(path, whole)
        self._answers[found.model] = list(found.answers)
        self._steps[found.model] = sum(isinstance(one, OptimStep) for one in found.commands)
        return found


def _entries(file: BinaryIO) -> Iterator[dict[str, Any]]:
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        size, check = _HEAD.unpack(head)
        data = file.read(size)
        if len(data) < size or zlib.adler32(data) != check:
            return
        yield torch.load(io.BytesIO(data), weights_only=True)


def _plain(answer: Any) -> Any:
    """An answer of the desk as torch.save takes it without code."""
    if isinstance(answer, bytes):
        return {"bytes": torch.frombuffer(bytearray(answer), dtype=torch.uint8)}
    if isinstance(answer, Exception):
        return {"refused": str(answer), "ours": not isinstance(answer, Refused)}
    return {"told": answer}


def _answer(plain: dict[str, Any]) -> Any:
    if "bytes" in plain:
        return plain["bytes"].numpy().tobytes()
    if "refused" in plain:
        return (RuntimeError if plain["ours"] else Refused)(plain["refused"])
    return plain["told"]


def _fields(command: Command, answer: Any) -> dict[str, Any] | None:
    """A command that changes something, as torch.save takes it."""
    if isinstance(answer, Exception) and not isinstance(command, OptimStep):  # a step drops the gradient
        return None
    match command:
        case CreateModel(model=model, spec=spec):
            return {"create": asdict(spec), "model": model}
        case ForwardBackward(forward_only=False):
            data = [
                (one.tokens, {name: torch.from_numpy(x.copy()) for name, x in one.inputs.items()})
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
    data = [Datum(row, {name: one.numpy() for name, one in inputs.items()}) for row, inputs in fields["data"]]
    return ForwardBackward(model, fields["loss"], fields["options"], data, False)
