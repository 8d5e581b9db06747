"""What the page shows of a run, in parts: each is read when it is asked for, and again when files changed."""

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.guarded_files import who_may_change
from siirl.observe.curve import METRICS_FILE
from siirl.observe.trace import TRACE_DIR, TRACE_FILE
from siirl.runs.folder_reader import Skipped, attempt, numbered, whole
from siirl.runs.run_files import JOB_FILE, HistoryReader, MetricHistory, read_job, recent_history
from siirl.runs.run_state import RunState
from siirl.runs.run_state import read_run as read_state
from siirl.spelling import size_text
from siirl.view.alerts import alerts
from siirl.view.dag_share import dag_of
from siirl.view.episodes import KINDS, Episodes, signatures
from siirl.view.memory_phases import memory_phases
from siirl.view.metric_curves import clock, curves
from siirl.view.rank_groups import RankGroup, rank_groups
from siirl.view.run_status import health, overview, settings, trainer_of
from siirl.view.timeline import timeline

TOKENS = "rollouts/tokens"
SAMPLE_KEYS = {"train": "rollout_data_dir", "validation": "validation_data_dir"}
OVERVIEW = "overview"
"""The part that is in the page itself: all that can be said at once of a run of any size."""
PARTS = (OVERVIEW, "alerts", "dag", "timeline", "memory", "curves", "clock", "episodes", "settings", "health")
TEXTS, LIVES = "texts ", "lives "
"""Before the name of a block: the texts of its episodes; before a step: what the ledger says of its rows."""
LEDGER, MOST_LEDGER_BYTES = "ledger", 256 << 20
OF_HISTORY = ("alerts", "memory", "curves", "clock")
"""They wait for one reading of all metrics; the others read the end of the file at most."""
REST = 4.0
"""A part is read again after so many times as long as reading it took, however fast its files change."""


@dataclass(frozen=True)
class Part:
    """A part of a run."""

    value: Any
    """JSON values; None where the run has nothing of it."""
    notes: tuple[str, ...]
    """What was left out, or is damaged."""


@dataclass(frozen=True)
class _Kept:
    part: Part
    signature: Any
    read_s: float
    """When, on time.monotonic."""
    took_s: float


