"""`siirl plan --search`: which sizes, micro-batches and placements make the fastest step of a run that fits.

Every candidate is compiled and checked as a run is, its memory estimated, its step predicted. Settings that
change what is learned are left as they are. No torch.
"""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from siirl.compiler.backends import backend_of
from siirl.compiler.choices import Machine
from siirl.compiler.choose import choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import DeviceKind, chosen_device
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.cost.work import RowTokens, row_tokens
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.memory.phases import PhasePeak, memory_lines, phase_peaks
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config, with_overrides
from siirl.config.checks import find_contradictions
from siirl.config.load import read_config
from siirl.config.resolve import get
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
_MOST_DOUBLINGS = 7
"""Micro-batches of up to so many doublings of one row are tried."""
ROOM = 0.9
"""Of a device: what is estimated to take more is left out, as estimates are up to 15% off."""
_SHARES = (0.25, 0.5, 0.75)
"""Of the ranks, for rollouts on ranks of their own."""
_ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"

Changes = dict[str, Any]
"""Key -> value."""


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
    tokens: RowTokens | None
    fitting: list[Candidate] = field(default_factory=list)
    tried: int = 0
    refused: int = 0
    too_large: int = 0

    @property
    def plan(self) -> Plan:
        assert self.base.plan is not None, "a run without a plan is refused before"
        return self.base.plan

    def weigh(self, plan: Plan, configs: dict[str, Config]) -> tuple[StepTime, PhasePeak]:
        """The predicted step of a plan, and its fullest phase. ConfigError where there is no prediction.

        What nobody set is chosen as in a run.
        """
        plan, configs = choose(plan, configs, self.machine)
        lines, time = memory_lines(plan, configs), step_time(plan, configs, self.kind, self.tokens)
        for found in (lines, time):
            if isinstance(found, str):
                raise ConfigError(f"nothing can be predicted: {found}.")
        assert not isinstance(lines, str) and not isinstance(time, str)
        peaks = phase_peaks(plan, lines, int(self.gib * GIB))
        return time, max(peaks, key=lambda peak: peak.device)

    def fits(self, peak: PhasePeak) -> bool:
        return peak.device <= ROOM * self.gib * GIB


def search(overrides: Sequence[str], config_name: str, device: str | None, tokens: str | None) -> str:
    """The fastest layouts of a run, as a text with overrides to paste. UserError: what is wrong with the run.

    device: a kind, as in "h200"; else that of the GPUs here. tokens: the mean lengths of a row.
    """
    base = _surveyed(overrides, config_name)
    cfg = base.cfg
    kind, said = chosen_device(device, device_name())
    here = None if device else device_memory_gib()
    gib = cfg.trainer.device_memory_gib or here or kind.gib
    machine = named_machine(cfg, dataclasses.replace(kind, gib=gib))
    found = Search(cfg, load_dag(cfg), base, kind, gib, machine, row_tokens(tokens))
    found.weigh(found.plan, base.node_cfgs)
    for placement in _placements(found):
        for sizes in _trainer_sizes(found, placement):
            _try_engines(found, placement | sizes)
    ranked = sorted(found.fitting, key=lambda one: (one.time.step_s, len(one.changes), one.peak.device))
    best: list[Candidate] = []
    for candidate in ranked:
        if len(best) < SHOWN and _is_accepted(candidate, overrides, config_name):
            best.append(candidate)
    return _text(found, best, said)


def _surveyed(overrides: Sequence[str], config_name: str) -> Survey:
    """The run as `siirl plan` sees it. UserError: all that is wrong with it."""
    problems = Findings()
    cfg = read_config(overrides, config_name, problems)
    seen = survey_inputs(survey(cfg, problems), True, problems)
    problems.close()
    return seen


def _is_accepted(candidate: Candidate, overrides: Sequence[str], config_name: str) -> bool:
    """Whether the printed command is accepted as it is."""
    try:
        _surveyed([*overrides, *_pasted(candidate.changes)], config_name)
    except UserError:
        return False
    return True


def _placements(found: Search) -> Iterator[Changes]:
    """As it is; and with rollouts on ranks of their own, where the workflow places no node itself."""
    yield {}
    plan, world = found.plan, found.plan.world_size
    engines = {model.name for model in plan.models.values() if model.is_rollout}
    if any(node.placement is not None for node in found.dag.nodes) or not engines:
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


def _trainer_sizes(found: Search, placement: Changes) -> Iterator[Changes]:
    """Sizes of the models on training engines: TP and PP under Megatron, shards of a machine under FSDP2."""
    models = [model for model in found.plan.models.values() if not model.generates]
    machine = found.cfg.trainer.n_gpus_per_node
    world = found.plan.world_size - _engine_ranks(found, placement)
    cut = [model for model in models if backend_of(model).five_sizes]
    sharded = [model for model in models if backend_of(model).gathers_weights]
    sizes: list[Changes] = [{}]
    if cut:
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel")
        sizes = [
            {
                f"{ROLES[model.role].group}.megatron.{name}": value
                for model in cut
                for name, value in zip(names, (tp, pp, tp > 1), strict=True)
            }
            for tp in _divisors(min(machine, world))
            for pp in _divisors(world)
            if world % (tp * pp) == 0 and all(_can_be_cut(found, model, tp, pp) for model in cut)
        ]
    yield from sizes
    for shard in (-1, machine) if sharded and world > machine and world % machine == 0 else ():
        named = {f"{ROLES[model.role].group}.fsdp_config.fsdp_size": shard for model in sharded}
        yield from (one | named for one in sizes)


