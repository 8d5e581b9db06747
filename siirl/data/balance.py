"""Shards of equal cost: rows stay on the shard where they are, unless it has more than its part."""

import heapq
from bisect import insort

import numpy as np

SLACK = 1.01
"""So much more than the mean, or than by assigning all rows anew, the costliest shard may cost."""
PASSES = 4
"""Exchanges between the costliest and the cheapest shard that are tried, for each shard."""
NOWHERE = -1
"""The start of a row that no shard has."""


def balance(
    cost: np.ndarray, group: np.ndarray, shared: np.ndarray, start: np.ndarray, num_shards: int
) -> np.ndarray:
    """The shard of each row [N]: of about equal cost, and as many rows as can be where they start.

    cost: [N]. group, shared: rows of a group on one shard cost `shared`, a part of their cost, once. start:
    the shard that has the row already, or NOWHERE. Rows of a group are moved together; where that does not
    balance, in 2, 4, ... pieces, at last one by one. If nothing else does, all are assigned anew
    (`assign_groups`).
    """
    if num_shards == 1 or not len(cost):
        return np.zeros(len(cost), dtype=np.int64)
    least = max(_once(cost, shared, _numbered(group)).sum() / num_shards, cost.max())
    tried: list[tuple[float, np.ndarray]] = []
    if (start != NOWHERE).all():
        tried.append((_loads(cost, group, shared, start, num_shards).max(), start))
    pieces, largest = 1, np.bincount(_numbered(group)).max()
    while pieces < 2 * largest and not (tried and tried[-1][0] <= SLACK * least):
        found = _levelled(cost, group, shared, start, num_shards, pieces, SLACK * least)
        tried.append((_loads(cost, group, shared, found, num_shards).max(), found))
        pieces *= 2
    if tried[-1][0] <= SLACK * least:
        return tried[-1][1]
    anew = assign_groups(cost, group, shared, num_shards)
    bound = SLACK * _loads(cost, group, shared, anew, num_shards).max()
    return next((found for load, found in tried if load <= bound), anew)


def assign_groups(cost: np.ndarray, group: np.ndarray, shared: np.ndarray, num_shards: int) -> np.ndarray:
    """The shard of each row, wherever it is: groups whole, or in 2, 4, ... pieces, as rows at last.

    Whichever leaves the costliest shard the cheapest, and of equals the fewest pieces. Longest processing
    time first: the costliest piece goes to the shard with the least cost so far (then the fewest pieces, then
    the lowest number), so the costliest shard is within 4/3 of the best for these pieces. Source: Graham,
    "Bounds on multiprocessing timing anomalies" (1969).
    """
    place, largest = _places(cost, _numbered(group))
    best, lowest, pieces = None, None, 1
    while best is None or pieces < 2 * largest:
        unit = _numbered(_numbered(group) * pieces + place % pieces)
        found = _assign(_once(cost, shared, unit), np.zeros(num_shards))[unit]
        load = _loads(cost, group, shared, found, num_shards).max()
        if lowest is None or load < lowest:
            best, lowest = found, load
        pieces *= 2
    return best


def _levelled(
    cost: np.ndarray,
    group: np.ndarray,
    shared: np.ndarray,
    start: np.ndarray,
    num_shards: int,
    pieces: int,
    most: float,
) -> np.ndarray:
    """`start`, less what shards have above `most`, which goes to the others in pieces of groups."""
    number = _numbered(group)
    place, _ = _places(cost, number * (num_shards + 1) + start + 1)
    unit = _numbered((number * (num_shards + 1) + start + 1) * pieces + place % pieces)
    unit_cost = _once(cost, shared, unit)
    shard = np.empty(len(unit_cost), dtype=np.int64)
    shard[unit] = start
    loads = np.bincount(shard[shard >= 0], unit_cost[shard >= 0], num_shards)
    dearest_first = np.lexsort((-unit_cost, shard))
    ends = np.searchsorted(shard[dearest_first], np.arange(num_shards + 1))
    for over in np.flatnonzero(loads > most):
        mine, kept = dearest_first[ends[over] : ends[over + 1]], 0.0
        for one, its_cost in zip(mine.tolist(), unit_cost[mine].tolist(), strict=True):
            if kept + its_cost <= most:
                kept += its_cost
            else:
                shard[one] = NOWHERE
        loads[over] = kept
    loose = np.flatnonzero(shard == NOWHERE)
    shard[loose] = _assign(unit_cost[loose], loads)
    _exchange(unit_cost, shard, num_shards, most)
    return shard[unit]


