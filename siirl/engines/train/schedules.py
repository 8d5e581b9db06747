"""Learning rate as a pure function of the number of optimizer steps taken: nothing to save or restore."""

import math

from siirl.config.common import OptimConfig
from siirl.errors import ConfigError


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of the optimizer step after `step` steps, of total_steps (0: unknown).

    Linear warmup from 0 over lr_warmup_steps (if negative: lr_warmup_steps_ratio of all steps), then by
    warmup_style: constant; linear to min_lr_ratio * lr; cosine with num_cycles waves to the same. These are
    transformers' schedules with a floor. ConfigError if the total is needed and unknown.
    """
    needs_total = optim.warmup_style != "constant" or (
        optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    )
    if needs_total and total_steps <= 0:
        raise ConfigError(
            f"optim.warmup_style={optim.warmup_style}, lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio}: "
            "the number of optimizer steps is unknown. Set optim.total_training_steps."
        )
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = int(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return optim.lr * step / warmup
    if optim.warmup_style == "constant":
        return optim.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if optim.warmup_style == "linear":
        share = 1.0 - progress
    elif optim.warmup_style == "cosine":
        share = 0.5 * (1.0 + math.cos(2.0 * math.pi * optim.num_cycles * progress))
    else:
        raise ConfigError(f"optim.warmup_style={optim.warmup_style!r}: use constant, linear or cosine.")
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)