def _engine_ranks(found: Search, placement: Changes) -> int:
    """Ranks that rollouts have for themselves."""
    if not placement:
        return 0
    engine = next(model for model in found.plan.models.values() if model.is_rollout)
    last = placement["dag.node_config"][engine.nodes[0]]["placement"].rpartition("-")[2]
    return int(last) + 1


def _can_be_cut(found: Search, model: ModelPlan, tp: int, pp: int) -> bool:
    """Whether whole heads, and at least a layer, are on each rank: what is not is refused by the compiler."""
    shape = read_shape(found.base.node_cfgs[model.node], model.role)
    return isinstance(shape, str) or (shape.kv_heads % tp == 0 and shape.layers >= pp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _try_engines(found: Search, sizes: Changes) -> None:
    """Each size of the rollout engines; micro-batches are those that fit beside the first that compiles."""
    engines = [model for model in found.plan.models.values() if model.is_rollout and model.backend == "vllm"]
    placed = {name: value for name, value in sizes.items() if name == "dag.node_config"}
    ranks = _engine_ranks(found, placed) or found.plan.world_size
    machine = found.cfg.trainer.n_gpus_per_node
    options = [tp for tp in _divisors(min(machine, ranks)) if ranks % tp == 0] if engines else [None]
    budgets: list[int] | None = None
    for tp in options:
        changes = sizes if tp is None else sizes | {_ROLLOUT_TP: tp}
        if not all(_can_be_cut(found, model, tp or 1, 1) for model in engines):
            continue
        found.tried += 1
        try:
            plan, configs = _compiled(found, changes)
        except UserError:
            found.refused += 1
            continue
        budgets = _try_micro_batches(found, plan, configs, changes, budgets)


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


def _try_micro_batches(
    found: Search, plan: Plan, configs: dict[str, Config], changes: Changes, known: list[int] | None
) -> list[int]:
    """Keep the largest micro-batches that fit, and half of them, if they make the step faster.

    known: the token budgets that fit another engine beside the same trainer. Returns those of this one.
    """
    rollout = found.cfg.actor_rollout_ref.rollout
    row = rollout.prompt_length + rollout.response_length
    fitting: list[int] = []
    best: Candidate | None = None
    for budget in known or [row << doublings for doublings in reversed(range(_MOST_DOUBLINGS))]:
        keys = _budget_keys(plan, budget)
        time, peak = found.weigh(plan, _changed(plan, configs, keys))
        if not found.fits(peak):
            continue
        fitting.append(budget)
        if best is None or time.step_s < best.time.step_s:
            best = Candidate(_differing(found.cfg, changes | keys), time, peak)
        if len(fitting) == 2:
            break
    if best is None:
        found.too_large += 1
    else:
        found.fitting.append(best)
    return fitting


def _budget_keys(plan: Plan, budget: int) -> Changes:
    """The keys of micro-batches of so many tokens, twice as many in passes without gradient."""
    keys: Changes = {}
    for model in plan.models.values():
        role = ROLES[model.role]
        for batch, tokens in ((role.forward, 2 * budget), (role.train if model.trains else None, budget)):
            if batch is not None:
                keys |= {batch.dynamic: True, batch.max_tokens: tokens}
    return keys


def _changed(plan: Plan, configs: dict[str, Config], keys: Changes) -> dict[str, Config]:
    nodes = {model.node for model in plan.models.values()}
    return configs | {node: with_overrides(configs[node], keys) for node in nodes}


def _differing(cfg: Config, changes: Changes) -> Changes:
    """Those that are other than what the run has already."""
    return {key: value for key, value in changes.items() if get(cfg, key) != value}


def _pasted(changes: Changes) -> list[str]:
    """The changes as overrides."""
    words = []
    for key, value in changes.items():
        if key == "dag.node_config":
            words += [f"{key}.{node}.placement={one['placement']}" for node, one in value.items()]
        else:
            words.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return words


def _lines_to_paste(words: list[str]) -> str:
    """Overrides on lines that a shell reads as one."""
    text = textwrap.fill(" ".join(words), 110, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(text.replace("\n", " \\\n"), "   ")


def _text(found: Search, best: list[Candidate], said: list[str]) -> str:
    kind, world = found.kind.name, found.plan.world_size
    time, peak = found.weigh(found.plan, found.base.node_cfgs)
    counts = f"{found.refused} refused, {found.too_large} too large, {len(found.fitting)} fit"
    fits = "" if found.fits(peak) else f": more than {100 * ROOM:.0f}% of a device"
    lines = [
        f"layouts for {world} x {kind} of {found.gib:g} GiB: {found.tried} tried, {counts}",
        f"as it is: {_numbers(time, peak, found.gib)}{fits}",
    ]
    for position, candidate in enumerate(best, 1):
        lines.append(f"{position}. {_numbers(candidate.time, candidate.peak, found.gib)}")
        lines.append(_lines_to_paste(_pasted(candidate.changes)) or "   as it is")
    if not best:
        lines.append("none fits: shard the models over more devices (siirl plan says what takes the memory)")
    notes = best[0].time if best else time
    apart = any("dag.node_config" in one.changes for one in found.fitting)
    if apart and not found.cfg.actor_rollout_ref.rollout.max_lag:
        lines.append("rollouts on ranks of their own take turns with training: no rollout.max_lag is set")
    lines += [f"not counted: {line}" for line in notes.not_counted]
    lines += [f"assumed: {line}" for line in [*said, *notes.assumed]]
    return "\n".join(lines)


def _numbers(time: StepTime, peak: PhasePeak, gib: float) -> str:
    return f"{time.step_s:.1f} s a step, {gib_texts(peak.device / GIB, gib)[0]} GiB in {peak.node}"
