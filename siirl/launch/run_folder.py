"""The folders that a run writes: held by one run at a time, and never with the results of two runs in them.

trainer.output_dir and, where they lie elsewhere, trainer.default_local_dir and trainer.dump_rollouts_dir. No
torch.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from siirl.checkpoint.files import current_step, pointer_problem, remove_checkpoints, replaced, saved_steps
from siirl.compiler.compile import load_dag
from siirl.config import Config
from siirl.config.roles import EXPORTS
from siirl.config.root import all_keys
from siirl.config.tree import filled
from siirl.errors import ConfigError, UserError
from siirl.guarded_files import first_bytes, open_regular
from siirl.observe.position import PROGRESS_FILE

log = logging.getLogger(__name__)
EXPERIMENT = "trainer.experiment_name"
LOCK, CODE_DIR = ".run.lock", "run_code"
RESULTS = ("metrics.jsonl", *EXPORTS.values())
"""What makes an output folder a used one."""
OWN = (
    *RESULTS,
    PROGRESS_FILE,
    "reward_curve.png",
    "tensorboard/events.out.tfevents.*",
    "rollouts/*/step_*",
    "conversations/step_*.html",
    "trace/rank_*.jsonl",
    "ledger/*.arrow",
    "trace.json.gz",
    "profile/step_*",
    CODE_DIR,
)
"""Patterns of what a run writes into its output folder, and what none that starts there may find."""
LOGS = (
    *("logs/rank_*.log*", "logs/vllm_*.log*", "logs/sglang_*.log*"),
    *("run.yaml", "attempts.jsonl", "attempts"),
)
"""The same, but kept for who wants to know why an earlier run died before it had results."""


@contextlib.contextmanager
def held(cfg: Config, run_id: str) -> Iterator[None]:
    """Keep the folders of a run to itself until the block ends, or this process does, however it ends.

    run_id: a run may hold a folder in several of its processes. Folders that were made here, and into which
    nobody has written, go again. ConfigError: another run holds one.
    """
    with contextlib.ExitStack() as stack:
        for key, folder in written_folders(cfg).items():
            stack.enter_context(_locked(key, folder, run_id))
        yield


def with_own_name(cfg: Config, shares_no_time: bool) -> Config:
    """The configuration of a run that starts, named by its workflow, its model and the time where nobody
    named it or its folder.

    shares_no_time: its processes compute the name each, so the time is left out.
    """
    has_name = cfg.trainer.experiment_name != all_keys()[EXPERIMENT].default
    if has_name or {"trainer.output_dir", EXPERIMENT} & set(cfg.explicit):
        return cfg
    words = []
    with contextlib.suppress(UserError):  # said elsewhere
        words.append(load_dag(cfg).dag_id)
    words.append(Path(cfg.actor_rollout_ref.model.path).name)
    if not shares_no_time:
        words.append(time.strftime("%Y%m%d-%H%M%S"))
    name = "_".join(re.sub(r"[^\w.-]+", "-", word) for word in words if word)
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    named = (filled(cfg, {EXPERIMENT: each}) for each in names)
    return next(one for one in named if shares_no_time or not absolute(one.trainer.output_dir).exists())


def written_folders(cfg: Config) -> dict[str, Path]:
    """Key -> folder that the run writes and that lies in none of the others."""
    trainer = cfg.trainer
    folders = {"trainer.output_dir": absolute(trainer.output_dir)}
    if trainer.save_freq > 0:
        folders["trainer.default_local_dir"] = absolute(trainer.default_local_dir)
    if trainer.dump_rollouts_dir:
        folders["trainer.dump_rollouts_dir"] = absolute(trainer.dump_rollouts_dir)
    return {
        key: folder
        for key, folder in folders.items()
        if not any(other in folder.parents for other in folders.values())
    }


def refuse_used(cfg: Config) -> None:
    """ConfigError if the run would mix its results with those of an earlier run. Writes nothing.

    A run that goes on from a checkpoint of the folder is that earlier run; with trainer.overwrite a run that
    starts over takes its place, and so does a server that goes on with the clients of an earlier one.
    """
    if cfg.trainer.overwrite or resumes(cfg) or serves_again(cfg):
        return
    output, root = absolute(cfg.trainer.output_dir), absolute(cfg.trainer.default_local_dir)
    found = [name for name in RESULTS if _is_filled(output / name)]
    steps = saved_steps(root)
    if not found and not steps:
        return
    has = f"{output} has {' and '.join(found)}" if found else f"{root} has checkpoints"
    if steps:
        resume = f"go on from its step {current_step(root) or steps[0]} (trainer.resume_mode=auto)"
    else:
        resume = f"resume it (not possible here: there is no checkpoint in {root}; see trainer.save_freq)"
    raise ConfigError(
        f"trainer.output_dir={cfg.trainer.output_dir}: {has} of an earlier run, and two runs would be mixed. "
        f"There are three ways out: {resume}; or choose another folder (trainer.output_dir, or "
        "trainer.experiment_name); or start over and remove what the earlier run wrote, checkpoints included "
        "(trainer.overwrite=true)."
    )


def with_own_results(cfg: Config) -> Config:
    """The configuration of a run that may find its own results in its folder: those of an earlier attempt."""
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, overwrite=True))


def serves_again(cfg: Config) -> bool:
    """Whether a server begins where an earlier one has left what its clients trained."""
    return cfg.service.enable and (absolute(cfg.trainer.output_dir) / "service" / "sessions.json").is_file()


def resumes(cfg: Config) -> bool:
    """Whether the run goes on from a checkpoint of its own folder, or ends because none there is whole."""
    trainer, root = cfg.trainer, absolute(cfg.trainer.default_local_dir)
    if trainer.rollout_only:
        return False
    if trainer.resume_mode == "resume_path":
        return absolute(str(trainer.resume_from_path)).parent == root
    return trainer.resume_mode == "auto" and bool(
        saved_steps(root) or replaced(root) or pointer_problem(root)
    )


def clear(cfg: Config) -> None:
    """Remove what earlier runs left in the folder, unless the run goes on from a checkpoint there, or with
    the clients of an earlier server.

    Only files that a run writes by their names; nothing else in the folder is touched. ConfigError if
    something cannot be removed.
    """
    if resumes(cfg) or (serves_again(cfg) and not cfg.trainer.overwrite):
        return
    output = absolute(cfg.trainer.output_dir)
    patterns = (*OWN, *LOGS) if cfg.trainer.overwrite else OWN
    try:
        for path in [path for pattern in patterns for path in output.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if cfg.trainer.overwrite:
            remove_checkpoints(absolute(cfg.trainer.default_local_dir))
    except OSError as error:
        raise ConfigError(
            f"trainer.output_dir={cfg.trainer.output_dir}: what an earlier run left cannot be removed: "
            f"{error}. Choose another folder, or fix its permissions."
        ) from error


def refuse_busy(cfg: Config) -> None:
    """ConfigError if a run that goes on now holds a folder of this one. Writes nothing."""
    for key, folder in written_folders(cfg).items():
        if is_held(folder):
            raise _busy(key, folder)


def is_held(folder: Path) -> bool:
    """Whether a run that goes on now, on this machine, holds the folder. Writes nothing."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(folder / LOCK)) as file:
        return not _try_lock(file.fileno(), fcntl.LOCK_SH)
    return False