def _exchange(unit_cost: np.ndarray, shard: np.ndarray, num_shards: int, most: float) -> None:
    """Move single units from the costliest shard to the cheapest, or swap two, until none is above `most`."""
    loads = np.bincount(shard, unit_cost, num_shards)
    if loads.max() <= most:
        return
    by_shard = np.argsort(shard, kind="stable")
    ends = np.searchsorted(shard[by_shard], np.arange(1, num_shards))
    units = [part.tolist() for part in np.split(by_shard, ends)]
    for _ in range(PASSES * num_shards):
        high, low = int(loads.argmax()), int(loads.argmin())
        gap = loads[high] - loads[low]
        if loads[high] <= most:
            return
        ours, theirs = units[high], units[low]
        less = unit_cost[ours][:, None] - np.append(unit_cost[theirs], 0)  # what the costliest loses
        worth = np.minimum(less, gap - less)
        row, column = np.unravel_index(worth.argmax(), worth.shape)
        if worth[row, column] <= 0:
            return
        swapped = [theirs.pop(column)] if column < len(theirs) else []
        insort(theirs, ours.pop(row))
        for one in swapped:
            insort(ours, one)
        shard[swapped], shard[theirs] = high, low
        loads[high] -= less[row, column]
        loads[low] += less[row, column]


def _assign(unit_cost: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """The shard of each unit, longest processing time first. loads: what the shards have already."""
    heap = [(load, 0, shard) for shard, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    order = np.argsort(-unit_cost, kind="stable")
    chosen = []
    for cost in unit_cost[order].tolist():
        load, num_units, shard = heap[0]
        heapq.heapreplace(heap, (load + cost, num_units + 1, shard))
        chosen.append(shard)
    shard_of_unit = np.empty(len(unit_cost), dtype=np.int64)
    shard_of_unit[order] = chosen
    return shard_of_unit


def _loads(
    cost: np.ndarray, group: np.ndarray, shared: np.ndarray, shard: np.ndarray, num_shards: int
) -> np.ndarray:
    """What each shard costs."""
    together = _numbered(_numbered(group) * num_shards + shard)
    of_shard = np.empty(together.max() + 1, dtype=np.int64)
    of_shard[together] = shard
    return np.bincount(of_shard, _once(cost, shared, together), num_shards)


def _once(cost: np.ndarray, shared: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """The cost of each unit [U] of rows that share a part: that of one row, and the rest of all."""
    total = np.bincount(unit, cost - shared)
    order = np.argsort(unit, kind="stable")
    firsts = np.searchsorted(unit[order], np.arange(len(total)))
    return total + np.maximum.reduceat(shared[order], firsts)


def _places(cost: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, int]:
    """The place of each row in its group, the costliest first; and the size of the largest group."""
    number = _numbered(number)
    size = np.bincount(number)
    order = np.lexsort((-cost, number))
    place = np.empty(len(cost), dtype=np.int64)
    place[order] = np.arange(len(cost)) - np.repeat(np.cumsum(size) - size, size)
    return place, int(size.max())


def _numbered(values: np.ndarray) -> np.ndarray:
    """0, 1, ... for the distinct values, ascending."""
    return np.unique(values, return_inverse=True)[1]
