"""The GPUs that this machine offers, without torch: a run that cannot start is refused before its workers."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from siirl.config import Config
from siirl.errors import ConfigError

OTHER_DRIVERS = ("kfd", "dxg")  # AMD's, and that of Windows' Linux: one file for all GPUs


def check_gpus(cfg: Config, env: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> None:
    """ConfigError if this machine has too few GPUs for its ranks; trainer.device=auto may have none at all.

    An upper bound is enough: each rank picks its GPU by torch, and says what is wrong if there is none.
    """
    wanted, ranks = cfg.trainer.device, cfg.trainer.n_gpus_per_node
    found = count_gpus(env, dev)
    if wanted == "cpu" or found is None or found >= ranks or (wanted == "auto" and not found):
        return
    raise ConfigError(
        f"trainer.device={wanted} with trainer.n_gpus_per_node={ranks}, but this machine offers {found} "
        f"GPU(s) (CUDA_VISIBLE_DEVICES: {env.get('CUDA_VISIBLE_DEVICES', 'not set')}): each rank needs its "
        f"own. Set {f'trainer.n_gpus_per_node={found}, or ' if found else ''}trainer.device=cpu."
    )


def count_gpus(env: Mapping[str, str], dev: Path) -> int | None:
    """The most GPUs that a process could see; None if that cannot be told."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        hidden = next((index for index, name in enumerate(names) if name.startswith("-")), len(names))
        return hidden  # CUDA ignores what follows an invalid entry
    if any((dev / name).exists() for name in OTHER_DRIVERS):
        return None
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in dev.iterdir())


def device_memory_gib(env: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> float | None:
    """Memory of the smallest NVIDIA GPU here, in GiB; None without one, or where its driver does not tell."""
    try:
        return min(map(float, _told("memory.total", env, dev))) / 1024
    except ValueError:
        return None


def device_name(env: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> str | None:
    """Name of the first NVIDIA GPU here, as in "NVIDIA H200"; None like device_memory_gib."""
    return next(iter(_told("name", env, dev)), None)


def _told(what: str, env: Mapping[str, str], dev: Path) -> list[str]:
    """What the driver says of each GPU; nothing without one."""
    if not count_gpus(env, dev):
        return []
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.stdout.splitlines() if line.strip()]
