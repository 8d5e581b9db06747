"""`siirl plan --search`: which sizes, micro-batches and placements make the fastest step of a run that fits.

All sizes that divide are weighed on the run's own plan, with their parallel sizes put in. Those that are best
by this are compiled and checked as a run is, their memory estimated, their step predicted. Settings that
change what is learned are left as they are. No torch.
"""

import contextlib
import dataclasses
import heapq
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from siirl.compiler.backends import backend_of
from siirl.compiler.choices import Changes, Machine
from siirl.compiler.choose import choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import DeviceKind, chosen_device
from siirl.compiler.cost.lengths import Lengths, lengths_of
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.memory.engine_starts import MOST_SHARE, engine_starts
from siirl.compiler.memory.estimate import longest_row
from siirl.compiler.memory.phases import PhasePeak, memory_lines, phase_peaks
from siirl.compiler.parallel_sizes import ENGINE_TP, FINE_SIZES, MEGATRON, engine_sizes, trainer_sizes
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config, with_overrides
from siirl.config.checks import find_contradictions
from siirl.config.keys import AUTO
from siirl.config.load import read_config
from siirl.config.resolve import get, is_set
from siirl.config.roles import ROLES
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagSpec
from siirl.errors import ConfigError, UserError
from siirl.findings import Findings
from siirl.launch.devices import device_memory_gib, device_name, named_machine
from siirl.launch.survey import Survey, survey, survey_inputs, trains_group
from siirl.parallel.placement import format_ranks
from siirl.spelling import GIB, gib_texts

SHOWN = 5
COMPILED = 40
"""So many layouts, the best by their sizes, are compiled and checked; more until SHOWN of them fit."""
MOST_COMPILED = 4 * COMPILED
ROOM = 0.9
"""Of a device: what is estimated to take more is left out, as estimates are up to 15% off."""
ENGINE_SHARE = 0.85
"""Of a device, for an engine whose share nobody set, until the plan chooses it."""
_MOST_DOUBLINGS = 7
"""Micro-batches of up to so many doublings of one row are weighed."""
_SHARES = (0.25, 0.5, 0.75)
"""Of the ranks, for disaggregated rollouts."""
_REASONS, _PARTS = 3, 3
"""That are shown: of what was refused, and of a step."""
_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


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


def search(overrides: Sequence[str], config_name: str, device: str | None, tokens: str | None) -> str:
    """The fastest layouts of a run, as a text with overrides to paste. UserError: what is wrong with the run.

    device: a kind, as in "h200"; else that of the GPUs here. tokens: as of PlannedRun.explain.
    """
    base, refused = _first_accepted(overrides, config_name)
    cfg = base.cfg
    kind, said = chosen_device(device, device_name())
    here = None if device else device_memory_gib()
    gib = cfg.trainer.device_memory_gib or here or kind.gib
    machine = named_machine(cfg, dataclasses.replace(kind, gib=gib))
    found = Search(cfg, load_dag(cfg), base, kind, gib, machine, lengths_of(tokens), refused)
    for away in (Changes(), _offloads(found)):
        layouts = [_in_turn(found, placement, away) for placement in _placements(found)]
        if not found.fitting:
            _compile_best(found, heapq.merge(*layouts, key=_seconds), away)
    ranked = sorted(found.fitting, key=lambda one: (one.time.step_s, len(one.changes), one.peak.device))
    best: list[Candidate] = []
    for candidate in ranked:
        if len(best) < SHOWN and _is_accepted(found, candidate, overrides, config_name):
            best.append(candidate)
    return _text(found, best, said)


def _first_accepted(overrides: Sequence[str], config_name: str) -> tuple[Survey, UserError | None]:
    """The run as it is; where that is refused, with larger engines and models that are cut more, and why.
    UserError where no sizes help."""
    try:
        return _surveyed(overrides, config_name), None
    except UserError as error:
        machine = read_config(overrides, config_name, Findings()).trainer.n_gpus_per_node
        actor = f"actor_rollout_ref.actor.megatron.{MEGATRON[0]}"
        for more in ([ENGINE_TP], [actor], [ENGINE_TP, actor]):
            with contextlib.suppress(UserError):
                return _surveyed([*overrides, *(f"{key}={machine}" for key in more)], config_name), error
        raise


def _surveyed(overrides: Sequence[str], config_name: str) -> Survey:
    """The run as `siirl plan` sees it. UserError: all that is wrong with it."""
    problems = Findings()
    cfg = read_config(overrides, config_name, problems)
    seen = survey_inputs(survey(cfg, problems), True, problems)
    problems.close()
    return seen


