"""Which launcher a run uses."""

import os
from collections.abc import Mapping
from typing import Literal

from siirl.config import Config
from siirl.errors import ConfigError

Launcher = Literal["local", "torchrun", "ray"]
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def choose_launcher(cfg: Config, env: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher of this run: trainer.launcher, or what `auto` means here.

    auto: torchrun in a process that torchrun started; ray where RAY_ADDRESS is set and for several machines;
    else local. ConfigError: torchrun was asked for outside of it.
    """
    wanted = cfg.trainer.launcher
    missing = [name for name in _TORCHRUN_VARIABLES if name not in env]
    if wanted == "torchrun" or (wanted == "auto" and not missing):
        if missing:
            raise ConfigError(
                f"trainer.launcher=torchrun, but {', '.join(missing)} are not set: this process was not "
                "started by torchrun. Start it as `torchrun --nproc-per-node N -m siirl.main_dag ...`, or "
                "set trainer.launcher=local."
            )
        return "torchrun"
    if wanted == "ray" or (wanted == "auto" and (env.get("RAY_ADDRESS") or cfg.trainer.nnodes > 1)):
        return "ray"
    return "local"
