"""Readers of the files of a run folder, for folders that are damaged, half copied or another user's.

None of them raises for what stands in a file: what cannot be read is absent, and `Unreadable` says why. No
torch.
"""

import json
import math
import os
import re
import stat
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from siirl.launch.failure import Failure, read_failure
from siirl.launch.run_record import CONFIG_FILE, RUN_FILE
from siirl.observe.columns import REWARD, VALIDATION_REWARD
from siirl.observe.curve import METRICS_FILE
from siirl.observe.position import Position, read_position
from siirl.observe.printable import printable

JOB_FILE, STATUS_DIR, ERRORS_DIR = "job.json", "status", "errors"
MARKS = (RUN_FILE, CONFIG_FILE, METRICS_FILE)
"""A folder with one of these is a run's."""
TAIL_BYTES, LATEST_BYTES = 1 << 18, 1 << 20
PACE_STEPS = 20
"""Steps over which the pace of a run is measured, as in the console's table."""
DEEPEST = 100
"""Nesting of YAML that is read; configurations have five levels."""
_NUMBER = rb"-?\d{1,15}(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
_LINE = re.compile(rb'\{"step": (\d{1,15}), "time_s": (' + _NUMBER + rb")[,}]")
_REWARDS = re.compile(
    rb'"((?:agent_\d+/)?(?:'
    + b"|".join(re.escape(name).encode() for name in (*VALIDATION_REWARD.names, *REWARD.names))
    + rb'))": ('
    + _NUMBER
    + rb")[,}]"
)
_RANK = re.compile(r"rank_(\d{1,9})(?:\.json)?")
_PACKAGES = re.compile(r"^packages:", re.M)
_DOCUMENT = re.compile(r"^---[ \t]*\n", re.M)


class Unreadable(dict[str, str]):
    """File -> why it could not be read, or not all of it; printable, a line each."""

    def add(self, path: Path, why: object) -> None:
        self[path.name] = one_line(str(why))


@dataclass
class MetricsScan:
    """What the metrics file of a run says of its progress, without the hundred other metrics of each step."""

    step: int = 0
    """Of the last line; 0 if there is none."""
    time_s: float = 0.0
    """When that line was written, since the epoch."""
    times: list[tuple[int, float]] = field(default_factory=list)
    """(step, time) of the last PACE_STEPS + 1 steps, the newest last; a resumed run begins them anew."""
    rewards: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric -> {step: value} of the rewards; what a run did after the step that it resumed from is gone."""


@dataclass(frozen=True)
class Start:
    """One start of a run in its folder, as run.yaml has it; "" and {} for what is not known."""

    started_s: float = 0.0
    """Seconds since the epoch."""
    host: str = ""
    directory: str = ""
    command: str = ""
    python: str = ""
    siirl: dict[str, Any] = field(default_factory=dict)
    """path, commit, changed."""
    project: dict[str, Any] = field(default_factory=dict)
    """commit and changed of the folder that the command was started in."""
    packages: dict[str, str] = field(default_factory=dict)
    """Package -> version."""


def one_line(text: str) -> str:
    """Text of models, users and their exceptions as one printable line."""
    return printable(" ".join(text.split()))


def content(path: Path, unreadable: Unreadable, last: int | None = None) -> bytes:
    """The bytes of a file, or the `last` of them; b"" where there is none. A pipe or device is not opened."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            unreadable.add(path, "it is no regular file")
            return b""
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - last))
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        unreadable.add(path, error.strerror or error)
        return b""


def scan_metrics(folder: Path, unreadable: Unreadable, since_s: float = 0.0) -> MetricsScan:
    """The progress of a run. since_s: when its last start was; the pace is that of this start alone."""
    path = folder / METRICS_FILE
    scan, lines, damaged = MetricsScan(), content(path, unreadable).split(b"\n"), 0
    for line in lines[:-1]:  # the last one ends without a line feed: it is being written, or was cut
        head = _LINE.match(line)
        if head is None or not line.endswith(b"}"):
            damaged += bool(line.strip(b"\0 \t\r"))
            continue
        step, time_s = int(head[1]), float(head[2])
        if step < scan.step:
            _rewind(scan, step)
        scan.step, scan.time_s = step, time_s
        if time_s >= since_s:
            if scan.times and scan.times[-1][0] == step:
                scan.times.pop()
            scan.times = [*scan.times[-PACE_STEPS:], (step, time_s)]
        for name, value in _REWARDS.findall(line):
            scan.rewards.setdefault(name.decode(), {})[step] = float(value)
    if damaged:
        unreadable.add(path, f"{damaged} of {len(lines) - 1} lines are no metrics")
    return scan


def _rewind(scan: MetricsScan, step: int) -> None:
    """Forget steps from `step` on: the run died after them and went on from an earlier checkpoint."""
    scan.times = []
    for name, points in scan.rewards.items():
        scan.rewards[name] = {at: value for at, value in points.items() if at < step}


def _numbers(line: bytes) -> dict[str, float]:
    """The metrics of a line that are numbers."""
    record = _json(line)
    return {
        name: float(value)
        for name, value in (record.items() if isinstance(record, dict) else ())
        if name not in ("step", "time_s") and _is_number(value)
    }


