"""Weights that are computed with in float32 where FSDP computes with all others in bfloat16.

FSDP casts the weights of a unit to one type, and reduces their gradients in one. These, which the table of
families names (Family.in_float32), are left out of it, as few and small as they are: they lie as FSDP lays
all others, a run of rows on each rank, so that exports, checkpoints and the optimizer see no difference; the
module that has one gathers it before its forward pass, and its gradient is reduced behind that pass.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import PreTrainedModel

from siirl.engines.train.adapters.lora import plain_name
from siirl.engines.train.experts.expert_parallel import cut_over_ranks
from siirl.models.families import family_of


def gather_float32(hf: PreTrainedModel, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Cut those weights of a model on the meta device over the last axis of its mesh; the new parameters.

    Call it before FSDP shards the model, which then has to leave these out. No communication; a forward pass
    and a backward pass of the model then have a small message more for each.
    """
    ends, cut = family_of(hf.config.model_type).in_float32, set()
    for prefix, module in list(hf.named_modules()) if ends else ():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        names = [name for name in names if plain_name(f"{prefix}.{name}").endswith(ends)]
        cut |= {cut_over_ranks(module, name, mesh) for name in names}
        if names:
            module.register_forward_pre_hook(_gather(names, mesh))
            module.register_forward_hook(_let_go(names), always_call=True)
    return cut


def _gather(names: list[str], mesh: DeviceMesh) -> Any:
    summed = [Partial()] * mesh.ndim

    def gather(module: nn.Module, args: Any) -> None:
        for name in names:  # what a module has itself is found before its parameters
            param = module._parameters[name]
            assert isinstance(param, DTensor)
            whole = param.redistribute(placements=[Replicate()] * mesh.ndim)
            module.__dict__[name] = whole.to_local(grad_placements=summed)

    return gather


def _let_go(names: list[str]) -> Any:
    def let_go(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        for name in names:
            module.__dict__.pop(name, None)

    return let_go