def is_gone(folder: Path, first: os.stat_result) -> bool:
    """Whether a folder was removed or renamed, or another is in its place: its lock then keeps nobody out."""
    try:
        return not os.path.samestat(folder.stat(), first)
    except FileNotFoundError:
        return True
    except OSError:  # of a file system that is away for a while
        return False


def holder(folder: Path) -> dict[str, Any]:
    """Who held a folder last, and may hold it now: run_id, host, pid, since; empty if it cannot be read."""
    try:
        told = json.loads(first_bytes(folder / LOCK))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def with_absolute_folders(cfg: Config) -> Config:
    """The configuration with whole paths of all folders that a run writes: what it prints can be found."""
    names = (
        "output_dir",
        "default_local_dir",
        "dump_rollouts_dir",
        "rollout_data_dir",
        "validation_data_dir",
    )
    given = {name: getattr(cfg.trainer, name) for name in names}
    whole = {name: str(absolute(folder)) for name, folder in given.items() if folder}
    return dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, **whole))


def absolute(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


@contextlib.contextmanager
def _locked(key: str, folder: Path, run_id: str) -> Iterator[None]:
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(
            f"{key}={str(folder)!r} cannot be written: {error}. Choose another folder, or fix its "
            "permissions."
        ) from error
    with file:
        if _try_lock(file.fileno(), fcntl.LOCK_EX):
            about = {"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
            with contextlib.suppress(OSError):  # of a full disk: the lock holds all the same
                file.truncate(0)
                file.write(json.dumps(about))
                file.flush()
        elif holder(folder).get("run_id") != run_id:
            raise _busy(key, folder)
        try:
            yield
        finally:
            if made:
                _remove_unused(folder, made)


def _remove_unused(folder: Path, made: Sequence[Path]) -> None:
    """Remove a folder that holds its lock alone, and those above it that were made with it."""
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
            for each in made:
                each.rmdir()


def _try_lock(fd: int, kind: int) -> bool:
    """Whether the lock was to be had. The kernel gives it back when its last process ends."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.warning("runs in one folder are not kept apart here: %s", error)
    return True


def _busy(key: str, folder: Path) -> ConfigError:
    about = holder(folder)
    who = ""
    if about:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["since"]))
        who = f" (process {about['pid']} on {about['host']}, since {since})"
    return ConfigError(
        f"{key}={folder} is in use by a run{who}: two would write the same files. Three ways "
        "out: end it, or wait for its end, and go on from its last checkpoint by this command "
        f"(trainer.resume_mode=auto); or choose another folder ({key}); or end it "
        "and start over (trainer.resume_mode=disable trainer.overwrite=true)."
    )


def _is_filled(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.stat().st_size > 0)
