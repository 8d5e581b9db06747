"""Readers of the files of a run folder, for folders that are damaged, half copied or another user's.

None of them raises for what stands in a file: what cannot be read is absent, and `Skipped` says why.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import msgspec

from siirl.compiler.plan import Plan
from siirl.config.tree import from_dict, to_dict
from siirl.dag.node_config import flat
from siirl.launch.attempts import ATTEMPTS_FILE, Attempt
from siirl.launch.failure import Failure, failure_in
from siirl.launch.run_record import CONFIG_FILE, RUN_FILE
from siirl.observe.amendments import JOURNAL, Amended
from siirl.observe.columns import PART, REWARD, VALIDATION_REWARD
from siirl.observe.curve import METRICS_FILE
from siirl.observe.metrics import OLDER_NAMES, with_todays_names
from siirl.observe.position import PROGRESS_FILE, How, Position, position_in
from siirl.runs.folder_reader import (
    Skipped,
    attempt,
    content,
    first_skipped,
    json_file,
    json_lines,
    json_value,
    mapping,
    number,
    numbered,
    one_line,
    part,
    tail,
    whole,
    word,
)

JOB_FILE, STATUS_DIR, ERRORS_DIR = "job.json", "status", "errors"
TAIL_BYTES, LATEST_BYTES, RECENT_BYTES, PROGRESS_BYTES = 1 << 18, 1 << 20, 4 << 20, 8 << 20
MOST_BYTES, MOST_JOB_BYTES, CHUNK_BYTES = 512 << 20, 64 << 20, 8 << 20
PACE_STEPS = 20
"""Steps over which the pace of a run is measured, as in the console's table."""
DEEPEST = 100
"""Nesting of YAML that is read; configurations have five levels."""
_NUMBER = rb"-?\d{1,15}(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
_LINE = re.compile(rb'\{"step": (\d{1,15}), "time_s": (' + _NUMBER + rb")[,}]")
_REWARD_NAMES = {*VALIDATION_REWARD.names, *REWARD.names}
_REWARDS = re.compile(
    rb'"((?:agent_\d+/)?(?:'
    + rb'(?:val/)?%b[^"]+|' % PART.encode()
    + b"|".join(
        re.escape(name).encode()
        for name in sorted(_REWARD_NAMES | OLDER_NAMES.keys())
        if OLDER_NAMES.get(name, name) in _REWARD_NAMES
    )
    + rb'))": ('
    + _NUMBER
    + rb")[,}]"
)
_NUMBERS = msgspec.json.Decoder(dict[str, float])
_PACKAGES = re.compile(r"^packages:", re.M)
_DOCUMENT = re.compile(r"^---[ \t]*\n", re.M)


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

    run_id: str = ""
    started_s: float = 0.0
    """Seconds since the epoch."""
    host: str = ""
    directory: str = ""
    device: str = ""
    """Name of a GPU there, as its driver has it."""
    command: str = ""
    python: str = ""
    siirl: dict[str, Any] = field(default_factory=dict)
    """path, commit, changed."""
    project: dict[str, Any] = field(default_factory=dict)
    """commit and changed of the folder that the command was started in."""
    packages: dict[str, str] = field(default_factory=dict)
    """Package -> version."""


def scan_metrics(
    folder: Path, unreadable: Skipped, since_s: float = 0.0, rewards: bool = True
) -> MetricsScan:
    """The progress of a run. since_s: when its last start was; the pace is that of this start alone.

    rewards: also those; without them the end of the file is enough, however long the run is.
    """
    path = folder / METRICS_FILE
    data, before = tail(path, None if rewards else PROGRESS_BYTES, unreadable)
    scan, lines, damaged = MetricsScan(), data.split(b"\n"), 0
    for line in lines[1 if before else 0 : -1]:  # one without a line feed is being written, or was cut
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
        told = _REWARDS.findall(line) if rewards else []
        found = {str(json_value(b'"%b"' % name)): float(value) for name, value in told}
        for name, value in with_todays_names(found).items():
            scan.rewards.setdefault(name, {})[step] = value
    if damaged:
        unreadable.add(path, f"{damaged} damaged line{'s' * (damaged > 1)} skipped")
    return scan


