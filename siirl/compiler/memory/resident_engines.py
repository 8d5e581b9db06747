"""Rollout engines that are resident at once on a device: the policies of a conversation. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from siirl.compiler.backends import backend_of
from siirl.compiler.plan import InteractionPlan, ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config, with_overrides
from siirl.errors import PlacementError, UserError
from siirl.parallel.placement import Ranks, format_ranks

MOST_OF_A_DEVICE = 0.95
"""What engines can have of a device; the rest is for CUDA contexts and the workers."""

Shares = dict[str, float]
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


def with_shares(
    interactions: Mapping[str, InteractionPlan],
    models: Mapping[str, ModelPlan],
    nodes: Mapping[str, ResolvedNode],
) -> dict[str, ResolvedNode]:
    """The nodes; engines that are resident together divide what is left of a device if nobody set a share.

    What somebody set stays. The new shares are overrides of the nodes that the engines are built from.
    """
    configs = {node_id: node.cfg for node_id, node in nodes.items()}
    lowered: Shares = {}
    for talk in interactions.values():
        for shares in resident_shares(talk, models, configs).values():
            free = [name for name in shares if not share_is_set(configs[models[name].node])]
            taken = sum(share for name, share in shares.items() if name not in free)
            for name in free:
                fits = int(100 * (MOST_OF_A_DEVICE - taken) / len(free) + 1e-6) / 100
                if 0 < fits < lowered.get(name, shares[name]):
                    lowered[name] = fits
    changed = dict(nodes)
    for name, share in lowered.items():
        node = nodes[models[name].node]
        cfg = with_overrides(node.cfg, {SHARE: share})
        changed[node.id] = replace(node, cfg=cfg, overrides=node.overrides | {SHARE: share})
    return changed


def share_is_set(cfg: Config) -> bool:
    """Whether somebody set the share of the device that a rollout engine takes."""
    return (
        SHARE in cfg.explicit or "gpu_memory_utilization" in cfg.actor_rollout_ref.rollout.engine_kwargs.vllm
    )


def resident_shares(
    talk: InteractionPlan, models: Mapping[str, ModelPlan], configs: Mapping[str, Config]
) -> dict[Ranks, Shares]:
    """Ranks -> model -> share of the device that its engine takes while the episodes are played.

    Engines of the policies, and others that never sleep (free_cache_engine=False). Only those that take a
    share (vllm) on a GPU, and only ranks with several.
    """
    by_models: dict[tuple[str, ...], list[int]] = {}
    shares: Shares = {}
    for name, model in models.items():
        cfg = configs[model.node]
        rollout = cfg.actor_rollout_ref.rollout
        stays = name in talk.policies or not rollout.free_cache_engine
        if model.base not in (None, name):
            continue  # speaks with the engine of its base
        on_gpu = backend_of(model).device_share and cfg.trainer.device != "cpu"
        if not model.is_rollout or not on_gpu or not stays:
            continue
        shares[name] = rollout.device_share
    on = {name: frozenset(models[name].ranks) for name in shares}
    for rank in sorted({rank for name in talk.policies for rank in models[name].ranks}):
        here = tuple(name for name, ranks in on.items() if rank in ranks)
        if len(here) > 1:
            by_models.setdefault(here, []).append(rank)
    return {tuple(ranks): {name: shares[name] for name in names} for names, ranks in by_models.items()}


def check_resident(
    interactions: Mapping[str, InteractionPlan],
    models: Mapping[str, ModelPlan],
    configs: Mapping[str, Config],
) -> Iterator[UserError]:
    """PlacementError if the engines of a conversation want more of a device than there is."""
    for entry, talk in interactions.items():
        for ranks, shares in resident_shares(talk, models, configs).items():
            if sum(shares.values()) <= MOST_OF_A_DEVICE + 1e-9:
                continue
            fits = int(100 * MOST_OF_A_DEVICE / len(shares)) / 100
            yield PlacementError(
                f"while node {entry!r} plays its episodes, the engines on ranks {format_ranks(ranks)} are "
                f"resident together and take {shares_text(shares)} of the device "
                f"(rollout.gpu_memory_utilization): at most {MOST_OF_A_DEVICE} fits. Set "
                f"{SHARE}={fits}, or a share for each in the config "
                "of its rollout node; or place the agents on ranks of their own; or let them share a policy "
                "(rollout.agent.share_instance)."
            )


def shares_text(shares: Shares) -> str:
    """Each engine's share and the sum, e.g. "0.5 (agent_0.rollout) + 0.4 (agent_1.rollout) = 0.9"."""
    terms = " + ".join(f"{share:g} ({name})" for name, share in shares.items())
    return f"{terms} = {sum(shares.values()):.4g}"
