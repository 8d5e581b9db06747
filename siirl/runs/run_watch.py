"""`siirl watch`: the state of a run as text, now and again."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from siirl.observe.columns import agents_of, cell, columns_of, matches
from siirl.observe.curve import duration
from siirl.parallel.placement import format_ranks
from siirl.runs.folder_reader import Skipped, attempt, one_line
from siirl.runs.rank_now import Doing, doing
from siirl.runs.run_files import latest_metrics, read_plan
from siirl.runs.run_state import RankState, RunState, attempt_text, last_problem, read_run
from siirl.runs.run_text import age_text, cut, last_and_best, line_width, moment_text, path_text

MOST_GROUPS, MOST_ATTEMPTS, MOST_RANKS_WIDTH, LEAST_PATH = 16, 3, 24, 20
CLEAR = "\x1b[H\x1b[J"


def watch(folder: Path, every_s: float, once: bool) -> None:
    """Print the state of a run, and on a terminal print it anew until the run is over or Ctrl-C."""
    stays = once or not sys.stdout.isatty()
    while True:
        run = read_run(folder)
        text = run_text(run, time.time(), line_width())
        print(text if stays else f"{CLEAR}{text}", flush=True)
        if stays or run.status != "running":
            return
        try:
            time.sleep(every_s)
        except KeyboardInterrupt:
            return


def run_text(run: RunState, now_s: float, width: int | None = None) -> str:
    """A screen about a run. width: of a line; None: nothing is cut."""
    status = f": {run.status}{f': {run.cause}' if run.cause else ''}"
    lines = [f"{_title(run.folder, status, width)}{status}", f"  {_progress(run, now_s)}"]
    if run.starts:
        who = f", process {run.pid}" if run.pid is not None and run.status == "running" else ""
        began = f", {moment_text(run.started_s)}" if run.started_s else ""
        lines.append(f"  start {run.starts} of this run, on {run.host or 'an unknown machine'}{who}{began}")
    lines += _attempt_lines(run, now_s)
    lines += [f"  {run.how_on}"] * bool(run.how_on)
    kind, rewards = run.reward()
    if rewards:
        for name, series in {kind: rewards, **run.parts()}.items():
            last, best = last_and_best(series)
            lines.append(f"  {one_line(name)}{' reward' * (name == kind)} {last}, best {best}")
    lines += _rank_lines(run, now_s)
    lines += _metric_lines(run)
    if problem := last_problem(run):
        lines += ["last problem", f"  {problem}"]
    lines += [f"not read: {file}: {why}" for file, why in run.unreadable.items()]
    return "\n".join(line if width is None else cut(line, width) for line in lines)


def _title(folder: Path, status: str, width: int | None) -> str:
    """The path of the run, or as much of its end as leaves room for the status behind it."""
    path = path_text(folder)
    room = len(path) if width is None else max(LEAST_PATH, width - len(status))
    return path if len(path) <= room else f"...{path[len(path) - room + 3 :]}"


def _progress(run: RunState, now_s: float) -> str:
    """Step N of M, how long it has run, how long the rest takes."""
    parts = [f"step {run.step} of {run.total_steps or 'a number not known yet'}"]
    until_s = now_s if run.status == "running" else run.last_sign_s
    if run.started_s and until_s >= run.started_s:
        parts.append(
            f"{duration(until_s - run.started_s)} since its start"
            if run.status == "running"
            else f"ran for {duration(until_s - run.started_s)}"
        )
    if run.step_s is not None:
        parts.append(f"{duration(run.step_s)} a step")
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    if run.last_sign_s:
        parts.append(f"last heartbeat {age_text(now_s - run.last_sign_s)} ago")
    return ", ".join(parts)


def _rank_lines(run: RunState, now_s: float) -> list[str]:
    """What each rank does now, or did last; ranks that do the same share a line, those behind come first."""
    if not run.ranks:
        return []
    now = attempt(lambda: doing(read_plan(run.folder), run.ranks), {}, "what ranks do", Skipped())
    groups: dict[tuple[int, str, str, str, Doing | None], list[RankState]] = {}
    for rank in run.ranks:
        key = (rank.step, rank.node, rank.error, rank.waits, now.get(rank.rank))
        groups.setdefault(key, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (not item[0][2], item[0][0], item[1][0].since_s))
    lines = ["ranks now" if run.status == "running" else "ranks at the end"]
    for (step, node, error, waits, does), ranks in ordered[:MOST_GROUPS]:
        where = f"step {step}, {node}" if step else node
        since = f"for {_span(now_s - rank.since_s for rank in ranks)}" if run.status == "running" else ""
        if run.status == "ended":
            does, waits = None, ""
        state = f"failed: {error}" if error else waits or (does.text() if does else "")
        what = "  ".join(part for part in (where, since, state) if part)
        lines.append(f"  {cut(format_ranks([rank.rank for rank in ranks]), MOST_RANKS_WIDTH):<8} {what}")
    if len(ordered) > MOST_GROUPS:
        left = sum(len(ranks) for _, ranks in ordered[MOST_GROUPS:])
        lines.append(f"  ... and {left} more ranks elsewhere")
    return lines


def _attempt_lines(run: RunState, now_s: float) -> list[str]:
    """Amendments of this start, and its last attempts that failed, and why."""
    amended = [f"  amended {one}" for one in run.amendments[-MOST_ATTEMPTS:]]
    if not run.attempts:
        return amended
    lines = [*amended, f"  attempt {run.attempts[-1].attempt + 1}, after {len(run.attempts)} that failed"]
    for one in run.attempts[-MOST_ATTEMPTS:]:
        ago = age_text(now_s - one.ended_s)
        ranks = f" with {one.world_size} rank{'s' * (one.world_size > 1)}" if one.world_size else ""
        lines.append(f"    {one.attempt}  {ago} ago{ranks}, {attempt_text(one)}; went on from {one.next}")
    return lines


def _span(seconds: Iterable[float]) -> str:
    """A duration, or the shortest and the longest of several."""
    each = sorted(max(0.0, value) for value in seconds)
    short, long = duration(each[0]), duration(each[-1])
    return short if short == long else f"{short} to {long}"


def _metric_lines(run: RunState) -> list[str]:
    """The columns of the console's table that the run fills, by its newest values."""
    latest = latest_metrics(run.folder)
    columns = columns_of(latest)
    agents = sorted({agent for column in columns for agent in agents_of(column, latest)})
    cells = [
        f"{column.header} {one_line(cell(column, latest, agents))}"
        for column in columns
        if matches(column, latest)
    ]
    return ["last metrics", f"  {', '.join(cells)}"] if cells else []