def latest_metrics(folder: Path) -> dict[str, float]:
    """The newest value of each metric of the last PACE_STEPS lines."""
    lines = content(folder / METRICS_FILE, Unreadable(), LATEST_BYTES).split(b"\n")
    latest: dict[str, float] = {}
    for line in lines[-PACE_STEPS - 1 : -1]:
        latest |= _numbers(line)
    return latest


def all_metrics(folder: Path, unreadable: Unreadable) -> dict[str, dict[int, float]]:
    """Metric -> {step: value} of every metric, with the same reading of damage and resumes as the scan."""
    series: dict[str, dict[int, float]] = {}
    last = 0
    for line in content(folder / METRICS_FILE, unreadable).split(b"\n")[:-1]:
        head = _LINE.match(line)
        if head is None:
            continue
        step = int(head[1])
        if step < last:
            series = {
                name: {at: value for at, value in points.items() if at < step}
                for name, points in series.items()
            }
        last = step
        for name, value in _numbers(line).items():
            series.setdefault(name, {})[step] = value
    return {name: points for name, points in series.items() if points}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer with hundreds of digits
        return False


def read_starts(folder: Path, unreadable: Unreadable, packages: bool = False) -> tuple[int, Start]:
    """(how often the run was started, its last start). packages: with their versions, which takes longer."""
    path = folder / RUN_FILE
    documents = _DOCUMENT.split(content(path, unreadable).decode(errors="replace"))[1:]
    if not documents:
        return 0, Start()
    text = documents[-1]
    found = _PACKAGES.search(text)
    told = _yaml(text if packages or found is None else text[: found.start()])
    if not isinstance(told, dict):
        unreadable.add(path, "its last document is damaged")
        return len(documents), Start()
    versions = _mapping(told.get("packages"))
    return len(documents), Start(
        started_s=_moment(told.get("started")),
        **{name: _word(told.get(name)) for name in ("host", "directory", "command", "python")},
        siirl=_mapping(told.get("siirl")),
        project=_mapping(told.get("project")),
        packages={str(name): _word(version) for name, version in versions.items()},
    )


def read_config(folder: Path, unreadable: Unreadable) -> dict[str, Any]:
    """Full key -> value of the run's configuration; {} if it cannot be read.

    From the job, which is quick to parse, else from the file that a user may have edited.
    """
    job = _json(content(folder / JOB_FILE, unreadable) or b"{}")
    config = job.get("config") if isinstance(job, dict) else None
    if not isinstance(config, dict):
        text = content(folder / CONFIG_FILE, unreadable).decode(errors="replace")
        config = _yaml(text) if text else {}
    if not isinstance(config, dict):
        unreadable.add(folder / CONFIG_FILE, "it holds no settings")
        return {}
    return {name: value for name, value in _flat(config).items() if name.split(".")[0] != "explicit"}


def _flat(tree: dict[Any, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value and depth < 20:
            flat |= _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def read_positions(folder: Path, unreadable: Unreadable) -> dict[int, Position]:
    """Rank -> the step and node that it entered last."""
    found: dict[int, Position] = {}
    for rank, path in _of_ranks(folder / STATUS_DIR, unreadable):
        try:
            position = read_position(path)
        except OSError as error:
            unreadable.add(path, error.strerror or error)
            continue
        if position is not None and math.isfinite(position.time_s):
            found[rank] = Position(position.step, one_line(position.node), position.time_s)
    return found


def read_failures(folder: Path, unreadable: Unreadable) -> list[Failure]:
    """What ended the ranks of the last start, the likeliest first cause first."""
    found = []
    for _, path in _of_ranks(folder / ERRORS_DIR, unreadable):
        try:
            failure = read_failure(path)
        except (OSError, RecursionError) as error:
            unreadable.add(path, error)
            continue
        texts = failure and (failure.error, failure.host, failure.traceback)
        if failure is None or not all(isinstance(text, str) for text in texts or ()):
            if path.suffix == ".json":
                unreadable.add(path, "it is no record of a failure")
        elif _is_number(failure.time_s) and _is_number(failure.rank):
            found.append(failure)
    return sorted(found, key=lambda failure: (bool(failure.secondary), failure.time_s, failure.rank))


def _of_ranks(folder: Path, unreadable: Unreadable) -> list[tuple[int, Path]]:
    """(rank, file) of a folder with a file for each rank."""
    try:
        with os.scandir(folder) as entries:
            files = [Path(entry.path) for entry in entries if entry.is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        unreadable.add(folder, error.strerror or error)
        return []
    found = ((_RANK.fullmatch(path.name), path) for path in files)
    return sorted((int(match[1]), path) for match, path in found if match)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _yaml(text: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:  # its constructor recurses in C, and would take the process with it
                return None
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
        return None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _word(value: object) -> str:
    return one_line(str(value)) if isinstance(value, str | int | float) else ""


def _moment(text: object) -> float:
    try:
        return datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S %z").timestamp()
    except (ValueError, OverflowError):
        return 0.0
