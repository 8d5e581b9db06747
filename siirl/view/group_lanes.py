"""The timeline of groups of ranks: what any of them was in, from the first who came to the last who went."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from siirl.view.rank_groups import RankGroup
from siirl.view.trace_spans import Interval, RankTrace, milliseconds

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
