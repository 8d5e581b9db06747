"""The terminal's view of a run: a progress bar at the bottom, above it one aligned line for each step."""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from siirl.observe.columns import ENGINE_RESTARTS, Column, agents_of, cell, columns_of, matches, number

HEADER_EVERY, LEAST_WIDTH = 20, 7
MOST_LINES, MOST_WIDTH = 24, 120  # of a conversation


class ConsoleSink:
    """Prints a line for each step, with the time that is left; on a terminal also a progress bar.

    total_steps: of the run; first_step: the last step already done (a resumed run), where the bar starts.
    progress: see trainer.progress.
    """

    def __init__(self, total_steps: int, first_step: int = 0, progress: str = "bar"):
        self._console = Console(file=sys.stdout, highlight=False)
        self._columns: dict[str, tuple[Column, int]] = {}  # header -> column, and its width
        self._legend = ""
        self._rows = 0
        self._seen: dict[str, float] = {}
        self._node_times: deque[dict[str, float]] = deque(maxlen=HEADER_EVERY)
        self._total_steps = total_steps
        self._start_s = self._last_s = time.monotonic()
        self._step_times: deque[float] = deque(maxlen=HEADER_EVERY)  # all that lies between two steps
        self._progress: Progress | None = None
        self._is_plain = progress == "plain"
        if progress == "bar" and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=2,
            )
            self._task = self._progress.add_task("training", total=total_steps, completed=first_step)
            self._progress.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._seen.update(values)
        now_s = time.monotonic()
        if step and "time/step_s" in values:
            self._step_times.append(now_s - self._last_s)
        self._last_s = now_s
        if self._is_plain:
            self._print(self._plain_line(step, values), "")
        else:
            self._log_row(step, values)
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def _plain_line(self, step: int, values: Mapping[str, float]) -> str:
        """The numbers of the table's columns that a step has, under the names of the metrics."""
        found = {name: column for column in columns_of(values) for name in matches(column, values)}
        numbers = [f"{name}={number(values[name], column.digits)}" for name, column in found.items()]
        return " ".join([f"step={step}/{self._total_steps}", *numbers, f"left={self._left(step)}"])

    def _log_row(self, step: int, values: Mapping[str, float]) -> None:
        known = columns_of(self._seen)
        found = {column: matches(column, self._seen) for column in known}
        agents = sorted({agent for column in known for agent in agents_of(column, self._seen)})
        columns = {
            column.header: (column, _width(column, len(agents) if agents_of(column, self._seen) else 1))
            for column in known
            if column.always or found[column]
        }
        if columns != self._columns or self._rows % HEADER_EVERY == 0:
            self._columns = columns
            self._print_node_times()
            self._print_legend(agents)
            self._print_row("step", [*columns, "left"], "bold")
            self._rows = 0
        cells = [cell(column, values, agents) for column, _ in columns.values()]
        self._print_row(f"{step}/{self._total_steps}", [*cells, self._left(step)], "")
        self._rows += 1
        if restarts := values.get(ENGINE_RESTARTS):
            self._print(f"      rollout engines started again in this step: {restarts:g}", "bold")
        times = {name.removeprefix("time/"): s for name, s in values.items() if name.startswith("time/")}
        self._node_times.append({name: s for name, s in times.items() if "/" not in name})

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """One conversation of a validation, in few lines; all other samples go to files alone."""
        texts = (row["conversation"] for row in rows if "conversation" in row)
        if self._is_plain or name != "validation" or (text := next(texts, None)) is None:
            return
        lines = text.splitlines()
        self._print(f"a conversation of the validation at step {step}:", "bold")
        for line in lines[:MOST_LINES]:
            self._print(f"  {line[:MOST_WIDTH]}{'...' * (len(line) > MOST_WIDTH)}", "")
        if len(lines) > MOST_LINES:
            self._print(f"  ... and {len(lines) - MOST_LINES} more lines", "dim")

    def close(self) -> None:
        if self._rows:
            self._print_node_times()
        if self._progress is not None:
            self._progress.stop()

    def _left(self, step: int) -> str:
        """How long the rest of the run takes, at the pace of the last steps."""
        if not self._step_times or step >= self._total_steps:
            return "-"
        return clock(sum(self._step_times) / len(self._step_times) * (self._total_steps - step))

    def _print_row(self, first: str, cells: Sequence[str], style: str) -> None:
        widths = [*(width for _, width in self._columns.values()), LEAST_WIDTH]
        texts = (f"{text:>{width}}" for text, width in zip(cells, widths, strict=True))
        width = max(LEAST_WIDTH, 2 * len(str(self._total_steps)) + 1)
        self._print("  ".join([f"{first:>{width}}", *texts]), style)

    def _print_legend(self, agents: Sequence[int]) -> None:
        """Which number of a cell is whose, and what a length is; once, and again if agents are added."""
        parts = [f"a|b: agents {'|'.join(map(str, agents))}"] if len(agents) > 1 else []
        if any(name.endswith("interaction/turns") for name in self._seen):
            parts.append("length: tokens of an agent's row, its turns and what it read between them")
        legend = "; ".join(parts)
        if legend and legend != self._legend:
            self._legend = legend
            self._print(f"      {legend}", "dim")

    def _print_node_times(self) -> None:
        """Mean time per node over the steps since the last header, and the share that is the engine's own."""
        steps = [times for times in self._node_times if "step_s" in times]
        self._node_times.clear()
        total_s = sum(times["step_s"] for times in steps)
        if not total_s:
            return
        means = {name: sum(times.get(name, 0.0) for times in steps) / len(steps) for name in steps[-1]}
        nodes = {name: mean for name, mean in means.items() if name not in ("step_s", "overhead_s")}
        parts = [
            f"{name.removesuffix('_s')} {number(mean, 2)}"
            for name, mean in sorted(nodes.items(), key=lambda item: -item[1])
            if mean >= 0.005 * total_s / len(steps)
        ]
        overhead = means.get("overhead_s")
        if overhead is not None:
            parts.append(f"overhead {100 * overhead * len(steps) / total_s:.1f}%")
        elapsed = clock(time.monotonic() - self._start_s)
        self._print(f"      {elapsed} since the start; seconds a step: {', '.join(parts)}", "dim")

    def _print(self, line: str, style: str) -> None:
        if self._progress is not None:
            self._progress.console.print(Text(line, style=style), soft_wrap=True)
        else:
            print(line, flush=True)


def clock(seconds: float) -> str:
    """A duration as hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _width(column: Column, num_agents: int) -> int:
    return max(LEAST_WIDTH, len(column.header), 6 * num_agents - 1)
