"""Where the policies of an interaction live, and which of their engines answer which rank's episodes. Pure.

A rank that plays episodes is a driver: the first rank of each shard of the entry's rollout. The first rank of
a shard answers for its engine.
"""

import math
from dataclasses import replace

from siirl.compiler.backends import backend_of
from siirl.compiler.plan import InteractionPlan, ModelPlan, StreamPlan
from siirl.compiler.workflow import Interactions, Nodes
from siirl.errors import PlacementError
from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks, format_ranks

Models = dict[str, ModelPlan]


def place_interactions(
    interactions: Interactions, models: Models, nodes: Nodes
) -> tuple[Interactions, Models]:
    """The interactions with their streams, and the models with services where the episodes are.

    PlacementError for a service that is placed elsewhere.
    """
    placed: dict[str, InteractionPlan] = {}
    moved = dict(models)
    for entry, plan in interactions.items():
        drivers = heads_of(models[plan.policies[0]])
        streams: list[StreamPlan] = []
        for name in plan.policies:
            if not backend_of(models[name]).weights:
                moved[name] = _beside(models[name], drivers, nodes)
            streams += _streams(name, drivers, heads_of(moved[name]))
        placed[entry] = replace(plan, streams=tuple(streams))
    return placed, moved


def heads_of(model: ModelPlan) -> Ranks:
    """The first rank of each shard of a model, in the order of the shards."""
    first: dict[int, int] = {}
    for shard, rank in zip(model.dims.data_shards(), model.ranks, strict=True):
        first.setdefault(shard, rank)
    return tuple(first[shard] for shard in sorted(first))


def serving_ranks(plan: InteractionPlan, models: Models) -> Ranks:
    """The ranks that hold an engine of an interaction and play no episodes."""
    drivers = heads_of(models[plan.policies[0]])
    everyone = {rank for name in plan.policies for rank in models[name].ranks}
    return tuple(sorted(everyone.difference(drivers)))


def _beside(model: ModelPlan, drivers: Ranks, nodes: Nodes) -> ModelPlan:
    """A service has no engine of its own: every driver asks it."""
    missing = sorted(set(drivers).difference(model.ranks))
    if missing and nodes[model.node].spec.placement is not None:
        raise PlacementError(
            f"{nodes[model.node]} is placed on ranks {format_ranks(model.ranks)}, and its service is asked "
            f"from where the episodes are played (ranks {format_ranks(drivers)}). Remove its placement."
        )
    return replace(model, ranks=drivers, dims=ParallelDims(len(drivers), dp_replicate=len(drivers)))


def _streams(policy: str, drivers: Ranks, heads: Ranks) -> list[StreamPlan]:
    """Which heads answer each driver; nothing to say where each asks the one on its own rank.

    A driver asks the engine of its own rank if it has one. Engines of ranks that play nothing go to the
    drivers without one, else to all; where there are none of these, drivers answer for each other.
    """
    answering = frozenset(heads)
    local, idle = [rank for rank in drivers if rank in answering], sorted(answering.difference(drivers))
    remote = [rank for rank in drivers if rank not in answering]
    if not remote and not idle:
        return []
    helped, helpers = remote or local, idle or sorted(heads)
    shares: dict[int, dict[int, int]] = {rank: {rank: len(helped)} for rank in local}
    for rank, divided in zip(helped, _divided(helpers, len(helped)), strict=True):
        shares[rank] = shares.get(rank, {}) | divided
    return [_stream(policy, rank, shares[rank]) for rank in drivers]


def _stream(policy: str, driver: int, shares: dict[int, int]) -> StreamPlan:
    heads, common = tuple(sorted(shares)), math.gcd(*shares.values())
    return StreamPlan(policy, driver, heads, tuple(shares[head] // common for head in heads))


def _divided(helpers: list[int], count: int) -> list[dict[int, int]]:
    """What each of `count` askers asks: helper -> its share, of `count` for a whole helper.

    Both are laid out on one line, in equal runs: so all helpers have the same load, and there are fewer
    streams than helpers and askers together.
    """
    divided, num_helpers = [], len(helpers)
    for asker in range(count):
        first, end = asker * num_helpers, (asker + 1) * num_helpers
        divided.append(
            {
                helpers[place]: min(end, (place + 1) * count) - max(first, place * count)
                for place in range(first // count, -(-end // count))
            }
        )
    return divided
