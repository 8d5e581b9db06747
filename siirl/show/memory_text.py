"""The memory estimate in words: a table of the phases, whether they fit a device, and what helps if not."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from siirl.compiler.backends import backend_of
from siirl.compiler.checks.other_engines import LARGEST_GIB
from siirl.compiler.memory.engine_starts import engine_starts
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.memory.phases import PhasePeak, estimated, host_peaks, memory_lines, phase_peaks
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config
from siirl.config.resolve import get
from siirl.config.roles import ROLE_GROUPS, ROLES
from siirl.config.tree import with_overrides
from siirl.errors import Place, PlacementError
from siirl.findings import Findings
from siirl.parallel.placement import Ranks, format_ranks
from siirl.spelling import GIB, aligned, gib_texts, size_text

_SHOWN = 5  # largest parts of a phase
_SMALL = 0.01  # of a phase: parts below are left out
_MOST_CHANGES = 6
_MOST_DEVICES = 4096
SURE = 1.25
"""Above so many times a device the estimate, which is within 15%, leaves no doubt."""

Configs = Mapping[str, Config]


def memory_table(plan: Plan, configs: Configs, device_gib: float | None) -> list[str]:
    """What each phase takes of the device of a rank, then the verdict; or why there is no estimate.

    device_gib: what a device has, if trainer.device_memory_gib does not say; on CPU what a process has of the
    host's memory.
    """
    if _on_cpu(configs):
        return _host_table(plan, configs, device_gib)
    found = estimated(plan, configs, device_gib)
    if isinstance(found, str):
        return [f"skipped: {found}"]
    rows = [["phase", "ranks", "device", "host", "the largest parts, GiB"]]
    for peak in found.phases:
        host = size_text(peak.host) if peak.host else ""
        rows.append([peak.node, format_ranks(peak.ranks), size_text(peak.device), host, _largest(peak)])
    gib = found.device_gib
    told = f"({gib:g} GiB is assumed: trainer.device_memory_gib sets what your devices have)"
    return [*aligned(rows), *_verdicts(plan, configs, gib), *([told] if found.assumed else [])]


def memory_warnings(plan: Plan, configs: Configs, device_gib: float | None, found: Findings) -> list[str]:
    """A line for each set of ranks whose fullest phase may not fit a device of known size; on CPU one for all
    ranks, which share the memory of the host.

    Into `found` goes what cannot run: an engine whose share does not hold its weights, and phases that take
    far more than a device has; where its size is not known, than any device has.
    """
    trainer = next(iter(configs.values())).trainer
    known = trainer.device_memory_gib or device_gib
    if _on_cpu(configs) and known is None:
        return []
    gib = known or LARGEST_GIB
    found.take(
        (PlacementError(one.text) for one in engine_starts(plan, configs, gib) if not one.starts),
        Place.MACHINE,
    )
    warnings = []
    for ranks, peak in _fullest(plan, configs, gib).items():
        room = _room_gib(plan, configs, gib) * GIB
        if peak.device > SURE * room:
            text = f"ranks {format_ranks(ranks)}: {_too_much(plan, configs, ranks, peak, gib)}"
            if known is None:
                text += " No device has more: trainer.device_memory_gib sets what yours have."
            found.add(PlacementError(text), Place.MACHINE)
        elif known and peak.device > room:
            warnings.append(f"memory: {_too_much(plan, configs, ranks, peak, gib)}")
    return warnings


def _on_cpu(configs: Configs) -> bool:
    return next(iter(configs.values())).trainer.device == "cpu"


def _room_gib(plan: Plan, configs: Configs, gib: float) -> float:
    """Of a device, or of a machine without GPUs, of whose memory each process has so much."""
    return gib * plan.world_size if _on_cpu(configs) else gib


def _host_table(plan: Plan, configs: Configs, gib: float | None) -> list[str]:
    """What each phase of a job without GPUs takes of the host's memory, then the verdict."""
    lines = memory_lines(plan, configs)
    if isinstance(lines, str):
        return [f"skipped: {lines}"]
    rows = [["phase", "host, all processes", "the largest parts, GiB"]]
    rows += [[peak.node, size_text(peak.device), _largest(peak)] for peak in host_peaks(plan, lines)]
    return [*aligned(rows), *([] if gib is None else _verdicts(plan, configs, gib))]


def _largest(peak: PhasePeak) -> str:
    """The largest parts of a phase, model by model."""
    of_model: dict[str, list[str]] = {}
    for (model, what), size in list(peak.parts.items())[:_SHOWN]:
        if size >= _SMALL * peak.device:
            of_model.setdefault(model, []).append(f"{what} {size / GIB:.1f}")
    return "; ".join(f"{model}: {', '.join(parts)}" for model, parts in of_model.items())


