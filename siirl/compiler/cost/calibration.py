"""What a run recorded of its steps, and how far the cost model is from it: each part by its own ratio. Pure.

A changed plan is predicted as the model has it, times the ratio of the recorded to the predicted seconds of
the same part of the run. So a constant that is wrong for a machine, or work that the model does not know,
counts only as far as the change moves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from siirl.compiler.cost.lengths import Lengths

SYNCS = "time/weight_sync_s"
FEWEST, WARM_UP = 4, 2
"""Steps of a run; of more than the fewest so many first ones are left out: graphs, caches, buffers fill."""
_SPREAD = 0.1
"""Share of the steps at either end of a metric's values that is left out of its mean: saves, other load."""
Series = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Calibration:
    """What is multiplied, and what is added, to the prediction of a step."""

    factors: Mapping[str, float] = field(default_factory=dict)
    """Phase -> recorded over predicted seconds."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """Kind of phase -> the mean of those, for phases that the run did not have."""
    row_seconds: Mapping[str, float] = field(default_factory=dict)
    """Node of no model -> recorded seconds, over the rows of one of its ranks."""
    rest_s: float = 0.0
    """Of a step, outside of all phases: moving rows, reading data, waiting."""

    def scaled(self, ratio: float) -> "Calibration":
        """With all parts shorter: each was recorded of the rank on which it took longest, not the step."""
        factors, kinds, rows = (
            {name: value * ratio for name, value in found.items()}
            for found in (self.factors, self.kinds, self.row_seconds)
        )
        return Calibration(factors, kinds, rows)

    def factor(self, phase: str, kind: str) -> float:
        """By what a predicted phase is multiplied."""
        near = {"pass": "update", "update": "pass"}.get(kind, kind)
        return self.factors.get(phase) or self.kinds.get(kind) or self.kinds.get(near) or 1.0


def calibrated(
    recorded: Mapping[str, float], predicted: Mapping[str, tuple[str, float]], rows: Mapping[str, float]
) -> Calibration:
    """The ratios of a run; what is left of its step is put in by the caller, who can add the parts up.

    recorded: phase -> seconds. predicted: phase -> (its kind, seconds). rows: node of no model -> rows of one
    of its ranks.
    """
    factors = {
        phase: recorded[phase] / seconds
        for phase, (_, seconds) in predicted.items()
        if recorded.get(phase) and seconds > 0
    }
    of_kind: dict[str, list[float]] = {}
    for phase, factor in factors.items():
        of_kind.setdefault(predicted[phase][0], []).append(factor)
    kinds = {kind: fmean(found) for kind, found in of_kind.items()}
    each = {node: recorded[node] / count for node, count in rows.items() if node in recorded and count}
    return Calibration(factors, kinds, each)


def step_means(series: Series) -> dict[str, float]:
    """Metric -> its mean over the steps of a run that count; empty for a run of fewer than FEWEST."""
    steps = sorted(series.get("time/step_s", {}))
    if len(steps) < FEWEST:
        return {}
    counted = set(steps[WARM_UP:] if len(steps) >= FEWEST + WARM_UP else steps[1:])
    means = {}
    for name, points in series.items():
        values = sorted(value for step, value in points.items() if step in counted)
        dropped = int(_SPREAD * len(values))
        if values:
            means[name] = fmean(values[dropped : len(values) - dropped])
    return means


def lengths_under(lengths: Lengths, most_before: int, most: int, truncated: float) -> Lengths:
    """The lengths of a run whose responses may have another number of tokens at most.

    truncated: share of its responses that had all that they might. With fewer tokens more are cut. With more,
    those that were cut go on, and end as often at each token as the others did.
    """
    if most == most_before:
        return lengths
    if most < most_before:
        found = lengths.up_to(most_before)
        cut = tuple(min(one, most) for one in found.lengths) or (min(found.response, most),)
        return replace(lengths, response=fmean(cut), sampled=cut if found.lengths else ())
    ends = (1 - truncated) / lengths.response  # of a token, as geometric lengths have it
    more = most - most_before
    further = (1 - (1 - ends) ** more) / ends if ends > 0 else float(more)
    return replace(lengths, response=lengths.response + truncated * further, sampled=())
