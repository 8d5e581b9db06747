"""The metrics of a run as curves, of at most so many points."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siirl.observe.curve import METRICS_FILE
from siirl.view.folder_reader import json_lines, number, whole

MOST_FILE_BYTES, MOST_POINTS, FEWEST_POINTS, MOST_NUMBERS = 128 << 20, 2_000, 100, 400_000

Series = dict[str, dict[int, float]]


@dataclass
class MetricHistory:
    """What metrics.jsonl says: of two lines for a step and metric the later one counts."""

    series: Series = field(default_factory=dict)
    broken: dict[str, set[int]] = field(default_factory=dict)
    """Metric -> steps whose value was not a number."""
    times: dict[int, float] = field(default_factory=dict)
    """Step -> seconds since the epoch."""
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """The last step that was reported."""
        return max(self.times, default=None)


def read_history(output_dir: Path) -> MetricHistory:
    """The history of a run's folder; empty where there is none."""
    history = MetricHistory()
    for record in json_lines(output_dir / METRICS_FILE, MOST_FILE_BYTES, history.notes):
        step = whole(record.pop("step", None))
        if step is None or step < 0:
            continue
        time_s = number(record.pop("time_s", None))
        history.times[step] = time_s if time_s is not None else 0.0
        for name, value in record.items():
            if (found := number(value)) is not None:
                history.series.setdefault(name, {})[step] = found
                history.broken.get(name, set()).discard(step)
            elif value is None:
                history.broken.setdefault(name, set()).add(step)
    return history


def curves(history: MetricHistory) -> dict[str, Any]:
    """metric -> {"steps", "values", "of"}; "of": how many points there were, where some are left out."""
    most = min(MOST_POINTS, max(FEWEST_POINTS, MOST_NUMBERS // max(1, len(history.series))))
    out, thinned = {}, 0
    for name in sorted(history.series):
        points = sorted(history.series[name].items())
        kept = thin(points, most)
        out[name] = {"steps": [p[0] for p in kept], "values": [float(f"{p[1]:.6g}") for p in kept]}
        if len(kept) < len(points):
            out[name]["of"] = len(points)
            thinned += 1
    if thinned:
        history.notes.append(
            f"{thinned} curve{'s' * (thinned > 1)} of more than {most} points: of each stretch the lowest "
            "and the highest point are shown"
        )
    return out


def thin(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` of the points, ends and extremes among them: of each stretch its lowest and highest."""
    if len(points) <= most:
        return points
    inner, buckets = points[1:-1], (most - 2) // 2
    kept = [points[0]]
    for index in range(buckets):
        part = inner[index * len(inner) // buckets : (index + 1) * len(inner) // buckets]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return [*kept, points[-1]]