def _rewind(scan: MetricsScan, step: int) -> None:
    """Forget steps from `step` on: the run died after them and went on from an earlier checkpoint."""
    scan.times = []
    for name, points in scan.rewards.items():
        scan.rewards[name] = {at: value for at, value in points.items() if at < step}


def latest_metrics(folder: Path) -> dict[str, float]:
    """The newest value of each metric of the last PACE_STEPS lines."""
    lines = content(folder / METRICS_FILE, Skipped(), LATEST_BYTES).split(b"\n")
    latest: dict[str, float] = {}
    for line in lines[-PACE_STEPS - 1 : -1]:
        found = mapping(json_value(line))
        latest |= {name: value for name in found if (value := number(found[name])) is not None}
    latest = {name: value for name, value in latest.items() if name not in ("step", "time_s")}
    return with_todays_names(latest)


@dataclass
class MetricHistory:
    """All numbers of a run, under today's names: of two lines for a step and metric the later one counts.

    What a run did after the step that it resumed from is gone.
    """

    series: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric -> {step: value}."""
    broken: dict[str, set[int]] = field(default_factory=dict)
    """Metric -> steps whose value was not a number."""
    times: dict[int, float] = field(default_factory=dict)
    """Step -> seconds since the epoch."""

    def add(self, record: dict[str, Any]) -> None:
        """A line of the file, in their order."""
        step = whole(record.pop("step", None))
        if step is None or step < 0:
            return
        if self.times and step < next(reversed(self.times)):
            self.rewind(step)
        self.times[step] = number(record.pop("time_s", None)) or 0.0
        series = self.series
        for name, value in with_todays_names(record).items():
            if (found := number(value)) is not None:
                if name in series:
                    series[name][step] = found
                else:
                    series[name] = {step: found}
                if name in self.broken:
                    self.broken[name].discard(step)
            elif value is None:
                self.broken.setdefault(name, set()).add(step)

    def add_rows(self, names: tuple[str, ...], rows: list[tuple[float, ...]]) -> None:
        """Lines with the same names, finite numbers alone, whose steps rise and are above those before."""
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        steps = list(map(int, columns.pop("step")))
        self.times.update(zip(steps, columns.pop("time_s", (0.0,) * len(steps)), strict=True))
        for name, values in with_todays_names(columns).items():
            self.series.setdefault(name, {}).update(zip(steps, values, strict=True))

    def rewind(self, step: int) -> None:
        """Forget steps from `step` on."""
        self.times = {at: time_s for at, time_s in self.times.items() if at < step}
        self.broken = {name: {at for at in steps if at < step} for name, steps in self.broken.items()}
        kept = (
            (name, {at: value for at, value in points.items() if at < step})
            for name, points in self.series.items()
        )
        self.series = {name: points for name, points in kept if points}


def read_history(folder: Path, unreadable: Skipped) -> MetricHistory:
    """The history of a run's folder; empty where there is none."""
    return HistoryReader(folder).read(unreadable)


def recent_history(folder: Path, unreadable: Skipped) -> MetricHistory:
    """The history of the last steps, dozens at least: quick, however long the run is."""
    data, before = tail(folder / METRICS_FILE, RECENT_BYTES, unreadable)
    history = MetricHistory()
    for line in data.split(b"\n")[1 if before else 0 : -1]:
        history.add(mapping(json_value(line)))
    return history


