"""One sample to score and what came of it: plain data that travels to reward workers as JSON. No torch."""

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from siirl.rewards.registry import ScoreFn


@dataclass(frozen=True)
class Sample:
    """A response with what its dataset row says of it, and the functions (with weights) that score it."""

    parts: tuple[tuple[str, float], ...]
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any


@dataclass(frozen=True)
class Outcome:
    """What came of a sample. error: None, or why there is no score; failure: what kind of error it is.

    "data": the dataset row cannot be scored; "raised": the function raised or returned something unusable;
    "timeout": it took too long and its process was killed; "died": its process ended by itself.
    """

    score: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    failure: Literal["data", "raised", "timeout", "died"] | None = None


def score_sample(functions: Mapping[str, ScoreFn], sample: Sample) -> Outcome:
    """Call the functions of the sample and add up their weighted scores.

    With one function of weight 1 its further values are the info; with several, each score is in the info
    under the function's name, its further values under "name/key". Whatever a function raises is the
    caller's to catch. ValueError for a result that is no finite number.
    """
    total, info = 0.0, {}
    alone = len(sample.parts) == 1
    for name, weight in sample.parts:
        result = functions[name](
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        score, more = _read_result(result)
        total += weight * score
        info |= more if alone else {name: score, **{f"{name}/{key}": value for key, value in more.items()}}
    return Outcome(total, info)


def _read_result(result: Any) -> tuple[float, dict[str, Any]]:
    more: dict[str, Any] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f'it returned a dict without "score": its keys are {sorted(map(str, result))}')
        more = {str(key): _plain(value) for key, value in result.items() if key != "score"}
        result = result["score"]
    value = _plain(result)
    if not isinstance(value, numbers.Real):
        raise ValueError(f"it returned {_short(result)} of type {type(result).__name__} instead of a number")
    if not math.isfinite(value):
        raise ValueError(f"it returned {value}: a score must be finite")
    try:
        json.dumps(more)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its further values must be numbers or texts: {error}") from error
    return float(value), more


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
