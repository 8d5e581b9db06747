"""What a run reads of the user's: code, tools, templates, models, datasets; known by digests, not by path.

A run records them when it begins (run.yaml, checkpoints), keeps to the code of then, and says which of them
changed meanwhile or since the checkpoint that it goes on from. No torch.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.compiler.resume_settings import counting_values
from siirl.config import Config
from siirl.user_code.load_object import keep_to
from siirl.user_code.source import find_module, is_own, own_code

WHOLE_BYTES = 4 << 20
"""Up to this size a file is read whole."""
BLOCK_BYTES = 4 << 10
NUM_BLOCKS = 256
MOST_HEADER_BYTES = 64 << 20
MOST_FILES = 1000
"""Of a folder."""


def digest_text(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_file(path: Path) -> str:
    """Of a file's size and content; of a large one, of blocks that are spread over it.

    Of a .safetensors file: its header, and a block from the middle of each tensor, so that no tensor changes
    unseen unless few of its numbers do. OSError if it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE_BYTES:
            return digest_text(file.read())
        found = hashlib.sha256(str(size).encode())
        for start, length in _blocks(path, size):
            file.seek(start)
            found.update(file.read(length))
    return found.hexdigest()[:16]


def digests_of(path: Path) -> dict[str, str]:
    """Name below the folder -> digest, of a file, of the files of a folder, or of those that a pattern names.

    Hidden files, and the compiled ones of Python, are passed over. Empty if there is nothing.
    """
    if path.is_file():
        return {path.name: digest_file(path)}
    if path.is_dir():
        inside = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
        shown = (name for name in inside if not any(part.startswith((".", "__py")) for part in name.parts))
        return {str(name): digest_file(path / name) for name in itertools.islice(shown, MOST_FILES)}
    matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else []
    return {one: digest_file(Path(one)) for one in matches[:MOST_FILES] if os.path.isfile(one)}


