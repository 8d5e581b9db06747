"""The metrics of a run as curves, of at most so many points."""

from typing import Any

from siirl.runs.folder_reader import Skipped
from siirl.runs.run_files import MetricHistory

MOST_POINTS, FEWEST_POINTS, MOST_NUMBERS = 2_000, 100, 400_000


def curves(history: MetricHistory, skipped: Skipped) -> dict[str, Any]:
    """metric -> {"steps", "values", "of"}; "of": how many points there were, where some are left out."""
    most = min(MOST_POINTS, max(FEWEST_POINTS, MOST_NUMBERS // max(1, len(history.series))))
    out, thinned = {}, 0
    for name in sorted(history.series):
        steps, values = _in_order(history.series[name])
        kept = thin(values, most)
        out[name] = {
            "steps": [steps[at] for at in kept],
            "values": [float(f"{values[at]:.6g}") for at in kept],
        }
        if len(kept) < len(steps):
            out[name]["of"] = len(steps)
            thinned += 1
    if thinned:
        skipped.add(
            "curves",
            f"of {thinned} that ha{'ve' if thinned > 1 else 's'} more than {most} points, the lowest and the "
            "highest point of each stretch are shown",
        )
    return out


def clock(history: MetricHistory) -> dict[str, list[float]]:
    """When steps were reported, in seconds since the first one's step began, as far as that is known."""
    points = sorted((step, time_s) for step, time_s in history.times.items() if time_s > 0)
    if not points:
        return {"steps": [], "seconds": []}
    first, begin_s = points[0]
    begin_s -= history.series.get("time/step_s", {}).get(first, 0.0)
    kept = [points[at] for at in thin([time_s for _, time_s in points], MOST_POINTS)]
    return {
        "steps": [step for step, _ in kept],
        "seconds": [round(time_s - begin_s, 2) for _, time_s in kept],
    }


def _in_order(points: dict[int, float]) -> tuple[list[int], list[float]]:
    """Steps and their values; what was read in the order of the steps is not sorted again."""
    steps = list(points)
    if steps == (rising := sorted(steps)):
        return steps, list(points.values())
    return rising, [points[step] for step in rising]


def thin(values: list[float], most: int) -> list[int]:
    """At most `most` places: the ends, and of each stretch the lowest and the highest."""
    if len(values) <= most:
        return list(range(len(values)))
    inner, buckets = len(values) - 2, (most - 2) // 2
    kept = [0]
    for index in range(buckets):
        begin = 1 + index * inner // buckets
        part = values[begin : 1 + (index + 1) * inner // buckets]
        low, high = part.index(min(part)), part.index(max(part))
        kept += [begin + at for at in sorted({low, high})]
    return [*kept, len(values) - 1]
