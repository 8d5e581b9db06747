"""AdamW over sharded parameters, and the gradient norm over shards."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from siirl.compiler.checks.fsdp_options import ADAMW
from siirl.config.common import OptimConfig
from siirl.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardAdamW(torch.optim.AdamW):
    """AdamW on this rank's shards as plain tensors: DTensor looks at each first, milliseconds of the host's.

    Parameters and state are those of AdamW.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(_local, tensors)
        return has_complex


def make_adamw(params: Sequence[nn.Parameter], optim: OptimConfig) -> ShardAdamW:
    """AdamW with its state allocated: memory is known, and a checkpoint can be read, before the first step.

    Weight decay applies to every parameter. Fused kernels unless override_optimizer_config says otherwise.
    ConfigError for overrides that change what the state holds. No communication.
    """
    overrides = dict(optim.override_optimizer_config or {})
    if unknown := sorted(set(overrides) - set(ADAMW)):
        raise ConfigError(
            f"override_optimizer_config has {', '.join(unknown)}: AdamW here takes {', '.join(ADAMW)} "
            "besides the keys of optim. Remove the others."
        )
    if "foreach" not in overrides:
        overrides.setdefault("fused", True)
    adamw = ShardAdamW(
        params, lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay, **overrides
    )
    fused = bool(overrides.get("fused"))
    for param in params:
        step = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
        adamw.state[param] = {"step": step} | {name: torch.zeros_like(param) for name in MOMENTS}
    return adamw


@torch.no_grad()
def scaled_to_norm(grads: Sequence[Tensor | None], max_norm: float, shard_group: dist.ProcessGroup) -> float:
    """Scale sharded gradients in place to a 2-norm of at most max_norm (0: any); returns the norm before.

    One all-reduce over the ranks that share one copy of the weights. A norm that is not finite scales
    nothing.
    """
    local = [_local(grad) for grad in grads if grad is not None]
    square = torch.nn.utils.get_total_norm(local).float().square()
    dist.all_reduce(square, group=shard_group)
    norm = square.sqrt().item()
    if 0 < max_norm < norm < float("inf"):
        torch._foreach_mul_(local, max_norm / norm)
    return norm


def _local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, without a graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
