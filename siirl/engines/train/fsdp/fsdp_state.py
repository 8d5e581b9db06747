"""What leaves and enters a sharded model: weights under HF names, and training state for checkpoints."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from siirl.engines.train.adapters.lora import adapter_name, adapters_of, hf_name, merged_rows, plain_name
from siirl.engines.train.experts.expert_lora import adapter_parts, adapters_of_experts, merged_experts
from siirl.engines.train.optimizer import STEP
from siirl.engines.train.pieces import Piece, PiecewiseTensor
from siirl.engines.weights.bucket import LiveWeights
from siirl.errors import CheckpointError
from siirl.model_files.file_parts import FilePart, file_parts, stored_parts
from siirl.models.families import family_of

_ALIGNED = 8
"""Bytes at whose multiples a number of each type may begin."""
BUCKET_BYTES = 64 << 20
"""Full tensors are gathered for at least so many bytes at once: small ones together, large ones alone."""


FileParts = dict[str, tuple[FilePart, ...]]
"""Name of a parameter without what adapters add to it -> the tensors of the model's files that it holds."""


def parts_of(hf: PreTrainedModel) -> FileParts:
    """Where the tensors of the model's files are in its parameters; NotSupportedError if they are not."""
    return file_parts(hf, {name: tuple(param.shape) for name, param in _named(hf)}) | adapter_parts(hf)


