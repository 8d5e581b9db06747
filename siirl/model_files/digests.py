"""Digests of what a run reads, cheap enough for every start: small files whole, of large ones samples."""

import glob
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

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
