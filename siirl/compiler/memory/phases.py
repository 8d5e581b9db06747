"""What is on a device at once: the peak of each phase of a step, against the size of a device. Pure.

A phase is a Run of the plan, or an interaction. The models of its node do what it asks of them, all others on
the same ranks are idle. docs/scaling.md works cases by hand.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siirl.compiler.backends import backend_of
from siirl.compiler.memory.engine_memory import version_lines
from siirl.compiler.memory.estimate import ENGINE_PARTS, Activity, MemoryLine, read_shape
from siirl.compiler.plan import ModelPlan, NodePlan, Plan
from siirl.compiler.plan_instructions import Run
from siirl.config import Config
from siirl.config.batch import batch_of
from siirl.config.roles import ROLES
from siirl.parallel.placement import Ranks, format_ranks
from siirl.spelling import GIB

CONTEXT_BYTES = int(0.6 * GIB)
"""CUDA context of a worker."""
SLACK = 1.06
"""What the allocator reserves for a byte that the trainer uses at its peak; 1.03 to 1.08 measured."""
ASSUMED_GIB = 80.0
"""Of a device whose size nobody has told."""

Configs = Mapping[str, Config]


@dataclass(frozen=True)
class PhasePeak:
    """Memory of one rank in a phase."""

    node: str
    """Whose Run it is."""
    ranks: Ranks
    """Those that hold the same models."""
    parts: dict[tuple[str, str], int]
    """(model, kind) -> bytes on the device, the largest first."""
    host: int
    """Bytes that wait in host memory meanwhile."""

    @property
    def tensors(self) -> int:
        """Bytes of the trainers' tensors, which torch counts as allocated."""
        return sum(size for (_, what), size in self.parts.items() if what not in ENGINE_PARTS)

    @property
    def device(self) -> int:
        """Bytes that the phase takes of the device, with the allocators' slack and the worker's context."""
        engines = sum(self.parts.values()) - self.tensors
        return int(self.tensors * SLACK) + engines + CONTEXT_BYTES


@dataclass(frozen=True)
class Estimate:
    """The phases of a step on devices of one size."""

    phases: list[PhasePeak]
    """In the order of a step."""
    device_gib: float
    assumed: bool
    """Whether nobody has told how large a device is."""

    def record(self) -> dict[str, Any]:
        """As JSON values, for the run's folder: sizes in bytes, ranks as text."""
        phases = [
            {
                "node": peak.node,
                "ranks": format_ranks(peak.ranks),
                "tensors": peak.tensors,
                "device": peak.device,
                "host": peak.host,
                "parts": [[model, what, size] for (model, what), size in peak.parts.items()],
            }
            for peak in self.phases
        ]
        return {"device_gib": self.device_gib, "assumed": self.assumed, "phases": phases}


def estimated(plan: Plan, configs: Configs, device_gib: float | None) -> Estimate | str:
    """The memory that each phase takes, or why there is no estimate.

    device_gib: what a device has, if trainer.device_memory_gib does not say.
    """
    trainer = next(iter(configs.values())).trainer
    if trainer.device == "cpu":
        return "the processes share the memory of a machine without a GPU (trainer.device=cpu)"
    known = trainer.device_memory_gib or device_gib
    lines = memory_lines(plan, configs)
    if isinstance(lines, str):
        return lines
    gib = known or ASSUMED_GIB
    return Estimate(phase_peaks(plan, lines, int(gib * GIB)), gib, not known)


def estimate_record(plan: Plan, configs: Configs, device_gib: float | None) -> dict[str, Any]:
    """What a run's folder says of the estimate: that of `Estimate.record`, or {"left_out": why}.

    Without GPUs sizes are those of all processes together, and of their machine (`on_host`).
    """
    if next(iter(configs.values())).trainer.device == "cpu":
        lines = memory_lines(plan, configs)
        if isinstance(lines, str):
            return {"left_out": lines}
        machine_gib = 0.0 if device_gib is None else device_gib * plan.world_size  # 0: not known
        return Estimate(host_peaks(plan, lines), machine_gib, False).record() | {"on_host": True}
    found = estimated(plan, configs, device_gib)
    return {"left_out": found} if isinstance(found, str) else found.record()


