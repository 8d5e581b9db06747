"""Learning rate as a pure function of the number of optimizer steps taken: nothing to save or restore."""

import math
from collections.abc import Callable

from siirl.config.common import OptimConfig
from siirl.errors import ConfigError

ENDLESS = ("constant", "inverse-square-root")
"""Schedules that need no last step."""

WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Share of the peak that is left, 1 to 0, by the progress of a warmup-stable-decay schedule's decay."""


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of the optimizer step after `step` steps, of total_steps (0: unknown).

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
