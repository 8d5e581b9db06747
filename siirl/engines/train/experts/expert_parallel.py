"""Experts that the ranks of a model under FSDP2 have some of each: tokens travel to them, not their weights.

The weights lie as FSDP lays them, a run of whole experts on each rank, so that exports, checkpoints and the
optimizer see no difference; but they are never gathered. Two messages from all ranks to all bring each
token's vector to the ranks of its experts, and what these make of it back (Lepikhin et al., "GShard", 2020).
A rank computes the gradient of its experts of all tokens: nothing is left to reduce but over copies.
Legend: R ranks, E experts, S pairs of a token and one of its experts, D hidden size, O outputs.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from siirl.errors import NotSupportedError

_RANKS = "siirl_expert_ranks"
"""Name under which a module of experts has the ranks that they are sharded to."""


def shard_experts(hf: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Cut the experts of a model on the meta device over the last axis of its mesh; the new parameters.

    Call it before FSDP shards the model, which then has to leave these out. No communication.
    NotSupportedError if there are none, or none that divide among the ranks.
    """
    group = mesh.get_group(mesh.ndim - 1)
    sharded: set[nn.Parameter] = set()
    for module in modules_of_experts(hf):
        if module.num_experts % group.size():
            raise NotSupportedError(
                f"not supported yet: fsdp_config.expert_parallel_size={group.size()} for layers of "
                f"{module.num_experts} experts: each rank has whole ones. Set it to 1."
            )
        setattr(module, _RANKS, group)
        for name in [name for name, _ in module.named_parameters()]:  # with adapters, if it has some
            sharded.add(cut_over_ranks(module, name, mesh))
    if not sharded:
        raise NotSupportedError(
            f"not supported yet: fsdp_config.expert_parallel_size={group.size()}: {type(hf).__name__} has no "
            "experts that transformers keeps in one tensor of a layer. Set it to 1."
        )
    return sharded


def modules_of_experts(hf: nn.Module) -> Iterator[nn.Module]:
    """Whose forward pass is our experts function (hf_experts)."""
    return (
        module for module in hf.modules() if hasattr(module, "has_gate") and hasattr(module, "num_experts")
    )


def cut_over_ranks(module: nn.Module, name: str, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter that takes the place of one on the meta device: its rows over the last axis of a mesh, as
    FSDP lays them. No communication."""
    param = module.get_parameter(name)
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    rows = -(-len(param) // mesh.size(mesh.ndim - 1))
    begin = min(rows * mesh.get_local_rank(mesh.ndim - 1), len(param))
    local = param.new_empty(min(rows, len(param) - begin), *param.shape[1:])
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=param.requires_grad))
    return module.get_parameter(name)


def ranks_of(experts: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that the experts of a module are sharded to; None: each has, or gathers, all."""
    return getattr(experts, _RANKS, None)


def held(param: Tensor, dtype: torch.dtype) -> Tensor:
    """What this rank computes with of a parameter of experts: all, or its own, in a type."""
    return param.to_local().to(dtype) if isinstance(param, DTensor) else param


def computed_elsewhere(
    x_SD: Tensor,
    expert_S: Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What the experts of S pairs make of them, each on the rank that has it: [S, O]. Collective.

    expert_S: ascending. compute: (pairs, the expert of each among this rank's, ascending) -> outputs.
    """
    ranks, own = group.size(), num_experts // group.size()
    sent_E = torch.bincount(expert_S, minlength=num_experts)
    received_E = torch.empty_like(sent_E)
    dist.all_to_all_single(received_E, sent_E, group=group)
    sent, received = (counts_E.view(ranks, own).sum(dim=1).tolist() for counts_E in (sent_E, received_E))
    mine_SD = _Exchange.apply(x_SD, sent, received, group)
    local_E = torch.arange(own, device=expert_S.device).repeat(ranks)
    local_S, order_S = local_E.repeat_interleave(received_E).sort(stable=True)
    out_SO = compute(mine_SD[order_S], local_S)
    as_received_SO = torch.zeros_like(out_SO).index_copy(0, order_S, out_SO)
    return _Exchange.apply(as_received_SO, received, sent, group)


class _Exchange(torch.autograd.Function):
    """Runs of rows to each rank, and from each, of these lengths."""

    @staticmethod
    def forward(ctx, x_SD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths = sent, received, group
        return _exchanged(x_SD, sent, received, group)

    @staticmethod
    def backward(ctx, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.lengths
        return _exchanged(grad_SD, received, sent, group), None, None, None


def _exchanged(x_SD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out_SD = x_SD.new_empty(sum(received), *x_SD.shape[1:])
    dist.all_to_all_single(out_SD, x_SD.contiguous(), received, sent, group=group)
    return out_SD


def add_up_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of sharded experts over the copies of the model, as FSDP does with all others."""
    if mesh.ndim == 1:
        return
    for module in model.modules():
        for param in module.parameters() if ranks_of(module) is not None else ():
            if param.grad is not None:
                dist.all_reduce(param.grad.to_local(), group=mesh.get_group(0))