def _is_accepted(found: Search, candidate: Candidate, overrides: Sequence[str], config_name: str) -> bool:
    """Whether the printed command is accepted as it is."""
    try:
        _surveyed([*overrides, *_pasted(candidate.changes)], config_name)
    except UserError as error:
        found.refuse(error)
        found.fitting.remove(candidate)
        return False
    return True


def _placements(found: Search) -> Iterator[Changes]:
    """As it is; and, with asynchronous rollouts, disaggregated, unless the workflow places a node itself."""
    yield {}
    plan, world = found.plan, found.plan.world_size
    engines = {model.name for model in plan.models.values() if model.is_rollout}
    placed = any(node.placement is not None for node in found.dag.nodes)
    if placed or not engines or not found.cfg.actor_rollout_ref.rollout.max_lag:
        return
    for part in dict.fromkeys(round(share * world) for share in _SHARES):
        if not 0 < part < world:
            continue
        ranks = format_ranks(range(part)), format_ranks(range(part, world))
        nodes = {
            node: {"placement": ranks[model.name not in engines]}
            for model in plan.models.values()
            for node in model.nodes
        }
        yield {"dag.node_config": nodes}


def _engine_ranks(found: Search, placement: Changes) -> int:
    """Ranks that rollouts have for themselves."""
    if not placement:
        return 0
    engine = next(model for model in found.plan.models.values() if model.is_rollout)
    last = placement["dag.node_config"][engine.nodes[0]]["placement"].rpartition("-")[2]
    return int(last) + 1


def _offloads(found: Search) -> Changes:
    """What trainers can keep in host memory, where nobody says whether: it takes time, so it comes last."""
    keys = Changes()
    for model in found.trained:
        backend, group = backend_of(model), ROLES[model.role].group
        names = (*backend.offloads, *(backend.offloads_trained if model.trains else ()))
        keys |= {f"{group}.{name}": True for name in names if not is_set(found.cfg, f"{group}.{name}")}
    return keys


def _in_turn(found: Search, placement: Changes, away: Changes) -> Iterator[tuple[float, Changes]]:
    """(seconds, changes) of a placement's layouts, the fastest by their sizes alone first."""
    own, plan, configs = _engine_ranks(found, placement), found.plan, found.base.node_cfgs
    of_trainers = (away | sizes for sizes in trainer_sizes(plan, configs, plan.world_size - own))
    trainers = _weighed(found, own, of_trainers, engines=False)
    engines = _weighed(found, own, engine_sizes(plan, configs, own or plan.world_size), engines=True)
    if not engines:
        found.unstarted = _why_no_engine(found)
    if not trainers or not engines:
        return
    least = trainers[0][0]
    pairs = [(seconds + more - least, at, of) for seconds, at in trainers for more, of in engines]
    for seconds, sizes, engine in sorted(pairs, key=lambda pair: pair[0]):
        yield seconds, placement | sizes | engine


def _why_no_engine(found: Search) -> str:
    """What an engine of the most GPUs takes of each."""
    plan, configs = _resized(found, 0, {ENGINE_TP: found.cfg.trainer.n_gpus_per_node})
    one = max(engine_starts(plan, configs, found.gib), key=lambda one: one.least)
    return (
        f"an engine of the {one.model.dims.tp} GPUs of a machine takes {one.least / GIB:.1f} GiB of each for "
        f"weights and one row, and may have {MOST_SHARE:g} of its {found.gib:g}"
    )


def _seconds(layout: tuple[float, Changes]) -> float:
    return layout[0]


def _weighed(
    found: Search, own: int, options: Iterator[Changes], engines: bool
) -> list[tuple[float, Changes]]:
    """(seconds of a step, sizes) of those that fit by themselves, on the run's own plan, the fastest first;
    of those that differ in virtual stages and in how experts are cut, the fastest only.

    own: the ranks that rollouts have for themselves, the first ones; 0: all have all. engines: sizes are
    those of rollout engines, not of the models on training engines.
    """
    known = []
    for sizes in options:
        found.weighed += 1
        plan, configs = _resized(found, own, sizes)
        seconds, most = _by_sizes(found, plan, configs, engines)
        starts = all(one.can_start for one in engine_starts(plan, configs, found.gib))
        if starts if engines else most <= ROOM * found.gib * GIB:
            known.append((seconds, sizes))
            continue
        found.too_large += 1
        if not engines and (found.smallest is None or most < found.smallest[0]):
            found.smallest = most, sizes, "beside the engine"
    alike: dict[tuple[Any, ...], tuple[float, Changes]] = {}
    for seconds, sizes in sorted(known, key=_seconds):
        coarse = tuple(value for key, value in sizes.items() if not key.endswith(FINE_SIZES))
        alike.setdefault(coarse, (seconds, sizes))
    return [*alike.values()]


