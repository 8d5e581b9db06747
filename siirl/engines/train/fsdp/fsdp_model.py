"""A sharded model on an FSDP2 mesh: every rank reads its shards, or one rank all of them for the others."""

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import PreTrainedModel

from siirl.compiler.memory.estimate import stays_whole
from siirl.compiler.plan import ModelPlan
from siirl.engines.train.adapters.frozen_base import join_shards, use_base
from siirl.engines.train.adapters.lora import adapter_name, add_lora
from siirl.engines.train.experts.expert_parallel import shard_experts
from siirl.engines.train.fsdp.float8 import use_float8
from siirl.engines.train.fsdp.float32_weights import gather_float32
from siirl.engines.train.fsdp.own_shards import Parts, can_be_read, parts_to_read, read_shards
from siirl.engines.train.hf_model import (
    build_skeleton,
    compile_layers,
    decoder_layers,
    empty_source,
    load_source,
    new_head,
    recompute_activations,
    torch_dtype,
    use_liger_kernels,
)
from siirl.engines.train.language_model import PACKED_MODELS, PackedModel
from siirl.engines.train.settings import EngineSettings
from siirl.engines.train.vision.tower import tower_of
from siirl.errors import DataError, UserError
from siirl.model_files.directory import check_weight_files, model_dir
from siirl.model_files.hf_config import load_hf_config
from siirl.parallel.process_groups import ProcessGroupManager


def group_of(plan: ModelPlan, groups: ProcessGroupManager, kind: str) -> dist.ProcessGroup:
    """This rank's group of a kind (ParallelDims.fsdp_groups)."""
    found = plan.dims.fsdp_groups(plan.ranks)[kind]
    return groups.get(next(ranks for ranks in found if groups.rank in ranks))


def mesh_of(
    plan: ModelPlan, groups: ProcessGroupManager, device: torch.device
) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """The mesh of a model, [dp_shard] or [dp_replicate, dp_shard], and this rank's dp_shard group.

    The ranks that share a sequence are on the axis dp_shard, too. No communication.
    """
    shard_group = group_of(plan, groups, "shard")
    if plan.dims.dp_replicate == 1:
        mesh = DeviceMesh.from_group(shard_group, device.type, mesh_dim_names=("dp_shard",))
    else:
        grid = torch.tensor(plan.ranks).view(plan.dims.dp_replicate, plan.dims.weight_shards)
        mesh = DeviceMesh.from_group(
            [group_of(plan, groups, "replicate"), shard_group],
            device.type,
            mesh=grid,
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
    return mesh, shard_group


def build_sharded(
    settings: EngineSettings,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
    device: torch.device,
    plan: ModelPlan,
    base: PackedModel | None = None,
) -> PackedModel:
    """The sharded model with its weights; collective over the model's ranks, which all raise or none.

    A rank reads its own rows of each tensor from the files. Where these do not have the model's tensors as
    they are, the first rank reads the model into host memory and hands the shards out, a tensor at a time.
    With a base, all but the adapters is that of the base, on the same ranks, and nothing is read.
    """
    dtype, trains = torch_dtype(settings.fsdp.model_dtype, "fsdp_config.model_dtype"), plan.trains
    config = load_hf_config(settings.model)
    own_code, kernels = settings.model.trust_remote_code, settings.model.attention_kernels
    hf = build_skeleton(config, dtype, own_code, settings.head, kernels)
    if settings.model.use_liger:
        use_liger_kernels(hf)
    if settings.fsdp.float8:
        use_float8(decoder_layers(hf), device)
    if settings.model.compile_layers:
        compile_layers(hf)
    if trains:
        add_lora(hf, settings.model, settings.seed)
        tower = tower_of(hf)
        if settings.freeze_vision_tower and tower is not None:
            tower.requires_grad_(False)
        if settings.model.enable_gradient_checkpointing:
            recompute_activations(hf, settings.model.gradient_checkpointing_kwargs)
    else:
        hf.requires_grad_(False)
    model = _shard(hf, settings, mesh, shards_experts=plan.dims.ep > 1)
    fresh = new_head(config, settings.head, settings.seed)
    parts = None if base is not None else _agreed_parts(settings, hf, group, fresh)
    source = _read_on_first_rank(settings, hf, group, trains, base is None and parts is None)
    _materialise(hf, source, mesh, group, device, base, parts)
    if parts is not None:
        _read_own(hf, model_dir(settings.model.path), parts, fresh, mesh, group)
    if base is not None:
        join_shards(model, base)
    model.top_k = settings.top_k
    if settings.full_kl:
        model.keep_reference_head(compute_dtype(settings))
    return model


def compute_dtype(settings: EngineSettings) -> torch.dtype:
    """The type of activations and of gathered weights."""
    return torch_dtype(settings.fsdp.mixed_precision.param_dtype, "fsdp_config.mixed_precision.param_dtype")


def reduce_dtype(settings: EngineSettings) -> torch.dtype:
    """The type that gradients are added up in."""
    return torch_dtype(settings.fsdp.mixed_precision.reduce_dtype, "fsdp_config.mixed_precision.reduce_dtype")


def _shard(
    hf: PreTrainedModel, settings: EngineSettings, mesh: DeviceMesh, shards_experts: bool
) -> PackedModel:
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(settings),
        reduce_dtype=reduce_dtype(settings),
        cast_forward_inputs=False,
    )
    reshard = not lies_whole(hf, settings, mesh)
    layers = decoder_layers(hf)
    ignored = shard_experts(hf, mesh) if shards_experts else set()
    if {policy.param_dtype, torch_dtype(settings.fsdp.model_dtype, "model_dtype")} != {torch.float32}:
        ignored |= gather_float32(hf, mesh)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    model = PACKED_MODELS[settings.head](hf)
    for layer in layers:
        shard(layer, reshard_after_forward=reshard)
    shard(model, reshard_after_forward=False)
    for module in fsdp_modules(model):  # shares of a loss add up: gradients are summed, not averaged
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return model


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every unit of sharding, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def leave_gathered(unit: FSDPModule) -> None:
    """Gather the weights of a unit, and have FSDP look no more before and after each of its passes whether
    there is something to gather. For frozen weights on one rank, until `shard_again`."""
    state: Any = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    unit.unshard()