class HistoryReader:
    """Reads the history of a run, and after that only what the run has added to it."""

    def __init__(self, folder: Path):
        self._path = folder / METRICS_FILE
        self._start_over(0)

    def _start_over(self, inode: int) -> None:
        self._inode, self._place, self._bad, self._left_bytes = inode, 0, 0, 0
        self._history = MetricHistory()

    def read(self, unreadable: Skipped) -> MetricHistory:
        """The history so far, always the same object while the run goes on in one file."""
        try:
            about = self._path.stat()
        except OSError:
            about = None
        if about is None or about.st_ino != self._inode or about.st_size < self._place:
            self._start_over(about.st_ino if about else 0)
            self._left_bytes = max(0, about.st_size - MOST_BYTES) if about else 0
            self._place = self._left_bytes
        while (lines := self._lines(unreadable)) is not None:
            self._add(lines)
        if self._left_bytes:
            unreadable.add(self._path, first_skipped(self._left_bytes))
        if self._bad:
            unreadable.add(self._path, f"{self._bad} damaged line{'s' * (self._bad > 1)} skipped")
        return self._history

    def _lines(self, unreadable: Skipped) -> list[bytes] | None:
        """The next whole lines; a last one without an end is being written, and waits. None: no more."""
        data = part(self._path, self._place, CHUNK_BYTES, unreadable)
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) < CHUNK_BYTES:
                return None
            self._place, self._bad = self._place + len(data), self._bad + 1  # no line is that long
            return []
        begun_within = self._left_bytes and self._place == self._left_bytes
        self._place += end
        return data[:end].split(b"\n")[1 if begun_within else 0 : -1]

    def _add(self, lines: list[bytes]) -> None:
        """Lines of the file; those alike together, as a column of each metric, in a third of the time."""
        names, rows, last = (), list[tuple[float, ...]](), -1.0
        for line in lines:
            record = _numbers_in(line)
            step = record.get("step", -1.0)
            if rows and (step <= last or tuple(record) != names):
                self._history.add_rows(names, rows)
                names, rows = (), []
            if step > next(reversed(self._history.times), -1) and step.is_integer():
                names, last = tuple(record), step
                rows.append(tuple(record.values()))
            else:
                self._add_one(line)
        if rows:
            self._history.add_rows(names, rows)

    def _add_one(self, line: bytes) -> None:
        if not line.strip(b"\0 \t\r"):
            return
        found = json_value(line)
        if isinstance(found, dict):
            self._history.add(found)
        else:
            self._bad += 1


def _numbers_in(line: bytes) -> dict[str, float]:
    """The record of a line that holds finite numbers alone; else nothing."""
    try:
        return _NUMBERS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


@dataclass(frozen=True)
class Progress:
    """What the last start of a run has recorded of itself."""

    begun: bool = False
    """Whether it says how many steps it has."""
    total_steps: int | None = None
    """None: it trains none."""
    how: How | None = None
    """How it ended; None: nothing is recorded, so it goes on, or was killed."""
    cause: str = ""
    time_s: float = 0.0
    """Of the last event, since the epoch."""


def read_progress(folder: Path, run_id: str, unreadable: Skipped) -> Progress:
    """What a start of a run has recorded; nothing if it has not begun yet."""
    told = Progress()
    for event in json_lines(folder / PROGRESS_FILE, TAIL_BYTES, unreadable):
        if event.get("run_id") != run_id:
            continue
        time_s, how = number(event.get("time_s")) or 0.0, event.get("how")
        if event.get("event") == "begin":
            told = Progress(True, whole(event.get("total_steps")), time_s=time_s)
        elif event.get("event") == "end" and how in get_args(How):
            told = replace(told, how=how, cause=word(event.get("cause")), time_s=time_s)
    return told


def read_starts(folder: Path, unreadable: Skipped, packages: bool = False) -> tuple[int, Start]:
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
    versions = mapping(told.get("packages"))
    return len(documents), Start(
        started_s=_moment(told.get("started")),
        **{
            name: word(told.get(name))
            for name in ("run_id", "host", "directory", "device", "command", "python")
        },
        siirl=mapping(told.get("siirl")),
        project=mapping(told.get("project")),
        packages={one_line(str(name)): word(version) for name, version in versions.items()},
    )


def read_job(folder: Path, unreadable: Skipped) -> dict[str, Any]:
    """job.json; empty where it is missing or damaged."""
    return json_file(folder / JOB_FILE, MOST_JOB_BYTES, unreadable)


RESUMED = ("trainer.output_dir", "trainer.default_local_dir", "trainer.resume_mode", "trainer.overwrite")
"""The keys that `siirl resume` sets: the folder of the run, that of its checkpoints, and that it goes on."""


