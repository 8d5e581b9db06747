"""Errors that a user's reward function catches, and returns a number all the same.

A text that cannot be read as an answer is no such error (ValueError): a name that is not defined, a service
that is not there, or a key that no row has, is.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from siirl.config import Config
from siirl.rewards.by_data_source import functions_of
from siirl.rewards.reward_registry import ScoreFn
from siirl.rewards.sample import Sample, score_sample
from siirl.rewards.user_function import load_user_function

ALWAYS = (NameError, ImportError, OSError)
"""Of the code or the machine, whatever the response is."""
IF_ALL = (AttributeError, TypeError, LookupError)
"""What parsers catch of responses that they cannot read; an error where no response can be."""


def user_functions(cfg: Config) -> dict[str, ScoreFn]:
    """Part -> the user's own reward function with its arguments; none where it takes many samples at once."""
    user = cfg.custom_reward_function
    if user.path is None or cfg.reward_model.reward_manager == "batch":
        return {}
    kwargs = dict(user.reward_kwargs)
    return {
        part: functools.partial(load_user_function(user.path, name, kwargs), **kwargs)
        for part, name in functions_of(cfg)
    }


def swallowed(functions: dict[str, ScoreFn], samples: Sequence[Sample]) -> str:
    """What the functions catch of these samples that they should not, in words; empty: nothing.

    Calls them, in this process, on the samples that are theirs alone.
    """
    own = [one for one in samples if all(part in functions for part, _ in one.parts)]
    seen: list[set[str]] = []
    for sample in own:
        seen.append(_caught(lambda sample=sample: score_sample(functions, sample)))
    for text in sorted(set().union(*seen)) if seen else ():
        count = sum(text in one for one in seen)
        if text.startswith("!") or count == len(own):
            return f"{count} of {len(own)} responses ({text.lstrip('!')}), and gives a number"
    return ""


def _caught(call: Callable[[], Any]) -> set[str]:
    """The errors raised within a call that returns; those of ALWAYS begin with "!"."""
    found: dict[int, str] = {}

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and isinstance(argument[1], ALWAYS + IF_ALL):
            name = frame.f_code.co_filename
            if "site-packages" not in name and not name.startswith((sys.base_prefix, "<frozen")):
                mark = "!" if isinstance(argument[1], ALWAYS) else ""
                found.setdefault(id(argument[1]), f"{mark}{argument[0].__name__}: {argument[1]}")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    except Exception:  # noqa: BLE001 - the edge to user code: what it raises is told elsewhere
        return set()
    finally:
        sys.settrace(before)
    return set(found.values())