def memory_lines(plan: Plan, configs: Configs) -> dict[str, list[MemoryLine]] | str:
    """Model -> what it has on a rank, or why there is no estimate: a config.json that is not known."""
    lines: dict[str, list[MemoryLine]] = {}
    for model in plan.models.values():
        cfg = ROLES[model.role].engine_cfg(configs[model.node])
        shape = read_shape(cfg, model.role)
        if isinstance(shape, str):
            return shape
        lines[model.name] = backend_of(model).memory(model, cfg, shape, engine_rows(plan, model, configs))
        kept = sum(link.pool.size for link in plan.links.values() if link.pool and link.source == model.name)
        lines[model.name] += version_lines(model, cfg, shape, kept)
    return lines


@functools.lru_cache(maxsize=16)
def _holders(
    world_size: int, placed: tuple[tuple[str, tuple[int, ...]], ...]
) -> dict[tuple[str, ...], list[int]]:
    """Models -> the ranks that have these and no others. A search asks for few placements again and again."""
    holders: dict[tuple[str, ...], list[int]] = {}
    on = {name: frozenset(ranks) for name, ranks in placed}
    for rank in range(world_size):
        holders.setdefault(tuple(name for name, ranks in on.items() if rank in ranks), []).append(rank)
    return holders


def phase_peaks(plan: Plan, lines: Mapping[str, list[MemoryLine]], device_bytes: int) -> list[PhasePeak]:
    """Each phase on each set of ranks that holds the same models, in the order of a step."""
    holders = _holders(plan.world_size, tuple((model.name, model.ranks) for model in plan.models.values()))
    peaks = []
    for node, active in _phases(plan):
        for here, ranks in holders.items():
            if active.keys().isdisjoint(here):
                continue
            parts: Counter[tuple[str, str]] = Counter()
            host = 0
            for name in here:
                activity = active.get(name, "idle")
                for line in lines[name]:
                    parts[name, line.what] += line.on_device(activity, device_bytes)
                    host += line.on_host(activity)
            largest = {part: size for part, size in parts.most_common() if size}
            peaks.append(PhasePeak(node, tuple(ranks), largest, host))
    return peaks


def host_peaks(plan: Plan, lines: Mapping[str, list[MemoryLine]]) -> list[PhasePeak]:
    """Each phase of a job without GPUs: what all its processes take of the memory that they share."""
    peaks = []
    for node, active in _phases(plan):
        parts: Counter[tuple[str, str]] = Counter()
        for model in plan.models.values():
            activity = active.get(model.name, "idle")
            for line in lines[model.name]:
                each = line.on_device(activity, 0) + line.on_host(activity)
                parts[model.name, line.what] += each * len(model.ranks)
        largest = {part: size for part, size in parts.most_common() if size}
        peaks.append(PhasePeak(node, tuple(range(plan.world_size)), largest, 0))
    return peaks


def engine_rows(plan: Plan, model: ModelPlan, configs: Configs) -> int:
    """Responses in flight on a shard, with those of a surplus; in an interaction, the most episodes that one
    engine answers."""
    interaction = next((x for x in plan.interactions.values() if model.name in x.policies), None)
    cfg = configs[interaction.entry if interaction else model.node]
    rows = batch_of(cfg).rows
    if interaction is None:
        return math.ceil(rows * (1 + cfg.actor_rollout_ref.rollout.surplus) / model.dims.dp)
    drivers = plan.run_of(interaction.entry).ranks
    loads = dict.fromkeys(model.ranks, 0.0)
    for driver in drivers:
        shares = interaction.shares(model.name, driver)
        for head, share in zip(interaction.heads(model.name, driver), shares, strict=True):
            loads[head] += rows / len(drivers) * share / sum(shares)
    return math.ceil(max(loads.values()))


def _phases(plan: Plan) -> list[tuple[str, dict[str, Activity]]]:
    """(node, model -> what it does) of the Runs of a training step that use models."""
    phases: list[tuple[str, dict[str, Activity]]] = []
    played = {stage.node for talk in plan.interactions.values() for stage in talk.stages}
    for ins in plan.instructions:
        if not isinstance(ins, Run):
            continue
        if ins.node in plan.interactions:
            policies = plan.interactions[ins.node].policies
            phases.append((ins.node, dict.fromkeys(policies, "generate")))
        elif ins.node not in played:
            users = [model for model in plan.models.values() if ins.node in model.nodes]
            if users:
                phases.append(
                    (ins.node, {model.name: _activity(model, plan.nodes[ins.node]) for model in users})
                )
    return phases


def _activity(model: ModelPlan, node: NodePlan) -> Activity:
    if model.generates:
        return "generate"
    return "update" if node.spec.trains else "forward"
