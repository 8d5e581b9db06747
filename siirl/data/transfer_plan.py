"""Which rows of a rank go where, and from whom rows come to it: what the ranks of a route find out together.

Where they are few, or where the target has rows already, all ranks gather the ids and lengths of all rows.
Where they are many, whole groups go by counts, and rows of equal cost by teams (siirl.data.teams).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from siirl.data import teams
from siirl.data.assign import (
    RowCost,
    assign,
    by_shard,
    goes_to,
    repeated_ids,
    shard_at,
    split_groups,
    tabulate,
)
from siirl.data.header import Header
from siirl.data.route_comm import RouteComm, RouteSides
from siirl.data.teams import Team
from siirl.errors import DagError


@dataclass(frozen=True)
class Agreed:
    """The largest of what the ranks of a route say."""

    known: bool
    """All have brought these rows before."""
    held: bool
    """One has rows in the target layout."""
    most_rows: int
    """Of a rank."""
    num_words: int
    """Of a header."""
    first_id: int
    last_id: int
    donor: int
    """A rank of the source layout with the most rows."""


@dataclass(frozen=True)
class TransferPlan:
    """For one rank."""

    leaving: dict[int, np.ndarray]
    """Target shard -> the positions of its rows among those of this rank's source shard; maybe none."""
    coming: tuple[int, ...]
    """The source shards with rows for its target shard; maybe none."""


def plan_transfer(
    mine: Header, agreed: Agreed, sides: RouteSides, talk: RouteComm, row_cost: RowCost
) -> TransferPlan:
    """Collective over the route."""
    source, target = sides.source, sides.target
    number = 1 if agreed.held else teams.num_teams(agreed.most_rows, source, target)
    if number > 1 and target.split == "group":
        found = _plan_by_counts(mine, agreed, sides, talk)
        return found or _plan_by_rows(mine, agreed, sides, talk, row_cost)
    if number > 1:
        every = teams.make_teams(source, target, number)
        return _plan_by_teams(mine, agreed, every, sides, talk, row_cost)
    return _plan_by_rows(mine, agreed, sides, talk, row_cost)


def _plan_by_rows(
    mine: Header, agreed: Agreed, sides: RouteSides, talk: RouteComm, row_cost: RowCost
) -> TransferPlan:
    """By what all ranks know of all rows."""
    words = talk.gather(mine.padded(agreed.num_words))
    headers = {rank: Header.decode(row) for rank, row in zip(talk.route.ranks, words, strict=True)}
    source, target = sides.source, sides.target
    rows = tabulate(
        {rank: headers[rank].row_id for rank in source.ranks},
        {rank: headers[rank].weight for rank in source.ranks},
        source,
    )
    held = {rank: headers[rank].held for rank in target.ranks}
    there = goes_to(assign(rows, source, target, held, row_cost), len(rows))
    leaving = by_shard(there, rows.position, rows.shard == sides.source_shard)
    return TransferPlan(leaving, tuple(np.unique(rows.shard[there == sides.target_shard]).tolist()))


def _plan_by_counts(mine: Header, agreed: Agreed, sides: RouteSides, talk: RouteComm) -> TransferPlan | None:
    """Whole groups in global order: by how many rows each shard has. None where this does not tell, as
    shards are no runs of whole groups, or where ranks of a shard have other rows."""
    group, shard = mine.weight[:, 0], sides.source_shard
    table = talk.gather(np.array([len(group), group.max(initial=-1)]).astype(np.int64))
    counts, most = table[sides.places(sides.first)].T
    ends, order = np.cumsum(counts), np.argsort(mine.row_id, kind="stable")
    begins, total = ends - counts, int(ends[-1])
    is_run = True
    if shard is not None:
        run = agreed.first_id + np.arange(begins[shard], ends[shard])
        new_groups = not len(group) or group.min() > most[:shard].max(initial=-1)
        is_run = new_groups and np.array_equal(mine.row_id[order], run)
    if talk.reduce(np.array([not is_run], dtype=np.int64), dist.ReduceOp.MAX)[0]:
        return None
    num_shards = sides.target.num_shards
    leaving: dict[int, np.ndarray] = {}
    if shard is not None:
        there = split_groups(group[order], num_shards, int(begins[shard]), total)
        first, last = _reached(begins[shard], ends[shard], total, num_shards)
        leaving = {to: order[there == to] for to in range(first, last + 1)}
    if sides.target_shard is None:
        return TransferPlan(leaving, ())
    first, last = _reached(begins, ends, total, num_shards)
    coming = np.flatnonzero((first <= sides.target_shard) & (sides.target_shard <= last))
    return TransferPlan(leaving, tuple(coming.tolist()))


def _reached(begin, end, total: int, num_shards: int):
    """The first and the last shard that rows from `begin` to `end` may go to; the last is less if none."""
    first = shard_at(2 * begin + 1, total, num_shards)
    return first, np.where(end > begin, shard_at(2 * end - 1, total, num_shards), first - 1)


