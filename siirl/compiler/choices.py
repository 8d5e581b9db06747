"""A plan in whose keys of speed and memory values are being chosen, and the machine they are for. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from siirl.compiler.memory.phases import memory_lines, phase_peaks
from siirl.compiler.plan import Choice, ModelPlan, Plan
from siirl.config import Config, with_overrides
from siirl.config.resolve import is_set
from siirl.parallel.placement import Ranks
from siirl.spelling import GIB, gib_texts

FITS = 0.9
"""Of a device: no more is planned, as steps took up to 4% over the estimate, and allocators need room."""

AS_BEFORE = "as at the start of the run: "
"""Before the reason of a choice that was kept."""

Changes = dict[str, Any]
"""Key -> value."""


@dataclass(frozen=True)
class Machine:
    """What a plan knows of where it will run."""

    device: Literal["cpu", "cuda"] | None = None
    """None: the devices are elsewhere, and nothing is known of them."""
    gib: float | None = None
    """Memory of a device; on CPUs, what one process may take of the host's. None: not known."""
    capability: tuple[int, int] = (0, 0)
    """Of the CUDA devices."""
    packages: frozenset[str] = frozenset()
    """Those that choices depend on, as far as they are installed."""
    triton: str = ""
    """Its version; "" if it is not installed."""

    def __str__(self) -> str:
        if self.device is None:
            return "devices of unknown size"
        if self.device == "cpu":
            return "CPUs"
        size = "of unknown size" if self.gib is None else f"of {self.gib:.0f} GiB"
        beside = f", with {' and '.join(sorted(self.packages))}" if self.packages else ""
        return f"GPUs {size}{beside}"


@dataclass(frozen=True)
class Kept:
    """What was chosen when a run began, as its checkpoints have it."""

    chosen_for: str | None
    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, plan: Plan) -> "Kept":
        """What a plan has chosen, with the same reasons however often the run has gone on."""
        first = (replace(one, reason=one.reason.removeprefix(AS_BEFORE)) for one in plan.choices)
        return cls(plan.chosen_for, tuple(first))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"chosen_for": self.chosen_for, "choices": [vars(choice) for choice in self.choices]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Kept":
        """What `to_dict` gave."""
        return cls(data["chosen_for"], tuple(Choice(**choice) for choice in data["choices"]))


