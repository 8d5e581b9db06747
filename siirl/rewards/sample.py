"""One sample to score and what came of it: plain data that travels to reward workers as JSON. No torch."""

import json
import numbers
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from siirl.errors import DataError, EndpointError, SandboxError, ScoreTimeoutError
from siirl.observe.printable import printable
from siirl.rewards.reward_registry import BATCH_ARGUMENTS, PARTS, REWARDS, ScoreFn, takes_parts

LARGEST_SCORE = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which scores are kept."""
MOST_VALUES_BYTES = 1 << 20
"""Of the further values of a sample, as JSON: they are kept with its row, logged and averaged."""
MOST_ERROR_CHARS, MOST_FRAMES_CHARS = 2000, 8000


@dataclass(frozen=True)
class Sample:
    """A response with what its dataset row says of it, and the functions (with weights) that score it."""

    parts: tuple[tuple[str, float], ...]
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any
    offset: float = 0.0
    """What is added to the weighted sum of their scores."""
    said: dict[str, Any] = field(default_factory=dict)
    """The parts of the response, as Said.as_dict gives them; {}: the whole is its answer."""
    scored_text: str = "auto"
    """reward_model.scored_text."""

    def arguments(self, reads: str = "whole") -> dict[str, Any]:
        """What a reward function that reads the "answer", or the "whole", is called with."""
        reads = reads if self.scored_text == "auto" else self.scored_text
        answer = self.said.get("answer", self.solution_str)
        return {
            "data_source": self.data_source,
            "solution_str": answer if reads == "answer" else self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }


@dataclass(frozen=True)
class Outcome:
    """What came of a sample."""

    score: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why there is no score; None: there is one."""
    frames: str = ""
    """The lines of the user's that were running when its function raised, as Python prints them."""
    failure: Literal["data", "raised", "timeout", "died", "service"] | None = None
    """"data": the dataset row cannot be scored; "raised": the function raised or returned something unusable;
    "timeout": it took too long, so that there is neither a right nor a wrong; "died": its process ended by
    itself; "service": what it depends on (a remote service, the sandbox) does not work."""


def score_sample(functions: Mapping[str, ScoreFn], sample: Sample) -> Outcome:
    """Call the functions of the sample and add up their weighted scores.

    With one function of weight 1 its further values are the info; with several, each score is in the info
    under the function's name, its further values under "name/key". Whatever a function raises is the
    caller's to catch. ValueError for a result that is no finite number.
    """
    total, info = sample.offset, {}
    alone = len(sample.parts) == 1
    for name, weight in sample.parts:
        reads = REWARDS[name].reads if name in REWARDS else "whole"
        parts = {PARTS: sample.said} if takes_parts(functions[name]) else {}
        score, more = _read_result(functions[name](**sample.arguments(reads), **parts))
        total += weight * score
        short = name.removeprefix("custom.")
        info |= more if alone else {short: score, **{f"{short}/{key}": value for key, value in more.items()}}
    if not abs(total) <= LARGEST_SCORE:
        raise ValueError(f"its weighted scores add up to {total}: a score must be finite, in float32")
    return Outcome(total, info)


def score_batch(function: ScoreFn, samples: Sequence[Sample]) -> list[Outcome]:
    """Call a function once for all samples; it returns as many results as there are samples.

    Its arguments are those of a sample, as lists and in the plural. ValueError for another number of results;
    a result that is no finite number is the failure of its sample.
    """
    columns = zip(*(sample.arguments().values() for sample in samples), strict=True)
    parts = {PARTS: [sample.said for sample in samples]} if takes_parts(function) else {}
    results = function(**dict(zip(BATCH_ARGUMENTS, map(list, columns), strict=True)), **parts)
    if hasattr(results, "tolist"):
        results = results.tolist()
    if not isinstance(results, Sequence) or isinstance(results, str):
        raise ValueError(f"it returned {_short(repr(results))} instead of a list of {len(samples)} scores")
    if len(results) != len(samples):
        raise ValueError(f"it returned {len(results)} scores for {len(samples)} responses")
    outcomes = []
    for result in results:
        try:
            outcomes.append(Outcome(*_read_result(result)))
        except ValueError as error:
            outcomes.append(Outcome(error=str(error), failure="raised"))
    return outcomes


def failed(error: BaseException) -> Outcome:
    """The outcome of a sample whose function raised."""
    match error:
        case DataError():
            return Outcome(error=str(error), failure="data")
        case SandboxError() | EndpointError():
            return Outcome(error=str(error), failure="service")
        case ScoreTimeoutError():
            return Outcome(error=str(error), failure="timeout")
    frames = "".join(traceback.format_list(user_frames(error)))
    return Outcome(error=describe(error), failure="raised", frames=printable(frames[-MOST_FRAMES_CHARS:]))


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of an exception that are neither siirl's nor of an installed package, the outermost first."""
    if isinstance(error, ResultError):  # no line of the user's raised it
        return []
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((*installed, "<"))]


class ResultError(ValueError):
    """What a function returned is no score."""


def describe(error: BaseException) -> str:
    """The exception in one line: type, message, and the line that raised it: the user's, if one did."""
    if isinstance(error, ResultError):
        return printable(str(error))
    frames = user_frames(error) or traceback.extract_tb(error.__traceback__)
    where = "".join(f" (at {frame.filename}:{frame.lineno})" for frame in frames[-1:])
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the edge to user code: the text of its exception is made by it, too
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {printable(_short(text, MOST_ERROR_CHARS))}{where}"


def _read_result(result: Any) -> tuple[float, dict[str, Any]]:
    more: dict[str, Any] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            keys = _short(str(sorted(map(str, result))), MOST_ERROR_CHARS)
            raise ResultError(f'it returned a dict without "score": its keys are {keys}')
        more = {printable(str(key)): _plain(value) for key, value in result.items() if key != "score"}
        result = result["score"]
    value = _plain(result)
    if not isinstance(value, numbers.Real):
        kind = (
            ": does a path end without return?" if result is None else f" (it is a {type(result).__name__})"
        )
        raise ResultError(f"it returned {_short(repr(result))} instead of a number{kind}")
    if not abs(value) <= LARGEST_SCORE:
        raise ResultError(f"it returned {value}: a score must be finite, in float32")
    try:
        num_bytes = len(json.dumps(more))
    except (TypeError, ValueError) as error:
        raise ResultError(f"its further values must be numbers or texts: {error}") from error
    if num_bytes > MOST_VALUES_BYTES:
        largest = max(more, key=lambda key: len(json.dumps(more[key])))
        raise ResultError(
            f"its further values take {num_bytes / 2**20:.1f} MiB, most of them {_short(largest)!r}: at most "
            f"{MOST_VALUES_BYTES >> 20} MiB a sample are kept"
        )
    return float(value), more


def _plain(value: Any) -> Any:
    """Scalars of numpy and torch as Python numbers; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