def checkpoints_of(folder: Path, config: Mapping[str, Any]) -> Path:
    """Where the checkpoints of a run lie now, by its configuration: of a copied or moved folder, in it."""
    recorded = Path(str(config.get(RESUMED[0]) or folder))
    root = Path(str(config.get(RESUMED[1]) or recorded / "checkpoints"))
    return folder / root.relative_to(recorded) if root.is_relative_to(recorded) else root


def read_plan(folder: Path) -> Plan | None:
    """The plan of the job; None where there is none, or it is damaged."""
    text = read_job(folder, Skipped()).get("plan")
    return attempt(lambda: Plan.from_json(str(text)), None, "the plan", Skipped()) if text else None


def read_config(folder: Path, unreadable: Skipped) -> dict[str, Any]:
    """Full key -> value of the run's configuration; {} if it cannot be read.

    From the job, which is quick to parse, else from the file that a user may have edited.
    """
    config = read_job(folder, Skipped()).get("config")
    if not isinstance(config, dict):
        text = content(folder / CONFIG_FILE, unreadable).decode(errors="replace")
        config = _yaml(text) if text else {}
        if isinstance(config, dict):  # in the file, keys that follow others are null
            as_written = config
            config = attempt(lambda: to_dict(from_dict(as_written)), as_written, CONFIG_FILE, Skipped())
    if not isinstance(config, dict):
        unreadable.add(folder / CONFIG_FILE, "it holds no settings")
        return {}
    return {name: value for name, value in flat(config).items() if name.split(".")[0] != "explicit"}


def read_positions(folder: Path, unreadable: Skipped) -> dict[int, Position]:
    """Rank -> the step and node that it entered last."""
    found: dict[int, Position] = {}
    for rank, path in numbered(folder / STATUS_DIR, "rank_", "", unreadable):
        position = position_in(tail(path, LATEST_BYTES, unreadable)[0].decode(errors="replace"))
        if position is not None and math.isfinite(position.time_s):
            found[rank] = replace(position, node=one_line(position.node), waits=one_line(position.waits))
    return found


def read_failures(folder: Path, unreadable: Skipped) -> list[Failure]:
    """What ended the ranks of the last start, the likeliest first cause first."""
    found = []
    for _, path in numbered(folder / ERRORS_DIR, "rank_", ".json", unreadable):
        failure = failure_in(tail(path, PROGRESS_BYTES, unreadable)[0])
        texts = failure and (failure.error, failure.host, failure.traceback)
        if failure is None or not all(isinstance(text, str) for text in texts or ()):
            unreadable.add(path, "it is no record of a failure")
        elif number(failure.time_s) is not None and number(failure.rank) is not None:
            found.append(failure)
    return sorted(found, key=lambda failure: (bool(failure.secondary), failure.time_s, failure.rank))


def read_attempts(folder: Path, unreadable: Skipped, run_id: str) -> list[Attempt]:
    """The attempts of one start that failed and were followed by another, in their order."""
    return [
        Attempt(
            run_id,
            whole(told.get("attempt")) or 0,
            number(told.get("started_s")) or 0.0,
            number(told.get("ended_s")) or 0.0,
            whole(told.get("rank")) or 0,
            word(told.get("host")),
            word(told.get("node")) or None,
            whole(told.get("step")),
            word(told.get("cause")),
            whole(told.get("world_size")) or 0,
            word(told.get("next")),
        )
        for told in json_lines(folder / ATTEMPTS_FILE, LATEST_BYTES, unreadable)
        if told.get("run_id") == run_id
    ]


def read_amendments(folder: Path, unreadable: Skipped, run_id: str) -> list[str]:
    """What `siirl amend` has changed in one start, or tried to, a line each."""
    return [
        str(
            Amended(
                "",
                run_id,
                0.0,
                whole(told.get("step")) or 0,
                [word(item) for item in settings if isinstance(item, str)],
                [],
                "withdrawn" if told.get("state") == "withdrawn" else "applied",
                word(told.get("cause")),
            )
        )
        for told in json_lines(folder / JOURNAL, LATEST_BYTES, unreadable)
        if told.get("run_id") == run_id and isinstance(settings := told.get("settings"), list)
    ]


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


def _moment(text: object) -> float:
    try:
        return datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S %z").timestamp()
    except (ValueError, OverflowError):
        return 0.0
