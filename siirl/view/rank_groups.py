"""Thousands of ranks as a page can show them: machines, shards, and ranks that do the same; the timeline of
such groups, what any of a group was in, from the first who came to the last who went.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.parallel.placement import Ranks, format_ranks, parse_ranks
from siirl.runs.rank_now import Doing
from siirl.runs.run_state import RankState
from siirl.show.plan_text import rank_classes
from siirl.view.trace_reader import Interval, RankTrace, milliseconds

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


MOST_LANES, MOST_LANE_SPANS = 64, 20_000
_SUMMED = ("rows", "tokens", "bytes")

Key = tuple[int, tuple[str, str], int]
"""Step, what is met, and which time it is."""


@dataclass(slots=True)
class _Shared:
    """An instruction on the ranks of a group."""

    name: str
    start_us: float
    end_us: float
    came_us: float
    """When the last of them began it."""
    longest_us: float
    last: int
    """The rank that ended last."""
    ranks: int = 0
    amounts: dict[str, float] = field(default_factory=dict)

    def add(self, rank: int, span: Interval) -> None:
        start_us, end_us = span.start_us, span.end_us
        self.ranks += 1
        self.start_us, self.came_us = min(self.start_us, start_us), max(self.came_us, start_us)
        self.longest_us = max(self.longest_us, end_us - start_us)
        if end_us > self.end_us:
            self.end_us, self.last = end_us, rank
        for name, value in span.args.items():
            if name in _SUMMED and isinstance(value, int | float):
                self.amounts[name] = self.amounts.get(name, 0) + value
            elif name.endswith("_gib") and isinstance(value, int | float):
                self.amounts[name] = max(self.amounts.get(name, 0.0), value)

    def row(self, step: int, start_us: float) -> list[Any]:
        begin, duration = milliseconds(self.start_us, start_us), milliseconds(self.end_us, self.start_us)
        about = {"step": step, "ranks": self.ranks, "last rank": self.last}
        about |= {"longest of a rank, ms": milliseconds(self.longest_us, 0), **self.amounts}
        return [self.name, begin, duration, 0, 0, about]


def group_lanes(
    traces: Iterable[RankTrace],
    groups: Mapping[str, list[RankGroup]],
    steps: Collection[int],
    start_us: float,
    meeting: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Kind of groups -> {"lanes", "of": how many groups there are}.

    Of more than MOST_LANES groups those are shown that others waited for most, and others evenly chosen.
    """
    by_rank = {trace.rank: _keyed(trace, steps) for trace in traces}
    found = {}
    for kind, all_of in groups.items():
        shared = [_shared(group, by_rank) for group in all_of]
        chosen = _latest(shared, meeting)
        most = MOST_LANE_SPANS // max(1, len(chosen))
        lanes = [
            {
                "rank": all_of[place].ranks[0],
                "label": all_of[place].label,
                "title": all_of[place].label.partition(":")[0],
                "lane": "",
                "spans": [one.row(key[0], start_us) for key, one in list(shared[place].items())[:most]],
            }
            for place in chosen
            if shared[place]
        ]
        if lanes:
            found[kind] = {"lanes": lanes, "of": len(all_of)}
    return found


def _keyed(trace: RankTrace, steps: Collection[int]) -> list[tuple[Key, Interval]]:
    """The instructions of a rank, with what they have in common with those of others."""
    keyed: list[tuple[Key, Interval]] = []
    for step in steps:
        seen: dict[tuple[str, str], int] = {}
        for span in trace.instructions(step):
            met = span.met
            times = seen[met] = seen.get(met, 0) + 1
            keyed.append(((step, met, times), span))
    return keyed


def _shared(group: RankGroup, by_rank: Mapping[int, list[tuple[Key, Interval]]]) -> dict[Key, _Shared]:
    found: dict[Key, _Shared] = {}
    for rank in group.ranks:
        for key, span in by_rank.get(rank, ()):
            if key not in found:
                found[key] = _Shared(span.name, span.start_us, span.end_us, span.start_us, 0.0, rank)
            found[key].add(rank, span)
    return found


def _latest(shared: list[dict[Key, _Shared]], meeting: Collection[str]) -> list[int]:
    """The groups to show, in their order."""
    if len(shared) <= MOST_LANES:
        return list(range(len(shared)))
    first: dict[Key, float] = {}
    for of_group in shared:
        for key, one in of_group.items():
            if one.name in meeting:
                first[key] = min(first.get(key, one.came_us), one.came_us)
    waited = [
        sum(one.came_us - first[key] for key, one in of_group.items() if key in first) for of_group in shared
    ]
    half = MOST_LANES // 2
    chosen = set(sorted(range(len(shared)), key=lambda place: -waited[place])[:half])
    chosen.update(index * len(shared) // half for index in range(half))
    return sorted(chosen)
