"""What a run is and where it stands: its record, its configuration, its ranks; its errors and logs."""

import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from siirl.launch.failure import read_failure
from siirl.launch.run_folder import is_held
from siirl.launch.run_record import RUN_FILE
from siirl.observe.logs import TAIL_BYTES, last_lines
from siirl.observe.position import read_position
from siirl.observe.printable import printable
from siirl.view.folder_reader import attempt, json_file, number, numbered, tail_bytes, whole
from siirl.view.metric_curves import MetricHistory

MOST_JOB_BYTES, MOST_RECORD_BYTES, MOST_RANKS, MOST_LOGS = 64 << 20, 4 << 20, 512, 64
PACE_STEPS = 20
_LOG = re.compile(r"(rank_\d+|vllm_.*|.*rank_\d+)\.log")
_OF_TOTAL = re.compile(r"^ *(\d+)/(\d+)\s", re.MULTILINE)


def read_job(output_dir: Path) -> dict[str, Any]:
    """job.json; empty where it is missing or damaged."""
    return json_file(output_dir / "job.json", MOST_JOB_BYTES)


def trainer_of(job: dict[str, Any]) -> dict[str, Any]:
    """The keys of `trainer` in the run's configuration."""
    return _table(_table(job, "config"), "trainer")


def overview(
    output_dir: Path, job: dict[str, Any], history: MetricHistory, notes: list[str]
) -> dict[str, Any]:
    """What ran, how far it is, in which state, by which command; ranks with where each is or ended."""
    trainer = trainer_of(job)
    starts = attempt(lambda: _starts(output_dir), [], RUN_FILE, notes)
    last = starts[-1] if starts else {}
    total = whole(trainer.get("total_training_steps")) or _total_of_log(output_dir)
    step = history.step
    state = _state(output_dir, step, total)
    name = str(trainer.get("experiment_name") or output_dir.name)
    packages, source = _table(last, "packages"), _table(last, "siirl")
    return {
        "name": printable(name),
        "folder": printable(str(output_dir)),
        "state": state,
        "step": step,
        "total": total,
        "left_s": _left_s(history, total) if state == "running" else None,
        "command": printable(str(last.get("command", ""))),
        "host": printable(str(last.get("host", ""))),
        "started": printable(str(last.get("started", ""))),
        "starts": len(starts),
        "world_size": whole(job.get("world_size")),
        "commit": printable(str(source.get("commit", "")))[:12]
        + (" (changed)" if source.get("changed") else ""),
        "packages": {
            key: printable(str(packages[key])) for key in ("torch", "transformers", "vllm") if key in packages
        },
        "ranks": _positions(output_dir, notes),
    }


def health(output_dir: Path, notes: list[str]) -> dict[str, Any]:
    """Errors that ranks left behind, first ones first, and the last lines of the logs."""
    found = []
    for rank, path in numbered(output_dir / "errors", "rank_", ".json"):
        failure = attempt(partial(read_failure, path), None, path.name, [])
        if failure is not None:
            found.append((bool(failure.secondary), number(failure.time_s) or 0.0, rank, failure))
        else:
            notes.append(f"errors/{path.name} is damaged")
    failures = [
        {**{key: printable(str(value)) for key, value in asdict(failure).items()}, "rank": rank}
        for _, _, rank, failure in sorted(found, key=lambda item: item[:3])
    ]
    logs = attempt(lambda: _logs(output_dir, notes), [], "logs", notes)
    if len(failures) > MOST_LOGS:
        notes.append(f"errors: those of {MOST_LOGS} of {len(failures)} ranks are shown")
    return {"errors": failures[:MOST_LOGS], "logs": logs}


def _state(output_dir: Path, step: int | None, total: int | None) -> str:
    """running | failed | finished | ended (before its last step, or nobody knows which is the last)."""
    if is_held(output_dir):
        return "running"
    if numbered(output_dir / "errors", "rank_", ".json"):
        return "failed"
    return "finished" if step is not None and total and step >= total else "ended"


def _table(data: dict[str, Any], key: str) -> dict[str, Any]:
    """What lies under a key, if that is a table."""
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _starts(output_dir: Path) -> list[dict[str, Any]]:
    """The documents of run.yaml, one for each start of a run in the folder."""
    import yaml

    data, before = tail_bytes(output_dir / RUN_FILE, MOST_RECORD_BYTES)
    text = data.decode(errors="replace")
    documents = text.split("\n---\n") if before else [text]
    found = []
    for document in documents[1 if before else 0 :]:
        found += [item for item in yaml.safe_load_all(document) if isinstance(item, dict)]
    return found


def _total_of_log(output_dir: Path) -> int | None:
    """How many steps the console's table counts to; for a run whose configuration counts epochs."""
    data, _ = tail_bytes(output_dir / "logs" / "rank_0.log", TAIL_BYTES)
    found = _OF_TOTAL.findall(data.decode(errors="replace"))
    return int(found[-1][1][:9]) if found else None


def _left_s(history: MetricHistory, total: int | None) -> float | None:
    """Seconds that the rest takes at the pace of the last steps, validations and checkpoints included."""
    times = [(step, at_s) for step, at_s in sorted(history.times.items()) if at_s][-PACE_STEPS:]
    if not total or len(times) < 2 or times[-1][0] == times[0][0]:
        return None
    pace = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
    return max(0.0, pace * (total - times[-1][0]))


def _positions(output_dir: Path, notes: list[str]) -> list[dict[str, Any]]:
    files = numbered(output_dir / "status", "rank_", "")
    if len(files) > MOST_RANKS:
        notes.append(f"ranks: the first {MOST_RANKS} of {len(files)} are shown")
    found = []
    for rank, path in files[:MOST_RANKS]:
        position = attempt(partial(read_position, path), None, f"status/{path.name}", notes)
        if position is not None:
            at_s = number(position.time_s)
            found.append(
                {"rank": rank, "step": position.step, "node": printable(position.node), "time_s": at_s}
            )
    return found


def _logs(output_dir: Path, notes: list[str]) -> list[dict[str, Any]]:
    folder = output_dir / "logs"
    paths = (
        sorted(path for path in folder.glob("*.log") if _LOG.fullmatch(path.name)) if folder.is_dir() else []
    )
    paths.sort(key=lambda path: (len(path.name), path.name))
    if len(paths) > MOST_LOGS:
        notes.append(f"logs: the last lines of {MOST_LOGS} of {len(paths)} are shown")
    return [{"name": printable(path.name), "lines": last_lines(path)} for path in paths[:MOST_LOGS]]
