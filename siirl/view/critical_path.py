"""What bounds a step: the chain of instructions that its end waited for, and what faster ones would change.

A rank runs its instructions one after another. Some meet: they begin on all their ranks when the last one
has come (moving rows, weights, a model that is split over ranks). The rest of such an instruction is work. So
a traced step can be run again with other durations.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from siirl.observe.curve import duration

OUTSIDE = ("start", "report", "validation", "checkpoint", "export")
"""Spans that are no part of a training step."""
MOST_FASTER, BETWEEN = 6, "between instructions"


class Part(NamedTuple):
    """An instruction on a rank in a step; times in one unit on one clock."""

    rank: int
    name: str
    key: Hashable
    """The same on all ranks that run it together."""
    start: float
    end: float


class Segment(NamedTuple):
    """A stretch of the critical path."""

    rank: int
    name: str
    start: float
    end: float


@dataclass(slots=True)
class _Done:
    part: Part
    begin: float
    end: float
    last: int
    """The rank that it waited for; its own if for none."""


def replay(
    parts: Iterable[Part], meeting: Collection[str], scale: Callable[[str], float] = lambda name: 1.0
) -> tuple[float, list[Segment]]:
    """(when the last instruction ends, what that waited for, in order) with durations times `scale(name)`.

    With durations as they were, ends are those of the trace.
    """
    done: dict[int, list[_Done]] = defaultdict(list)

    def arrival(part: Part) -> float:
        before = done[part.rank]
        return before[-1].end + max(0.0, part.start - before[-1].part.end) if before else part.start

    for together in _groups(parts, meeting):
        came = [arrival(part) for part in together]
        begin = max(came)
        last, met = together[came.index(begin)], max(part.start for part in together)
        for part in together:
            end = begin + max(0.0, part.end - met) * scale(part.name)
            done[part.rank].append(_Done(part, begin, end, last.rank))
    return _walk(done)


def _groups(parts: Iterable[Part], meeting: Collection[str]) -> list[list[Part]]:
    """The parts that begin together, or one part alone, each after those before them on their ranks."""
    together: dict[Hashable, list[Part]] = {}
    queues: dict[int, list[list[Part]]] = defaultdict(list)
    seen: dict[tuple[int, Hashable], int] = defaultdict(int)
    for part in sorted(parts, key=lambda part: (part.start, part.end)):
        group: list[Part] = []
        if part.name in meeting:
            seen[part.rank, part.key] += 1
            group = together.setdefault((part.key, seen[part.rank, part.key]), group)
        group.append(part)
        queues[part.rank].append(group)
    place, came = dict.fromkeys(queues, 0), defaultdict[int, int](int)
    order: list[list[Part]] = []
    free = list(queues)
    while free:
        rank = free.pop()
        if place[rank] == len(queues[rank]):
            continue
        group = queues[rank][place[rank]]
        came[id(group)] += 1
        if came[id(group)] == len(group):
            order.append(group)
            for part in group:
                place[part.rank] += 1
                free.append(part.rank)
    if any(place[rank] < len(queue) for rank, queue in queues.items()):  # damaged: they met in no one order
        groups = {id(group): group for queue in queues.values() for group in queue}
        return sorted(groups.values(), key=lambda group: group[-1].start)
    return order


def _walk(done: Mapping[int, list[_Done]]) -> tuple[float, list[Segment]]:
    """From the last end back to the first beginning."""
    ends = [(items[-1].end, rank) for rank, items in done.items() if items]
    if not ends:
        return 0.0, []
    total, rank = max(ends)
    path: list[Segment] = []
    place = len(done[rank]) - 1
    while place >= 0:
        item = done[rank][place]
        path.append(Segment(rank, item.part.name, item.begin, item.end))
        if item.last != rank:
            rank = item.last
            place = next(
                index
                for index, other in enumerate(done[rank])
                if other.part.key == item.part.key and other.begin == item.begin
            )
        place -= 1
        if place >= 0 and done[rank][place].end < item.begin:
            path.append(Segment(rank, BETWEEN, done[rank][place].end, item.begin))
    return total, path[::-1]


def ranks_of_path(parts: list[Part], meeting: Collection[str], most: int) -> tuple[list[Part], int]:
    """(the parts of some ranks, how many ranks there are), at most `most` parts beside those of the path.

    All who came last on the way to the end are among them, so the path is that of all ranks. The others that
    are kept came late, too: one of them may bound the step when an instruction is faster.
    """
    num_ranks = len({part.rank for part in parts})
    if len(parts) <= most:
        return parts, num_ranks
    _, path = replay(parts, meeting)
    kept = {segment.rank for segment in path}
    late: Counter[int] = Counter()
    first: dict[Hashable, float] = {}
    for part in parts:
        if part.name in meeting:
            first[part.key] = min(first.get(part.key, part.start), part.start)
    for part in parts:
        if part.name in meeting:
            late[part.rank] += int(1e3 * (part.start - first[part.key]))
    sizes = Counter(part.rank for part in parts)
    room = most - sum(sizes[rank] for rank in kept)
    for rank, _ in late.most_common():
        if rank not in kept and room >= sizes[rank]:
            kept.add(rank)
            room -= sizes[rank]
    return [part for part in parts if part.rank in kept], num_ranks


def bounds(step: int, parts: list[Part], meeting: Collection[str], num_ranks: int = 0) -> dict[str, Any]:
    """The critical path of a step as the page shows it; times in the unit of the parts, milliseconds.

    num_ranks: of the step, if not all of them are in the parts.
    """
    total, path = replay(parts, meeting)
    began = min(part.start for part in parts)
    whole = max(total - began, 1e-9)
    spent: dict[str, float] = defaultdict(float)
    ranks: dict[str, set[int]] = defaultdict(set)
    for segment in path:
        spent[segment.name] += segment.end - segment.start
        ranks[segment.name].add(segment.rank)
    names = sorted((name for name in spent if name != BETWEEN), key=lambda name: -spent[name])[:MOST_FASTER]
    faster = []
    for name in names:
        end, _ = replay(parts, meeting, lambda other, name=name: 0.5 if other == name else 1.0)
        faster.append(
            {
                "name": name,
                "ms": round(spent[name], 3),
                "share": round(spent[name] / whole, 4),
                "ranks": sorted(ranks[name]),
                "total_ms": round(end - began, 3),
            }
        )
    return {
        "step": step,
        "begin_ms": round(began, 3),
        "total_ms": round(whole, 3),
        "path": [[part.rank, part.name, round(part.start, 3), round(part.end, 3)] for part in path],
        "faster": faster,
        "text": _sentence(step, whole, faster) + _counted(len({part.rank for part in parts}), num_ranks),
    }


def _sentence(step: int, whole_ms: float, faster: list[dict[str, Any]]) -> str:
    if not faster:
        return f"Step {step} has no instruction on record."
    top = faster[0]
    best = min(faster, key=lambda row: row["total_ms"])
    where = f"rank{'s' * (len(top['ranks']) > 1)} {', '.join(map(str, top['ranks'][:8]))}"
    text = (
        f"{top['name']} bounds step {step}: {top['share']:.0%} of its {duration(whole_ms / 1e3)} wait for it "
        f"on {where}. Were it twice as fast, the step would take {duration(top['total_ms'] / 1e3)}."
    )
    if best is not top:
        text += f" Most would be won by a faster {best['name']}: {duration(best['total_ms'] / 1e3)}."
    return text


def _counted(shown: int, num_ranks: int) -> str:
    if num_ranks <= shown:
        return ""
    return (
        f" The path is that of all {num_ranks} ranks; what a faster instruction would change is computed "
        f"with the {shown} that others waited for most, so it may be less."
    )
