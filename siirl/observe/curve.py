"""Reads a run's metrics file and draws its reward curve; and the closing summary: what a run achieved and
where its results lie.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siirl.guarded_files import json_lines
from siirl.observe.columns import REWARD, VALIDATION_REWARD, Column, matches
from siirl.observe.metrics import todays_name, with_todays_names

METRICS_FILE = "metrics.jsonl"

INK, TRAIN_COLOURS, VALIDATION_COLOURS = (
    "#333333",
    ("#8fb3d9", "#d9b38f", "#9cc9a0"),
    ("#1f5a94", "#94531f", "#2f7d37"),
)
Series = dict[str, dict[int, float]]


class RunSeries(Series):
    """metric -> {step: value}; who asks for an older name of a metric gets it, too."""

    def __getitem__(self, name: str) -> dict[int, float]:
        return super().__getitem__(todays_name(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(todays_name(name) if isinstance(name, str) else name)

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(todays_name(name), default)


def read_series(metrics_jsonl: Path) -> RunSeries:
    """A run's metrics; the last line for a step counts; a half-written last line is skipped."""
    series = RunSeries()
    for record in json_lines(metrics_jsonl):
        step = record.pop("step")
        for name, value in with_todays_names(record).items():
            if value is not None:
                series.setdefault(name, {})[step] = value
    return series


def of_column(series: Series, column: Column) -> Series:
    """The series that fill a column of the table: one, or one for each agent."""
    last: Mapping[str, float] = {name: 0.0 for name in series}
    return {name: dict(sorted(series[name].items())) for name in matches(column, last)}


def reward_curve_png(metrics_jsonl: Path, out_png: Path, title: str = "reward") -> Path | None:
    """Draw training reward (of many steps with its moving mean) and validation reward; return out_png.

    None of a run without rewards, such as supervised fine-tuning: there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = read_series(metrics_jsonl)
    training, validation = of_column(series, REWARD), of_column(series, VALIDATION_REWARD)
    if not (training or validation):
        return None
    figure = Figure(figsize=(8, 4.5), dpi=140)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.12, 0.86, 0.8))  # a layout that is computed draws all of it twice
    for index, (name, points) in enumerate(training.items()):
        colour = TRAIN_COLOURS[index % len(TRAIN_COLOURS)]
        window, label = smoothing_window(len(points)), _label(name, "training", training)
        if window > 1:
            axes.plot(list(points), list(points.values()), color=colour, linewidth=0.8, alpha=0.55)
            label += f", mean of {window} steps (thin: each)"
        means = _moving_mean(list(points.values()), window)
        axes.plot(list(points), means, color=colour, linewidth=1.6, label=label)
    for index, (name, points) in enumerate(validation.items()):
        colour = VALIDATION_COLOURS[index % len(VALIDATION_COLOURS)]
        label = _label(name, "validation", validation)
        axes.plot(
            list(points),
            list(points.values()),
            color=colour,
            linewidth=2,
            marker="o",
            markersize=4,
            label=label,
        )
        step, value = list(points.items())[-1]
        axes.annotate(
            f"{value:.3g}",
            (step, value),
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    axes.set_title(title, loc="left", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.05)
    if training or validation:
        axes.legend(frameon=False, loc="best")
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png)
    return out_png


def smoothing_window(num_steps: int) -> int:
    """Over how many steps the mean is taken, an odd number: 9, or about a third of a short run."""
    return min(9, max(1, num_steps // 3 - (num_steps // 3 + 1) % 2))


def _moving_mean(values: list[float], window: int) -> list[float]:
    """Centred moving mean; shorter windows at both ends."""
    half = window // 2
    slices = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in slices]


def _label(name: str, kind: str, among: Series) -> str:
    return kind if len(among) == 1 else f"{kind} {name.split('/')[0]}"


COUNTS = {
    "prompts": "",
    "truncated": " truncated",
    "dropped": " of the files dropped as too long",
    "without_truth": " without ground truth",
    "not_varied": " responses dropped by dynamic sampling",
    "filtered": " responses dropped by a filter",
}
COUNTED = re.compile(rf"(agent_\d+/)?data/(?P<source>.+)/(?P<what>{'|'.join(COUNTS)})")


def closing_summary(metrics_jsonl: Path, total_s: float, places: Mapping[str, Path | None]) -> str:
    """Rewards of the run and the places of its results, aligned.

    places: what -> where, e.g. {"TensorBoard": ..., "reward curve": ..., "checkpoint": ..., "HF model": ...};
    None: absent.
    """
    series = read_series(metrics_jsonl)
    lines: list[tuple[str, str]] = []
    for name, points in of_column(series, VALIDATION_REWARD).items():
        best = max(points, key=lambda step: points[step])
        text = f"{_first_to_last(points)}; best {points[best]:.3f} (step {best})"
        lines.append((f"validation reward{_agent(name)}", text))
    for name, points in of_column(series, REWARD).items():
        lines.append((f"training reward{_agent(name)}", _first_to_last(points)))
    lines += _prompts(series)
    lines.append(("time", duration(total_s)))
    lines += [(what, str(where)) for what, where in places.items() if where is not None]
    width = max(len(what) for what, _ in lines)
    return "\n".join(["done.", *(f"  {what:<{width}}  {text}" for what, text in lines)])


def _prompts(series: Mapping[str, Mapping[int, float]]) -> list[tuple[str, str]]:
    """The prompts that were read, and what was not as it should be with some, by source."""
    told: dict[str, dict[str, int]] = {}
    for name, points in series.items():
        if found := COUNTED.fullmatch(name):
            number = max(points.values()) if found["what"] == "dropped" else sum(points.values())
            counts = told.setdefault(found["what"], {})
            counts[found["source"]] = counts.get(found["source"], 0) + int(number)
    parts = [
        f"{sum(counts.values()):,}{words} ({', '.join(f'{source} {n:,}' for source, n in counts.items())})"
        for what, words in COUNTS.items()
        if (counts := told.get(what))
    ]
    return [("prompts", "; ".join(parts))] if parts else []


def duration(seconds: float) -> str:
    """1:02:03, or 2 min 3 s, or 3.4 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02}:{rest:02}" if hours else f"{minutes} min {rest} s"


def _first_to_last(points: Mapping[int, float]) -> str:
    steps = list(points)
    return " -> ".join(f"{points[step]:.3f} (step {step})" for step in dict.fromkeys((steps[0], steps[-1])))


def _agent(name: str) -> str:
    prefix = name.split("/")[0]
    return f" {prefix}" if prefix.startswith("agent_") else ""
