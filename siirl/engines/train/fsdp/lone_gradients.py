"""Gradients of a model that lies whole on one rank: added up as they come, with nobody to reduce them with.

FSDP would write each unit's gradients into one buffer, divide it and copy it into another, on a stream with
memory of its own; on one rank these are copies of what is there.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from siirl.engines.train.fsdp.fsdp_model import fsdp_modules

if torch.cuda.is_available():
    from siirl.engines.train import triton_kernels
else:
    triton_kernels = None


class LoneGradients:
    """The gradients of a mini-batch, summed over its backward passes in the type that FSDP reduces in.

    FSDP finds none where it looks, and reduces nothing.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """model: sharded by FSDP over one rank, its weights in place. dtype: of the sums."""
        self._dtype = dtype
        self._sums: dict[nn.Parameter, Tensor] = {}
        units, owners = fsdp_modules(model), dict(_trained(model))
        for unit in units:
            unit.unshard()
        for name, gathered in _trained(model):
            gathered.register_post_accumulate_grad_hook(functools.partial(self._add, owners[name]))
        for unit in units:
            unit.reshard()

    def hand_over(self) -> None:
        """Make the sums the gradients of the parameters that have one; no sum outlives its cast."""
        while self._sums:
            owner, total = self._sums.popitem()
            grad = total.to(owner.dtype)
            owner.grad = DTensor.from_local(grad, owner.device_mesh, owner.placements, run_check=False)

    @torch.no_grad()
    def _add(self, owner: nn.Parameter, gathered: nn.Parameter) -> None:
        grad, gathered.grad = gathered.grad, None
        self._sums[owner] = _added(self._sums.get(owner), grad, self._dtype)


def _added(total: Tensor | None, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """total + grad, in total where there is one; else grad in this type, itself if it is of it."""
    if total is None and grad.dtype == dtype:
        return grad
    lies_whole = grad.is_contiguous() and (total is None or total.is_contiguous())
    if triton_kernels is not None and grad.is_cuda and lies_whole:
        return triton_kernels.added(total, grad, dtype)
    return grad.to(dtype) if total is None else total.add_(grad)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters as they are now: FSDP puts the gathered ones in the places of the shards, and back."""
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad)
