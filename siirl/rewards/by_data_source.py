"""Which reward functions score a row: chosen by its data source. No torch."""

import fnmatch
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl.config import Config
from siirl.config.reward_weights import WeightedPart, parse_parts
from siirl.config.values import closest
from siirl.errors import ConfigError
from siirl.rewards.fusion import MAX_CONCURRENT, check_fusion
from siirl.rewards.reward_registry import CUSTOM, REWARDS, Executor, register_built_in
from siirl.rewards.reward_service import REMOTE, remote_settings

register_built_in()

WEIGHTS = "custom_reward_function.weights"

DATA_SOURCES = {
    function: tuple(names.split())
    for function, names in {
        "gsm8k": "gsm8k* gsm_8k*",
        "math": "math math500 math_500 math_lighteval math12k math_train math_test hendrycks_math* "
        "competition_math prm800k* deepscaler* amc* hmmt* brumo* cmimc* numina* olympiad* minerva* "
        "openr1_math* open_r1_math* openmath* polaris* orz* open_reasoner_zero* big_math* omni_math* "
        "omnimath* simplelr* skywork_math* geometry3k* geo3k* geoqa* svamp* asdiv* mawps* multiarith* "
        "carp_en* tabmwp* gsm_hard* gsm1k* gsm_plus* gsm_symbolic* mgsm* metamath* math_level* "
        "math_lvl* math_8k math_hard simplerl* aimo_validation_* deepmath* gaokao* college_math* "
        "theoremqa* still3* still_3* beyondaime* beyond_aime* cmath* cnmo* imo imo_* apex* "
        "train_math_* light_r1* mathvista* mathverse* mathvision* clevr*",
        "math_dapo": "math_dapo* dapo_math* dapo17k* dapo_17k* aime aime_* aime[0-9]*",
        "exact_match": "arithmetic*",
        "code": "codecontests code_contests apps codeforces taco livecodebench* lcb* primeintellect* "
        "deepcoder*",
        "multiple_choice": "gpqa* mmlu* cmmlu* ceval* arc arc_[ce]* ai2_arc* supergpqa* medqa* medmcqa* "
        "commonsenseqa* commonsense_qa* openbookqa* sciq logiqa* aqua* race hellaswag* csqa* agieval* piqa*",
        "search_qa": "nq nq_open nq_search natural_questions* triviaqa* trivia_qa* popqa* musique* hotpotqa* "
        "hotpot_qa* 2wikimultihopqa* 2wiki* bamboogle* searchr1_* squad*",
        "countdown": "countdown*",
        "ifeval": "ifeval* if_eval*",
    }.items()
}
"""Reward function -> its data sources: names, or patterns with *, of what `known_as` makes of a name. A
registered name is its own data source."""

NAMES = sorted({pattern.rstrip("*_") for patterns in DATA_SOURCES.values() for pattern in patterns})

EXACT_SOURCES = {"reasoning_gym/*": "reasoning_gym"}
"""The same for names of our own, as they are written."""


def known_as(data_source: str) -> tuple[str, str]:
    """A data source as DATA_SOURCES has it, whole and without its owner: small letters, "_" for "-"."""
    name = re.sub(r"[-\s]+", "_", data_source.strip().lower())
    return name, name.rpartition("/")[2]


@functools.cache
def built_in(data_source: str) -> str | None:
    """The reward function of a data source; None if it is not known."""
    if data_source in REWARDS:
        return data_source
    for pattern, function in EXACT_SOURCES.items():
        if fnmatch.fnmatchcase(data_source, pattern):
            return function
    names = known_as(data_source)
    for function, patterns in DATA_SOURCES.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return function
    return None


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
        weights, own = cfg.custom_reward_function.weights, dict(functions_of(cfg))
        given = {part: weights.get(name, 1.0) for part, name in own.items()}
        self.own = _added(parse_parts(WEIGHTS, given, own, normalize and bool(weights), "function"))
        self.known = [*REWARDS, *(own if self.custom else ())]
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
            return self.own
        if self.manager == REMOTE:
            return Mix(((REMOTE, 1.0),))
        function = built_in(data_source)
        if function is None:
            raise ConfigError(
                f"data_source {data_source!r} has no reward function: it is none of those of docs/rewards.md."
                f"{closest(data_source, NAMES)} Map it by +reward_model.reward_kwargs.functions, e.g. "
                f"{{*:exact_match}} (known: {', '.join(REWARDS)}), or give your own by "
                "custom_reward_function.path."
            )
        return self._usable(Mix(((function, 1.0),)), data_source)

    def added(self, data_source: str) -> tuple[str, ...]:
        """The functions of a data source as metrics name them, if the scores of several are added up."""
        names = [name.removeprefix(f"{CUSTOM}.") for name, _ in self.parts(data_source)]
        return tuple(names) if len(names) > 1 else ()

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
        if is_custom(name):
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
        if self.manager == "batch" and len(self.own.parts) > 1:
            raise ConfigError(
                f"{key} gives all rows to one function, and {WEIGHTS} names {len(self.own.parts)}. Remove "
                "one of them."
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


def functions_of(cfg: Config) -> list[tuple[str, str]]:
    """(name in a mix, name in the file) of the user's own functions."""
    user = cfg.custom_reward_function
    return [(f"{CUSTOM}.{name}", name) for name in user.weights] or [(CUSTOM, user.name)]


def is_custom(name: str) -> bool:
    """Whether a function of a mix is the user's own."""
    return name.partition(".")[0] == CUSTOM


def _mix(source: str, value: Any, known: Collection[str], normalize: bool) -> Mix:
    """The parts that a value of reward_kwargs.functions names."""
    where = f"reward_model.reward_kwargs.functions[{source!r}]"
    return _added(parse_parts(where, value, known, normalize, "reward function"))


def _added(parts: Sequence[WeightedPart]) -> Mix:
    return Mix(tuple((part.name, float(part.scale)) for part in parts), float(sum(p.offset for p in parts)))


def _options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in REWARDS[name].options()}