def specs(
    hf: PreTrainedModel, parts: FileParts, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """HF name -> (full shape, dtype) of what `exported` yields, in its order. No communication."""
    weights = {
        part.name: (part.shape, _type_of(hf, name, dtype)) for name, _ in _named(hf) for part in parts[name]
    }
    return weights | {name: (tuple(part.shape), part.dtype) for name, part in _buffers(hf).items()}


def _buffers(hf: PreTrainedModel) -> dict[str, Tensor]:
    """What the files have besides weights, whole on every rank, and which nothing trains: name -> tensor.

    Such are the biases by which DeepSeek's routers choose experts. They keep their own type.
    """
    stored = {
        plain_name(f"{place}.{name}".lstrip(".")): buffer
        for place, module in hf.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return stored_parts(hf, stored) if stored else {}


def exported(hf: PreTrainedModel, parts: FileParts, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under HF names, adapters merged, cast before the gather, which takes a bucket at a time.

    Collective: every rank exhausts it. On one rank and without a cast a tensor is the live weight itself:
    copy it to keep it.
    """
    return itertools.chain(_whole_parts(_merged(hf, dtype), parts), _buffers(hf).items())


def _merged(hf: PreTrainedModel, dtype: torch.dtype) -> Iterator["_Shard"]:
    """This rank's rows of all that is exported, with adapters merged, cast."""
    adapters, of_experts = adapters_of(hf), adapters_of_experts(hf)
    for name, param in _named(hf):
        local = param.to_local()
        if name in adapters:
            a, b, scale = adapters[name]
            local = merged_rows(local, a.full_tensor(), b.to_local(), scale)
        elif name in of_experts:
            local = merged_experts(local, of_experts[name])
        yield _Shard(name, local.detach().to(_type_of(hf, name, dtype)), param)


def _type_of(hf: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """The type that a parameter is exported in where the model is in `dtype`."""
    return torch.float32 if name.endswith(family_of(hf.config.model_type).in_float32) else dtype


def live(hf: PreTrainedModel, parts: FileParts) -> LiveWeights | None:
    """What `exported` yields without a cast, as views of live memory, where this rank has all of it.

    None where weights are sharded, or adapters are to be merged. No communication.
    """
    if adapters_of(hf) or adapters_of_experts(hf):
        return None
    tensors: dict[str, Tensor] = {}
    for name, param in _named(hf):
        if param.device_mesh.size(param.device_mesh.ndim - 1) > 1:
            return None
        local = param.to_local().detach()
        tensors |= {part.name: part.of(local) for part in parts[name]}
    return LiveWeights(tensors | _buffers(hf), held_tensors(hf))


def held_tensors(hf: PreTrainedModel) -> list[Tensor]:
    """What this rank has of parameters and buffers, in an order that stays. Asked in every weight sync.

    Without to_local, which makes a tensor of each, and without names: they take most of the time. What
    several modules share comes several times.
    """
    modules: list[Any] = [hf]
    for module in modules:  # which grows
        if module is not None and module._modules:
            modules += module._modules.values()
    held = [
        tensor
        for module in modules
        if module is not None
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in held]


def exported_adapter(
    hf: PreTrainedModel, parts: FileParts, dtype: torch.dtype, with_base: bool
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of the adapter under X.lora_A.weight and X.lora_B.weight, and of the base unmerged.

    As `exported` otherwise.
    """
    shards = (
        _Shard(plain_name(name), param.to_local().detach().to(_type_of(hf, plain_name(name), dtype)), param)
        for name, param in hf.named_parameters()
        if with_base or adapter_name(name)
    )
    return itertools.chain(_whole_parts(shards, parts), _buffers(hf).items() if with_base else ())


@torch.no_grad()
def _whole_parts(shards: Iterable["_Shard"], parts: FileParts) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the files that are in these parameters, whole, gathered a bucket at a time."""
    bucket: list[_Shard] = []
    size = 0
    for shard in shards:
        bucket.append(shard)
        size += shard.param.numel() * shard.local.itemsize
        if size >= BUCKET_BYTES:
            yield from _split(_gathered(bucket), parts)
            bucket, size = [], 0
    yield from _split(_gathered(bucket), parts)


def _split(tensors: Iterable[tuple[str, Tensor]], parts: FileParts) -> Iterator[tuple[str, Tensor]]:
    for name, whole in tensors:
        if name not in parts:  # of an adapter on a linear layer
            yield name, whole
        for part in parts.get(name, ()):
            yield part.name, part.of(whole).contiguous()


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
    sizes = [_padded_size(shard, world) for shard in bucket]
    sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=bucket[0].local.device)
    for shard, part in zip(bucket, sent.split(sizes), strict=True):
        part.view(shard.local.dtype)[: shard.local.numel()] = shard.local.reshape(-1)
    received = sent.new_empty(world * len(sent))
    dist.all_gather_into_tensor(received, sent, group=mesh.get_group(mesh.ndim - 1))
    for shard, parts in zip(bucket, received.view(world, -1).split(sizes, dim=1), strict=True):
        shape, rows = shard.param.shape, -(-len(shard.param) // world)
        each = parts.view(shard.local.dtype)[:, : rows * math.prod(shape[1:])]
        yield shard.name, each.reshape(-1, *shape[1:])[: shape[0]].contiguous()


def _padded_size(shard: "_Shard", world: int) -> int:
    """Bytes of the largest shard, in which any type may follow: FSDP2 cuts dim 0 into equal runs, the last
    ones shorter or empty."""
    param = shard.param
    assert param.placements[-1] == Shard(0), f"sharded as {param.placements}"
    rows = -(-param.shape[0] // world)
    num_bytes = rows * math.prod(param.shape[1:]) * shard.local.itemsize
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _named(hf: PreTrainedModel) -> Iterator[tuple[str, DTensor]]:
    for name, param in hf.named_parameters():
        if (exported_name := hf_name(name)) is not None:
            yield exported_name, param


def base_names(hf: PreTrainedModel, parts: FileParts) -> list[str]:
    """HF names of what a training state leaves out: with adapters, the weights that stay as they are."""
    stored = _stored(hf)
    skipped = [plain_name(name) for name, _ in hf.named_parameters() if name not in stored]
    buffers = _buffers(hf) if skipped else {}
    return [part.name for name in skipped for part in parts[name]] + list(buffers)


def _stored(hf: PreTrainedModel) -> dict[str, nn.Parameter]:
    params = dict(hf.named_parameters())
    adapted = any(adapter_name(name) for name in params)
    return {name: param for name, param in params.items() if param.requires_grad or not adapted}


def training_state(
    hf: PreTrainedModel, parts: FileParts, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """{"model": name -> tensor, "optimizer": moment.name -> tensor}: the live tensors. No communication.

    Of a model with adapters it has what trains; the rest are its base's (base_names). Else it has what the
    files have besides weights, too.
    Names are those of the model's files. Tensors are DTensors, or where a parameter holds several tensors of
    the files, those that this rank has: torch.distributed.checkpoint reads both on any number of ranks. The
    step count of AdamW is the engine's version.
    """
    params = _stored(hf)
    moments: dict[str, Tensor] = {}
    if optimizer is not None:
        trained = {name: param for name, param in params.items() if param.requires_grad}
        kinds = dict.fromkeys(kind for param in trained.values() for kind in optimizer.state[param])
        for moment in (kind for kind in kinds if kind != STEP):
            held = {
                name: optimizer.state[param][moment]
                for name, param in trained.items()
                if moment in optimizer.state[param]
            }
            moments |= {f"{moment}.{name}": tensor for name, tensor in _held_parts(held, parts).items()}
    weights = _held_parts({name: param.detach() for name, param in params.items()}, parts)
    if not base_names(hf, parts):
        weights |= {name: _whole(buffer) for name, buffer in _buffers(hf).items()}
    return {"model": weights, "optimizer": moments}


def _whole(buffer: Tensor) -> Tensor:
    """A tensor that every rank has, as checkpoints see one."""
    shape = tuple(buffer.shape)
    return PiecewiseTensor(shape, [Piece(buffer, (0,) * len(shape))], buffer.dtype)


def _held_parts(tensors: dict[str, DTensor], parts: FileParts) -> dict[str, Tensor]:
    """Sharded tensors under the names of the files. Of one that holds several, those in this rank's rows."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        of_files = parts.get(name, ())
        if [part.shape for part in of_files] in ([], [tuple(tensor.shape)]):
            found[of_files[0].name if of_files else name] = tensor
            continue
        local, row = tensor.to_local(), math.prod(tensor.shape[1:])
        _, (start, *_) = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        for part in of_files:
            assert part.first // row == part.last // row, f"{part.name} is in several rows of {name}"
            if start <= part.first // row < start + len(local):
                piece = Piece(part.of(local, start * row), (0,) * len(part.shape))
                found[part.name] = PiecewiseTensor(part.shape, [piece], tensor.dtype)
    return found


def live_pieces(hf: PreTrainedModel, parts: FileParts) -> dict[str, list[Piece]]:
    """HF name -> what this rank holds of a weight: views of live memory. No communication."""
    return {name: tensor.pieces for name, tensor in piecewise_state(hf, parts).items()}


def piecewise_state(hf: PreTrainedModel, parts: FileParts) -> dict[str, PiecewiseTensor]:
    """The "model" of a training state, each tensor known by the pieces that this rank holds."""
    found: dict[str, PiecewiseTensor] = {}
    for name, tensor in training_state(hf, parts, None)["model"].items():
        if not isinstance(tensor, PiecewiseTensor):
            place = tensor.shape, tensor.device_mesh, tensor.placements
            _, offset = compute_local_shape_and_global_offset(*place)
            local = tensor.to_local()
            pieces = [Piece(local, offset)] if local.numel() else []
            tensor = PiecewiseTensor(tuple(tensor.shape), pieces, tensor.dtype)
        found[name] = tensor
    return found


@torch.no_grad()
def load_training_state(
    own: dict[str, Any], optimizer: torch.optim.Optimizer | None, state: dict[str, Any]
) -> None:
    """Copy a training state into the live tensors of `own`; CheckpointError if it lacks, or has, others."""
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
            if STEP in per_param:
                per_param[STEP].fill_(float(state["version"]))