def _resized(found: Search, own: int, sizes: Changes) -> tuple[Plan, dict[str, Config]]:
    """The run's own plan with other parallel sizes, and on other ranks; nothing is checked."""
    world, models = found.plan.world_size, {}
    known: list[tuple[Config, Config]] = []  # most nodes have the same keys, and setting them takes long
    configs = dict(found.base.node_cfgs)
    for node in {model.node for model in found.plan.models.values()}:
        resized = next((new for old, new in known if old == configs[node]), None)
        if resized is None:
            resized = with_overrides(configs[node], sizes | {_SHARE: ENGINE_SHARE})
            known.append((configs[node], resized))
        configs[node] = resized
    for name, model in found.plan.models.items():
        placed = model.ranks
        if own:
            placed = tuple(range(own)) if model.is_rollout else tuple(range(own, world))
        cfg = ROLES[model.role].engine_cfg(configs[model.node])
        dims = backend_of(model).dims(cfg, model.role, len(placed))
        models[name] = dataclasses.replace(model, ranks=placed, dims=dims)
    return dataclasses.replace(found.plan, models=models), configs


def _by_sizes(found: Search, plan: Plan, configs: dict[str, Config], engines: bool) -> tuple[float, int]:
    """(seconds of a step, bytes of a device) of the rollout engines, or of the other models in their fullest
    phase: with the largest micro-batches that fit, and recomputed activations where they do not without.
    """
    sized = {model.name for model in plan.models.values() if model.is_rollout == engines}
    room = ROOM * found.gib * GIB
    for recomputes in (False, True) if not engines else (False,):
        drafts = _drafted(found, configs, 0, recomputes)
        most = _fullest(found, plan, drafts, sized)
        low, high = 0, _MOST_DOUBLINGS - 1 if most <= room and not engines else 0
        while low < high:
            middle = (low + high + 1) // 2
            larger = _drafted(found, configs, middle, recomputes)
            size = _fullest(found, plan, larger, sized)
            low, high = (middle, high) if size <= room else (low, middle - 1)
            drafts, most = (larger, size) if size <= room else (drafts, most)
        if most <= room:
            break
    time = step_time(plan, drafts, found.kind, found.lengths)
    assert isinstance(time, StepTime), "the run has been weighed"
    return time.step_s, most


def _fullest(found: Search, plan: Plan, configs: dict[str, Config], sized: set[str]) -> int:
    """Bytes that these models have of a device in the fullest phase."""
    lines = memory_lines(plan, configs)
    assert not isinstance(lines, str), "the run has been weighed"
    peaks = phase_peaks(plan, lines, int(found.gib * GIB))
    return max(sum(size for (name, _), size in peak.parts.items() if name in sized) for peak in peaks)


def _drafted(
    found: Search, configs: dict[str, Config], doublings: int, recomputes: bool
) -> dict[str, Config]:
    """Configurations with micro-batches of so many doublings; where nobody says whether, activations are
    computed again, or not."""
    drafts = dict(configs)
    for model in found.trained:
        changes = _budgets(model, drafts[model.node], doublings)
        if model.trains and not is_set(configs[model.node], _again(model)):
            changes |= {_again(model): recomputes}
        drafts[model.node] = with_overrides(drafts[model.node], changes)
    return drafts


def _again(model: ModelPlan) -> str:
    """The key of recomputed activations."""
    return f"{ROLES[model.role].model}.enable_gradient_checkpointing"


def _budgets(model: ModelPlan, cfg: Config, doublings: int) -> Changes:
    """Micro-batches of so many doublings of the longest row, and twice that without gradient."""
    role, row = ROLES[model.role], longest_row(cfg, model.role)
    sizes = ((role.forward, 2 * row << doublings), (role.train if model.trains else None, row << doublings))
    return {
        key: value
        for batch, tokens in sizes
        if batch is not None
        for key, value in ((batch.dynamic, True), (batch.max_tokens, tokens))
    }


