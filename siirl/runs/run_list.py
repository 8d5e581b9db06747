"""`siirl ls`: the runs below a folder, a line each, or as JSON."""

import dataclasses
import os
import stat
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from siirl.config.roles import EXPORTS
from siirl.errors import ConfigError
from siirl.observe.columns import REWARD, VALIDATION_REWARD
from siirl.observe.curve import of_column
from siirl.runs.folder_reader import MARKS, Skipped, one_line
from siirl.runs.run_state import RunState, read_run
from siirl.runs.run_text import age_text, cut, last_and_best, path_text, short_command, table
from siirl.spelling import size_text

DEPTH = 5
"""Folders between the one that is listed and a run."""
WRITTEN = (
    *("checkpoints", "conversations", "errors", *EXPORTS.values(), "logs", "rollouts", "status"),
    *("swanlab", "attempts", "profile", "tensorboard", "trace", "wandb", "weights"),
)
"""Folders that a run writes into its own: no run is looked for in them."""
HEAD = (
    "run",
    "state",
    "step",
    "rewards of",
    "last",
    "best",
    "starts",
    "restarts",
    "ranks",
    "size",
    "age",
    "command",
)
CAUSE_WIDTH, COMMAND_WIDTH = 48, 80
MOST_RESUMED = 3
"""Runs whose line to go on is printed."""


def find_runs(folder: Path, unreadable: Skipped, depth: int = DEPTH) -> Iterator[Path]:
    """The run folders at and below a folder. Hidden folders, links and what a run writes are left out."""
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        unreadable[path_text(folder)] = one_line(error.strerror or str(error))
        return
    is_run = any(entry.name in MARKS and not entry.is_dir(follow_symlinks=False) for entry in inside)
    if is_run:
        yield folder
    for entry in inside if depth else ():
        own = is_run and (entry.name in WRITTEN or entry.name.startswith("global_step_"))
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and not own:
            yield from find_runs(Path(entry.path), unreadable, depth - 1)


def size_on_disk(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk; neither links nor closed folders are followed."""
    total, folders = 0, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # a folder of another user, or one that was removed just now
            continue
    return total


def listed(folder: Path) -> tuple[list[tuple[RunState, int]], Skipped]:
    """(runs with their sizes, the one that was started last first; folders that could not be read).

    ConfigError: there is no such folder, or this user may not read it.
    """
    if not _may_be_folder(folder):
        raise ConfigError(
            f"there is no folder {path_text(folder)}: runs cannot be looked for in it. Give a folder above "
            "your runs; without trainer.output_dir they are in outputs/PROJECT/EXPERIMENT of where they "
            "were started."
        )
    unreadable = Skipped()
    runs = [(read_run(path), size_on_disk(path)) for path in find_runs(folder, unreadable)]
    if not runs and path_text(folder) in unreadable:
        raise ConfigError(
            f"{path_text(folder)} cannot be read: {unreadable[path_text(folder)]}. Choose a folder that this "
            "user may read."
        )
    return sorted(runs, key=lambda run: -_when(run[0])), unreadable


def _may_be_folder(folder: Path) -> bool:
    """Whether something can be a folder: it is one, or lies in a folder that this user may not look into."""
    try:
        return stat.S_ISDIR(folder.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def list_text(folder: Path, width: int | None) -> str:
    """The table of `siirl ls`. width: of a line; None: as long as it is."""
    runs, unreadable = listed(folder)
    closed = [f"not read: {path}: {why}" for path, why in unreadable.items()]
    if not runs:
        told = f"no runs in {path_text(folder)}, nor up to {DEPTH} folders below it."
        return "\n".join([told, *closed])
    now_s = time.time()
    rows = [_row(run, size, folder, now_s) for run, size in runs]
    damaged = sum(bool(run.unreadable) for run, _ in runs)
    if damaged:
        closed.append(
            f"(?) not everything in {damaged} of these folders can be read: `siirl watch RUN` says what"
        )
    ways = [run.how_on for run, _ in runs if run.how_on]
    more = f"(`siirl watch RUN` says how {len(ways) - MOST_RESUMED} more go on)"
    on = [*ways[:MOST_RESUMED], *[more] * (len(ways) > MOST_RESUMED)]
    return "\n".join([table(HEAD, rows, width), *on, *closed])


def _row(run: RunState, size: int, top: Path, now_s: float) -> tuple[str, ...]:
    name = path_text(run.folder.relative_to(top)) + " (?)" * bool(run.unreadable)
    cause = f": {run.cause}" if run.cause else ""
    state = f"{run.status}{cause}"
    kind, rewards = run.reward()
    last, best = last_and_best(rewards)
    parts = [f"{one_line(name)} {last_and_best(series)[0]}" for name, series in run.parts().items()]
    return (
        name,
        cut(state, CAUSE_WIDTH),
        f"{run.step}/{run.total_steps or '?'}",
        kind,
        f"{last} ({', '.join(parts)})" if parts else last,
        best,
        str(run.starts or "?"),
        str(len(run.attempts)),
        _ranks(run),
        size_text(size),
        age_text(now_s - when) if (when := _when(run)) else "?",
        cut(short_command(run.command), COMMAND_WIDTH) or "?",
    )


def _ranks(run: RunState) -> str:
    """How many ranks the run has; if attempts of its last start had another number, in their order."""
    counts = [count for count in (*(one.world_size for one in run.attempts), len(run.ranks)) if count]
    changes = [now for before, now in pairwise([0, *counts]) if now != before]
    return ", ".join(map(str, changes)) or "?"


def list_json(folder: Path) -> list[dict[str, Any]]:
    """What `siirl ls --json` prints: an object for each run."""
    return [_object(run, size) for run, size in listed(folder)[0]]


def _object(run: RunState, size: int) -> dict[str, Any]:
    return {
        "folder": str(run.folder.absolute()),
        "state": run.status,
        "cause": run.cause,
        "step": run.step,
        "total_steps": run.total_steps,
        "validation_reward": _extremes(of_column(run.rewards, VALIDATION_REWARD)),
        "training_reward": _extremes(of_column(run.rewards, REWARD)),
        "reward_parts": {
            name: told for series in run.parts().values() for name, told in _extremes(series).items()
        },
        "starts": run.starts,
        "world_size": len(run.ranks) or None,
        "attempts": [dataclasses.asdict(attempt) for attempt in run.attempts],
        "size_bytes": size,
        "started_s": run.started_s or None,
        "last_sign_s": run.last_sign_s or None,
        "checkpoint_step": run.checkpoint_step,
        "host": run.host,
        "command": run.command,
        "unreadable": dict(run.unreadable),
    }


def _extremes(series: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    """Metric -> its last and best value, and the step of the best."""
    found = {}
    for name, points in series.items():
        best = max(points, key=lambda step: (points[step], -step))
        found[name] = {"last": points[max(points)], "best": points[best], "best_step": best}
    return found


def _when(run: RunState) -> float:
    """When the run was started last, or was seen last where that is not known."""
    return run.started_s or run.last_sign_s
