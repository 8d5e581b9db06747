"""A checkpoint as a Hugging Face model directory, in one process, without the ranks that saved it."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from siirl.checkpoint import files
from siirl.checkpoint.hf import declared_dtype, save_hf
from siirl.checkpoint.writer import STATE_FILE
from siirl.data.stored_tensors import load_tensors, stored_tensors
from siirl.errors import CheckpointError, ConfigError

READ_BYTES = 2 * 10**9
_PREFIX = "model/"


def export_hf(checkpoint: Path, out: Path, model: str | None = None) -> Path:
    """Write the weights of one model of a checkpoint, with its config and tokenizer, to `out`; return it.

    model: e.g. "agent_0.actor"; None: the only one. Adapters are merged. The type is the one that the model's
    config.json declares. At most a shard and one read are in memory. CheckpointError if the checkpoint is
    damaged.
    """
    checkpoint = current(Path(checkpoint))
    name = _choose(checkpoint, files.read_manifest(checkpoint)["models"], model)
    files.verify(checkpoint, under=f"{name}/")
    return export_folder(checkpoint / name, Path(out))


def export_folder(folder: Path, out: Path) -> Path:
    """export_hf of a model's folder alone, whose files are not compared with a manifest."""
    if not (folder / "hf" / "config.json").exists():
        raise CheckpointError(f"{folder}/hf has no config.json: a model without it cannot be exported.")
    save_hf(_weights(folder, declared_dtype(folder / "hf")), str(folder / "hf"), out, rank=0)
    return out


def current(path: Path) -> Path:
    """`path` itself if it is a checkpoint; the current one if it is a folder of checkpoints."""
    step = files.current_step(path)
    return path if step is None else files.step_folder(path, step)


def _choose(checkpoint: Path, names: list[str], wanted: str | None) -> str:
    if wanted in names:
        return str(wanted)
    if wanted is None and len(names) == 1:
        return names[0]
    problem = "has several models" if wanted is None else f"has no model {wanted!r}"
    raise ConfigError(f"{checkpoint} {problem}. Choose one of {', '.join(names)}.")


def _weights(folder: Path, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under HF names, read a few at a time; adapters merged into the weights they belong to."""
    stored = {name: entry for name, entry in stored_tensors(folder).items() if name.startswith(_PREFIX)}
    if not stored:
        raise CheckpointError(f"{folder} holds no weights: it was saved without save_contents 'model'.")
    alpha = json.loads((folder / STATE_FILE).read_text())["lora_alpha"]
    batch: list[str] = []
    batch_bytes = 0
    for name in (name for name in stored if ".lora_" not in name):
        num_bytes = stored[name].size.numel() * stored[name].properties.dtype.itemsize
        if batch and batch_bytes + num_bytes > READ_BYTES:
            yield from _read(folder, batch, stored, alpha, dtype)
            batch, batch_bytes = [], 0
        batch.append(name)
        batch_bytes += num_bytes
    yield from _read(folder, batch, stored, alpha, dtype)


def _read(folder, names, stored, alpha, dtype) -> Iterator[tuple[str, Tensor]]:
    adapters = {name: _adapter_names(name) for name in names if _adapter_names(name)[0] in stored}
    wanted = [*names, *(adapter for pair in adapters.values() for adapter in pair)]
    tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in wanted}
    load_tensors(tensors, folder, None)
    for name in names:
        tensor = tensors[name]
        if name in adapters:
            a, b = (tensors[adapter].float() for adapter in adapters[name])
            if alpha is None:
                raise CheckpointError(f"{folder} has LoRA adapters but no lora_alpha: they cannot be merged.")
            tensor = torch.addmm(tensor.float(), b, a, alpha=alpha / a.shape[0])
        hf_name = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        yield hf_name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _adapter_names(name: str) -> tuple[str, str]:
    """Names of the adapter pair of "<module>.base_layer.weight"."""
    module = name.removesuffix(".base_layer.weight")
    return f"{module}.lora_A.default.weight", f"{module}.lora_B.default.weight"
