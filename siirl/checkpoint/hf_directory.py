"""Hugging Face model directories: companions of the weights are copied, weights become safetensors shards."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from siirl.disk import naming
from siirl.model_files.directory import model_dir

SHARD_BYTES = 5 * 10**9
NO_CHANGES: Mapping[str, Any] = {}
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")


def copy_hf_files(model_path: str, out: Path, config_changes: Mapping[str, Any] = NO_CHANGES) -> None:
    """Copy config, tokenizer, chat template and custom code of a model, not its weights.

    config_changes: keys of config.json that the copy has instead.
    """
    source = model_dir(model_path)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COMPANIONS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    _change_config(out / "config.json", config_changes)


def save_hf(
    weights: Iterator[tuple[str, Tensor]],
    model_path: str,
    out: Path,
    rank: int,
    config_changes: Mapping[str, Any] = NO_CHANGES,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `weights`, full tensors under HF names, as a model directory that transformers and vLLM load.

    Every rank of the model calls it and exhausts the iterator; rank 0 writes, at most one shard in memory.
    `out` appears complete, by a rename, and replaces an earlier one.
    """
    if rank != 0:
        for _ in weights:
            pass
        return
    aside = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        copy_hf_files(model_path, aside, config_changes)
        dtype = _write_shards(weights, aside, shard_bytes)
        _declare_dtype(aside / "config.json", dtype)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(aside, out)
    finally:
        for _ in weights:  # after an error here the other ranks are still in the middle of theirs
            pass


def declared_dtype(folder: Path) -> torch.dtype | None:
    """The type that config.json of a model directory declares for its weights; None if it declares none."""
    config = json.loads((folder / "config.json").read_text())
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


def _write_shards(weights: Iterator[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> torch.dtype:
    """Write model-*.safetensors and, if several, their index; return the type of the first float tensor."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0
    dtype = torch.float32

    def flush() -> None:
        with naming(folder / f"shard-{len(shards)}"):
            save_file(held, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and held_bytes + num_bytes > shard_bytes:
            flush()
            held_bytes = 0
        if not total_bytes and tensor.is_floating_point():
            dtype = tensor.dtype
        # a copy: an engine may yield its live weight, or reuse one buffer
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held_bytes += num_bytes
        total_bytes += num_bytes
    flush()
    _name_shards(folder, shards, total_bytes)
    return dtype


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        os.replace(folder / "shard-0", folder / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(shards):
        file_name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(folder / f"shard-{index}", folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))


def _declare_dtype(config_path: Path, dtype: torch.dtype) -> None:
    """Make config.json name the type that the weights have."""
    config = json.loads(config_path.read_text())
    keys = {"dtype"} | ({"torch_dtype"} & config.keys())
    _change_config(config_path, dict.fromkeys(keys, str(dtype).removeprefix("torch.")))


def _change_config(config_path: Path, changes: Mapping[str, Any]) -> None:
    if changes:
        config = json.loads(config_path.read_text())
        config_path.write_text(json.dumps(config | changes, indent=2))
