"""Which rank sends which rectangles of the weights to whom, so that no tensor is whole on the way.

Each receiver gets what it keeps from those who have it. Where several have the same, copies of a model, who
sends is chosen so that the rank that sends the most sends as little as it can: what the same ranks could send
is poured over them like water, again and again until nothing moves. Loads whose squares have the least sum
have the least maximum, too (Fujishige, "Lexicographically Optimal Base of a Polymatroid with Respect to a
Weight Vector", 1980). Tensors that lie alike on both sides are planned together, so a plan has some ten
thousand lines for a model of 671 billion parameters.
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


class _Need(NamedTuple):
    """A rectangle that a rank wants of each tensor of a group, and who has it."""

    group: int
    box: Box
    target: int
    sources: Ranks
    item: int
    """Its bytes of one tensor."""


def plan_transfers(groups: Sequence[AlikeTensors]) -> list[Transfer]:
    """Who sends what to whom. ValueError if something that is wanted is nowhere.

    What a rank has itself it takes from there. All ranks make the same plan of the same groups.
    """
    by_sources: dict[Ranks, list[_Need]] = defaultdict(list)
    transfers: list[Transfer] = []
    for number, group in enumerate(groups):
        for need in _needs(number, group):
            if need.target in need.sources:
                transfers.append(_transfer(need, 0, len(group.names), need.target))
            else:
                by_sources[need.sources].append(need)
    sums = {
        sources: sum(need.item * len(groups[need.group].names) for need in needs)
        for sources, needs in by_sources.items()
    }
    shares = _poured(sums)
    for sources, needs in by_sources.items():
        transfers += _assigned(needs, groups, [shares[sources][rank] for rank in sources])
    return transfers


def largest_loads(transfers: Iterable[Transfer]) -> tuple[int, int]:
    """Bytes that the busiest rank sends, and that the busiest one receives."""
    sent, received = defaultdict(int), defaultdict(int)
    for one in transfers:
        if one.source != one.target:
            sent[one.source] += one.num_bytes
            received[one.target] += one.num_bytes
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


def _needs(number: int, group: AlikeTensors) -> Iterator[_Need]:
    for wanted, targets in group.wanted.items():
        found = 0
        for held, sources in group.held.items():
            if (box := overlap(wanted, held)) is not None:
                found += box_size(box)
                item = box_size(box) * group.item_bytes
                for target in targets:
                    yield _Need(number, box, target, sources, item)
        if found != box_size(wanted):
            raise ValueError(
                f"{group.names[0]}: of the {box_size(wanted)} elements of {wanted} that ranks {targets} want "
                f"{found} are held by somebody"
            )


def _transfer(need: _Need, first: int, count: int, source: int) -> Transfer:
    return Transfer(need.group, first, count, need.box, source, need.target, need.item * count)


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


def _assigned(
    needs: Sequence[_Need], groups: Sequence[AlikeTensors], shares: Sequence[float]
) -> Iterator[Transfer]:
    """The needs of one set of ranks, in their order: up to its share the first rank sends, then the next."""
    sources = needs[0].sources
    at, left = 0, shares[0]
    for need in needs:
        first, count = 0, len(groups[need.group].names)
        while first < count:
            fits = count - first
            if at + 1 < len(sources):
                fits = min(fits, max(0, round(left / need.item)))
            if fits:
                yield _transfer(need, first, fits, sources[at])
                first, left = first + fits, left - fits * need.item
            if first < count:
                at += 1
                left += shares[at]