def _plan_by_teams(
    mine: Header,
    agreed: Agreed,
    every: Sequence[Team],
    sides: RouteSides,
    talk: RouteComm,
    row_cost: RowCost,
) -> TransferPlan:
    """Shards of equal cost: by the rows of my teams, that of my source shard and that of my target shard, and
    what those of all teams cost."""
    firsts = _first_ids(mine, agreed, sides, talk)
    own = {team.number: team for team in every if talk.rank in team.ranks}
    rows = _own_rows(mine, agreed, own.values(), firsts, sides, talk, row_cost)
    sums = np.zeros((len(firsts) + 1, len(every)))
    for number, team in own.items():
        if team.ranks[0] == talk.rank:
            sums[:, number] = rows[number].sums(len(sums))
    sums = talk.reduce(sums, dist.ReduceOp.SUM)
    num_shards = np.array([len(team.target_shards) for team in every])
    found = [teams.trades(of_batch, num_shards) for of_batch in sums]
    pairs = sorted({(giver, taker) for of_batch in found for giver, taker, _ in of_batch})
    given = {number: teams.given(rows[number], number, found) for number in own}
    letters = {(a, b): rows[a].letter(part) for a, parts in given.items() for b, part in parts.items()}
    received = _send(letters, pairs, every, talk)
    assigned: dict[int, teams.AssignedRows] = {}
    answers: dict[tuple[int, int], np.ndarray] = {}
    for number, team in own.items():
        come = {pair: letter for pair, letter in received.items() if pair[1] == number}
        one = teams.assign_rows(
            team, rows[number], given[number], [*come.values()], sides.target, firsts, row_cost
        )
        answers |= {(number, giver): one.answer(letter) for (giver, _), letter in come.items()}
        assigned[number] = one
    replies = _send(answers, [(taker, giver) for giver, taker in pairs], every, talk)
    leaving: dict[int, np.ndarray] = {}
    coming: tuple[int, ...] = ()
    for number, team in own.items():
        one, table = assigned[number], rows[number].table
        if talk.rank in team.source.ranks:
            away = [(given[number][taker], reply) for (taker, to), reply in replies.items() if to == number]
            shard = np.concatenate([one.shard, *(table.shard[part] for part, _ in away)])
            position = np.concatenate([one.position, *(table.position[part] for part, _ in away)])
            there = np.concatenate([one.there, *(reply for _, reply in away)])
            leaving = by_shard(there, position, shard == sides.source_shard)
        if sides.target_shard in team.target_shards:
            coming = tuple(np.unique(one.shard[one.there == sides.target_shard]).tolist())
    return TransferPlan(leaving, coming)


def _own_rows(
    mine: Header,
    agreed: Agreed,
    own: Collection[Team],
    firsts: np.ndarray,
    sides: RouteSides,
    talk: RouteComm,
    row_cost: RowCost,
) -> dict[int, teams.TeamRows]:
    """The rows of my teams, by number."""
    to = [rank for team in own if talk.rank in team.source.ranks for rank in team.ranks]
    senders = sorted({rank for team in own for rank in team.source.ranks})
    words = talk.exchange(mine.padded(agreed.num_words), to, senders)
    headers = {rank: Header.decode(row) for rank, row in words.items()}
    split, near = sides.target.split, sides.near
    return {team.number: teams.team_rows(team, headers, near, split, firsts, row_cost) for team in own}


def _first_ids(mine: Header, agreed: Agreed, sides: RouteSides, talk: RouteComm) -> np.ndarray:
    """See siirl.data.teams. DagError if there are more rows than ids."""
    ids = mine.row_id if sides.is_first else mine.row_id[:0]

    def add(counts: np.ndarray) -> np.ndarray:
        return talk.reduce(counts, dist.ReduceOp.SUM)

    total = int(add(np.array([len(ids)]))[0])
    if total > agreed.last_id - agreed.first_id + 1:
        raise DagError(repeated_ids(f"of {total} rows", sides.source.rowset))
    step = sides.target.mini_batch_rows or total
    return teams.first_ids(ids, step, total, (agreed.first_id, agreed.last_id), add)


def _send(
    letters: Mapping[tuple[int, int], np.ndarray],
    pairs: Sequence[tuple[int, int]],
    every: Sequence[Team],
    talk: RouteComm,
) -> dict[tuple[int, int], np.ndarray]:
    """Letters of one team to another, (from, to): those to mine, sorted. pairs: of all ranks.

    Each rank of a team gets one from one rank of the other, as all of these have the same.
    """
    outgoing: dict[int, list[np.ndarray]] = {}
    received: dict[tuple[int, int], np.ndarray] = {}
    senders: set[int] = set()
    for pair in pairs:
        ranks, others = every[pair[0]].ranks, every[pair[1]].ranks
        for place, other in enumerate(others):
            sender = ranks[place % len(ranks)]
            if sender == other == talk.rank:
                received[pair] = letters[pair]
            elif sender == talk.rank:
                outgoing.setdefault(other, []).append(
                    np.concatenate([[*pair, len(letters[pair])], letters[pair]])
                )
            elif other == talk.rank:
                senders.add(sender)
    data = {
        rank: torch.from_numpy(np.concatenate(parts)).view(torch.uint8) for rank, parts in outgoing.items()
    }
    for blob in talk.swap(data, sorted(senders), "headers").values():
        words = blob.numpy().view(np.int64)
        while len(words):
            giver, taker, length = words[:3].tolist()
            received[giver, taker] = words[3 : 3 + length]
            words = words[3 + length :]
    return dict(sorted(received.items()))
