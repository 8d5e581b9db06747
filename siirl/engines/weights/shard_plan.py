"""Which rank sends which rectangles of the weights to whom, so that no tensor is whole on the way.

Each receiver gets what it keeps from those who have it. Where several have the same, copies of a model, who
sends is chosen so that the rank that sends the most sends as little as it can: what the same ranks could send
is poured over them like water, again and again until nothing moves. Loads whose squares have the least sum
have the least maximum, too (Fujishige, "Lexicographically Optimal Base of a Polymatroid with Respect to a
Weight Vector", 1980). Where receivers want more copies than their senders could send at the pace at which
each of them can receive, each gets a share of what they want alike, and sends it on to the others. Tensors
that lie alike on both sides are planned together, so a plan has some ten thousand lines for a model of 671
billion parameters.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]
"""A rectangle of a tensor: where it begins and ends, along each axis."""
Ranks = tuple[int, ...]
SWEEPS = 100
"""After so many times pouring has ended; it does after a few."""
SETTLED = 1e-3
"""Of the largest load: what still moves when pouring ends."""
RELAYED = 1.25
"""Receivers send on what they get where else the busiest sender sent so many times what one receives."""


@dataclass(frozen=True)
class AlikeTensors:
    """Tensors of one shape and type that lie on the same ranks in the same rectangles, on both sides."""

    names: tuple[str, ...]
    item_bytes: int
    held: Mapping[Box, Ranks]
    """Rectangles that do not overlap -> the ranks that have each."""
    wanted: Mapping[Box, Ranks]
    """Rectangles -> the ranks that keep each."""


class Transfer(NamedTuple):
    """A rectangle of some tensors in a row, from a rank to another one, or to itself."""

    group: int
    """Which AlikeTensors."""
    first: int
    count: int
    """Its tensors from `first` on."""
    box: Box
    source: int
    target: int
    num_bytes: int
    """Of all of them."""
    relayed: Ranks = ()
    """To these the target sends it on."""


class _Need(NamedTuple):
    """A rectangle that a rank wants of each tensor of a group, and who has it."""

    group: int
    first: int
    count: int
    """Its tensors from `first` on."""
    box: Box
    target: int
    sources: Ranks
    item: int
    """Its bytes of one tensor."""
    relayed: Ranks = ()
    """See Transfer."""


def plan_transfers(groups: Sequence[AlikeTensors]) -> list[Transfer]:
    """Who sends what to whom. ValueError if something that is wanted is nowhere.

    What a rank has itself it takes from there. All ranks make the same plan of the same groups.
    """
    transfers = planned(groups, relays=False)
    sent, received = largest_loads(transfers)
    if sent > RELAYED * received:
        relayed = planned(groups, relays=True)
        return relayed if max(largest_loads(relayed)) < sent else transfers
    return transfers


def planned(groups: Sequence[AlikeTensors], relays: bool) -> list[Transfer]:
    """See plan_transfers. relays: receivers that want the same send it on; else all comes from who has it."""
    by_sources: dict[Ranks, list[_Need]] = defaultdict(list)
    transfers: list[Transfer] = []
    given: dict[int, int] = defaultdict(int)
    for number, group in enumerate(groups):
        for need in _needs(number, group, given if relays else None):
            if need.target in need.sources:
                transfers.append(_transfer(need, need.first, need.count, need.target))
            else:
                by_sources[need.sources].append(need)
    sums = {sources: sum(need.item * need.count for need in needs) for sources, needs in by_sources.items()}
    shares = _poured(sums)
    for sources, needs in by_sources.items():
        transfers += _assigned(needs, [shares[sources][rank] for rank in sources])
    return transfers


def largest_loads(transfers: Iterable[Transfer]) -> tuple[int, int]:
    """Bytes that the busiest rank sends, and that the busiest one receives."""
    sent, received = defaultdict(int), defaultdict(int)
    for one in transfers:
        if one.source != one.target:
            sent[one.source] += one.num_bytes
            received[one.target] += one.num_bytes
            sent[one.target] += one.num_bytes * len(one.relayed)
            for rank in one.relayed:
                received[rank] += one.num_bytes
    return max(sent.values(), default=0), max(received.values(), default=0)


def overlap(one: Box, other: Box) -> Box | None:
    """The rectangle that two have in common; None: there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(begin < end for begin, end in common) else None


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def box_size(box: Box) -> int:
    """Its elements."""
    return math.prod(end - begin for begin, end in box)


