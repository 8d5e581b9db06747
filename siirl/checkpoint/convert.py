"""Weights between a Hugging Face directory and a distributed checkpoint, in one process and little memory.

The distributed form is the folder of a model in a checkpoint, without an optimizer:

OUT/.metadata, __0_*.distcp   "model/<Hugging Face name>" -> tensor, in pieces of CHUNK_BYTES at most
OUT/state.json                no schedule, no version
OUT/hf/                       config and tokenizer

Each rank of a model of any strategy and layout reads the rectangles that it holds of it, nothing more.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from siirl.checkpoint import files, state_tree
from siirl.checkpoint.export import copy_hf_files, export_folder, export_hf
from siirl.checkpoint.files import STATE_FILE
from siirl.errors import ConfigError
from siirl.model_files.directory import check_weight_files, model_dir
from siirl.model_files.stored_tensors import INDEX_FILE, ChunkedTensor, save_tensors
from siirl.model_files.weight_slices import SafetensorsFolder

CHUNK_BYTES = 64 << 20


def convert(source: Path, out: Path, model: str | None = None) -> str:
    """Write the weights of `source` to `out` in the other form; return what was written, in words.

    source: a Hugging Face directory, a distributed checkpoint as above, or a checkpoint of a run (model:
    which of its models; None: the only one). `out` appears complete, by a rename. ConfigError if `source` is
    none of them or `out` exists, DataError or CheckpointError if it is damaged.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    if out.exists():
        raise ConfigError(f"{out} exists already. Remove it, or choose another directory.")
    if (source / INDEX_FILE).is_file():
        export_folder(source, out)
    elif files.current_step(source) is not None or (source / files.MANIFEST).is_file():
        export_hf(source, out, model)
    elif (source / "config.json").is_file():
        to_distributed(source, out)
        return "a distributed checkpoint: for megatron.use_dist_checkpointing and dist_checkpointing_path"
    else:
        raise ConfigError(
            f"{source} is neither a Hugging Face model (with config.json), nor a distributed checkpoint "
            f"(with {INDEX_FILE}), nor a checkpoint of a run (with {files.MANIFEST}). Give one of them."
        )
    return "a Hugging Face model"


def to_distributed(source: Path, out: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Write a Hugging Face directory as a distributed checkpoint, a piece of a tensor in memory at a time."""
    check_weight_files(model_dir(str(source)))
    aside = out.with_name(out.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with SafetensorsFolder(source) as weights:
        state = {name: FileTensor(weights, name, chunk_bytes) for name in weights.names()}
        values, tensors = state_tree.split(state, "model")
        save_tensors(tensors, aside, None)
    copy_hf_files(str(source), aside / "hf")
    files.write_file(aside / STATE_FILE, json.dumps({"lora_alpha": None, "state": {"model": values}}))
    files.sync_folders(aside)
    os.replace(aside, out)


class FileTensor(ChunkedTensor):
    """A tensor of a model directory that is read when it is written: for checkpoints, not for computing."""

    @staticmethod
    def __new__(cls, weights: SafetensorsFolder, name: str, chunk_bytes: int) -> "FileTensor":
        like = weights.like(name)
        tensor = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("cpu"))
        tensor.weights, tensor.name_in_file, tensor.chunk_bytes = weights, name, chunk_bytes
        return tensor

    def __repr__(self) -> str:
        return f"FileTensor({self.name_in_file}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on a {args[0]!r}: it only enters checkpoints")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.ndim or not self.numel():
            return [ChunkStorageMetadata(torch.Size([0] * self.ndim), self.shape)]
        row_bytes = self.numel() // self.shape[0] * self.element_size()
        step = max(1, self.chunk_bytes // row_bytes)
        return [
            ChunkStorageMetadata(
                torch.Size([row, *[0] * (self.ndim - 1)]),
                torch.Size([min(step, self.shape[0] - row), *self.shape[1:]]),
            )
            for row in range(0, self.shape[0], step)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunk = next(chunk for chunk in self.__create_chunk_list__() if chunk.offsets == index.offset)
        first = chunk.offsets[0] if self.ndim else 0
        return self.weights.part(self.name_in_file, first, first + chunk.sizes[0] if self.ndim else 0)
