"""Which reward functions score a row: chosen by its data source. No torch."""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from siirl.config import Config
from siirl.config.reward_weights import parse_parts
from siirl.config.values import closest
from siirl.errors import ConfigError, NotSupportedError
from siirl.rewards import code, generated_answer, math_answer, reward_service, rules
from siirl.rewards.fusion import MAX_CONCURRENT, check_fusion
from siirl.rewards.reward_registry import REWARDS, Executor
from siirl.rewards.reward_service import REMOTE, remote_settings

BUILT_IN_MODULES = (
    rules,
    math_answer,
    code,
    generated_answer,
    reward_service,
)  # importing them registers their functions

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
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "livecodebench*": "code",
    "reasoning_gym/*": "reasoning_gym",
}
"""Data source (a name, or a pattern with *) -> reward function. A registered name is its own data source."""

LATER_SOURCES = ("hiyouga/geometry3k", "searchR1_*")

Parts = tuple[tuple[str, float], ...]
"""(name of a reward function, weight), ...: the score of a row is the weighted sum, plus an offset."""


@dataclass(frozen=True)
class Mix:
    """What scores the rows of a data source."""

    parts: Parts
    offset: float = 0.0


class RewardChooser:
    """Finds the reward functions of a data source, as reward_model.reward_kwargs and DATA_SOURCES say.

    `reward_kwargs.functions` maps a data source or pattern to a name, to {name: weight, ...} or to
    {name: {weight, low, high}, ...}, and comes first. What it does not name is scored by the user's own
    function (custom_reward_function.path), or the service of reward_manager=remote, if there is one, else as
    DATA_SOURCES says. The other keys of reward_kwargs are keyword arguments of the functions that take them.
    """

    def __init__(self, cfg: Config):
        self.custom = cfg.custom_reward_function.path is not None
        self.manager = cfg.reward_model.reward_manager
        options = dict(cfg.reward_model.reward_kwargs)
        functions, normalize = options.pop("functions", {}), options.pop("normalize_weights", False)
        if not isinstance(functions, Mapping):
            raise ConfigError(
                f"reward_model.reward_kwargs.functions={functions!r}: it must be a map from data sources to "
                "function names, e.g. {my/data:math,*:exact_match} (no quotes inside)."
            )
        self.known = [*REWARDS, *([CUSTOM] if self.custom else [])]
        self.functions = {
            source: _mix(source, value, self.known, normalize) for source, value in functions.items()
        }
        self.kwargs = {name: _options_of(name, options) for name in REWARDS}
        known = set().union(*(reward.options() for reward in REWARDS.values()))
        for key in options:
            if key not in known:
                raise ConfigError(
                    f"reward_model.reward_kwargs.{key}: no built-in reward function takes it. "
                    f"Known: functions, normalize_weights, {', '.join(sorted(known))}."
                    f"{closest(key, known)}"
                )
        self._add_services(cfg)
        self._check_manager()

    def mix(self, data_source: str) -> Mix:
        """What scores rows of `data_source`. ConfigError if nothing does."""
        for pattern, mix in self.functions.items():
            if fnmatch.fnmatchcase(data_source, pattern):
                return self._usable(mix, data_source)
        if self.custom:
            return Mix(((CUSTOM, 1.0),))
        if self.manager == REMOTE:
            return Mix(((REMOTE, 1.0),))
        if data_source in REWARDS:
            return self._usable(Mix(((data_source, 1.0),)), data_source)
        for pattern, name in DATA_SOURCES.items():
            if fnmatch.fnmatchcase(data_source, pattern):
                return Mix(((name, 1.0),))
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

    def parts(self, data_source: str) -> Parts:
        """The functions that score rows of `data_source`, with weights. ConfigError if there are none."""
        return self.mix(data_source).parts

    def check_truth(self, data_source: str, ground_truth: Any) -> None:
        """DataError unless the functions of a data source can score by a ground truth; None: it is absent."""
        for name, _ in self.parts(data_source):
            reads = REWARDS[name].reads_truth if name in REWARDS else None
            if reads is not None:
                reads(ground_truth)

    def executor(self, data_source: str) -> Executor:
        """Where rows of `data_source` are scored: the place of their most demanding function."""
        executors = {self._executor(name) for name, _ in self.parts(data_source)}
        return next(place for place in ("process", "thread", "inline") if place in executors)

    def max_concurrent(self) -> int:
        """Requests at once that the services allow, the largest of them; 1 if there is none."""
        service, fusion = self.kwargs[REMOTE].get("service"), self.kwargs["code"].get("sandbox_fusion")
        return max(
            service["max_concurrent"] if service else 1,
            fusion.get("max_concurrent", MAX_CONCURRENT) if fusion else 1,
        )

    def check(self, data_sources: Collection[str]) -> None:
        """ConfigError if a data source has no reward function: worth a call before training starts."""
        for source in sorted(data_sources):
            self.parts(source)

    def _executor(self, name: str) -> Executor:
        if name == CUSTOM:
            return "process"
        return "thread" if "sandbox_fusion" in self.kwargs[name] else REWARDS[name].executor

    def _add_services(self, cfg: Config) -> None:
        """Give the functions that ask a service its address."""
        fusion, service = cfg.reward_model.sandbox_fusion, remote_settings(cfg)
        if fusion and fusion.get("url") is not None:
            check_fusion(fusion)
            self.kwargs["code"]["sandbox_fusion"] = dict(fusion)
        if service is not None:
            self.kwargs[REMOTE]["service"] = service

    def _check_manager(self) -> None:
        key = f"reward_model.reward_manager={self.manager}"
        if self.manager == "batch" and not self.custom:
            raise ConfigError(
                f"{key}: there is no function to call with a batch. Set custom_reward_function.path, or "
                "reward_manager=naive for the built-in functions."
            )
        if self.manager == "batch" and self.functions:
            raise ConfigError(
                f"{key} gives all rows to custom_reward_function, and reward_kwargs.functions names others. "
                "Remove one of them."
            )
        if self.manager == REMOTE and self.custom:
            raise ConfigError(
                f"{key} with custom_reward_function.path: both would score every row. Remove one of them, or "
                "share the data sources out by reward_model.reward_kwargs.functions."
            )
        if self.manager == REMOTE and "service" not in self.kwargs[REMOTE]:
            raise ConfigError(f"{key}: there is no service. Set reward_model.remote.url.")

    def _usable(self, mix: Mix, data_source: str) -> Mix:
        if any(name == REMOTE for name, _ in mix.parts) and "service" not in self.kwargs[REMOTE]:
            raise ConfigError(
                f"data_source {data_source!r} is scored by {REMOTE}, and there is no service. Set "
                "reward_model.remote.url."
            )
        return mix


def _mix(source: str, value: Any, known: Collection[str], normalize: bool) -> Mix:
    """The parts that a value of reward_kwargs.functions names."""
    where = f"reward_model.reward_kwargs.functions[{source!r}]"
    parts = parse_parts(where, value, known, normalize, "reward function")
    return Mix(tuple((part.name, float(part.scale)) for part in parts), float(sum(p.offset for p in parts)))


def _options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in REWARDS[name].options()}
