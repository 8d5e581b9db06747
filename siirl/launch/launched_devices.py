"""The devices and processes that a run has by its launcher, and what a start refuses of them."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siirl.config import Config
from siirl.errors import ConfigError, Place
from siirl.findings import Findings
from siirl.launch.devices import DEVICES, check_gpus, count_gpus, with_machines
from siirl.launch.job import Launcher, ProcessPlace
from siirl.launch.ray_cluster import check_cluster, find_address
from siirl.launch.rendezvous import check_port


def check_start(cfg: Config, launcher: Launcher) -> None:
    """ConfigError if this machine, torchrun's processes or port, or the Ray cluster do not fit the plan."""
    if launcher == "ray":
        check_cluster(cfg)
        return
    found = Findings(Place.MACHINE)
    if launcher == "torchrun":
        with found.at():
            check_processes(cfg)
        with found.at():
            check_port()
    with found.at():
        check_gpus(cfg)
    found.close()


def check_processes(cfg: Config, env: Mapping[str, str] = os.environ) -> None:
    """ConfigError: torchrun has not started the processes of the plan."""
    place, trainer = ProcessPlace.from_env(env), cfg.trainer
    nnodes, ranks = trainer.nnodes, trainer.n_gpus_per_node
    if (place.world_size, place.local_world_size) != (nnodes * ranks, ranks):
        raise ConfigError(
            f"torchrun started {place.world_size} processes, {place.local_world_size} on this machine, but "
            f"trainer.nnodes * trainer.n_gpus_per_node = {nnodes} * {ranks}: the "
            "plan is made for exactly these. Leave both out, and they are torchrun's --nnodes and "
            "--nproc-per-node, or set them so."
        )


def with_devices_here(cfg: Config, launcher: Launcher, starts: bool = False) -> Config:
    """The configuration of a job of this machine alone with this machine's GPUs, or one process on CPU, where
    nobody said how many; without a GPU here its device is the CPU. Under torchrun with the machines and
    processes that it has started.

    starts: the run starts here. Else a command that says how many devices there are may mean those of another
    machine, which a run will have.
    """
    cfg = with_processes_there(cfg) if launcher == "torchrun" else cfg
    trainer, found = cfg.trainer, count_gpus(os.environ, Path("/dev"))
    is_said = DEVICES in cfg.explicit or trainer.device_memory_gib is not None
    if not _is_alone(cfg, launcher) or found is None or (is_said and not starts):
        return cfg
    on_cpu = trainer.device == "cpu" or (trainer.device == "auto" and not found)
    changes: dict[str, Any] = {"device": "cpu"} if on_cpu else {}
    if launcher != "torchrun" and DEVICES not in cfg.explicit and (on_cpu or found):  # else refused
        changes["n_gpus_per_node"] = 1 if on_cpu else found
    return dataclasses.replace(cfg, trainer=dataclasses.replace(trainer, **changes))


def assumed_devices(cfg: Config, launcher: Launcher) -> list[str]:
    """A warning where a plan is for devices of a cluster that nobody counted."""
    if launcher != "ray" or _is_alone(cfg, launcher) or DEVICES in cfg.explicit:
        return []
    ranks = cfg.trainer.n_gpus_per_node
    return [
        f"{DEVICES} is not set: {ranks} devices on each machine of the Ray cluster are assumed, and a start "
        "on one with fewer is refused. Set it to what they have."
    ]


def with_processes_there(cfg: Config, env: Mapping[str, str] = os.environ) -> Config:
    """The configuration for the machines that torchrun has found, where the run may do with so many or nobody
    said how many, and for the processes that it started on each, where nobody said."""
    place, trainer = ProcessPlace.from_env(env), cfg.trainer
    if DEVICES not in cfg.explicit:
        trainer = dataclasses.replace(trainer, n_gpus_per_node=place.local_world_size)
        cfg = dataclasses.replace(cfg, trainer=trainer)
    fewest = trainer.nnodes if trainer.min_nnodes is None else trainer.min_nnodes
    may_do = "trainer.nnodes" not in cfg.explicit or fewest <= place.nnodes <= trainer.nnodes
    return with_machines(cfg, place.nnodes) if may_do else cfg


def _is_alone(cfg: Config, launcher: Launcher) -> bool:
    """Whether all processes of a job are on this machine, whose devices are known."""
    asked = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    on_cluster = launcher == "ray" and (asked not in (None, "local", "auto") or find_address(cfg) is not None)
    return cfg.trainer.nnodes == 1 and not on_cluster
