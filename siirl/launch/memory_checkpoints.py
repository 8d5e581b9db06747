"""Where a run keeps checkpoints in host memory, between those on disk. No torch.

A folder of /dev/shm, which holds files in memory: it outlives the workers, and ends with what starts them on
its machine: the local launcher, an actor of Ray, or torchrun's agent. If that is killed, another process
removes it; if that is killed too, the next run on the machine that has such a folder does. On
several machines each has one; siirl/checkpoint/machines.py keeps each file in two of them.

torchrun's agent outlives the workers, and runs no code of ours. So its folder is named after it, which the
workers of every attempt find; a process that the first of them starts removes it when the agent is gone. The
actors of Ray outlive the workers and their actors, and end with the run. A machine that is lost takes its
folder with it; the next one has copies.
"""

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from siirl.checkpoint.files import current_step
from siirl.checkpoint.held_files import Held, held_files, newest_whole
from siirl.cleanup import owned_folder, sweep
from siirl.config import Config
from siirl.errors import ConfigError
from siirl.launch.process import end_with_parent
from siirl.launch.ray_cluster import Node
from siirl.sandbox.linux import PR_SET_PDEATHSIG, prctl

SHARED_MEMORY = Path("/dev/shm")
KEY = "trainer.memory_checkpoint_freq"
KEEPER = 'read -r nothing; rm -rf -- "$1"'
"""Waits until nobody holds the other end of its input, as the launcher is gone, then removes the folder. One
process: no part of it can be stopped alone."""
NAME = "siirl-torchrun-{}-{}-{}"
"""User, process id and start of the agent."""
NAMED = re.compile(r"siirl-torchrun-(\d+)-(\d+)-(\d+)")
OF_AGENT = b"TORCHELASTIC_RUN_ID="
"""In the environment of all that an agent starts, and not in its own."""
OPEN_S, ANSWER_S = 120.0, 10.0
"""For an actor of Ray to start; to answer."""
LOOK_S, WORKERS_S = 0.5, 3.0
"""WORKERS_S: in which they end when the agent is gone, and may still write."""
START_FIELD, STATE_FIELD = 19, 0
"""In /proc/PID/stat, behind the name."""


def keeps_in_memory(cfg: Config) -> bool:
    """Whether the run has checkpoints in memory: a restart may come, and there is something to save."""
    trainer = cfg.trainer
    trains = not (trainer.val_only or trainer.rollout_only)
    return trains and trainer.memory_checkpoint_freq > 0 and trainer.max_restarts > 0


def step_in(folder: str) -> int:
    """Of the newest checkpoint in a folder; 0 if there is none."""
    return (current_step(Path(folder)) or 0) if folder else 0


@contextlib.contextmanager
def memory_folder(cfg: Config) -> Iterator[str]:
    """The folder of a run's checkpoints in memory, until the block ends; "" if it keeps none there.

    ConfigError: this machine has no such memory.
    """
    if not keeps_in_memory(cfg):
        yield ""
        return
    try:
        folder, lock = owned_folder("siirl-checkpoints-", SHARED_MEMORY)
    except OSError as error:
        raise _no_memory(f"{KEY}={cfg.trainer.memory_checkpoint_freq}", error) from error
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", KEEPER, "siirl-keeper", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
        preexec_fn=_go_on_after_the_parent,
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # not the keeper's: it may be gone, or stopped
        with contextlib.suppress(OSError):
            os.unlink(folder)  # where something else has come in its place
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
        lock.close()


def _no_memory(key: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{key}: {SHARED_MEMORY}, where files stay in memory, cannot be used: {error}. Set {KEY}=-1, and "
        "trainer.save_freq for checkpoints on disk."
    )


def _go_on_after_the_parent() -> None:
    """A keeper that somebody stopped goes on when the launcher is gone: else neither would ever end."""
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def agent_folder(cfg: Config, env: Mapping[str, str] = os.environ) -> str:
    """Where this machine's checkpoints in memory are or will be; "" if the run keeps none there.

    ConfigError: no agent of torchrun has started this process: nothing would outlive it.
    """
    if not keeps_in_memory(cfg) or env.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        return ""
    agent = _agent()
    if "TORCHELASTIC_RUN_ID" not in env or agent is None:
        raise ConfigError(
            f"{KEY}={cfg.trainer.memory_checkpoint_freq}, but no torchrun has started this process, only "
            "something that sets its variables: nothing would outlive the workers. Start it by `torchrun "
            f"--max-restarts=3 ...`, or set {KEY}=-1 and trainer.save_freq."
        )
    return str(SHARED_MEMORY / NAME.format(os.getuid(), agent, _began(agent)))