class RunParts:
    """A run's folder. Reads only; several threads may ask."""

    def __init__(self, output_dir: Path):
        self.folder = output_dir
        self._history, self._plan = HistoryReader(output_dir), (None, "")
        self._episodes: tuple[Any, Episodes] | None = None
        self._ledger: tuple[Any, Any] | None = None
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._kept: dict[str, _Kept] = {}

    def read(self, name: str) -> Part | None:
        """A part by its name, of PARTS or a block of texts; None if there is none of that name."""
        if name.startswith(TEXTS):
            skipped = Skipped()
            return _part(self._read_episodes().texts(name.removeprefix(TEXTS), skipped), skipped)
        if name.startswith(LIVES):
            skipped = Skipped()
            return _part(self._lives(name.removeprefix(LIVES), skipped), skipped)
        if name not in PARTS:
            return None
        with self._locks["history" if name in OF_HISTORY else name]:
            signature, began_s, kept = self._signature(name), time.monotonic(), self._kept.get(name)
            if kept and (
                kept.signature == signature is not None or began_s < kept.read_s + REST * kept.took_s
            ):
                return kept.part
            with _no_collections():
                part = self._read(name)
            now_s = time.monotonic()
            self._kept[name] = _Kept(part, signature, now_s, now_s - began_s)
            return part

    def _read(self, name: str) -> Part:
        read: dict[str, Callable[[Skipped], Any]] = {
            OVERVIEW: self._overview,
            "alerts": self._alerts,
            "dag": self._dag,
            "timeline": self._timeline,
            "memory": self._memory,
            "curves": lambda skipped: curves(self._read_history(skipped), skipped),
            "clock": lambda skipped: clock(self._read_history(skipped)),
            "settings": self._settings,
            "episodes": lambda skipped: self._read_episodes().listed(skipped),
            "health": lambda skipped: health(self._state(skipped), skipped),
        }
        skipped = Skipped()
        return _part(read[name](skipped), skipped)

    def _signature(self, name: str) -> Any:
        """What changes when the files of a part do; None: it is not looked for."""
        own = [self.folder / JOB_FILE]
        if name == "settings":
            return signatures(own)
        if name in OF_HISTORY or name == "dag":
            return signatures([*own, self.folder / METRICS_FILE])
        if name == "timeline":
            ranks = [path for _, path in numbered(self.folder / TRACE_DIR, "rank_", ".jsonl", Skipped())]
            return signatures([*own, *ranks, self.folder / TRACE_FILE])
        return None

    def blocks(self) -> list[str]:
        """Names of the parts with texts, the newest first."""
        return [f"{TEXTS}{kind} {step}" for step, kind, _ in self._read_episodes().files(Skipped())]

    def _lives(self, step: str, skipped: Skipped) -> dict[str, list[str]]:
        """Sample -> what became of its rows, as `siirl audit --row` tells it; empty for what is no step."""
        files = sorted((self.folder / LEDGER).glob("attempt_*.arrow"))
        about = signatures(files)
        size = sum(size for _, size in about)
        if size > MOST_LEDGER_BYTES:
            skipped.add("ledger", f"{size_text(size)} are too much for a page: siirl audit --row reads them")
        if not 0 < size <= MOST_LEDGER_BYTES or not (step.isascii() and step.isdigit() and len(step) < 10):
            return {}
        from siirl.runs.audit import lives_in, read_ledger  # Arrow takes a while: not before somebody asks

        def found() -> dict[str, list[str]]:
            if self._ledger is None or self._ledger[0] != about:
                self._ledger = about, read_ledger(self.folder)
            return lives_in(self._ledger[1], int(step))

        with self._locks["ledger"]:
            return attempt(found, {}, "ledger", skipped)

    def _overview(self, skipped: Skipped) -> dict[str, Any]:
        job = read_job(self.folder, skipped)
        return overview(self._state(skipped), job, self._read_plan(job), self._groups(job), skipped)

    def _alerts(self, skipped: Skipped) -> list[dict[str, Any]]:
        history = self._read_history(skipped)
        return attempt(lambda: [asdict(alert) for alert in alerts(history)], [], "alerts", skipped)

    def _dag(self, skipped: Skipped) -> dict[str, Any] | None:
        job, history = read_job(self.folder, skipped), recent_history(self.folder, skipped)
        return attempt(lambda: dag_of(job, history, skipped), None, "the plan of job.json", skipped)

    def _timeline(self, skipped: Skipped) -> dict[str, Any] | None:
        job = read_job(self.folder, Skipped())
        plan, groups = self._read_plan(job), self._groups(job)
        return attempt(lambda: timeline(self.folder, plan, groups, skipped), None, "the trace", skipped)

    def _settings(self, skipped: Skipped) -> list[list[str]]:
        job = read_job(self.folder, Skipped())
        plan = self._read_plan(job)
        return attempt(lambda: settings(self.folder, job, plan, skipped), [], "settings", skipped)

    def _memory(self, skipped: Skipped) -> dict[str, Any] | None:
        job, series = read_job(self.folder, Skipped()), self._read_history(skipped).series
        return attempt(lambda: memory_phases(job, series), None, "memory", skipped)

    def _state(self, skipped: Skipped) -> RunState:
        state = read_state(self.folder, rewards=False)
        for what, why in state.unreadable.items():
            skipped.add(what, why)
        return state

    def _read_history(self, skipped: Skipped) -> MetricHistory:
        """Only where the lock of OF_HISTORY is held: the reader changes what it gave before."""
        return self._history.read(skipped)

    def _read_plan(self, job: dict[str, Any]) -> Plan | None:
        """The plan of the job, parsed once."""
        with self._locks["plan"]:
            text = job.get("plan")
            if text != self._plan[1]:
                plan = attempt(lambda: Plan.from_json(str(text)), None, "the plan of job.json", Skipped())
                self._plan = (plan, text)
            return self._plan[0]

    def _groups(self, job: dict[str, Any]) -> dict[str, list[RankGroup]]:
        plan = self._read_plan(job)
        size, per_machine = whole(job.get("world_size")) or 0, whole(job.get("local_world_size")) or 0
        if not 0 < size <= 1 << 20 or per_machine < 1:
            return {}
        return attempt(lambda: rank_groups(plan, size, per_machine), {}, "groups", Skipped())

    def _read_episodes(self) -> Episodes:
        """By the folders that the run's configuration names."""
        with self._locks["episodes of"]:
            trainer = trainer_of(read_job(self.folder, Skipped()))
            names = {kind: trainer.get(SAMPLE_KEYS[kind]) for kind in KINDS}
            if self._episodes is None or self._episodes[0] != names:
                folders = {kind: self._samples(kind, name) for kind, name in names.items()}
                self._episodes = names, Episodes(folders, self.folder / TOKENS, self.folder / LEDGER)
            return self._episodes[1]

    def _samples(self, kind: str, name: Any) -> Path:
        """Where samples are: elsewhere than in the run's folder only if nobody else can have said so."""
        own = self.folder / "rollouts" / kind
        named = Path(str(name or own))
        elsewhere = not named.absolute().is_relative_to(self.folder.absolute())
        return own if elsewhere and who_may_change(self.folder) else named


@contextmanager
def _no_collections() -> Iterator[None]:
    """Readers make millions of objects and no cycles; to look for those takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _part(value: Any, skipped: Skipped) -> Part:
    return Part(value, tuple(f"{what}: {why}" for what, why in skipped.items()))
