"""Metrics of one step on one rank, as sums and weights: they add up exactly over micro-batches and ranks."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["mean", "sum", "max", "min"]

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