def _fullest(plan: Plan, configs: Configs, gib: float) -> dict[Ranks, PhasePeak]:
    """The fullest phase of each set of ranks; nothing where there is no estimate."""
    lines = memory_lines(plan, configs)
    fullest: dict[Ranks, PhasePeak] = {}
    if isinstance(lines, str):
        return fullest
    peaks = host_peaks(plan, lines) if _on_cpu(configs) else phase_peaks(plan, lines, int(gib * GIB))
    for peak in peaks:
        fullest[peak.ranks] = max(fullest.get(peak.ranks, peak), peak, key=lambda one: one.device)
    return fullest


def _verdicts(plan: Plan, configs: Configs, gib: float) -> list[str]:
    """For each set of ranks whether its fullest phase fits a device, what to change if not; of each engine
    what its share holds."""
    fullest = _fullest(plan, configs, gib)
    lines = []
    for ranks, peak in fullest.items():
        where = f"ranks {format_ranks(ranks)}: " if len(fullest) > 1 else ""
        room = _room_gib(plan, configs, gib)
        taken, of = gib_texts(peak.device / GIB, room)
        fits = f"fits {_room_text(configs, of)}: yes, {taken} GiB in {peak.node}"
        lines.append(
            where + (fits if peak.device <= room * GIB else _too_much(plan, configs, ranks, peak, gib))
        )
    return lines + [one.text for one in engine_starts(plan, configs, gib)]


def _too_much(plan: Plan, configs: Configs, ranks: Ranks, peak: PhasePeak, gib: float) -> str:
    need, room = gib_texts(peak.device / GIB, _room_gib(plan, configs, gib))
    advice = _advice(plan, configs, ranks, gib)
    return f"does not fit {_room_text(configs, room)}: {need} GiB in {peak.node}. {advice}"


def _room_text(configs: Configs, room: str) -> str:
    return f"the {room} GiB of this machine, which has no GPU" if _on_cpu(configs) else f"{room} GiB"


def _advice(plan: Plan, configs: Configs, ranks: Ranks, gib: float) -> str:
    """The keys that make the fullest phase smaller, one after the other the one that helps most."""
    chosen: list[str] = []
    peak = _fullest(plan, configs, gib)[ranks]
    room = _room_gib(plan, configs, gib) * GIB
    while peak.device > room and len(chosen) < _MOST_CHANGES:
        tried = []
        for key, value in _remedies(plan, configs, ranks):
            changed = {node: with_overrides(cfg, {key: value}) for node, cfg in configs.items()}
            tried.append((_fullest(plan, changed, gib)[ranks], f"{key}={value}", changed))
        best = min(tried, key=lambda one: one[0].device, default=None)
        if best is None or best[0].device >= peak.device:
            break
        peak, text, configs = best
        name = text.partition("=")[0]
        chosen = [item for item in chosen if item.partition("=")[0] != name] + [text]
    reached = f"{gib_texts(peak.device / GIB, room / GIB)[0]} GiB in {peak.node}"
    if peak.device <= room:
        return f"With {' '.join(chosen)}: {reached}."
    tried_all = f"Even with {' '.join(chosen)}: {reached}. " if chosen else ""
    if _on_cpu(configs):
        return (
            f"{tried_all}Take a smaller model (actor_rollout_ref.model.path), or say on which GPUs elsewhere "
            "it will be: trainer.n_gpus_per_node=8 trainer.device_memory_gib=80."
        )
    return f"{tried_all}{_sharded_further(plan, configs, ranks, gib)}"


def _sharded_further(plan: Plan, configs: Configs, ranks: Ranks, gib: float) -> str:
    """The fewest devices, doubled, that hold the fullest phase by the same estimate, as keys to set."""
    times = 1
    while times * len(ranks) <= _MOST_DEVICES:
        for of_engine, tensor in itertools.product((1, 2, 4, 8), repeat=2):
            found = _resized(plan, configs, ranks, times, tensor, of_engine)
            if found is None:
                continue
            resized, keys = found
            peak = _fullest(resized, configs, gib)[ranks]
            if peak.device <= gib * GIB and all(one.starts for one in engine_starts(resized, configs, gib)):
                return f"With {' '.join(keys)}: {gib_texts(peak.device / GIB, gib)[0]} GiB in {peak.node}."
        times *= 2
    return (
        f"{_MOST_DEVICES} devices are too few. Take a smaller model (actor_rollout_ref.model.path), or "
        "shorter rows (data.max_prompt_length, data.max_response_length)."
    )


