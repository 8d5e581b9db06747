"""The metrics of a run as curves, of at most so many points."""

from typing import Any

from siirl.runs.folder_reader import LeftOut
from siirl.runs.run_files import MetricHistory

MOST_POINTS, FEWEST_POINTS, MOST_NUMBERS = 2_000, 100, 400_000


def curves(history: MetricHistory, left_out: LeftOut) -> dict[str, Any]:
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
        left_out.add(
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
    kept = thin(points, MOST_POINTS)
    return {
        "steps": [step for step, _ in kept],
        "seconds": [round(time_s - begin_s, 2) for _, time_s in kept],
    }


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
