"""Weights of several rewards, as the configuration writes them: {source: {name: weight or {weight, ...}}}."""

import fnmatch
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from siirl.config.values import closest
from siirl.errors import ConfigError


@dataclass(frozen=True)
class WeightedPart:
    """One reward of several: weight * (score - low) / (high - low)."""

    name: str
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    standardize: bool = False
    """The score is first brought to mean 0 and standard deviation 1."""

    @property
    def scale(self) -> float:
        """What the score is multiplied by."""
        return self.weight / (self.high - self.low)

    @property
    def offset(self) -> float:
        """What is added to that product."""
        return -self.scale * self.low


def parse_parts(
    where: str, value: Any, known: Collection[str], normalize: bool, what: str, standardize: bool = False
) -> tuple[WeightedPart, ...]:
    """The parts that a value names: a name, {name: weight}, or {name: {weight, low, high}}.

    normalize: the weights are divided by their sum. what: what the names are, for messages. standardize:
    whether the parts may ask for it. ConfigError, which begins with `where`, for unknown names and for
    numbers that cannot be.
    """
    given = dict(value) if isinstance(value, Mapping) else {value: 1.0}
    if not given:
        raise ConfigError(f"{where} is empty: name at least one of {', '.join(known)}.")
    numbers = {"weight": 1.0, "low": 0.0, "high": 1.0}
    parts = []
    for name, options in given.items():
        if name not in known:
            raise ConfigError(
                f"{where}: unknown {what} {name!r}. Known: {', '.join(known)}.{closest(str(name), known)}"
            )
        options = dict(options) if isinstance(options, Mapping) else {"weight": options}
        flag = options.pop("standardize", False) if standardize else False
        if not isinstance(flag, bool):
            raise ConfigError(f"{where}: standardize of {name} is {flag!r}: it must be true or false.")
        for key, number in options.items():
            if key not in numbers:
                names = [*numbers, *(["standardize"] if standardize else [])]
                raise ConfigError(f"{where}: {name} has no option {key!r}. Known: {', '.join(names)}.")
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ConfigError(f"{where}: the {key} of {name} is {number!r}: it must be a number.")
        part = WeightedPart(name, **(numbers | options), standardize=flag)
        if part.low >= part.high:
            raise ConfigError(
                f"{where}: {name} has low={part.low:g} and high={part.high:g}: low must be less than high."
            )
        parts.append(part)
    return _normalized(where, parts) if normalize else tuple(parts)


def _normalized(where: str, parts: list[WeightedPart]) -> tuple[WeightedPart, ...]:
    total = sum(part.weight for part in parts)
    if total <= 0:
        raise ConfigError(
            f"{where}: the weights add up to {total:g}, so they cannot be normalised. Raise one."
        )
    return tuple(
        WeightedPart(part.name, part.weight / total, part.low, part.high, part.standardize) for part in parts
    )


class RewardWeights:
    """How the rewards of several nodes are added up, for each data source: reward_model.weights.

    weights: data source, or pattern with * -> what parse_parts takes; the first that fits counts. Without any
    the rewards are added up as they are. ConfigError for names that are not among `names`.
    """

    def __init__(self, weights: Mapping[str, Any], names: Collection[str], normalize: bool):
        self._parts = {
            source: parse_parts(
                f"reward_model.weights[{source!r}]", value, names, normalize, "reward", standardize=True
            )
            for source, value in (weights or {"*": dict.fromkeys(names, 1.0)}).items()
        }

    def parts(self, data_source: str) -> tuple[WeightedPart, ...]:
        """What scores the rows of a data source. ConfigError if nothing does."""
        for pattern, parts in self._parts.items():
            if fnmatch.fnmatchcase(data_source, pattern):
                return parts
        raise ConfigError(
            f"data_source {data_source!r} has no weights: reward_model.weights knows "
            f"{', '.join(self._parts)}. Add it, or * for all others."
        )