def _resized(
    plan: Plan, configs: Configs, ranks: Ranks, times: int, tensor: int, of_engine: int
) -> tuple[Plan, list[str]] | None:
    """The plan with the models of these ranks on so many times their devices, and so many times the tensor
    parallel size of Megatron's, and of engines; the keys that say so. None where that is no plan.
    """
    trainer, models = next(iter(configs.values())).trainer, dict(plan.models)
    keys = dict.fromkeys(_devices(len(ranks) * times, trainer.n_gpus_per_node) if times > 1 else ())
    if times > 1 and len(ranks) < plan.world_size:
        names = ", ".join(name for name, model in models.items() if set(ranks) & set(model.ranks))
        keys = {f"placement on {len(ranks) * times} ranks for the nodes of {names}": None}
    sizes: dict[str, None] = {}
    for name, model in plan.models.items():
        if set(ranks).isdisjoint(model.ranks):
            continue
        dims, group = dataclasses.replace(model.dims, world=model.dims.world * times), ROLE_GROUPS[model.role]
        more = of_engine if model.generates else tensor
        if backend_of(model).gathers_weights:
            if dims.dp_replicate > 1:
                keys[f"{group}.fsdp_config.fsdp_size=-1"] = None
            dims = dataclasses.replace(dims, dp_shard=dims.dp, dp_replicate=1)
        elif more > 1:
            dims, shape = (
                dataclasses.replace(dims, tp=dims.tp * more),
                read_shape(configs[model.node], model.role),
            )
            machine = max(trainer.n_gpus_per_node, min(8, len(ranks) * times))
            fits = dims.tp <= machine and dims.world % dims.model_parallel == 0
            if isinstance(shape, str) or not fits or shape.heads % dims.tp or shape.kv_heads % dims.tp:
                return None
            owner = group if model.generates else f"{group}.megatron"
            sizes[f"{owner}.tensor_model_parallel_size={dims.tp}"] = None
            if model.generates and model.backend == "hf":
                sizes[f"{group}.name=vllm"] = None
                model = dataclasses.replace(model, backend="vllm")
        models[name] = dataclasses.replace(model, dims=dims)
    wanted = (tensor > 1) + (of_engine > 1)
    if not (keys or sizes) or wanted > len(sizes):
        return None
    return dataclasses.replace(plan, models=models), [*keys, *sizes]


def _devices(count: int, machine: int) -> list[str]:
    """The keys of so many devices, on machines of eight where they are more."""
    machine = max(machine, min(count, 8))
    nnodes = [f"trainer.nnodes={-(-count // machine)}"] * (count > machine)
    return [*nnodes, f"trainer.n_gpus_per_node={machine}"]


def _remedies(plan: Plan, configs: Configs, ranks: Ranks) -> Iterator[tuple[str, Any]]:
    """Keys that free memory, with their next value, for the models on these ranks. They change no result."""
    here = set(ranks)
    for model in plan.models.values():
        if here.isdisjoint(model.ranks):
            continue
        cfg = configs[model.node]
        for key, value in _of_model(model, cfg):
            if get(cfg, key) != value:
                yield key, value


def _of_model(model: ModelPlan, cfg: Config) -> Iterator[tuple[str, Any]]:
    rollout = "actor_rollout_ref.rollout"
    if model.generates:
        share = get(cfg, f"{rollout}.gpu_memory_utilization")
        if share > 0.2:
            yield f"{rollout}.gpu_memory_utilization", round(share - 0.05, 2)
        yield f"{rollout}.free_cache_engine", True
        return
    group = ROLE_GROUPS[model.role]
    backend = backend_of(model)
    for name in backend.offloads + (backend.offloads_trained if model.trains else ()):
        yield f"{group}.{name}", True
    if backend.gathers_weights:
        yield f"{group}.fsdp_config.reshard_after_forward", True
    if model.trains:
        yield f"{ROLES[model.role].model}.enable_gradient_checkpointing", True
        yield from _halved(
            cfg, f"{group}.use_dynamic_bsz", group, "ppo_max_token_len", "ppo_micro_batch_size"
        )
    if model.head == "lm":
        owner = rollout if model.is_policy else group
        names = ("log_prob_max_token_len", "log_prob_micro_batch_size")
        yield from _halved(cfg, f"{owner}.log_prob_use_dynamic_bsz", owner, *names)


def _halved(cfg: Config, dynamic: str, group: str, tokens: str, rows: str) -> Iterator[tuple[str, int]]:
    """Half the micro-batch: its token budget, but for one row of the longest kind, or its rows."""
    rollout = cfg.actor_rollout_ref.rollout
    key = f"{group}.{tokens if get(cfg, dynamic) else rows}_per_gpu"
    least = rollout.prompt_length + rollout.response_length if get(cfg, dynamic) else 1
    if get(cfg, key) // 2 >= least:
        yield key, get(cfg, key) // 2
