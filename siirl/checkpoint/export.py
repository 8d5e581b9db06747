"""Hugging Face model directories: companions of the weights are copied, weights become safetensors shards. A
checkpoint becomes one in one process, without the ranks that saved it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from siirl.checkpoint import files
from siirl.checkpoint.files import STATE_FILE
from siirl.disk import naming
from siirl.errors import CheckpointError, ConfigError, DataError
from siirl.model_files.directory import model_dir, weights_digest
from siirl.model_files.requantised import Released
from siirl.model_files.stored_tensors import load_tensors, stored_tensors
from siirl.model_files.weight_slices import SafetensorsFolder, declared_dtype, write_adapter
from siirl.models.trained import own_type

SHARD_BYTES = 5 * 10**9
NO_CHANGES: Mapping[str, Any] = {}
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")


def copy_hf_files(model_path: str, out: Path, config_changes: Mapping[str, Any] = NO_CHANGES) -> None:
    """Copy config, tokenizer, chat template and custom code of a model, not its weights.

    config_changes: keys of config.json that the copy has instead. Of quantised files: those of plain numbers.
    """
    source = model_dir(model_path)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COMPANIONS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    _change_config(out / "config.json", {"quantization_config": None} | dict(config_changes))


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
        if "dtype" not in config_changes:
            _declare_dtype(aside / "config.json", dtype)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(aside, out)
    finally:
        for _ in weights:  # after an error here the other ranks are still in the middle of theirs
            pass


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
    config = json.loads(config_path.read_text())
    changed = config | dict(changes)
    if changed.get("quantization_config") is None:
        changed.pop("quantization_config", None)
    if changed != config:
        config_path.write_text(json.dumps(changed, indent=2))


READ_BYTES = 2 * 10**9
_PREFIX = "model/"
Typed = Callable[[str, Tensor], Tensor]
"""A tensor in the type that the export has it in, by its name."""


def export_adapter(checkpoint: Path, out: Path, model: str | None = None, base: Path | None = None) -> Path:
    """Write the LoRA adapter of one model of a checkpoint alone, as peft stores it, to `out`; return it.

    base: what it names as its base, instead of where that was; neither is read. `out` appears complete, by a
    rename. ConfigError if the model has no adapter or trains more than that, or `out` exists;
    CheckpointError if the checkpoint is damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already. Remove it, or choose another directory.")
    folder = _verified(checkpoint, model)
    with files.reading(folder):
        stored = {name: entry for name, entry in stored_tensors(folder).items() if name.startswith(_PREFIX)}
        about = json.loads((folder / STATE_FILE).read_text())
        on_base, alpha = about["state"].get("base"), about["lora_alpha"]
        adapters = {name: _empty(entry) for name, entry in stored.items() if ".lora_" in name}
    if not adapters:
        raise ConfigError(f"{folder} has no LoRA adapter. Leave out --adapter.")
    others = stored.keys() - adapters.keys()
    if on_base and others:
        raise ConfigError(
            f"{folder} trains {', '.join(sorted(others)[:3])} besides its adapter, which has no place for "
            "them. Leave out --adapter."
        )
    if alpha is None:
        raise CheckpointError(f"{folder} has LoRA adapters but no lora_alpha: their scale is not known.")
    with files.reading(folder):
        load_tensors(adapters, folder, None)
    plain = {name.removeprefix(_PREFIX).replace(".default.", "."): x for name, x in adapters.items()}
    rank = next(len(tensor) for name, tensor in plain.items() if ".lora_A." in name)
    aside = out.with_name(out.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    trained_on = str(base) if base else on_base and on_base["path"]
    write_adapter(aside, plain, rank, alpha, trained_on)
    os.replace(aside, out)
    return out


def export_hf(
    checkpoint: Path,
    out: Path,
    model: str | None = None,
    base: Path | None = None,
    quantised_as: Path | None = None,
) -> Path:
    """Write the weights of one model of a checkpoint, with its config and tokenizer, to `out`; return it.

    model: e.g. "agent_0.actor"; None: the only one. Adapters are merged into the weights that they were
    trained on, which are read where they were then, or from `base`. The type is the one that the model's
    config.json declares; quantised_as: a released model, in whose FP8 they are instead. At most a shard and
    one read are in memory. CheckpointError if the checkpoint is damaged; ConfigError for another release.
    """
    released = Released(quantised_as) if quantised_as else None
    return export_folder(_verified(checkpoint, model), Path(out), base, released)


def export_folder(
    folder: Path, out: Path, base: Path | None = None, released: Released | None = None
) -> Path:
    """export_hf of a model's folder alone, whose files are not compared with a manifest."""
    if not (folder / "hf" / "config.json").exists():
        raise CheckpointError(f"{folder}/hf has no config.json: a model without it cannot be exported.")
    with files.reading(folder):
        dtype = declared_dtype(folder / "hf")
        kind = json.loads((folder / "hf" / "config.json").read_text()).get("model_type")
    if not isinstance(kind, str | None):
        raise CheckpointError(f"{folder}/hf/config.json is corrupted: model_type={kind!r} names no type.")
    weights = _weights(folder, partial(_typed, dtype, own_type(kind)), base)
    changes = released.config if released else NO_CHANGES
    save_hf(released.again(weights) if released else weights, str(folder / "hf"), out, 0, changes)
    return out


def current(path: Path) -> Path:
    """`path` itself if it is a checkpoint; the current one if it is a folder of checkpoints or a run."""
    for folder in (path, path / "checkpoints"):
        step = files.current_step(folder)
        if step is not None:
            return files.step_folder(folder, step)
    return path


def _verified(checkpoint: Path, model: str | None) -> Path:
    """The folder of a checkpoint's model, after its files were compared with the manifest."""
    given, checkpoint = checkpoint, current(Path(checkpoint))
    if not (checkpoint / files.MANIFEST).exists():
        raise CheckpointError(
            f"{given} is no checkpoint: there is no {checkpoint / files.MANIFEST}. Give the folder of one, "
            "as RUN/checkpoints/global_step_N, or a run that has saved one (trainer.save_freq)."
        )
    name = _choose(checkpoint, files.read_manifest(checkpoint)["models"], model)
    files.verify(checkpoint, under=f"{name}/")
    return checkpoint / name


def _choose(checkpoint: Path, names: list[str], wanted: str | None) -> str:
    if wanted in names:
        return str(wanted)
    trained = [name for name in names if name.split(".")[1:2] != ["teacher"]]
    if wanted is None and len(trained) == 1:
        return trained[0]
    problem = "has several models" if wanted is None else f"has no model {wanted!r}"
    raise ConfigError(f"{checkpoint} {problem}. Choose one of {', '.join(names)}.")


def _weights(folder: Path, typed: Typed, base: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under HF names, read a few at a time; adapters merged into the weights they belong to."""
    with files.reading(folder):
        yield from _stored_weights(folder, typed, base)


def _stored_weights(folder: Path, typed: Typed, base: Path | None) -> Iterator[tuple[str, Tensor]]:
    stored = {name: entry for name, entry in stored_tensors(folder).items() if name.startswith(_PREFIX)}
    if not stored:
        raise CheckpointError(f"{folder} holds no weights: it was saved without save_contents 'model'.")
    about = json.loads((folder / STATE_FILE).read_text())
    alpha, on_base = about["lora_alpha"], about["state"].get("base")
    if on_base:
        yield from _of_base(folder, stored, alpha, typed, on_base, base)
    batch: list[str] = []
    batch_bytes = 0
    for name in (name for name in stored if ".lora_" not in name):
        num_bytes = stored[name].size.numel() * stored[name].properties.dtype.itemsize
        if batch and batch_bytes + num_bytes > READ_BYTES:
            yield from _read(folder, batch, stored, alpha, typed)
            batch, batch_bytes = [], 0
        batch.append(name)
        batch_bytes += num_bytes
    yield from _read(folder, batch, stored, alpha, typed)


def _of_base(folder, stored, alpha, typed, on_base, given: Path | None) -> Iterator[tuple[str, Tensor]]:
    """The weights that the checkpoint has adapters for but does not hold, from the model directory."""
    path = given or Path(on_base["path"])
    try:
        problem = "" if weights_digest(path) == on_base["digest"] else f"{path} has others."
    except (DataError, OSError) as error:
        problem = str(error)
    if problem:
        raise CheckpointError(
            f"{folder} holds an adapter on the weights of {on_base['path']}, which are needed: {problem} "
            "Name the directory that has them (siirl export --base DIRECTORY)."
        )
    adapters = {name: _empty(stored[name]) for name in stored if ".lora_" in name}
    load_tensors(adapters, folder, None)
    with SafetensorsFolder(path) as source:
        for name in on_base["names"]:
            tensor = source.part(name, 0, source.like(name).shape[0])
            a, b = (adapters.get(f"{_PREFIX}{other}") for other in _adapter_names(name))
            yield name, typed(name, tensor if a is None else _merged(tensor, a, b, alpha, folder))


def _read(folder, names, stored, alpha, typed) -> Iterator[tuple[str, Tensor]]:
    adapters = {name: _adapter_names(name) for name in names if _adapter_names(name)[0] in stored}
    wanted = [*names, *(adapter for pair in adapters.values() for adapter in pair)]
    tensors = {name: _empty(stored[name]) for name in wanted}
    load_tensors(tensors, folder, None)
    for name in names:
        tensor = tensors[name]
        if name in adapters:
            a, b = (tensors[adapter] for adapter in adapters[name])
            tensor = _merged(tensor, a, b, alpha, folder)
        yield name.removeprefix(_PREFIX).replace(".base_layer.", "."), typed(name, tensor)


def _empty(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _typed(dtype: torch.dtype | None, own: tuple[str, ...], name: str, tensor: Tensor) -> Tensor:
    is_cast = dtype is not None and tensor.is_floating_point() and not name.endswith(own)
    return tensor.to(dtype) if is_cast else tensor


def _merged(tensor: Tensor, a: Tensor, b: Tensor, alpha: float | None, folder: Path) -> Tensor:
    if alpha is None:
        raise CheckpointError(f"{folder} has LoRA adapters but no lora_alpha: they cannot be merged.")
    return torch.addmm(tensor.float(), b.float(), a.float(), alpha=alpha / a.shape[0])


def _adapter_names(name: str) -> tuple[str, str]:
    """Names of the adapter pair of "<module>.weight", or "<module>.base_layer.weight"."""
    module = name.removesuffix(".weight").removesuffix(".base_layer")
    return f"{module}.lora_A.default.weight", f"{module}.lora_B.default.weight"