class Draft:
    """A plan whose choices are being made, one after the other: each is weighed beside those before it."""

    def __init__(self, plan: Plan, configs: Mapping[str, Config], machine: Machine):
        """configs: the configuration of each node."""
        self.plan, self.machine, self.configs = plan, machine, dict(configs)
        self._given = dict(configs)
        self._choices: list[Choice] = []
        self._peaks = self._weighed(self.configs)

    @property
    def models(self) -> list[ModelPlan]:
        return list(self.plan.models.values())

    def cfg(self, model: ModelPlan) -> Config:
        """The configuration that a model is built from, with what was chosen so far."""
        return self.configs[model.node]

    def is_free(self, model: ModelPlan, *keys: str) -> bool:
        """Whether nobody set any of the keys for a model."""
        nodes = {model.node, *model.nodes}
        return not any(is_set(self._given[node], key) for node in nodes for key in keys)

    @property
    def chosen_for(self) -> str:
        """The ranks and devices that the choices are made for."""
        return f"{self.plan.world_size} x {self.machine}"

    @property
    def is_known(self) -> bool:
        """Whether there is an estimate of the memory that choices take."""
        return self._peaks is not None

    @property
    def unknown(self) -> str:
        """Why there is no estimate of the memory that choices take."""
        if self.machine.gib is None:
            return "larger ones need to know the size of a device (trainer.device_memory_gib)"
        lines = memory_lines(self.plan, self.configs)
        return f"no estimate of larger ones: {lines}" if isinstance(lines, str) else "larger ones do not fit"

    def weigh(self, model: ModelPlan, changes: Changes) -> str | None:
        """What a model's ranks take with these changes, in words: their fullest phase. None where it is more
        than a device has, or not known.

        A phase that was too full before may stay so. It is left out if it is of other nodes and some fit.
        """
        return self.weigh_all([(model, changes)])

    def weigh_all(self, drafts: Sequence[tuple[ModelPlan, Changes]]) -> str | None:
        """`weigh` of changes of several models."""
        nodes = {node for model, _ in drafts for node in model.nodes}
        sampled = {node for model, _ in drafts if model.generates for node in model.nodes}
        configs, here = self.configs, set[int]()
        for model, changes in drafts:
            configs, here = self._with(model, changes, configs), here | {*model.ranks}
        peaks = self._weighed(configs)
        gib = self.machine.gib
        if peaks is None or gib is None:
            return None
        most, before = FITS * gib * GIB, self._peaks or {}
        if any(
            size > most and (phase[0] in sampled or size > before.get(phase, 0))
            for phase, size in peaks.items()
        ):
            return None
        found = [(size / GIB, node) for (node, ranks), size in peaks.items() if here & {*ranks}]
        fitting = [one for one in found if one[0] <= gib]
        own = [one for one in found if one[1] in nodes and one not in fitting]
        needs, node = max(own or fitting or found, default=(0.0, ""))
        if needs > gib:
            return "{2} takes {0} of {1} GiB even so".format(*gib_texts(needs, gib), node)
        return "{} of {} GiB".format(*gib_texts(needs, gib)) if needs >= 1 else "little memory"

    def take(self, model: ModelPlan, changes: Changes, reason: str = "") -> None:
        """Choose values for a model; without a reason as a first draft, of which nothing is said."""
        self.configs = self._with(model, changes)
        self._peaks = self._weighed(self.configs)
        if reason:
            self.say(model, changes, reason)

    def say(self, model: ModelPlan, changes: Changes, reason: str) -> None:
        """Note what was chosen for a model, and why; in the place of an earlier choice of the same keys."""
        same = model.name, changes.keys()
        self._choices = [one for one in self._choices if (one.model, one.keys.keys()) != same]
        self._choices.append(Choice(model.name, changes, reason))

    def finished(self) -> tuple[Plan, dict[str, Config]]:
        """The plan, whose nodes have the choices among their overrides, and the configurations."""
        nodes = dict(self.plan.nodes)
        for choice in self._choices:
            model = self.plan.models[choice.model]
            for name in {model.node, *model.nodes} & nodes.keys():
                nodes[name] = replace(nodes[name], overrides=nodes[name].overrides | choice.keys)
        if not self._choices:
            return self.plan, self.configs
        choices = tuple(self._choices)
        return replace(self.plan, nodes=nodes, choices=choices, chosen_for=self.chosen_for), self.configs

    def _with(
        self, model: ModelPlan, changes: Changes, configs: dict[str, Config] | None = None
    ) -> dict[str, Config]:
        known = self.configs if configs is None else configs
        nodes = {model.node, *model.nodes} & known.keys()
        return known | {node: with_overrides(known[node], changes) for node in nodes}

    def _weighed(self, configs: Mapping[str, Config]) -> dict[tuple[str, Ranks], int] | None:
        """(node, ranks) -> bytes of a device in that phase; None where there is no estimate."""
        if self.machine.gib is None:
            return None
        if self.machine.device == "cpu":
            configs = {
                name: replace(cfg, trainer=replace(cfg.trainer, device="cpu"))
                for name, cfg in configs.items()
            }
        lines = memory_lines(self.plan, configs)
        if isinstance(lines, str):
            return None
        peaks = phase_peaks(self.plan, lines, int(self.machine.gib * GIB))
        return {(peak.node, peak.ranks): peak.device for peak in peaks}


def choice_lines(plan: Plan) -> list[str]:
    """A line for each choice: the model, its keys with their values, and why."""
    return [
        f"{choice.model}: {' '.join(f'{_short(key)}={_text(value)}' for key, value in choice.keys.items())}: "
        f"{choice.reason}"
        for choice in plan.choices
    ]


def _short(key: str) -> str:
    return key.removeprefix("actor_rollout_ref.")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
