"""The devices and processes of a run, without torch: what cannot start is refused before its workers."""

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from siirl.compiler.choices import Machine
from siirl.compiler.choose import PACKAGES
from siirl.compiler.cost.device_kinds import DeviceKind
from siirl.config import Config
from siirl.errors import ConfigError

DEVICES = "trainer.n_gpus_per_node"
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


def with_machines(cfg: Config, nnodes: int) -> Config:
    """The configuration of a run that has so many machines, no more and no fewer."""
    trainer = dataclasses.replace(cfg.trainer, nnodes=nnodes, min_nnodes=None)
    return dataclasses.replace(cfg, trainer=trainer)


def machine_of(cfg: Config, launcher: str, here: bool = False) -> Machine:
    """What is known of the devices of a run: of a job of this machine alone all, of others what keys say.

    here: the run starts here. Else `siirl plan` may be asked about GPUs that are elsewhere.
    """
    trainer, gib = cfg.trainer, cfg.trainer.device_memory_gib
    alone = trainer.nnodes == 1 and launcher != "ray"
    none_here = alone and count_gpus(os.environ, Path("/dev")) == 0
    if trainer.device == "cpu" or (trainer.device == "auto" and none_here and (here or gib is None)):
        return Machine("cpu", _host_gib() / 2 / trainer.n_gpus_per_node)
    if not alone:
        return Machine() if gib is None else Machine("cuda", gib)
    return Machine("cuda", gib or device_memory_gib(), _capability(), *installed())


def named_machine(cfg: Config, kind: DeviceKind) -> Machine:
    """A machine with devices of a kind, as `siirl plan --explain` assumes it, with the packages here."""
    trainer = cfg.trainer
    if trainer.device == "cpu":
        return Machine("cpu", _host_gib() / 2 / trainer.n_gpus_per_node)
    gib = trainer.device_memory_gib or (kind.gib if trainer.nnodes == 1 else None)
    capability = {"h": (9, 0), "b": (10, 0)}.get(kind.name[0], (0, 0))
    return Machine("cuda", gib, capability, *installed())


def installed() -> tuple[frozenset[str], str]:
    """Those of the packages that choices depend on that are installed, and the version of Triton or ""."""
    found = {}
    for name in (*PACKAGES, "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return frozenset(found) & frozenset(PACKAGES), found.get("triton", "")


def _host_gib() -> float:
    """Memory of this machine, or of the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # of a container
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total / 2**30


def _capability() -> tuple[int, int]:
    """Of the least able NVIDIA GPU here; (0, 0) without one, or where its driver does not tell."""
    told = [tuple(map(int, text.split("."))) for text in _told("compute_cap", os.environ, Path("/dev"))]
    return min(((major, minor) for major, minor in told), default=(0, 0))


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


def rank_memory_gib(cfg: Config) -> float | None:
    """GiB of a device of this machine; on CPU what a process has of the host's memory. None: not known."""
    trainer = cfg.trainer
    if trainer.device != "cpu":
        return device_memory_gib()
    return _host_gib() / trainer.n_gpus_per_node if trainer.nnodes == 1 else None


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
