"""Metrics of one step on one rank, as sums and weights: they add up exactly over micro-batches and ranks.

And those that follow from joined ones, as they do not add up; older names; peaks of devices, for MFU.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeVar

Kind = Literal["mean", "sum", "max", "min"]
T = TypeVar("T")

OLDER_NAMES = {
    "rollout/lag": "rollout/staleness",
    "rollout/lag_max": "rollout/staleness_max",
    "rollout/lag_#": "rollout/staleness_#",
    "rollout/token_lag": "rollout/token_staleness",
    "reward/group_degenerate": "reward/zero_std_groups",
    "speaker_#/group_degenerate": "speaker_#/zero_std_groups",
    "turn_#/group_degenerate": "turn_#/zero_std_groups",
    "reward/shaped": "reward/total",
}
"""Older name of a metric -> today's, after agent_N/ too; # is a number.

Runs tell both, for what users have that asks for the older ones; what siirl reads of a run has today's.
"""
_TODAYS_NAMES = {today: older for older, today in OLDER_NAMES.items()}
_NUMBER, _AGENT = re.compile(r"\d+"), re.compile(r"(?:agent_\d+/)?")

MOST_TURNS = 16
"""Turns of an episode that have metrics of their own; later ones count together."""


@dataclass
class Metrics:
    """name -> (kind, total, weight). A mean is total/weight; the weight of the other kinds is ignored.

    Names are paths, e.g. "actor/entropy", "time/rollout_actor_s". No communication here: `merge` joins the
    metrics of micro-batches, nodes or ranks.
    """

    entries: dict[str, tuple[Kind, float, float]] = field(default_factory=dict)

    def mean(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add to a weighted mean: `total` is the weighted sum already. Weight 0 counts as absent."""
        self._add(name, "mean", float(total), float(weight))

    def sum(self, name: str, value: float) -> None:
        self._add(name, "sum", float(value), 1.0)

    def max(self, name: str, value: float) -> None:
        self._add(name, "max", float(value), 1.0)

    def min(self, name: str, value: float) -> None:
        self._add(name, "min", float(value), 1.0)

    def merge(self, other: "Metrics", prefix: str = "") -> None:
        """Add the entries of `other`, each name preceded by `prefix`."""
        for name, (kind, total, weight) in other.entries.items():
            self._add(prefix + name, kind, total, weight)

    def values(self) -> dict[str, float]:
        """name -> number, in insertion order; means without weight are left out."""
        return {
            name: total / weight if kind == "mean" else total
            for name, (kind, total, weight) in self.entries.items()
            if kind != "mean" or weight
        }

    def _add(self, name: str, kind: Kind, total: float, weight: float) -> None:
        if name not in self.entries:
            self.entries[name] = (kind, total, weight)
            return
        old_kind, old_total, old_weight = self.entries[name]
        if old_kind != kind:
            raise ValueError(f"metric {name!r} is a {old_kind} and a {kind}: use one name for one kind")
        if kind in ("mean", "sum"):
            joined = old_total + total
        else:
            joined = max(old_total, total) if kind == "max" else min(old_total, total)
        self.entries[name] = (kind, joined, old_weight + weight)


def todays_name(name: str) -> str:
    """The name that a metric has today; of others the same."""
    return _renamed(name, False) or name


def with_todays_names(record: Mapping[str, T]) -> dict[str, T]:
    """A record of a run of any age; where it has both names of a metric, today's counts."""
    todays = ((todays_name(name), name, value) for name, value in record.items())
    return {today: value for today, name, value in todays if today == name or today not in record}


def with_older_names(values: Mapping[str, T]) -> dict[str, T]:
    """Values, and those of metrics that had another name under that name too."""
    return {**values, **{older: value for name, value in values.items() if (older := _renamed(name, True))}}


@lru_cache(20_000)
def _renamed(name: str, to_older: bool) -> str:
    """The other name of a metric; "": it has none."""
    agent = _AGENT.match(name)[0]  # pyright: ignore[reportOptionalSubscript]  it matches anything
    bare = name[len(agent) :]
    numbers = _NUMBER.findall(bare)
    other = (_TODAYS_NAMES if to_older else OLDER_NAMES).get(_NUMBER.sub("#", bare), "")
    return other and agent + other.replace("#", "".join(numbers))


def derived_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Of joined values: <path>/std from mean and square_mean, <path>/ess from weight and weight_square.

    ess is the effective sample size as a share of the samples, (sum w)^2 / (n sum w^2). Source: Kong, "A note
    on importance sampling using standardized weights" (1992).
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        path, _, last = name.rpartition("/")
        if last == "square_mean" and f"{path}/mean" in values:
            found[f"{path}/std"] = max(value - values[f"{path}/mean"] ** 2, 0.0) ** 0.5
        if last == "weight_square" and f"{path}/weight" in values:
            found[f"{path}/ess"] = values[f"{path}/weight"] ** 2 / value if value else 0.0
    return found


_PEAK_BF16 = {
    # dense bf16 FLOP/s by NVIDIA's data sheets, without sparsity; the first name that matches counts
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its CUDA name; None where unknown, as for a CPU."""
    return next((peak for name, peak in _PEAK_BF16.items() if name.lower() in device_name.lower()), None)


def mfu(flops: float, seconds: float, num_devices: int, device_name: str) -> float | None:
    """`flops` of all devices in `seconds` as a share of their peak; None where the peak is unknown."""
    peak = peak_flops(device_name)
    if peak is None or seconds <= 0 or num_devices < 1:
        return None
    return flops / (seconds * num_devices * peak)
