"""Which reward functions score a row: chosen by its data source. No torch."""

import difflib
import fnmatch
import math
from collections.abc import Collection, Mapping
from typing import Any

from siirl.config import Config
from siirl.errors import ConfigError, NotSupportedError
from siirl.rewards import math_answer, rules
from siirl.rewards.registry import REWARDS

BUILT_IN_MODULES = (rules, math_answer)  # importing them registers their functions

CUSTOM = "custom"

DATA_SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "HuggingFaceH4/aime_2024": "math",
    "agentica-org/DeepScaleR-Preview-Dataset": "math",
    "deepscaler*": "math",
    "aime*": "math",
    "amc*": "math",
    "math_dapo*": "math",
    "numina_*": "math",
    "arithmetic*": "exact_match",
}
"""Data source (a name, or a pattern with *) -> reward function. A registered name is its own data source."""

LATER_SOURCES = ("codecontests", "apps", "codeforces", "taco", "hiyouga/geometry3k", "searchR1_*")

Parts = tuple[tuple[str, float], ...]
"""(name of a reward function, weight), ...: the score of a row is the weighted sum."""


class RewardChooser:
    """Finds the reward functions of a data source, as reward_model.reward_kwargs and DATA_SOURCES say.

    The user's own function (custom_reward_function.path) scores every row. Else `reward_kwargs.functions`
    maps a data source or pattern to a name, or to {name: weight, ...}, and comes before DATA_SOURCES; the
    other keys of reward_kwargs are keyword arguments of the functions that take them.
    """

    def __init__(self, cfg: Config):
        self.custom = cfg.custom_reward_function.path is not None
        options = dict(cfg.reward_model.reward_kwargs)
        functions = options.pop("functions", {})
        if not isinstance(functions, Mapping):
            raise ConfigError(
                f"reward_model.reward_kwargs.functions={functions!r}: it must be a map from data sources to "
                "function names, e.g. {my/data:math,*:exact_match} (no quotes inside)."
            )
        self.functions = {source: _parts(source, value) for source, value in functions.items()}
        self.kwargs = {name: _options_of(name, options) for name in REWARDS}
        known = set().union(*(reward.options() for reward in REWARDS.values()))
        for key in options:
            if key not in known:
                raise ConfigError(
                    f"reward_model.reward_kwargs.{key}: no built-in reward function takes it. "
                    f"Known: functions, {', '.join(sorted(known))}.{_did_you_mean(key, known)}"
                )

    def parts(self, data_source: str) -> Parts:
        """The functions that score rows of `data_source`, with weights. ConfigError if there are none."""
        if self.custom:
            return ((CUSTOM, 1.0),)
        for pattern, parts in self.functions.items():
            if fnmatch.fnmatchcase(data_source, pattern):
                return parts
        if data_source in REWARDS:
            return ((data_source, 1.0),)
        for pattern, name in DATA_SOURCES.items():
            if fnmatch.fnmatchcase(data_source, pattern):
                return ((name, 1.0),)
        if any(fnmatch.fnmatchcase(data_source, pattern) for pattern in LATER_SOURCES):
            raise NotSupportedError(
                f"not supported yet: a built-in reward for data_source {data_source!r}. Give your own by "
                "custom_reward_function.path."
            )
        raise ConfigError(
            f"data_source {data_source!r} has no reward function: it is none of {', '.join(DATA_SOURCES)}. "
            "Map it by +reward_model.reward_kwargs.functions, e.g. {*:exact_match} "
            f"(known: {', '.join(REWARDS)}), or give your own by custom_reward_function.path."
        )

    def check(self, data_sources: Collection[str]) -> None:
        """ConfigError if a data source has no reward function: worth a call before training starts."""
        for source in sorted(data_sources):
            self.parts(source)


def _parts(source: str, value: str | Mapping[str, float]) -> Parts:
    weights = dict(value) if isinstance(value, Mapping) else {value: 1.0}
    where = f"reward_model.reward_kwargs.functions[{source!r}]"
    for name, weight in weights.items():
        if name not in REWARDS:
            raise ConfigError(
                f"{where}: unknown reward function {name!r}. Known: {', '.join(REWARDS)}."
                f"{_did_you_mean(str(name), REWARDS)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{where}: the weight of {name} is {weight!r}: it must be a number.")
    if not weights:
        raise ConfigError(f"{where} is empty: name at least one of {', '.join(REWARDS)}.")
    return tuple((name, float(weight)) for name, weight in weights.items())


def _options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in REWARDS[name].options()}


def _did_you_mean(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
