"""AdamW over sharded parameters, the norm of gradients over shards, and the learning rate of a step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from siirl.compiler.backends.fsdp import ADAMW
from siirl.config.common import OptimConfig
from siirl.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
"""What AdamW calls the number of steps in the state of a parameter; all else there is as the parameter is."""
ENDLESS = ("constant", "inverse-square-root")
"""Schedules that need no last step."""

WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Share of the peak that is left, 1 to 0, by the progress of a warmup-stable-decay schedule's decay."""


class ShardAdamW(torch.optim.AdamW):
    """AdamW on this rank's shards as plain tensors: DTensor looks at each first, milliseconds of the host's.

    Parameters and state are those of AdamW.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
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
        adamw.state[param] = {STEP: step} | {name: torch.zeros_like(param) for name in MOMENTS}
    return adamw


@torch.no_grad()
def scaled_to_norm(grads: Sequence[Tensor | None], max_norm: float, shard_group: dist.ProcessGroup) -> float:
    """Scale sharded gradients in place to a 2-norm of at most max_norm (0: any); returns the norm before.

    One all-reduce over the ranks that share one copy of the weights. A norm that is not finite scales
    nothing.
    """
    local = [local_shard(grad) for grad in grads if grad is not None]
    square = torch.nn.utils.get_total_norm(local).float().square()
    dist.all_reduce(square, group=shard_group)
    norm = square.sqrt().item()
    if 0 < max_norm < norm < float("inf"):
        torch._foreach_mul_(local, max_norm / norm)
    return norm


def local_shard(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, without a graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of the optimizer step after `step` steps, of total_steps (0: unknown).

    A pure function of the number of steps taken: nothing to save or restore.

    Linear warmup from lr_warmup_init over lr_warmup_steps (if negative: lr_warmup_steps_ratio of all steps),
    then lr_decay_style, else warmup_style, down to min_lr or min_lr_ratio * lr at lr_decay_steps, else at
    total_steps. Those of warmup_style are transformers' schedules with a floor, those of lr_decay_style
    megatron-core's (OptimizerParamScheduler). ConfigError if the total is needed and unknown.
    """
    style = optim.lr_decay_style or optim.warmup_style
    end = optim.lr_decay_steps or total_steps
    by_share = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    if (style not in ENDLESS and end <= 0) or (by_share and total_steps <= 0):
        raise ConfigError(
            f"optim: a {style} schedule, lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio}: the number of "
            "optimizer steps is unknown. Set optim.total_training_steps."
        )
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return optim.lr_warmup_init + (optim.lr - optim.lr_warmup_init) * step / warmup
    floor = optim.min_lr or optim.min_lr_ratio * optim.lr
    if style == "inverse-square-root":
        return (
            max(floor, optim.lr * math.sqrt(max(warmup, 1) / max(step, 1)))
            if end <= 0 or step <= end
            else floor
        )
    return floor + (optim.lr - floor) * _share(optim, style, step, warmup, end)


def _share(optim: OptimConfig, style: str, step: int, warmup: int, end: int) -> float:
    """Where between the floor (0) and the peak (1) the learning rate is after the warmup."""
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    match style:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            cycles = 0.5 if optim.lr_decay_style else optim.num_cycles
            return 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress))
        case "WSD":
            decay = optim.lr_wsd_decay_steps or 1
            left = min(1.0, max(0.0, (step - (end - decay)) / decay))
            return WSD_DECAYS[optim.lr_wsd_decay_style](left)
    raise ConfigError(f"optim.warmup_style={style!r}: use constant, linear or cosine.")
