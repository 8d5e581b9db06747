"""What leaves and enters a sharded model: weights under HF names, and training state for checkpoints."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from siirl.engines.train.lora import adapter_name, adapters_of, hf_name, merged_rows, plain_name
from siirl.engines.train.optimizer import MOMENTS
from siirl.errors import CheckpointError

BUCKET_BYTES = 64 << 20
"""Full tensors are gathered for at least so many bytes at once: small ones together, large ones alone."""


def specs(hf: PreTrainedModel, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """HF name -> (full shape, dtype) of what `exported` yields, in its order. No communication."""
    return {exported_name: (tuple(param.shape), dtype) for exported_name, param in _named(hf)}


@torch.no_grad()
def exported(hf: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under HF names, adapters merged, cast before the gather, which takes a bucket at a time.

    Collective: every rank exhausts it. On one rank and without a cast a tensor is the live weight itself:
    copy it to keep it.
    """
    adapters = adapters_of(hf)
    bucket: list[_Shard] = []
    for name, param in _named(hf):
        local = param.to_local()
        if name in adapters:
            a, b, scale = adapters[name]
            local = merged_rows(local, a.full_tensor(), b.to_local(), scale)
        bucket.append(_Shard(name, local.to(dtype), param))
        if sum(shard.param.numel() for shard in bucket) * dtype.itemsize >= BUCKET_BYTES:
            yield from _gathered(bucket)
            bucket = []
    yield from _gathered(bucket)


@torch.no_grad()
def exported_adapter(
    hf: PreTrainedModel, dtype: torch.dtype, with_base: bool
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of the adapter under X.lora_A.weight and X.lora_B.weight, and of the base unmerged.

    As `exported` otherwise.
    """
    bucket: list[_Shard] = []
    for name, param in hf.named_parameters():
        if not (with_base or adapter_name(name)):
            continue
        bucket.append(_Shard(plain_name(name), param.to_local().to(dtype), param.detach()))
        if sum(shard.param.numel() for shard in bucket) * dtype.itemsize >= BUCKET_BYTES:
            yield from _gathered(bucket)
            bucket = []
    yield from _gathered(bucket)


class _Shard(NamedTuple):
    """This rank's rows of one exported tensor."""

    name: str
    local: Tensor
    param: DTensor
    """It says how the rows are spread."""


def _gathered(bucket: list[_Shard]) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a bucket, by one all-gather over the sharded axis of their mesh."""
    if not bucket:
        return
    mesh = bucket[0].param.device_mesh
    world = mesh.size(mesh.ndim - 1)
    if world == 1:
        yield from ((shard.name, shard.local) for shard in bucket)
        return
    sizes = [_padded_size(shard.param, world) for shard in bucket]
    sent = bucket[0].local.new_zeros(sum(sizes))
    for shard, part in zip(bucket, sent.split(sizes), strict=True):
        part[: shard.local.numel()] = shard.local.reshape(-1)
    received = sent.new_empty(world * len(sent))
    dist.all_gather_into_tensor(received, sent, group=mesh.get_group(mesh.ndim - 1))
    for shard, parts in zip(bucket, received.view(world, -1).split(sizes, dim=1), strict=True):
        shape = shard.param.shape
        yield shard.name, parts.reshape(-1, *shape[1:])[: shape[0]].contiguous()


def _padded_size(param: DTensor, world: int) -> int:
    """Elements of the largest shard: FSDP2 cuts dim 0 into equal runs, the last ones shorter or empty."""
    assert param.placements[-1] == Shard(0), f"sharded as {param.placements}"
    rows = -(-param.shape[0] // world)
    return rows * (param.numel() // param.shape[0])


def _named(hf: PreTrainedModel) -> Iterator[tuple[str, DTensor]]:
    for name, param in hf.named_parameters():
        if (exported_name := hf_name(name)) is not None:
            yield exported_name, param.detach()


def base_names(hf: PreTrainedModel) -> list[str]:
    """HF names of what a training state leaves out: with adapters, the weights that stay as they are."""
    stored = _stored(hf)
    return [plain_name(name) for name, _ in hf.named_parameters() if name not in stored]


def _stored(hf: PreTrainedModel) -> dict[str, nn.Parameter]:
    params = dict(hf.named_parameters())
    adapted = any(adapter_name(name) for name in params)
    return {name: param for name, param in params.items() if param.requires_grad or not adapted}


def training_state(hf: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """{"model": name -> DTensor, "optimizer": moment.name -> DTensor}: the live tensors. No communication.

    Of a model with adapters it has what trains; the rest are its base's (base_names).
    DTensors carry their global shape, so torch.distributed.checkpoint reads them on any number of ranks. The
    step count of AdamW is the engine's version.
    """
    params = _stored(hf)
    moments = {}
    if optimizer is not None:
        moments = {
            f"{moment}.{name}": optimizer.state[param][moment]
            for moment in MOMENTS
            for name, param in params.items()
            if param.requires_grad
        }
    return {"model": {name: param.detach() for name, param in params.items()}, "optimizer": moments}


@torch.no_grad()
def load_training_state(
    hf: PreTrainedModel, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]
) -> None:
    """Copy a training state into the live tensors. CheckpointError, naming tensors, if it does not fit."""
    own = training_state(hf, optimizer)
    for part in ("model", "optimizer") if optimizer is not None else ("model",):
        missing, unknown = own[part].keys() - state[part].keys(), state[part].keys() - own[part].keys()
        if missing or unknown:
            raise CheckpointError(
                f"{part} state does not fit: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]} "
                f"({len(missing)} and {len(unknown)} tensors). Was it saved from another model, or LoRA?"
            )
        for name, tensor in own[part].items():
            tensor.copy_(state[part][name])
    if optimizer is not None:
        for per_param in optimizer.state.values():
            per_param["step"].fill_(float(state["version"]))
