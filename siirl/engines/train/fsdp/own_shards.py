"""Shards of a model's weights, read by the ranks that have them. No communication."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from siirl.engines.train.adapters.lora import adapter_name, plain_name
from siirl.errors import NotSupportedError
from siirl.model_files.file_parts import FilePart, file_parts
from siirl.model_files.weight_slices import SafetensorsFolder
from siirl.models.families import family_of

Parts = dict[str, tuple[FilePart, ...]]
"""Name of a parameter -> its parts in the files; none: it is fresh."""


def parts_to_read(hf: PreTrainedModel, folder: Path, fresh: Mapping[str, Tensor]) -> Parts | None:
    """Where the files have all parameters of a sharded model, but adapters, so that a rank may read its own.

    fresh: tensors that the files may lack. None where the files cannot be read by rows: then transformers has
    to load the model, which also says what is wrong.
    """
    own = {name: param for name, param in hf.named_parameters() if not adapter_name(name)}
    kept = {plain_name(name) for name, _ in hf.named_parameters(remove_duplicate=False)}
    if {plain_name(name) for name in hf.state_dict()} - kept:
        return None  # buffers that files have
    try:
        found = file_parts(hf, {plain_name(name): tuple(param.shape) for name, param in own.items()})
    except NotSupportedError:
        return None
    dtypes, plan = set(), dict.fromkeys(own, ())
    in_float32 = family_of(hf.config.model_type).in_float32
    with SafetensorsFolder(folder) as files:
        for name, param in own.items():
            parts = found[plain_name(name)]
            if plain_name(name) in fresh and not any(files.has(part.name) for part in parts):
                continue
            if not parts or not all(files.has(part.name) and _fits(part, param, files) for part in parts):
                return None
            if sum(part_size(part) for part in parts) != param.numel():
                return None
            kept = {files.like(part.name).dtype for part in parts if not part.name.endswith(in_float32)}
            dtypes |= kept
            plan[name] = parts
    loaded = getattr(hf.config, "dtype", None)
    return plan if len(dtypes) == 1 and loaded in (None, torch.float32, *dtypes) else None


def part_size(part: FilePart) -> int:
    """How many elements it has."""
    return torch.Size(part.shape).numel()


def _fits(part: FilePart, param: nn.Parameter, files: SafetensorsFolder) -> bool:
    """Whether the file's tensor is the part, and has its rows where the parameter does, or lies in one."""
    row = torch.Size(param.shape[1:]).numel()
    within = bool(part.shape) and part.first // row == part.last // row
    by_rows = bool(part.shape) and part.stride[0] == row
    return (within or by_rows) and tuple(files.like(part.name).shape) == part.shape


def can_be_read(params: Mapping[str, nn.Parameter]) -> bool:
    """Whether every parameter is cut into rows."""
    return all(
        isinstance(param, DTensor)
        and param.placements[-1] == Shard(0)
        and all(placement == Replicate() for placement in param.placements[:-1])
        for param in params.values()
    )


@torch.no_grad()
def read_shards(
    hf: PreTrainedModel, folder: Path, parts: Parts, fresh: Mapping[str, Tensor], mesh: DeviceMesh
) -> None:
    """Fill this rank's rows of every parameter in `parts`."""
    params = dict(hf.named_parameters())
    place, of = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    with SafetensorsFolder(folder) as files:
        for name, found in parts.items():
            param = params[name]
            local = param.to_local()
            begin = min(place * -(-param.shape[0] // of), param.shape[0])
            if not found:
                local.copy_(fresh[plain_name(name)][begin : begin + len(local)])
            for part in found:
                _read_part(local, begin, part, files)


def _read_part(local: Tensor, begin: int, part: FilePart, files: SafetensorsFolder) -> None:
    """Fill what a part has of the rows `begin`, ... of a parameter."""
    if not len(local):
        return
    row = local[0].numel()
    first = part.first // row
    if part.stride[0] != row:
        if begin <= first < begin + len(local):
            part.of(local, begin * row).copy_(files.part(part.name, 0, part.shape[0]))
        return
    low, high = max(begin, first), min(begin + len(local), first + part.shape[0])
    if low < high:
        offset = local.storage_offset() + (low - begin) * row + part.first % row
        target = local.as_strided((high - low, *part.shape[1:]), part.stride, offset)
        target.copy_(files.part(part.name, low - first, high - first))