def _blocks(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a large file."""
    yield 0, BLOCK_BYTES
    yield max(0, size - BLOCK_BYTES), BLOCK_BYTES
    tensors = list(_tensors(path, size)) if path.suffix == ".safetensors" else []
    if tensors:
        yield 0, tensors[0][0]
        yield from ((start + (end - start) // 2, min(512, end - start)) for start, end in tensors)
        return
    step = size // (NUM_BLOCKS + 1)
    yield from ((number * step, BLOCK_BYTES) for number in range(1, NUM_BLOCKS + 1))


def _tensors(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Where the tensors of a .safetensors file begin and end; nothing if it is none."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size, MOST_HEADER_BYTES):
            return
        try:
            header = json.loads(file.read(length))
            places = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, KeyError, TypeError):
            return
    yield from sorted((8 + length + start, 8 + length + end) for start, end in places)


REFERENCE = re.compile(r"(?P<where>[\w./~@+-]+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
MODULE_KEYS = ("*custom_reward_function.path", "*.external_lib")
"""Keys whose values may be modules."""
PATH_KEYS = ("*path", "*files", "*.tokenizer", "*_dir", "*.lora_adapter*")
"""Keys whose values are files and folders, even if they look like a plain word."""
CODE_SUFFIXES = (".py", ".sh", ".toml", ".js")
"""Of files that count wherever they are named; a file of another kind may be one that the run writes."""
KEPT_SUFFIXES = (".yaml", ".yml", ".jinja", ".jinja2", ".txt", ".md")
MOST_KEPT_BYTES = 1 << 20


@dataclass(frozen=True)
class RunInputs:
    """What a run reads, as it was at one moment. Names are "KEY, FILE"."""

    digests: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Name -> path in full."""
    texts: dict[str, str] = field(default_factory=dict)
    """Real path -> text, of code, tools and templates."""

    def is_kept(self, name: str) -> bool:
        """Whether workers keep to the text of this input, whatever its file says later."""
        return os.path.realpath(self.files[name]) in self.texts

    def changed(self) -> dict[str, str]:
        """Name -> path of what is another one now, or gone."""
        return {name: path for name, path in self.files.items() if _digest_now(path) != self.digests[name]}


def inputs_of(cfg: Config, plan: Plan | None) -> RunInputs:
    """All that the counting settings and the workflow name and that is here: see resume_settings.FREE."""
    found = RunInputs()
    named = [(name, text) for name, value in counting_values(cfg, plan).items() for text in _texts(value)]
    if plan is not None:
        named += [("workflow", text) for text in _texts(json.loads(plan.to_json())["interactions"])]
    for name, text in named:
        with contextlib.suppress(OSError):  # what cannot be read is refused by who needs it
            _add(found, name, text, None)
    return found


def _add(found: RunInputs, name: str, text: str, beside: Path | None) -> None:
    """Take in what a text names, if it names a file, folder or module.

    beside: the folder of the file that has the text; None: it is the key's own value.
    """
    for path in _named(name, text, beside):
        if path.suffix == ".py" and path.is_file():
            for inner, file in own_code(path).items():
                _add_file(found, f"{name}, {inner}", file, file.read_bytes(), True)
            continue
        for inner, digest in digests_of(path).items():
            file = path if path.is_file() else path / inner
            label = f"{name}, {inner}"
            if path.is_file() and path.suffix in KEPT_SUFFIXES and path.stat().st_size <= MOST_KEPT_BYTES:
                if label not in found.digests:
                    _add_file(found, label, file, file.read_bytes(), not name.startswith("data."))
                    for more in _texts_of_yaml(file):
                        _add(found, name, more, file.parent)
            else:
                found.digests[label], found.files[label] = digest, str(file.absolute())


def _add_file(found: RunInputs, label: str, file: Path, content: bytes, keep: bool) -> None:
    found.digests[label], found.files[label] = digest_text(content), str(file.absolute())
    if keep:
        with contextlib.suppress(UnicodeDecodeError):
            found.texts[os.path.realpath(file)] = content.decode()


def _named(name: str, text: str, beside: Path | None) -> Iterator[Path]:
    """Files and folders that a value names: as a path, as "file.py:name", "pkg.mod:name", or in a command.

    A folder inside a file of tools (beside) is none: a server's environment may say where it writes.
    """
    if not text or len(text) > 4096 or "\0" in text or "://" in text:
        return
    if reference := REFERENCE.fullmatch(text):
        text = reference["where"]
        if not text.endswith(".py"):
            yield from _module(text)
            return
    whole = beside is None and any(fnmatchcase(name, pattern) for pattern in PATH_KEYS)
    words = [text]
    if any(space in text for space in " \t\n"):
        with contextlib.suppress(ValueError):
            words += shlex.split(text)
    for word in words:
        path = Path(word).expanduser()
        path = beside / path if beside is not None and (beside / path).exists() else path
        if (whole and word == text and (path.exists() or any(mark in word for mark in "*?["))) or (
            path.suffix in (*CODE_SUFFIXES, *KEPT_SUFFIXES) and path.is_file()
        ):
            yield path
        elif word == text and DOTTED.fullmatch(word) and beside is not None:  # a tool, as verl writes it
            yield from _module(word.rpartition(".")[0])
        elif word == text and any(fnmatchcase(name, pattern) for pattern in MODULE_KEYS):
            yield from _module(word)


def _module(name: str) -> Iterator[Path]:
    source = find_module(name)
    if source is not None and is_own(source):
        yield source


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _texts(item)


def _texts_of_yaml(file: Path) -> list[str]:
    if file.suffix not in (".yaml", ".yml"):
        return []
    import yaml

    try:
        return list(_texts(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except (yaml.YAMLError, ValueError, RecursionError):  # who reads it for good says so
        return []


def _digest_now(path: str) -> str | None:
    try:
        return next(iter(digests_of(Path(path)).values()), None)
    except OSError:
        return None


class ChangeWatch:
    """Says of each input once that its file has changed since the run began."""

    def __init__(self, inputs: RunInputs):
        self._inputs = inputs
        self._seen = {path: _stamp(path) for path in inputs.files.values()}

    def look(self) -> list[str]:
        """A line for each input that was changed since the last look; only what looks changed is read."""
        lines = []
        for name, path in self._inputs.files.items():
            stamp = _stamp(path)
            if stamp == self._seen[path]:
                continue
            self._seen[path] = stamp
            if _digest_now(path) == self._inputs.digests[name]:
                continue
            what = "changed" if stamp else "removed"
            after = "what this run reads of it from now on is another"
            if self._inputs.is_kept(name):
                after = "this run keeps to what it was when the run began (the copy is in its folder, code/)"
            lines.append(f"{path} was {what} while the run goes on ({name}): {after}")
        return lines


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


_began_with = RunInputs()


def begin_with(inputs: RunInputs) -> None:
    """In a process of the run: keep to the code that it began with."""
    global _began_with
    _began_with = inputs
    keep_to(inputs.texts)


def began_with() -> RunInputs:
    """What the run of this process reads, as it was when the run began."""
    return _began_with
