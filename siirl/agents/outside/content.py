"""What programs send, as values: bounded where it is parsed, and a BadRequest whatever reading it raises.

Nothing that a request holds may cost more than its own episode. All that comes from outside goes through
`parsed`; whatever reads it further, and templates that show it, are called by `understood`.
"""

import json
import logging
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from siirl.agents.contexts import ContextFull
from siirl.agents.episode import MOST_REWARD

MOST_DEPTH = 64
"""Lists and objects inside each other. Python's own readers and writers give up at about 1000."""
MOST_VALUES = 200_000
"""Of a request: texts, names, numbers, and what holds them."""
MOST_BITS = 1024
"""Of a whole number: a larger one is no float."""
GIVEN = ParamSpec("GIVEN")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class BadRequest(Exception):
    """What is wrong with a request, in words for whoever wrote the program."""

    def __init__(self, text: str, code: str = "invalid_value", status: int = 400):
        super().__init__(text)
        self.code, self.status = code, status


def parsed(text: bytes | str, what: str) -> Any:
    """The value that JSON writes. BadRequest, which begins with `what`, for none or one out of bounds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest(f"{what} is no JSON") from None
    check_bounds(value, what)
    return value


def check_bounds(value: Any, what: str) -> None:
    """BadRequest, which begins with `what`, unless JSON can write the value, and it is of bounded size."""
    level, num_values = [value], 1
    for _ in range(MOST_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one
                inner += one.values()
                if not all(isinstance(name, str) for name in one):
                    raise BadRequest(f"{what} has a name that is no text")
            elif isinstance(one, list):
                inner += one
            elif wrong := _wrong(one):
                raise BadRequest(f"{what} {wrong}")
            if num_values + len(inner) > MOST_VALUES:
                raise BadRequest(f"{what} has more than {MOST_VALUES} values")
        if not inner:
            return
        level, num_values = inner, num_values + len(inner)
    raise BadRequest(f"{what} has more than {MOST_DEPTH} lists and objects inside each other")


def _wrong(value: Any) -> str:
    """Why a value is none that JSON writes, to continue its name; empty if it is one."""
    if isinstance(value, str):
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError as error:
            return f"has half a surrogate pair ({value[error.start]!a}), which is no text"
    elif isinstance(value, float):
        return "" if math.isfinite(value) else f"has {value}, which is no number of JSON"
    elif isinstance(value, int):
        return "" if value.bit_length() <= MOST_BITS else f"has a whole number of {value.bit_length()} bits"
    elif value is not None:
        return f"has a value of type {type(value).__name__}"
    return ""


def understood(
    refusal: str, read: Callable[GIVEN, Result], *given: GIVEN.args, **more: GIVEN.kwargs
) -> Result:
    """What `read` makes of a request's content. BadRequest, with `refusal`, for whatever else it raises than
    that what is read is too long."""
    try:
        return read(*given, **more)
    except (BadRequest, ContextFull):
        raise
    except Exception as error:  # the edge to what others wrote
        log.debug("%s", refusal, exc_info=True)
        raise BadRequest(f"{refusal}: {type(error).__name__}: {error}"[:500]) from error


def is_reward(value: Any) -> bool:
    """Whether a value is a number that can be a reward."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_REWARD
