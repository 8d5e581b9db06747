"""Where a run keeps checkpoints in host memory, between those on disk. No torch.

A folder of /dev/shm, which holds files in memory: it outlives the workers, and ends with what starts them on
its machine: the local launcher, torchrun's agent (agent_memory.py), an actor of Ray (ray_memory.py). If that
is killed, another process removes it; if that is killed too, the next run on the machine that has such a
folder does. On several machines each has one; siirl/checkpoint/machines.py keeps each file in two of them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from siirl.checkpoint.files import current_step
from siirl.cleanup import owned_folder
from siirl.config import Config
from siirl.errors import ConfigError
from siirl.sandbox.linux import PR_SET_PDEATHSIG, prctl

SHARED_MEMORY = Path("/dev/shm")
KEY = "trainer.memory_checkpoint_freq"
KEEPER = 'read -r nothing; rm -rf -- "$1"'
"""Waits until nobody holds the other end of its input, as the launcher is gone, then removes the folder. One
process: no part of it can be stopped alone."""


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
        raise ConfigError(
            f"{KEY}={cfg.trainer.memory_checkpoint_freq}: {SHARED_MEMORY}, where files stay in memory, "
            f"cannot be used: {error}. Set {KEY}=-1, and trainer.save_freq for checkpoints on disk."
        ) from error
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


def _go_on_after_the_parent() -> None:
    """A keeper that somebody stopped goes on when the launcher is gone: else neither would ever end."""
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
