"""Rollout engines that keep their memory between rollouts, as everything fits beside them. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from siirl.compiler.backends import backend_of
from siirl.compiler.memory.awake_engines import SHARE, share_is_set
from siirl.compiler.memory.engine_memory import engine_bytes
from siirl.compiler.memory.estimate import GIB, read_shape
from siirl.compiler.memory.phases import engine_rows, memory_lines, phase_peaks
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config, with_overrides

FITS = 0.9
"""Of a device: no more is planned with engines that stay awake, as steps took up to 4% over the estimate."""
WORKSPACE_BYTES = 4 * GIB
"""Of a vLLM engine's share beside weights and KV cache: what it measures for its largest step at most."""
GRAPHS_BYTES = 4 * GIB
"""The same for its CUDA graphs, which some versions of vLLM count in."""
AWAKE = "actor_rollout_ref.rollout.free_cache_engine"

Overrides = dict[str, dict[str, Any]]


def keep_awake(
    plan: Plan, configs: Mapping[str, Config], device_gib: float | None
) -> tuple[Plan, dict[str, Config]]:
    """The plan and its configurations, where engines stay awake if that fits and nobody has set it.

    An engine whose share of the device nobody has set has one that holds the rows of a step, if that is less.
    All engines that could, or none: with one that does not fit, each gives its memory back, as ever.

    device_gib: what a device has; None if that is not known, and nothing changes.
    """
    known = dict(configs)
    found = _chosen(plan, known, device_gib) if device_gib is not None else {}
    changed = known | {node: with_overrides(known[node], keys) for node, keys in found.items()}
    if not found or device_gib is None or not _fits(plan, changed, device_gib):
        return plan, known
    nodes = {
        name: replace(node, overrides=node.overrides | found.get(name, {}))
        for name, node in plan.nodes.items()
    }
    return replace(plan, nodes=nodes), changed


def awake_lines(plan: Plan, configs: Mapping[str, Config]) -> list[str]:
    """A line for each engine that keep_awake has changed."""
    lines = []
    for model in plan.models.values():
        if model.is_rollout and plan.nodes[model.node].overrides.get(AWAKE) is False:
            share = configs[model.node].actor_rollout_ref.rollout.device_share
            lines.append(
                f"{model.name}: stays awake between rollouts, with {share:g} of the device, as all fits "
                f"beside it; {AWAKE.removeprefix('actor_rollout_ref.')}=true has it give its memory back"
            )
    return lines


def _chosen(plan: Plan, configs: dict[str, Config], device_gib: float | None) -> Overrides:
    """Node -> what it is told to keep its engine awake; nothing unless all engines can be told."""
    engines = [model for model in plan.models.values() if model.is_rollout]
    on_rank = Counter(rank for model in engines for rank in model.ranks)
    others = {rank for model in plan.models.values() if not model.is_rollout for rank in model.ranks}
    found: Overrides = {}
    for model in engines:
        cfg = configs[model.node]
        if not _may(model, plan, cfg) or max(on_rank[rank] for rank in model.ranks) > 1:
            return {}
        if others.isdisjoint(model.ranks):
            continue  # it never sleeps
        found[model.node] = {AWAKE: False}
        if share_is_set(cfg):
            continue
        shape = read_shape(cfg, model.role)
        if isinstance(shape, str) or device_gib is None:
            return {}
        graphs = 0 if cfg.actor_rollout_ref.rollout.enforce_eager else GRAPHS_BYTES
        held = sum(engine_bytes(model, cfg, shape, engine_rows(plan, model, configs)))
        need = held + WORKSPACE_BYTES + graphs
        share = ceil(100 * need / (device_gib * GIB)) / 100
        if share < cfg.actor_rollout_ref.rollout.device_share:
            found[model.node][SHARE] = share
    return found


def _may(model: ModelPlan, plan: Plan, cfg: Config) -> bool:
    """Whether an engine gives its memory back by default, and for no other reason than the memory."""
    return (
        backend_of(model).device_share
        and cfg.trainer.device != "cpu"
        and model.role == "rollout"
        and not model.is_teacher
        and model.base is None
        and not plan.nodes[model.node].max_lag
        and AWAKE not in cfg.explicit
        and cfg.actor_rollout_ref.rollout.free_cache_engine
    )


def _fits(plan: Plan, configs: dict[str, Config], device_gib: float) -> bool:
    lines = memory_lines(plan, configs)
    if isinstance(lines, str):
        return False
    return all(
        peak.device <= FITS * device_gib * GIB for peak in phase_peaks(plan, lines, int(device_gib * GIB))
    )