def open_folder_of_agent(folder: str) -> None:
    """Make it, with a process that looks after it, unless an earlier attempt has; by one rank of a machine.

    ConfigError: this machine has no such memory, or somebody else has the folder.
    """
    _sweep()
    path = Path(folder)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        about = path.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077:
            raise ConfigError(f"{folder} is another user's: checkpoints in memory cannot be there.") from None
        return
    except OSError as error:
        raise _no_memory(KEY, error) from error
    subprocess.Popen(
        [sys.executable, "-m", "siirl.launch.memory_checkpoints", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it outlives the worker
    )


def goes_on_from(folder: str) -> bool:
    """Whether an earlier attempt has left checkpoints here, from which the run goes on."""
    return bool(folder) and any(Path(folder).glob("global_step_*"))


def keep(folder: Path) -> None:
    """Wait until the agent that the folder is named after has ended; remove it."""
    while _is_of_a_living(folder.name):
        time.sleep(LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(WORKERS_S)
    shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove folders of agents that have ended, where what was to do it was killed or stopped."""

    def is_left(folder: int, name: str) -> bool:
        return NAMED.fullmatch(name) is not None and not _is_of_a_living(name)

    sweep(SHARED_MEMORY, f"siirl-torchrun-{os.getuid()}-", is_left)


def _is_of_a_living(name: str) -> bool:
    found = NAMED.fullmatch(name)
    return found is not None and _began(int(found[2])) == found[3]


def _agent() -> int | None:
    """The process id of the agent: the closest one above this process that is not of its making."""
    pid = os.getppid()
    while pid > 1:
        try:
            if OF_AGENT not in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
            pid = int(_fields(pid)[1])
        except OSError:
            return None
    return None


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's time; None if there is none that runs."""
    with contextlib.suppress(OSError):
        fields = _fields(pid)
        return None if fields[STATE_FIELD] in "ZX" else fields[START_FIELD]
    return None


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class MemoryActor:
    """On one machine. Its methods are called by the driver."""

    def __init__(self, cfg: Config):
        end_with_parent()  # with its raylet
        self._open = contextlib.ExitStack()
        self._folder = self._open.enter_context(memory_folder(cfg))

    def folder(self) -> str:
        return self._folder

    def held(self) -> list[Held]:
        return held_files(Path(self._folder), contents=False)

    def close(self) -> None:
        self._open.close()


class RayMemory:
    """The folders of a run, by machine: `open` makes those that are not there yet. None if it keeps none."""

    def __init__(self, cfg: Config, options: dict[str, Any]):
        """options: of the actors."""
        self._cfg, self._options = cfg, options
        self._actors: dict[str, Any] = {}
        self._folders: dict[str, str] = {}

    def open(self, nodes: Sequence[Node], gather: Callable[..., list[str]]) -> None:
        """Have a folder on each of these machines.

        gather: waits for what actors answer, see RayTrainer. Other machines keep theirs: they may come back.
        """
        if not keeps_in_memory(self._cfg):
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._forget_lost()
        actor_class = ray.remote(MemoryActor)
        machines = {node.node_id: node for node in nodes}
        for node_id in machines:
            if node_id not in self._actors:
                where = NodeAffinitySchedulingStrategy(node_id, soft=False)
                actor = actor_class.options(num_cpus=0, scheduling_strategy=where, **self._options)
                self._actors[node_id] = actor.remote(self._cfg)
        refs = [self._actors[node_id].folder.remote() for node_id in machines]
        what = f"keep checkpoints in memory ({KEY})"
        self._folders = dict(zip(machines, gather(what, machines.values(), refs, OPEN_S), strict=True))

    def folder_on(self, node: str) -> str:
        return self._folders.get(node, "")

    def newest(self) -> int:
        """The step of the newest checkpoint that is whole on the machines which are there; 0: none."""
        version = newest_whole([held for held in self._forget_lost() if held is not None])
        return 0 if version is None else version.step

    def remove_folders(self) -> None:
        """Without Ray's head, too."""
        self._answers("close")

    def close(self) -> None:
        """Remove the folders, and end the actors."""
        import ray

        self.remove_folders()
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._folders = {}, {}

    def _forget_lost(self) -> list[list[Held]]:
        """What is held by the actors that answer; the others are forgotten."""
        answers = self._answers("held")
        self._actors = {node: actor for node, actor in self._actors.items() if node in answers}
        return list(answers.values())

    def _answers(self, method: str) -> dict[str, Any]:
        if not self._actors:  # perhaps without Ray
            return {}
        import ray
        from ray.exceptions import RayError

        refs = {node: getattr(actor, method).remote() for node, actor in self._actors.items()}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_S)
        found = {}
        for node, ref in refs.items():
            with contextlib.suppress(RayError):  # GetTimeoutError too
                found[node] = ray.get(ref, timeout=0)
        return found


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