def _chosen_by_plan(found: Search) -> Changes:
    """Micro-batches and an engine's share of the device that somebody set are chosen by the plan instead."""
    keys: Changes = {_SHARE: AUTO} if is_set(found.cfg, _SHARE) else {}
    for model in found.trained:
        role, cfg = ROLES[model.role], found.base.node_cfgs[model.node]
        for batch in filter(None, (role.forward, role.train if model.trains else None)):
            if any(is_set(cfg, key) for key in (batch.dynamic, batch.max_rows, batch.max_tokens)):
                keys |= {batch.dynamic: True, batch.max_tokens: AUTO}
    return keys


def _compile_best(found: Search, layouts: Iterator[tuple[float, Changes]], away: Changes) -> None:
    """Compile and weigh layouts as a run is, until enough fit."""
    budgets = away | _chosen_by_plan(found)
    before, least = found.tried, None
    for _, sizes in layouts:
        if found.tried - before >= (COMPILED if len(found.fitting) >= SHOWN else MOST_COMPILED):
            return
        found.tried += 1
        try:
            plan, configs = _compiled(found, sizes | budgets)
            time, peak = found.weigh_as_run(plan, configs)
        except UserError as error:
            found.refuse(error)
            continue
        if found.fits(peak):
            found.fitting.append(Candidate(_differing(found.cfg, sizes | budgets), time, peak))
            continue
        found.without_room += 1
        if least is None or peak.device < least:
            least = peak.device
            found.smallest = least, sizes | budgets, f"in {peak.node}"


def _compiled(found: Search, changes: Changes) -> tuple[Plan, dict[str, Config]]:
    """The plan of a candidate, and its nodes' configurations, whose models are where those of the run are.

    UserError for what the checks of a run refuse.
    """
    problems = Findings()
    trains = partial(trains_group, found.dag)
    cfg = find_contradictions(with_overrides(found.cfg, changes), problems, trains)
    problems.close()
    dag = with_node_config(found.dag, changes.get("dag.node_config", {}))
    plan, configs = compile_plan(dag, cfg, found.plan.world_size)
    for model in plan.models.values():
        path = f"{ROLES[model.role].model}.path"
        known = get(found.base.node_cfgs[model.node], path)
        if get(configs[model.node], path) != known:
            configs[model.node] = with_overrides(configs[model.node], {path: known})
    return plan, configs


def _differing(cfg: Config, changes: Changes) -> Changes:
    """Those that are other than what the run has already."""
    return {key: value for key, value in changes.items() if _value(cfg, key) != value}


def _value(cfg: Config, key: str) -> Any:
    """Of a key, or of a name in a map."""
    group, _, name = key.rpartition(".")
    found = get(cfg, group)
    return found.get(name) if isinstance(found, dict) else getattr(found, name)


def _pasted(changes: Changes) -> list[str]:
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


def _text(found: Search, best: list[Candidate], said: list[str]) -> str:
    kind, world = found.kind.name, found.plan.world_size
    time, peak = found.weigh_as_run(found.plan, found.base.node_cfgs)
    as_it_is = f"refused: {found.own_problem}" if found.own_problem else _numbers(time, peak, found.gib)
    refused = sum(map(len, found.refused.values()))
    fits = "" if found.fits(peak) or found.own_problem else f": more than {100 * ROOM:.0f}% of a device"
    lines = [
        f"layouts for {world} x {kind} of {found.gib:g} GiB: {found.weighed} sizes weighed, "
        f"{found.too_large} of them too large; {found.tried} layouts compiled, {refused} of them refused, "
        f"{found.without_room} too large, {len(found.fitting)} fit",
        f"as it is: {as_it_is}{fits}",
    ]
    for position, candidate in enumerate(best, 1):
        lines.append(f"{position}. {_numbers(candidate.time, candidate.peak, found.gib)}")
        lines.append(_lines_to_paste(_pasted(candidate.changes)) or "   as it is")
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
    named = " ".join(_pasted(_differing(found.cfg, sizes))) or "the sizes as they are"
    return (
        f"none fits: least is taken by {named}: {taken} of {there} GiB {where}. "
        "More devices, offloaded parts (param_offload, optimizer_offload), or LoRA"
    )


def _numbers(time: StepTime, peak: PhasePeak, gib: float) -> str:
    """The step, its longest parts, and the fullest phase."""
    longest = sorted(time.phases, key=lambda phase: -phase.seconds)[:_PARTS]
    parts = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in longest)
    return f"{time.step_s:.1f} s a step ({parts}), {gib_texts(peak.device / GIB, gib)[0]} GiB in {peak.node}"
