"""The closing summary: what a run achieved and where its results lie."""

import re
from collections.abc import Mapping
from pathlib import Path

from siirl.observe.columns import REWARD, VALIDATION_REWARD
from siirl.observe.curve import of_column, read_series

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
    series = read_series(metrics_jsonl) if metrics_jsonl.exists() else {}
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
