"""What `siirl plan --search` has found, and how it is told. No torch."""

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

from siirl.compiler.choices import Changes, Machine
from siirl.compiler.choose import choose
from siirl.compiler.cost.device_kinds import DeviceKind
from siirl.compiler.cost.lengths import Lengths
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.memory.phases import PhasePeak, memory_lines, phase_peaks
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config
from siirl.config.resolve import get
from siirl.dag.spec import DagSpec
from siirl.errors import ConfigError, UserError
from siirl.launch.survey import Survey
from siirl.spelling import GIB, gib_texts

ROOM = 0.9
"""Of a device: what is estimated to take more is left out, as estimates are up to 15% off."""
_REASONS, _PARTS = 3, 3
"""That are shown: of what was refused, and of a step."""


@dataclass(frozen=True)
class Candidate:
    """A layout that compiles and fits."""

    changes: Changes
    """What is other than in the run's own configuration."""
    time: StepTime
    peak: PhasePeak
    """The fullest phase."""


@dataclass
class Search:
    """What is searched, and what became of the layouts."""

    cfg: Config
    dag: DagSpec
    base: Survey
    kind: DeviceKind
    gib: float
    """Memory of a device."""
    machine: Machine
    lengths: Lengths | None
    own_problem: UserError | None
    """Why the run is refused as it is; the base has other sizes then."""
    fitting: list[Candidate] = field(default_factory=list)
    weighed: int = 0
    """Sizes that divide."""
    tried: int = 0
    """Layouts that were compiled."""
    too_large: int = 0
    """Of the sizes."""
    without_room: int = 0
    """Of the layouts."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """What the checks said, without its numbers -> what they said of each layout."""
    smallest: tuple[int, Changes, str] | None = None
    """Of those that are too large, the one that takes least: bytes, changes, and in which phase."""
    unstarted: str = ""
    """Why no rollout engine starts; empty: one does."""

    @property
    def plan(self) -> Plan:
        assert self.base.plan is not None, "a run without a plan is refused before"
        return self.base.plan

    @property
    def trained(self) -> list[ModelPlan]:
        """The models on training engines."""
        return [model for model in self.plan.models.values() if not model.generates]

    def weigh(self, plan: Plan, configs: dict[str, Config]) -> tuple[StepTime, PhasePeak]:
        """The predicted step of a plan, and its fullest phase. ConfigError where there is no prediction."""
        lines, time = memory_lines(plan, configs), step_time(plan, configs, self.kind, self.lengths)
        for found in (lines, time):
            if isinstance(found, str):
                raise ConfigError(f"nothing can be predicted: {found}.")
        assert not isinstance(lines, str) and not isinstance(time, str)
        peaks = phase_peaks(plan, lines, int(self.gib * GIB))
        return time, max(peaks, key=lambda peak: peak.device)

    def weigh_as_run(self, plan: Plan, configs: dict[str, Config]) -> tuple[StepTime, PhasePeak]:
        """`weigh` of a plan in which what nobody set is chosen, as in a run."""
        return self.weigh(*choose(plan, configs, self.machine))

    def fits(self, peak: PhasePeak) -> bool:
        return peak.device <= ROOM * self.gib * GIB

    def refuse(self, error: UserError) -> None:
        """Count a layout that the checks refuse."""
        said = str(error).partition("\n")[0]
        self.refused.setdefault(re.sub(r"\d+", "N", said), []).append(said)


def differing(cfg: Config, changes: Changes) -> Changes:
    """Those that are other than what the run has already."""
    return {key: value for key, value in changes.items() if _value(cfg, key) != value}


def _value(cfg: Config, key: str) -> Any:
    """Of a key, or of a name in a map."""
    group, _, name = key.rpartition(".")
    found = get(cfg, group)
    return found.get(name) if isinstance(found, dict) else getattr(found, name)


def pasted(changes: Changes) -> list[str]:
    """The changes as overrides."""
    words = []
    for key, value in changes.items():
        if key == "dag.node_config":
            words += [f"{key}.{node}.placement={one['placement']}" for node, one in value.items()]
        else:
            words.append(f"{key}={_written(value)}")
    return words


def _written(value: Any) -> str:
    """A value as a command line has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines_to_paste(words: list[str]) -> str:
    """Overrides on lines that a shell reads as one."""
    text = textwrap.fill(" ".join(words), 110, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(text.replace("\n", " \\\n"), "   ")


def text_of(found: Search, best: list[Candidate], said: list[str]) -> str:
    """What the command prints. best: the layouts that are shown; said: what else was assumed."""
    kind, world = found.kind.name, found.plan.world_size
    time, peak = found.weigh_as_run(found.plan, found.base.node_cfgs)
    as_it_is = f"refused: {found.own_problem}" if found.own_problem else _numbers(time, peak, found.gib)
    refused = sum(map(len, found.refused.values()))
    fits = "" if found.fits(peak) or found.own_problem else f": more than {100 * ROOM:.0f}% of a device"
    lines = [
        f"layouts for {world} x {kind} of {found.gib:g} GiB: {found.weighed} sizes estimated, "
        f"{found.too_large} of them too large; {found.tried} layouts compiled, {refused} of them refused, "
        f"{found.without_room} too large, {len(found.fitting)} fit",
        f"as it is: {as_it_is}{fits}",
    ]
    for position, candidate in enumerate(best, 1):
        lines.append(f"{position}. {_numbers(candidate.time, candidate.peak, found.gib)}")
        lines.append(_lines_to_paste(pasted(candidate.changes)) or "   as it is")
    if not best:
        lines.append(_why_none(found))
    elif not found.own_problem and time.step_s > best[0].time.step_s:
        longer = [*time.longer(best[0].time).items()][:_PARTS]
        differs = ", ".join(f"{what} {seconds:+.1f}" for what, seconds in longer)
        lines.append(f"as it is, against 1.: {time.step_s - best[0].time.step_s:+.1f} s ({differs})")
    for texts in sorted(found.refused.values(), key=len, reverse=True)[:_REASONS]:
        lines.append(f"refused, {len(texts)}: {texts[0]}")
    notes = best[0].time if best else time
    if not found.cfg.actor_rollout_ref.rollout.max_lag:
        lines.append("disaggregated rollouts are tried with rollout.max_lag: without, ranks take turns")
    on_vllm = any(model.is_rollout and model.backend == "vllm" for model in found.plan.models.values())
    if on_vllm and found.cfg.trainer.nnodes > 1:
        lines.append(f"an engine has at most {found.cfg.trainer.n_gpus_per_node} GPUs: those of one machine")
    lines += [f"not counted: {line}" for line in notes.not_counted]
    lines += [f"assumed: {line}" for line in [*said, *notes.assumed]]
    return "\n".join(lines)


def _why_none(found: Search) -> str:
    if found.unstarted:
        return f"none fits: {found.unstarted}. Larger devices, or a smaller model"
    if found.smallest is None:
        return "none fits: siirl plan says what takes the memory, and of which keys it would be less"
    num_bytes, sizes, where = found.smallest
    taken, there = gib_texts(num_bytes / GIB, found.gib)
    named = " ".join(pasted(differing(found.cfg, sizes))) or "the sizes as they are"
    return (
        f"none fits: least is taken by {named}: {taken} of {there} GiB {where}. "
        "More devices, offloaded parts (param_offload, optimizer_offload), or LoRA"
    )


def _numbers(time: StepTime, peak: PhasePeak, gib: float) -> str:
    """The step, its longest parts, and the fullest phase."""
    longest = sorted(time.phases, key=lambda phase: -phase.seconds)[:_PARTS]
    parts = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in longest)
    return f"{time.step_s:.1f} s a step ({parts}), {gib_texts(peak.device / GIB, gib)[0]} GiB in {peak.node}"
