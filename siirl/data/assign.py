"""Which rank gets which row: pure functions of row ids, groups and lengths, the same on every rank."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from siirl.errors import DagError
from siirl.types import Layout


@dataclass(frozen=True)
class RowTable:
    """All rows of a source layout, sorted by row_id: [N] each."""

    row_id: np.ndarray
    weight: np.ndarray
    """What the target's split asks for of each row, [N, k]: (group_id), (tokens), or (tokens, group_id,
    tokens of the prompt). Tokens are -1 where they are not known."""
    shard: np.ndarray
    """The source shard that holds it."""
    position: np.ndarray
    """Which row of that shard it is."""

    def __len__(self) -> int:
        return len(self.row_id)


def split_weights(split: str, row_id: np.ndarray, column: Callable[[str], np.ndarray | None]) -> np.ndarray:
    """RowTable.weight of some rows, [n, k], for a target of this split.

    column: a column of these rows by name, None where there is none. Rows whose group_id is not known are
    taken for groups of their own.
    """
    group = column("group_id") if split != "cost" else None
    group = row_id if group is None else group
    if split == "group":
        return group[:, None]
    prompt, response = column("prompt_length"), column("response_length")
    known = [lengths for lengths in (prompt, response) if lengths is not None]
    tokens = sum(known) if known else np.full(len(row_id), -1)
    if split == "cost":
        return tokens[:, None]
    return np.stack([tokens, group, np.zeros_like(tokens) if prompt is None else prompt], 1)


def tabulate(row_id: Mapping[int, np.ndarray], weight: Mapping[int, np.ndarray], source: Layout) -> RowTable:
    """The rows of `source`, from what each of its ranks holds (rank -> [n]).

    DagError if two ranks of one shard hold different rows, or if a row_id occurs twice.
    """
    first = first_ranks(source)
    for rank, shard in zip(source.ranks, source.shards, strict=True):
        if not np.array_equal(row_id[rank], row_id[first[shard]]):
            raise DagError(
                f"ranks {first[shard]} and {rank} should hold the same rows of {source.rowset!r} "
                f"(shard {shard}), but have row_id {_some(row_id[first[shard]])} and {_some(row_id[rank])}: "
                "an op gave different results on ranks that share a shard."
            )
    ids = np.concatenate([row_id[rank] for rank in first])
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    if len(repeated := ids[1:][ids[1:] == ids[:-1]]):
        raise DagError(
            f"row_id {_some(repeated)} of {source.rowset!r} occur more than once: rows are told apart by "
            "row_id. An op that makes new rows must number them."
        )
    counts = [len(row_id[rank]) for rank in first]
    return RowTable(
        ids,
        np.concatenate([weight[rank] for rank in first])[order],
        np.repeat(np.arange(len(first)), counts)[order],
        np.concatenate([np.arange(count) for count in counts])[order],
    )


def assign(
    rows: RowTable,
    target: Layout,
    held: Mapping[int, np.ndarray | None],
    row_cost: Callable[[np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    """The rows of each target shard, as indices into `rows`.

    held: target rank -> row ids that it already has in the target layout, which then stay as they are; None
    on all ranks when the layout is empty. Then rows go by target.split, ascending on each shard; that
    depends on ids and weights alone. A row of unknown length (weight -1) costs 1.
    """
    filled = {rank: row_id for rank, row_id in held.items() if row_id is not None}
    if filled and len(filled) < len(held):
        raise DagError(
            f"a layout of {target.rowset!r} has rows on ranks {sorted(filled)} and none yet on "
            f"{sorted(set(held) - set(filled))}: all ranks must run the same plan."
        )
    if filled:
        return _assign_as_held(rows, filled, target)
    if target.split == "group":
        shard = split_groups(rows.weight[:, 0], target.num_shards)
    else:
        tokens = rows.weight[:, 0]
        cost = np.where(tokens < 0, 1, row_cost(np.maximum(tokens, 0)))
        if target.split == "cost":
            shard = split_costs(cost, target.num_shards, target.mini_batch_rows)
        else:
            _, group, prompt = rows.weight.T
            shared = np.where(tokens < 0, 0, row_cost(np.maximum(prompt, 0)))
            shard = split_prompts(cost, group, shared, target.num_shards, target.mini_batch_rows)
    order = np.argsort(shard, kind="stable")
    return np.split(order, np.searchsorted(shard[order], np.arange(1, target.num_shards)))


def _assign_as_held(rows: RowTable, held: Mapping[int, np.ndarray], target: Layout) -> list[np.ndarray]:
    """The rows of each target shard, given the row_ids that its ranks already hold there (rank -> [n])."""
    parts = [held[rank] for rank in first_ranks(target)]
    everything = np.concatenate(parts)
    if len(everything) != len(rows) or not np.array_equal(np.sort(everything), rows.row_id):
        raise DagError(
            f"a layout of {target.rowset!r} already holds {len(everything)} rows, others than the "
            f"{len(rows)} that arrive: columns of one layout must have the same rows."
        )
    return [np.searchsorted(rows.row_id, part) for part in parts]


def split_groups(group_id: np.ndarray, num_shards: int) -> np.ndarray:
    """The shard of each row [N]: contiguous runs of whole groups, cut as near to N/num_shards rows as can be.

    group_id: [N] int64, of rows sorted by row_id; the rows of a group need not be adjacent. Groups are taken
    in the order of their first rows.
    """
    _, first, group_of_row, size = np.unique(
        group_id, return_index=True, return_inverse=True, return_counts=True
    )
    in_order = np.argsort(first)
    size = size[in_order]
    twice_middle = 2 * np.cumsum(size) - size
    # The cut before shard s belongs at row s*N/num_shards; a group goes to the side where its middle row is.
    cuts = 2 * len(group_id) * np.arange(1, num_shards)
    shard_of_group = np.empty(len(size), dtype=np.int64)
    shard_of_group[in_order] = np.searchsorted(cuts, twice_middle * num_shards, side="right")
    return shard_of_group[group_of_row]


def split_costs(cost: np.ndarray, num_shards: int, mini_batch_rows: int) -> np.ndarray:
    """The shard of each row [N]: shards of equal cost in every mini-batch of `mini_batch_rows` rows (0: all).

    cost: [N], of rows sorted by row_id. Longest processing time first: the costliest row goes to the shard
    with the least cost so far (then the fewest rows, then the lowest number), so the costliest shard is
    within 4/3 of the best. Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).
    """
    shard_of_row = np.zeros(len(cost), dtype=np.int64)
    if num_shards == 1 or not len(cost):
        return shard_of_row
    step = mini_batch_rows or len(cost)
    for start in range(0, len(cost), step):
        shard_of_row[start : start + step] = _deal(cost[start : start + step], num_shards)
    return shard_of_row


def _deal(cost: np.ndarray, num_shards: int) -> np.ndarray:
    """The shard of each of some items, longest processing time first."""
    loads = [(0, 0, shard) for shard in range(num_shards)]
    order = np.argsort(-cost, kind="stable")
    chosen = []
    for item_cost in cost[order].tolist():
        load, num_items, shard = loads[0]
        heapq.heapreplace(loads, (load + item_cost, num_items + 1, shard))
        chosen.append(shard)
    shard_of_item = np.empty(len(cost), dtype=np.int64)
    shard_of_item[order] = chosen
    return shard_of_item


def split_prompts(
    cost: np.ndarray, group: np.ndarray, shared: np.ndarray, num_shards: int, mini_batch_rows: int
) -> np.ndarray:
    """The shard of each row [N], where the rows of a group on one shard cost their common part once.

    shared: [N], that part of a row's cost. In each mini-batch groups are dealt whole, or in 2, 4, ... pieces,
    as rows at last: whichever leaves the costliest shard the cheapest, and of equals the fewest pieces.
    """
    shard_of_row = np.zeros(len(cost), dtype=np.int64)
    if num_shards == 1 or not len(cost):
        return shard_of_row
    step = mini_batch_rows or len(cost)
    for start in range(0, len(cost), step):
        rows = slice(start, start + step)
        shard_of_row[rows] = _deal_groups(cost[rows], group[rows], shared[rows], num_shards)
    return shard_of_row


def _deal_groups(cost: np.ndarray, group: np.ndarray, shared: np.ndarray, num_shards: int) -> np.ndarray:
    _, number, size = np.unique(group, return_inverse=True, return_counts=True)
    order = np.lexsort((-cost, number))
    place = np.empty(len(cost), dtype=np.int64)  # of a row in its group, the costliest first
    place[order] = np.arange(len(cost)) - np.repeat(np.cumsum(size) - size, size)
    best, lowest, pieces = None, None, 1
    while best is None or pieces < 2 * size.max():
        _, first, unit = np.unique(number * pieces + place % pieces, return_index=True, return_inverse=True)
        found = _deal(_once(cost, shared, unit, len(first)), num_shards)[unit]
        together = np.unique(number * num_shards + found, return_inverse=True)[1]
        of_group = _once(cost, shared, together, together.max() + 1)
        loads = np.zeros(num_shards, dtype=of_group.dtype)
        np.add.at(loads, found[np.unique(together, return_index=True)[1]], of_group)
        if lowest is None or loads.max() < lowest:
            best, lowest = found, loads.max()
        pieces *= 2
    return best


def _once(cost: np.ndarray, shared: np.ndarray, unit: np.ndarray, num_units: int) -> np.ndarray:
    """The cost of each unit [U] of rows that share a part: that of its first row, and the rest of all."""
    total = np.zeros(num_units, dtype=np.int64)
    np.add.at(total, unit, cost - shared)
    part = np.zeros(num_units, dtype=np.int64)
    np.maximum.at(part, unit, shared)
    return total + part


def first_ranks(layout: Layout) -> list[int]:
    """The lowest rank of each shard, by shard: the one that sends its rows."""
    first: dict[int, int] = {}
    for rank, shard in zip(layout.ranks, layout.shards, strict=True):
        first[shard] = min(rank, first.get(shard, rank))
    return [first[shard] for shard in range(layout.num_shards)]


@dataclass(frozen=True)
class Moves:
    """What one rank sends and gets."""

    send: list[np.ndarray]
    """For each rank of the route, the positions of my source rows that go there."""
    receive: list[int]
    """How many rows come from each."""
    order: np.ndarray
    """My i-th target row is the order[i]-th of the rows that arrive, taken by sending rank."""


def plan_moves(
    me: int,
    ranks: Sequence[int],
    rows: RowTable,
    wanted: Sequence[np.ndarray],
    source: Layout,
    target: Layout,
) -> Moves:
    """The part of rank `me` in bringing every rank of `target` the rows of its shard."""
    place = {rank: index for index, rank in enumerate(ranks)}
    send = [np.empty(0, dtype=np.int64)] * len(ranks)
    receive = [0] * len(ranks)
    order = np.empty(0, dtype=np.int64)
    for rank, shard in zip(target.ranks, target.shards, strict=True):
        sender = _senders(rows, wanted[shard], rank, source)
        send[place[rank]] = rows.position[wanted[shard][sender == me]]
        if rank == me:
            order = np.argsort(np.argsort(sender, kind="stable"))
            for origin, count in zip(*np.unique(sender, return_counts=True), strict=True):
                receive[place[int(origin)]] = int(count)
    return Moves(send, receive, order)


def _senders(rows: RowTable, wanted: np.ndarray, receiver: int, source: Layout) -> np.ndarray:
    """The rank that sends each of the `wanted` rows to `receiver`: itself if it has the row."""
    shard = rows.shard[wanted]
    sender = np.asarray(first_ranks(source))[shard]
    if receiver in source.ranks:
        sender[shard == source.shard_of(receiver)] = receiver
    return sender


def stays_in_place(rows: RowTable, wanted: Sequence[np.ndarray], source: Layout, target: Layout) -> bool:
    """Whether every target rank already holds exactly its rows, in order, as a source rank."""
    sizes = np.bincount(rows.shard, minlength=source.num_shards)
    if not set(target.ranks) <= set(source.ranks):
        return False
    shard_of = dict(zip(source.ranks, source.shards, strict=True))
    return all(
        len(wanted[new]) == sizes[old]
        and bool((rows.shard[wanted[new]] == old).all())
        and np.array_equal(rows.position[wanted[new]], np.arange(sizes[old]))
        for old, new in {
            (shard_of[rank], shard) for rank, shard in zip(target.ranks, target.shards, strict=True)
        }
    )


def _some(row_id: np.ndarray) -> str:
    shown = ", ".join(map(str, row_id[:5].tolist()))
    return f"{shown}, ... ({len(row_id)} rows)" if len(row_id) > 5 else shown or "none"
