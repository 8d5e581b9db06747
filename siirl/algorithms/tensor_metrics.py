"""Metrics of micro-batches whose numbers are still on the device: it is asked for all of them at once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from siirl.observe.metrics import Kind, Metrics


class _Entry(NamedTuple):
    kind: Kind
    name: str
    total: float | Tensor
    weight: float | Tensor


class TensorMetrics:
    """As Metrics, of numbers and of tensors with one element; nothing but `read` waits for the device.

    What it gives is what Metrics would be had each number been read when it came: the same sums in the same
    order.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._reports: list[tuple[str, Callable[[], Metrics | None]]] = []

    def mean(self, name: str, total: float | Tensor, weight: float | Tensor) -> None:
        """Add to a weighted mean: `total` is the weighted sum already."""
        self._entries.append(_Entry("mean", name, total, weight))

    def sum(self, name: str, value: float | Tensor) -> None:
        self._entries.append(_Entry("sum", name, value, 1.0))

    def max(self, name: str, value: float | Tensor) -> None:
        self._entries.append(_Entry("max", name, value, 1.0))

    def later(self, report: Callable[[], Metrics | None]) -> None:
        """Call `report` in `read`, and add what it gives: for whatever else has to see numbers."""
        self._reports.append(("", report))

    def merge(self, other: "TensorMetrics", prefix: str = "") -> None:
        """Add the entries of `other`, each name preceded by `prefix`."""
        self._entries += (entry._replace(name=prefix + entry.name) for entry in other._entries)
        self._reports += ((prefix + before, report) for before, report in other._reports)

    def read(self) -> Metrics:
        """The numbers, added up in float64 on the host."""
        given = (x for entry in self._entries for x in (entry.total, entry.weight) if isinstance(x, Tensor))
        tensors = list({id(x): x for x in given}.values())
        found = torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else []
        number = dict(zip(map(id, tensors), found, strict=True))
        metrics = Metrics()
        for kind, name, *pair in self._entries:
            total, weight = (number[id(x)] if isinstance(x, Tensor) else float(x) for x in pair)
            metrics.merge(Metrics({name: (kind, total, weight)}))
        for prefix, report in self._reports:
            metrics.merge(report() or Metrics(), prefix)
        return metrics


def masked_sums(columns_BT: list[Tensor], mask_BT: Tensor) -> list[Tensor]:
    """Of each column the sum over the places where the mask is True, float64, on the device."""
    column_SBT = torch.stack(columns_BT)
    return list(torch.where(mask_BT.bool(), column_SBT, 0).sum((1, 2), dtype=torch.float64).unbind())
