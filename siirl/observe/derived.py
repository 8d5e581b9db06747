"""Metrics that do not add up over micro-batches and ranks, from joined ones that do."""

from collections.abc import Mapping


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
