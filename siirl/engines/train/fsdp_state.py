"""What leaves and enters a sharded model: weights under HF names, and training state for checkpoints."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from siirl.engines.train.lora import adapters_of, hf_name, merged_rows
from siirl.engines.train.optimizer import MOMENTS
from siirl.errors import CheckpointError


def specs(hf: PreTrainedModel, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """HF name -> (full shape, dtype) of what `exported` yields, in its order. No communication."""
    return {exported_name: (tuple(param.shape), dtype) for exported_name, param in _named(hf)}


@torch.no_grad()
def exported(hf: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under HF names, adapters merged, cast before the gather.

    Collective: every rank exhausts it. On one rank and without a cast a tensor is the live weight itself:
    copy it to keep it.
    """
    adapters = adapters_of(hf)
    for name, param in _named(hf):
        local = param.to_local()
        if name in adapters:
            a, b, scale = adapters[name]
            local = merged_rows(local, a.full_tensor(), b.to_local(), scale)
        shard = DTensor.from_local(
            local.to(dtype),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        yield name, shard.full_tensor()


def _named(hf: PreTrainedModel) -> Iterator[tuple[str, DTensor]]:
    for name, param in hf.named_parameters():
        if (exported_name := hf_name(name)) is not None:
            yield exported_name, param.detach()


def training_state(hf: PreTrainedModel, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """{"model": name -> DTensor, "optimizer": moment.name -> DTensor}: the live tensors. No communication.

    DTensors carry their global shape, so torch.distributed.checkpoint reads them on any number of ranks. The
    step count of AdamW is the engine's version.
    """
    params = dict(hf.named_parameters())
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
