"""`siirl compare`: what two runs differ in, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.config.values import SECRET_KEYS
from siirl.observe.columns import PART, PARTS, columns_of, matches, number
from siirl.runs.folder_reader import Skipped, one_line
from siirl.runs.run_files import Start, read_config, read_history, read_starts
from siirl.runs.run_text import cut, path_text, table

MEAN_STEPS = 10
VALUE_WIDTH = 60
BETTER: Mapping[str, int] = {
    **dict.fromkeys(("reward/total", "reward/score", *(f"reward/{part}" for part in PARTS)), 1),
    PART: 1,
    "val/": 1,
    "perf/idle": -1,
    "perf/": 1,
    "critic/explained_variance": 1,
    "critic/value_loss": -1,
    "actor/rollout_log_prob_diff": -1,
    "time/": -1,
    "memory/": -1,
}
"""Beginning of a metric's name, its agent aside -> 1: more is better, -1: less is. Others have no best."""
PLACES = ("trainer.output_dir", "trainer.default_local_dir")
"""Keys in which any two runs differ: they say nothing."""


@dataclass(frozen=True)
class Extract:
    """What is compared of one run."""

    config: dict[str, Any]
    start: Start
    series: dict[str, dict[int, float]]
    unreadable: Mapping[str, str]


def extract(folder: Path) -> Extract:
    """Configuration, versions and metrics of a run; what cannot be read is empty."""
    unreadable = Skipped()
    config = read_config(folder, unreadable)
    _, start = read_starts(folder, unreadable, packages=True)
    return Extract(config, start, read_history(folder, unreadable).series, unreadable)


def compared(folders: tuple[Path, Path]) -> dict[str, Any]:
    """What `siirl compare --json` prints: [first, second] of whatever differs, and every metric of both."""
    one, two = (extract(folder) for folder in folders)
    keys = {name: pair for name, pair in _differing(one.config, two.config).items() if name not in PLACES}
    secret = {name: ["***", "***"] for name in keys if name.endswith(SECRET_KEYS)}
    names = dict.fromkeys([*one.series, *two.series])
    return {
        "runs": [str(folder.absolute()) for folder in folders],
        "configuration": keys | secret,
        "versions": _differing(_versions(one.start), _versions(two.start)),
        "metrics": {name: [_measured(name, run.series.get(name)) for run in (one, two)] for name in names},
        "unreadable": [dict(run.unreadable) for run in (one, two)],
    }


def compare_text(folders: tuple[Path, Path], every_metric: bool, width: int | None) -> str:
    """The comparison as tables. every_metric: not only those of the console's table."""
    told = compared(folders)
    lines = [f"{letter}: {path_text(folder)}" for letter, folder in zip("AB", folders, strict=True)]
    for title, kind in (("configuration", "configuration"), ("versions", "versions")):
        rows = [(name, *(_value(value) for value in pair)) for name, pair in sorted(told[kind].items())]
        lines += ["", f"{title}: {len(rows)} differ" if rows else f"{title}: the same"]
        lines += (
            [
                table(
                    (f"  {'key' if kind == title == 'configuration' else 'what'}", "A", "B"),
                    [(f"  {name}", *pair) for name, *pair in rows],
                    width,
                )
            ]
            if rows
            else []
        )
    metrics = told["metrics"]
    names = list(metrics) if every_metric else _of_table(metrics)
    head = (
        "  metric",
        "last A",
        "last B",
        "best A",
        "best B",
        f"mean of {MEAN_STEPS} A",
        f"mean of {MEAN_STEPS} B",
    )
    rows = [(f"  {one_line(name)}", *_cells(metrics[name])) for name in names]
    lines += ["", "metrics:" if rows else "metrics: neither run has any"]
    lines += [table(head, rows, width)] if rows else []
    if len(names) < len(metrics):
        lines.append(f"  ... and {len(metrics) - len(names)} more: --all")
    for letter, files in zip("AB", told["unreadable"], strict=True):
        lines += [f"not read of {letter}: {file}: {why}" for file, why in files.items()]
    return "\n".join(lines)


def _differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name -> [first, second] where they differ; None: absent there."""
    names = sorted({*one, *two})
    return {name: [one.get(name), two.get(name)] for name in names if one.get(name) != two.get(name)}


def _versions(start: Start) -> dict[str, Any]:
    """What a start ran with: commits, Python, packages."""
    commits = {}
    for what, found in (("siirl", start.siirl), ("the project", start.project)):
        if found.get("commit"):
            changed = " (files changed)" if found.get("changed") else ""
            commits[f"commit of {what}"] = f"{one_line(str(found['commit']))[:12]}{changed}"
    return commits | ({"python": start.python} if start.python else {}) | start.packages


def _measured(name: str, points: Mapping[int, float] | None) -> dict[str, Any] | None:
    """Last value with its step, best value with its step, mean of the last MEAN_STEPS values."""
    if not points:
        return None
    steps = sorted(points)
    values = [points[step] for step in steps[-MEAN_STEPS:]]
    told: dict[str, Any] = {"last": points[steps[-1]], "step": steps[-1], "mean": sum(values) / len(values)}
    if sign := _better(name):
        best = max(steps, key=lambda step: (sign * points[step], -step))
        told |= {"best": points[best], "best_step": best}
    return told


def _better(name: str) -> int:
    first, _, rest = name.partition("/")
    bare = rest if first.removeprefix("agent_").isdecimal() else name
    return next((sign for start, sign in BETTER.items() if bare.startswith(start)), 0)


def _of_table(metrics: Mapping[str, Any]) -> list[str]:
    """The metrics that the console's table shows, in its order."""
    present = {name: 0.0 for name in metrics}
    return [name for column in columns_of(present) for name in matches(column, present)]


def _cells(pair: list[dict[str, Any] | None]) -> list[str]:
    cells = []
    for kind in ("last", "best", "mean"):
        for told in pair:
            if told is None or kind not in told:
                cells.append("-")
            else:
                at = f" @{told['best_step']}" if kind == "best" else ""
                cells.append(f"{number(told[kind], 4)}{at}")
    return cells


def _value(value: Any) -> str:
    """A value of a key as it is written on the command line, in a cell."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return cut(one_line(text) or "''", VALUE_WIDTH)
