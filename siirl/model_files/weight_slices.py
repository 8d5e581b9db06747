"""Slices of the tensors of a Hugging Face model directory, read as they are asked for, quantised ones as
plain numbers; and LoRA adapters as peft stores them, written. No communication.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from siirl.errors import DataError
from siirl.model_files.directory import INDEX, WEIGHTS
from siirl.model_files.quantised import plain_names, slice_of
from siirl.models.trained import weight_block


def declared_dtype(folder: Path) -> torch.dtype | None:
    """The type that config.json of a model directory declares for its weights; None if it declares none."""
    config = json.loads((folder / "config.json").read_text())
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


class SafetensorsFolder:
    """Slices of the tensors of a model directory; a context manager."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, tuple[Any, frozenset[str]]] = {}
        index = folder / INDEX
        self._file_of = json.loads(index.read_text())["weight_map"] if index.is_file() else None
        self._block = weight_block(json.loads((folder / "config.json").read_text()))
        self._dtype = declared_dtype(folder) or torch.bfloat16

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        """All tensors, file by file."""
        files = [WEIGHTS] if self._file_of is None else sorted(set(self._file_of.values()))
        return plain_names(name for file in files for name in self._opened(file)[0].keys())

    def stored_type(self, name: str) -> torch.dtype | None:
        """The type in which the files have a tensor of their own; None: they have none of that name."""
        found = self._stored(name)
        return None if found is None else found[:0].dtype if found.get_shape() else found[...].dtype

    def like(self, name: str) -> Tensor:
        """A tensor without memory, of the type and shape of one that is there."""
        part = self.tensor_slice(name)
        shape = part.get_shape()
        return torch.empty(shape, dtype=(part[0:0] if shape else part[...]).dtype, device="meta")

    def part(self, name: str, first: int, last: int) -> Tensor:
        """Rows first to last - 1 of a tensor that is there; all of one without dimensions."""
        part = self.tensor_slice(name)
        return part[first:last] if part.get_shape() else part[...]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self.tensor_slice(name) is not None

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int],
        columns: tuple[int, int] | None,
        expert: int | None = None,
    ) -> Tensor:
        """A rectangle of a tensor, which must have this whole shape. DataError if there is none such.

        expert: of which one the rectangle is, where the tensor has those of several, [E, ...].
        """
        part = self.tensor_slice(name)
        if part is None:
            raise DataError(
                f"{self._folder} has no tensor {name}: its config.json describes another model. "
                "Check the directory, or override_config."
            )
        if tuple(part.get_shape()) != shape:
            raise DataError(
                f"{self._folder}: {name} has the shape {part.get_shape()}, and config.json means "
                f"{list(shape)}. Check the directory, or override_config."
            )
        index = (slice(*rows),) if columns is None else (slice(*rows), slice(*columns))
        return part[index] if expert is None else part[(slice(expert, expert + 1), *index)][0]

    def tensor_slice(self, name: str) -> Any:
        """What reads of a tensor what it is indexed by; None if there is none of that name."""
        return slice_of(name, self._stored, self._dtype, self._block)

    def _stored(self, name: str) -> Any:
        """The same of one of the files, as it is there."""
        file = WEIGHTS if self._file_of is None else self._file_of.get(name)
        if file is None:
            return None
        opened, names = self._opened(file)
        return opened.get_slice(name) if name in names else None

    def _opened(self, file: str) -> tuple[Any, frozenset[str]]:
        if file not in self._open:
            opened = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            self._open[file] = opened, frozenset(opened.keys())
        return self._open[file]


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, base: str | None = None
) -> None:
    """Write an adapter into an existing folder.

    tensors: "<module>.lora_A.weight" [rank, in] and "<module>.lora_B.weight" [out, rank] of each module.
    base: directory or name of the model that it belongs to. The text part of a model that sees images is
    named module by module, as others of its layers may end in the same names.
    """
    modules = {name.rpartition(".lora_")[0] for name in tensors}
    apart = any(".language_model." in module for module in modules)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules if apart else {module.rpartition(".")[2] for module in modules}),
        "bias": "none",
    }
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
