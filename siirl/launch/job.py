"""The job: all that a worker process needs to know, as one JSON file; and which launcher a run uses. No
torch.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from siirl.config import Config
from siirl.errors import ConfigError
from siirl.guarded_files import write_own

DEFAULT_ENTRY = "siirl.dag_worker.training:run_worker"


@dataclass(frozen=True)
class Job:
    """One run, the same for every rank."""

    config: dict[str, Any]
    """The composed Config as a dict (siirl.config.to_dict)."""
    plan: str
    """Plan.to_json()."""
    output_dir: str
    """Folder of logs/, errors/, status/ and what the run produces."""
    world_size: int
    local_world_size: int
    """Processes on each machine."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else that the worker wants, JSON values."""
    entry: str = DEFAULT_ENTRY
    """ "pkg.mod:fn", called as fn(cfg, plan, rank, world_size, device, job) in every process."""
    run_id: str = ""
    """Tells this start from others in the same folder."""
    memory_estimate: dict[str, Any] = field(default_factory=dict)
    """What the phases of a step were estimated to take of a device, for readers of the folder; workers do not
    look at it. See siirl/compiler/memory/phases.py, estimate_record."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """What the run reads of the user's, as it was when it began: RunInputs as a dict."""
    memory_dir: str = ""
    """Folder in host memory for checkpoints between those on disk; "" if there are none."""
    launcher: "Launcher" = "local"
    """What starts its workers."""
    amendable: bool = False
    """Whether that takes what `siirl amend` asks for in the output folder (siirl/observe/amendments.py)."""
    amendments: list[str] = field(default_factory=list)
    """Those that it has had, a line each."""

    @property
    def output_path(self) -> Path:
        """In full: what is printed of it is found from any folder."""
        return Path(self.output_dir).expanduser().absolute()

    @property
    def log_dir(self) -> Path:
        return self.output_path / "logs"

    def log_path(self, rank: int) -> Path:
        return self.log_dir / f"rank_{rank}.log"

    def error_path(self, rank: int) -> Path:
        return self.output_path / "errors" / f"rank_{rank}.json"

    def position_path(self, rank: int) -> Path:
        return self.output_path / "status" / f"rank_{rank}"

    def prepare(self) -> Path:
        """Make the folders, forget an earlier run's errors and positions, write job.json; return its path."""
        try:
            for folder in (self.log_dir, self.error_path(0).parent, self.position_path(0).parent):
                folder.mkdir(parents=True, exist_ok=True)
            for stale in (
                *self.error_path(0).parent.glob("rank_*"),
                *self.position_path(0).parent.glob("rank_*"),
            ):
                stale.unlink()
            path = self.output_path / "job.json"
            write_own(path, self.to_json())
        except OSError as error:
            raise ConfigError(
                f"trainer.output_dir={self.output_dir!r} cannot be written: {error}. "
                "Choose a folder that this user may write to."
            ) from error
        return path

    @classmethod
    def read(cls, path: Path) -> "Job":
        return cls.from_json(path.read_text())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        return cls(**json.loads(text))


@dataclass(frozen=True)
class ProcessPlace:
    """This process among all: what the launcher's environment says."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def nnodes(self) -> int:
        """Machines, if all have as many processes as this one."""
        return self.world_size // self.local_world_size

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "ProcessPlace":
        rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        return cls(
            rank, int(env.get("LOCAL_RANK", rank)), world_size, int(env.get("LOCAL_WORLD_SIZE", world_size))
        )


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
