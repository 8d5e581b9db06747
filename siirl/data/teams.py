"""How rows are assigned when they are too many for every rank to know them all: by teams. Pure functions.

The shards of a route are cut into runs, and the ranks of a run are a team: they know each other's rows, and
of the other teams only what their rows cost together. A team that has more than its part gives the surplus to
those that lack as much: surplus and lack are laid out on one line each, in the order of the teams, and what
overlaps is given. Then each team assigns the rows that it has to its shards, as a small route's ranks do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from siirl.data.assign import RowCost, RowTable, repeated_ids, row_costs, some, starts, tabulate
from siirl.data.balance import NOWHERE, SLACK, balance
from siirl.data.header import Header
from siirl.errors import DagError
from siirl.types import Layout

MOST_ROWS = 2048
"""Of a team, about: all ranks of a route with no more know every row."""
PROBES = 64
"""Values that are counted at once in the search for the first row of a mini-batch."""
ENOUGH = (SLACK - 1) / 2
"""A team gives nothing away as long as it has so little above its part."""


@dataclass(frozen=True)
class Team:
    """A run of source shards, and a run of target shards."""

    number: int
    ranks: tuple[int, ...]
    """That have one of them, sorted."""
    source: Layout
    """Its part; shards count from 0."""
    first_source: int
    """The shard that is 0 there."""
    target_shards: range


@lru_cache(maxsize=16)
def make_teams(source: Layout, target: Layout, num_teams: int) -> list[Team]:
    """num_teams: at most as many as either layout has shards."""
    least = min(source.num_shards, target.num_shards)
    cuts = least * np.arange(num_teams + 1) // num_teams
    source_cuts, target_cuts = (cuts * layout.num_shards // least for layout in (source, target))
    members: list[set[int]] = [set() for _ in range(num_teams)]
    sources: list[list[tuple[int, int]]] = [[] for _ in range(num_teams)]
    for layout, ends in ((source, source_cuts), (target, target_cuts)):
        of_shard = np.repeat(np.arange(num_teams), np.diff(ends)).tolist()
        for rank, shard in zip(layout.ranks, layout.shards, strict=True):
            members[of_shard[shard]].add(rank)
            if layout is source:
                sources[of_shard[shard]].append((rank, shard - int(ends[of_shard[shard]])))
    teams = []
    for number, parts in enumerate(sources):
        ranks, shards = zip(*parts, strict=True)
        teams.append(
            Team(
                number,
                tuple(sorted(members[number])),
                Layout(ranks, shards, source.rowset),
                int(source_cuts[number]),
                range(target_cuts[number], target_cuts[number + 1]),
            )
        )
    return teams


def num_teams(most_rows: int, source: Layout, target: Layout) -> int:
    """How many a route is cut into. most_rows: of a source shard."""
    if not most_rows:
        return 1
    rows = source.num_shards << (most_rows - 1).bit_length()
    return max(1, min(source.num_shards, target.num_shards, -(-rows // max(MOST_ROWS, 1))))


@dataclass(frozen=True)
class TeamRows:
    """The rows of a team, sorted by row_id: [N] each."""

    table: RowTable
    """Shards are those of the whole source."""
    batch: np.ndarray
    """The mini-batch."""
    cost: np.ndarray
    group: np.ndarray
    shared: np.ndarray
    """See siirl.data.balance."""
    start: np.ndarray
    """The target shard that has it already, NOWHERE if none of the team has."""

    def sums(self, num_batches: int) -> np.ndarray:
        """What its rows cost in each mini-batch."""
        return np.array([self.cost_of(np.flatnonzero(self.batch == one)) for one in range(num_batches)])

    def cost_of(self, rows: np.ndarray) -> float:
        """Of some rows together."""
        _, first = np.unique(self.group[rows], return_index=True)
        return float((self.cost[rows] - self.shared[rows]).sum() + self.shared[rows][first].sum())

    def letter(self, rows: np.ndarray) -> np.ndarray:
        """Some rows as int64 words, for another team."""
        parts = (self.table.row_id, self.table.shard, self.table.position, *self.table.weight.T)
        return np.stack([part[rows] for part in parts]).ravel()


def team_rows(
    team: Team,
    headers: Mapping[int, Header],
    near: Sequence[tuple[int, ...]],
    split: str,
    firsts: np.ndarray,
    row_cost: RowCost,
) -> TeamRows:
    """headers: of the ranks of team.source. near: siirl.data.assign.homes, of all source shards. firsts: see
    first_ids."""
    row_id, weight = (
        {rank: getattr(headers[rank], name) for rank in team.source.ranks} for name in ("row_id", "weight")
    )
    table = tabulate(row_id, weight, team.source)
    costs = row_costs(table.row_id, table.weight, split, row_cost)
    batch = np.searchsorted(firsts, table.row_id, side="right")
    within = [
        tuple(shard for shard in near[team.first_source + of] if shard in team.target_shards)
        for of in range(team.source.num_shards)
    ]
    start = np.empty(len(table), dtype=np.int64)
    for number in range(len(firsts) + 1):
        part = batch == number
        cost, group, shared = (column[part] for column in costs)
        start[part] = starts(cost, group, shared, table.shard[part], within)
    table = replace(table, shard=table.shard + team.first_source)
    return TeamRows(table, batch, *costs, start)


def trades(cost: np.ndarray, num_shards: np.ndarray) -> list[tuple[int, int, float]]:
    """Who gives how much to whom: (giver, taker, cost). cost, num_shards: of teams, [T]; of a mini-batch."""
    part = cost.sum() * num_shards / num_shards.sum()
    surplus = np.where(cost > (1 + ENOUGH) * part, cost - part, 0.0)
    line, lack = np.cumsum(surplus), np.cumsum(np.maximum(part - cost, 0))
    ends = np.unique(np.concatenate([line, lack[lack < line[-1]]]))
    amount = np.diff(ends, prepend=0.0)
    middle = ends - amount / 2
    giver = np.minimum(np.searchsorted(line, middle), len(line) - 1)
    taker = np.minimum(np.searchsorted(lack, middle), len(lack) - 1)
    kept = amount > ENOUGH * part[taker] / 10
    return list(zip(giver[kept].tolist(), taker[kept].tolist(), amount[kept].tolist(), strict=True))


def given(
    rows: TeamRows, giver: int, found: Sequence[Sequence[tuple[int, int, float]]]
) -> dict[int, np.ndarray]:
    """Taker -> which of the rows of a team go there, ascending. found: the trades of each mini-batch."""
    chosen: dict[int, list[int]] = {}
    for number, of_batch in enumerate(found):
        mine = [(taker, amount) for one, taker, amount in of_batch if one == giver]
        if mine:
            takers, amounts = zip(*mine, strict=True)
            for row, place in _picked(rows, np.flatnonzero(rows.batch == number), amounts):
                chosen.setdefault(takers[place], []).append(row)
        for taker, _ in mine:
            chosen.setdefault(taker, [])
    return {taker: np.sort(np.array(of, dtype=np.int64)) for taker, of in chosen.items()}


def _picked(rows: TeamRows, among: np.ndarray, amounts: Sequence[float]) -> list[tuple[int, int]]:
    """(row, place in `amounts`): whole groups first, the costliest that fit, then single rows."""
    left, found, stay = [float(amount) for amount in amounts], [], []
    order = among[np.argsort(rows.group[among], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(rows.group[order])) + 1)
    costs = [rows.cost_of(group) for group in groups]
    for which in sorted(range(len(groups)), key=lambda one: -costs[one]):
        fits = [place for place, room in enumerate(left) if room >= costs[which]]
        if not fits:
            stay.append(which)
            continue
        place = min(fits, key=left.__getitem__)
        left[place] -= costs[which]
        found += [(row, place) for row in groups[which].tolist()]
    part = sum(costs) * ENOUGH / 4
    for which in stay[::-1]:
        if max(left) <= part:
            break
        has = set()
        for row in groups[which].tolist():
            place = max(range(len(left)), key=left.__getitem__)
            cost = rows.cost[row] - (rows.shared[row] if place in has else 0)
            if cost <= left[place]:
                left[place] -= cost
                has.add(place)
                found.append((row, place))
    return found


@dataclass(frozen=True)
class AssignedRows:
    """The rows of a team after others have given it theirs, and it its own: [N] each, sorted by row_id."""

    row_id: np.ndarray
    shard: np.ndarray
    """The source shard."""
    position: np.ndarray
    there: np.ndarray
    """The target shard."""
    width: int
    """Of the weights."""

    def answer(self, letter: np.ndarray) -> np.ndarray:
        """Where the rows of a letter go."""
        row_id = letter.reshape(3 + self.width, -1)[0]
        return self.there[np.searchsorted(self.row_id, row_id)]


def assign_rows(
    team: Team,
    rows: TeamRows,
    given: Mapping[int, np.ndarray],
    letters: Sequence[np.ndarray],
    target: Layout,
    firsts: np.ndarray,
    row_cost: RowCost,
) -> AssignedRows:
    """To the target shards of the team. given: rows that it gives away. letters: rows that it is given.

    DagError if two rows have one id.
    """
    width = rows.table.weight.shape[1]
    stay = np.ones(len(rows.table), dtype=bool)
    for part in given.values():
        stay[part] = False
    nothing = np.empty((3 + width, 0), dtype=np.int64)
    come = np.concatenate([nothing, *(letter.reshape(3 + width, -1) for letter in letters)], axis=1)
    row_id = np.concatenate([rows.table.row_id[stay], come[0]])
    order = np.argsort(row_id, kind="stable")
    row_id = row_id[order]
    if len(repeated := row_id[1:][row_id[1:] == row_id[:-1]]):
        raise DagError(repeated_ids(some(repeated), target.rowset))

    def joined(own: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        return np.concatenate([own[stay], theirs])[order]

    costs = row_costs(come[0], come[3:].T, target.split, row_cost)
    cost, group, shared = map(joined, (rows.cost, rows.group, rows.shared), costs)
    first = team.target_shards[0]
    start = joined(rows.start, np.full(come.shape[1], NOWHERE))
    start = np.where(start == NOWHERE, NOWHERE, start - first)
    batch = np.searchsorted(firsts, row_id, side="right")
    there = np.empty(len(row_id), dtype=np.int64)
    for number in range(len(firsts) + 1):
        part = batch == number
        of_part = cost[part], group[part], shared[part], start[part]
        there[part] = first + balance(*of_part, len(team.target_shards))
    shard, position = joined(rows.table.shard, come[1]), joined(rows.table.position, come[2])
    return AssignedRows(row_id, shard, position, there, width)


def first_ids(
    row_id: np.ndarray,
    step: int,
    total: int,
    span: tuple[int, int],
    add: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """The smallest row_id of every mini-batch of `step` rows but the first one.

    row_id: of this rank, [n]; each row is given by one rank. total: how many all have. span: the smallest and
    the largest id. add: sums an int64 vector over the ranks. Collective, unless there are no gaps between
    ids; in each round PROBES numbers for a mini-batch.
    """
    rank = np.arange(step, total, step)  # of the rows that are looked for
    if span[1] - span[0] + 1 == total:
        return span[0] + rank
    ids = np.sort(row_id)
    low, high = np.full(len(rank), span[0]), np.full(len(rank), span[1] + 1)  # low <= it < high
    while len(rank) and (high - low).max() > 1:
        stride = -(-(high - low) // PROBES)
        probe = np.minimum(low[:, None] + stride[:, None] * np.arange(1, PROBES), high[:, None])
        below = add(np.searchsorted(ids, probe.ravel())).reshape(probe.shape)
        at = (below <= rank[:, None]).sum(1)  # so many probes are not above it
        edges = np.concatenate([low[:, None], probe, high[:, None]], 1)
        low, high = (np.take_along_axis(edges, (at + more)[:, None], 1)[:, 0] for more in (0, 1))
    return low
