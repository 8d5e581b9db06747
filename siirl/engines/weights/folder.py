"""Weights of one version in a folder: written aside, current by a rename, read tensor by tensor."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 1 << 30
"""Tensors are written together up to this size, and held in host memory until then."""
INDEX = "files.json"

Named = tuple[str, Tensor]


def write_weights(root: Path, version: int, tensors: Iterator[Named]) -> None:
    """Write all tensors as root/version_<version>, complete or not at all; older versions go. OSError."""
    root.mkdir(parents=True, exist_ok=True)
    final, aside = _folder(root, version), root / "partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    files: list[str] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held:
            files.append(f"weights_{len(files)}.safetensors")
            save_file(held, aside / files[-1])
            held.clear()

    for name, tensor in tensors:
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(part.nbytes for part in held.values()) >= FILE_BYTES:
            flush()
    flush()
    (aside / INDEX).write_text(json.dumps(files))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    for other in root.glob("version_*"):
        if other != final:
            shutil.rmtree(other, ignore_errors=True)


def read_weights(root: Path, version: int) -> Iterator[Named]:
    """The tensors of root/version_<version>, on the CPU, as they were written. OSError if it is not there."""
    folder = _folder(root, version)
    for name in json.loads((folder / INDEX).read_text()):
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():
                yield key, file.get_tensor(key)


def _folder(root: Path, version: int) -> Path:
    return root / f"version_{version}"
