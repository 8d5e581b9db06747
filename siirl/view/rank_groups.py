"""Thousands of ranks as a page can show them: machines, shards, and ranks that do the same."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl.compiler.plan import Plan, Run
from siirl.parallel.placement import Ranks, format_ranks, parse_ranks
from siirl.runs.rank_now import Doing
from siirl.runs.run_state import RankState
from siirl.show.plan_text import rank_classes

MOST_CELLS = 4_096
KINDS = ("alike", "machines", "shards")


@dataclass(frozen=True)
class RankGroup:
    """Ranks that are shown as one."""

    label: str
    ranks: Ranks


def rank_groups(plan: Plan | None, world_size: int, per_machine: int) -> dict[str, list[RankGroup]]:
    """Kind of groups -> groups, each rank in one of each kind.

    alike: run the same nodes. machines: `per_machine` consecutive ranks, as launchers place them. shards: are
    alike and hold the same rows. Kinds that tell nothing (each group is a rank, or all ranks are one) are
    left out, except alike.
    """
    found = {
        "machines": [_machine(first, per_machine, world_size) for first in range(0, world_size, per_machine)]
    }
    if plan is not None and plan.world_size == world_size:
        classes = [ranks for ranks, _ in rank_classes(plan)]
        found["alike"] = [RankGroup(f"ranks {format_ranks(ranks)}", ranks) for ranks in classes]
        found["shards"] = [group for ranks in classes for group in _shards(plan, ranks)]
    return {
        kind: found[kind]
        for kind in KINDS
        if kind in found and (kind == "alike" or 1 < len(found[kind]) < world_size)
    }


def _machine(first: int, per_machine: int, world_size: int) -> RankGroup:
    ranks = tuple(range(first, min(first + per_machine, world_size)))
    return RankGroup(f"machine {first // per_machine}: ranks {format_ranks(ranks)}", ranks)


def _shards(plan: Plan, alike: Ranks) -> list[RankGroup]:
    """The shards of the first layout of these ranks in which several hold the same rows, or each its own."""
    runs = [ins for ins in plan.instructions if isinstance(ins, Run) and alike[0] in ins.ranks]
    layouts = [plan.layouts[ins.source] for ins in runs]
    layout = min(layouts, key=lambda one: one.num_shards / len(one.ranks), default=None)
    if layout is None:
        return [RankGroup(f"rank {rank}", (rank,)) for rank in alike]
    shard_of = dict(zip(layout.ranks, layout.shards, strict=True))
    shards: dict[int, list[int]] = {}
    for rank in alike:
        shards.setdefault(shard_of[rank], []).append(rank)
    return [
        RankGroup(f"ranks {format_ranks(ranks)}: shard {shard}", tuple(ranks))
        for shard, ranks in shards.items()
    ]


Place = tuple[int, str, Doing]
"""Step, the node or other part of it, and what a rank does there."""


def _place(rank: RankState, now: Mapping[int, Doing]) -> Place:
    return rank.step, rank.node, now.get(rank.rank, Doing("runs", rank.node))


def places(ranks: Sequence[RankState], now: Mapping[int, Doing]) -> list[dict[str, Any]]:
    """Where ranks are: those who do the same in the same step as one, who is behind first."""
    found: dict[Place, list[RankState]] = {}
    for rank in ranks:
        found.setdefault(_place(rank, now), []).append(rank)
    return [
        {
            "step": step,
            "node": node,
            "state": doing.state,
            "at": doing.node,
            "behind": format_ranks(doing.behind),
            "text": doing.text(),
            "ranks": format_ranks([rank.rank for rank in here]),
            "count": len(here),
            "first_s": min(rank.since_s for rank in here),
            "last_s": max(rank.since_s for rank in here),
        }
        for (step, node, doing), here in sorted(
            found.items(), key=lambda item: (item[0][0], min(r.since_s for r in item[1]))
        )
    ]


def cells(groups: Iterable[RankGroup], where: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """For each group [label, [(place, how many of its ranks are there)]], the place that most are in first.

    A place is the index in `where`, what `places` gave.
    """
    at = {rank: index for index, place in enumerate(where) for rank in parse_ranks(place["ranks"])}
    out = []
    for group in groups:
        counts: dict[int, int] = {}
        for rank in group.ranks:
            if rank in at:
                counts[at[rank]] = counts.get(at[rank], 0) + 1
        out.append([group.label, sorted(counts.items(), key=lambda item: (-item[1], item[0]))])
    return out
