"""`siirl plan --search`: which sizes, micro-batches and placements make the fastest step of a run that fits.

All sizes that divide are weighed on the run's own plan, with their parallel sizes put in. Those that are best
by this are compiled and checked as a run is, their memory estimated, their step predicted. Settings that
change what is learned are left as they are. No torch.
"""

import contextlib
import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from siirl.commands.search_report import ROOM, Candidate, Search, differing, pasted, text_of
from siirl.compiler.backends import backend_of
from siirl.compiler.choices import Changes
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import chosen_device
from siirl.compiler.cost.lengths import lengths_of
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.memory.engine_starts import MOST_SHARE, engine_starts
from siirl.compiler.memory.estimate import longest_row
from siirl.compiler.memory.phases import memory_lines, phase_peaks
from siirl.compiler.parallel_sizes import ENGINE_TP, FINE_SIZES, MEGATRON, engine_sizes, trainer_sizes
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config, with_overrides
from siirl.config.checks import find_contradictions
from siirl.config.keys import AUTO
from siirl.config.load import read_config
from siirl.config.resolve import get, is_set
from siirl.config.roles import ROLES
from siirl.dag.node_config import with_node_config
from siirl.errors import UserError
from siirl.findings import Findings
from siirl.launch.devices import device_memory_gib, device_name, named_machine
from siirl.launch.survey import Survey, survey, survey_inputs, trains_group
from siirl.parallel.placement import format_ranks
from siirl.spelling import GIB

SHOWN = 5
COMPILED = 40
"""So many layouts, the best by their sizes, are compiled and checked; more until SHOWN of them fit."""
MOST_COMPILED = 4 * COMPILED
ENGINE_SHARE = 0.85
"""Of a device, for an engine whose share nobody set, until the plan chooses it."""
_MOST_DOUBLINGS = 7
"""Micro-batches of up to so many doublings of one row are weighed."""
_SHARES = (0.25, 0.5, 0.75)
"""Of the ranks, for disaggregated rollouts."""
_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


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
    ranked = sorted(found.fitting, key=_told_order)
    best: list[Candidate] = []
    for candidate in ranked:
        if len(best) < SHOWN and _is_accepted(found, candidate, overrides, config_name):
            best.append(candidate)
    return text_of(found, best, said)


def _told_order(one: Candidate) -> tuple[float, int, float, int]:
    """By time; of those that differ by less than the prediction can tell, first what changes fewest keys."""
    return float(f"{one.time.step_s:.3g}"), len(one.changes), one.time.step_s, one.peak.device


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
        _surveyed([*overrides, *pasted(candidate.changes)], config_name)
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
            found.fitting.append(Candidate(differing(found.cfg, sizes | budgets), time, peak))
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