def _needs(number: int, group: AlikeTensors, given: dict[int, int] | None) -> Iterator[_Need]:
    """given: bytes that each rank sends on so far, where ranks do."""
    for wanted, targets in group.wanted.items():
        found = 0
        for held, sources in group.held.items():
            if (box := overlap(wanted, held)) is None:
                continue
            found += box_size(box)
            others = tuple(rank for rank in targets if rank not in sources)
            direct = targets
            if given is not None and len(others) > len(sources):
                direct = tuple(rank for rank in targets if rank in sources)
                yield from _relayed_needs(number, group, box, sources, others, given)
            for target in direct:
                yield _Need(
                    number, 0, len(group.names), box, target, sources, box_size(box) * group.item_bytes
                )
        if found != box_size(wanted):
            raise ValueError(
                f"{group.names[0]}: of the {box_size(wanted)} elements of {wanted} that ranks {targets} want "
                f"{found} are held by somebody"
            )


def _relayed_needs(
    number: int, group: AlikeTensors, box: Box, sources: Ranks, targets: Ranks, given: dict[int, int]
) -> Iterator[_Need]:
    """A rectangle that several ranks want: each gets a share, and sends it on. Tensors go to those who
    have least; of fewer tensors than ranks, parts."""
    names = len(group.names)
    for part in _parted(box, -(-len(targets) // names)):
        item, first = box_size(part) * group.item_bytes, 0
        each, more = divmod(names, len(targets))
        for place, target in enumerate(sorted(targets, key=given.__getitem__)):
            count = each + (place < more)
            if count:
                others = tuple(rank for rank in targets if rank != target)
                yield _Need(number, first, count, part, target, sources, item, others)
                given[target] += count * item
                first += count


def _parted(box: Box, parts: int) -> Iterator[Box]:
    """A rectangle in so many about equal parts, along its longest axis, or in as many as that has places."""
    axis = max(range(len(box)), key=lambda axis: box[axis][1] - box[axis][0], default=0)
    begin, end = box[axis] if box else (0, 1)
    parts = min(parts, end - begin)
    for part in range(parts):
        ends = begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts
        yield (*box[:axis], ends, *box[axis + 1 :]) if box else box


def _transfer(need: _Need, first: int, count: int, source: int) -> Transfer:
    return Transfer(need.group, first, count, need.box, source, need.target, need.item * count, need.relayed)


def _poured(sums: Mapping[Ranks, int]) -> dict[Ranks, dict[int, float]]:
    """Bytes that each of some ranks sends of what all of them have, for each such set of ranks."""
    shares = {sources: dict.fromkeys(sources, total / len(sources)) for sources, total in sums.items()}
    loads: dict[int, float] = defaultdict(float)
    for share in shares.values():
        for rank, size in share.items():
            loads[rank] += size
    for _ in range(SWEEPS):
        moved = 0.0
        for sources, total in sums.items():
            share = shares[sources]
            others = {rank: loads[rank] - share[rank] for rank in sources}
            level = _level(sorted(others.values()), total)
            for rank in sources:
                now = max(0.0, level - others[rank])
                moved = max(moved, abs(now - share[rank]))
                loads[rank], share[rank] = others[rank] + now, now
        if moved <= SETTLED * max(loads.values(), default=0.0):
            break
    return shares


def _level(ascending: list[float], amount: float) -> float:
    """How high water stands that is poured over ranks which are so full."""
    filled = 0.0
    for count, height in enumerate(ascending, 1):
        filled += height
        level = (amount + filled) / count
        if count == len(ascending) or level <= ascending[count]:
            return level
    return 0.0


def _assigned(needs: Sequence[_Need], shares: Sequence[float]) -> Iterator[Transfer]:
    """The needs of one set of ranks, in their order: up to its share the first rank sends, then the next."""
    sources = needs[0].sources
    at, left = 0, shares[0]
    for need in needs:
        first, end = need.first, need.first + need.count
        while first < end:
            fits = end - first
            if at + 1 < len(sources):
                fits = min(fits, max(0, round(left / need.item)))
            if fits:
                yield _transfer(need, first, fits, sources[at])
                first, left = first + fits, left - fits * need.item
            if first < end:
                at += 1
                left += shares[at]