def shard_again(unit: Any) -> None:
    """Undo `leave_gathered`."""
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle = unit.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = unit.register_forward_hook(state._post_forward)
    unit.reshard()


def lies_whole(model: nn.Module, settings: EngineSettings, mesh: DeviceMesh) -> bool:
    """Whether the model stays whole on every rank during a mini-batch or a pass (stays_whole)."""
    return stays_whole(sum(param.numel() for param in model.parameters()), mesh.size(-1), settings.fsdp)


def _agreed_parts(
    settings: EngineSettings, hf: PreTrainedModel, group: dist.ProcessGroup, fresh: Mapping[str, Tensor]
) -> Parts | None:
    """What ranks read by themselves; None on all ranks if one of them cannot."""
    folder, parts = model_dir(settings.model.path), None
    if can_be_read(dict(hf.named_parameters())):
        with contextlib.suppress(DataError, OSError, SafetensorError):
            check_weight_files(folder)
            parts = parts_to_read(hf, folder, fresh)
    lacking = torch.tensor([parts is None], dtype=torch.int64)
    dist.all_reduce(lacking, group=group)
    return None if lacking.item() else parts


def _read_own(
    hf: PreTrainedModel,
    folder: Path,
    parts: Parts,
    fresh: Mapping[str, Tensor],
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
) -> None:
    """Every rank reads its rows; all raise if one cannot."""
    failure = None
    try:
        read_shards(hf, folder, parts, fresh, mesh)
    except (OSError, SafetensorError) as error:
        failure = error
    failed = torch.tensor([failure is not None], dtype=torch.int64)
    dist.all_reduce(failed, group=group)
    if failure is not None:
        raise DataError(f"weights of {folder} cannot be read: {failure}. Check its files.") from failure
    if failed.item():
        raise DataError(f"another rank could not read the weights of {folder}: see its message.")


def _read_on_first_rank(
    settings: EngineSettings, hf: PreTrainedModel, group: dist.ProcessGroup, trains: bool, reads: bool
) -> PreTrainedModel | None:
    """The full model on the first rank of the group, None on others; all raise if it cannot be read.

    reads: whether its weights are needed; without, only its adapters have values.
    """
    source, failure = None, None
    if dist.get_rank(group) == 0:
        try:
            source = (
                load_source(hf.config, settings.model, settings.head, settings.seed)
                if reads
                else empty_source(hf.config, settings.model, settings.head)
            )
            if trains:
                add_lora(source, settings.model, settings.seed)
        except UserError as error:
            failure = error
    failed = torch.tensor([failure is not None], dtype=torch.int64)
    dist.all_reduce(failed, group=group)
    if failure:
        raise failure
    if failed.item():
        raise DataError(
            f"the first rank could not read the weights of {settings.model.path}: see its message."
        )
    return source


def _materialise(
    hf: PreTrainedModel,
    source: PreTrainedModel | None,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
    device: torch.device,
    base: PackedModel | None,
    parts: Parts | None,
) -> None:
    """Allocate the shards on the device and fill them, and the buffers, from the first rank's model.

    With a base only adapters are filled. parts: parameters that are left as they are, without values.
    """
    if base is None:
        ties = _tied_names(hf)
        hf.to_empty(device=device)
        _tie(hf, ties)
    else:
        use_base(hf, base.hf, device)
    full_params = dict(source.named_parameters()) if source is not None else {}
    full_buffers = dict(source.named_buffers()) if source is not None else {}
    first = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for name, param in hf.named_parameters():
            if (base is not None and not adapter_name(name)) or (parts is not None and name in parts):
                continue
            full = _on_device(full_params.get(name), param, device, name)
            param.to_local().copy_(distribute_tensor(full, mesh, param.placements).to_local())
        for name, buffer in hf.named_buffers() if base is None else ():
            full = _on_device(full_buffers.get(name), buffer, device, name)
            dist.broadcast(full, first, group=group)
            buffer.copy_(full)


def _on_device(full: Tensor | None, like: Tensor, device: torch.device, name: str) -> Tensor:
    """The full tensor, cast, on the device; on ranks without it, memory to receive it in."""
    if full is None:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    assert full.shape == like.shape, f"{name}: {tuple(full.shape)} read, {tuple(like.shape)} needed"
    return full.detach().to(device=device, dtype=like.dtype).contiguous()


def _tied_names(hf: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter -> its first name."""
    first: dict[int, str] = {}
    ties = {}
    for name, param in hf.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            ties[name] = first[id(param)]
    return ties


def _tie(hf: nn.Module, ties: dict[str, str]) -> None:
    """Share parameters again: to_empty gives each name a parameter of its own."""
    for name, original in ties.items():
        module, _, leaf = name.rpartition(".")
        setattr(hf.get_submodule(module), leaf, hf.get_parameter(original))
