"""Which rank gets which row: pure functions of row ids, groups and lengths, the same on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from siirl.data.balance import NOWHERE, assign_groups, balance
from siirl.errors import DagError
from siirl.types import Layout

RowCost = Callable[[np.ndarray], np.ndarray]
"""Tokens [N] -> cost [N]; the engines' own, handed in because data does not import algorithms."""


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
                f"(shard {shard}), but have row_id {some(row_id[first[shard]])} and {some(row_id[rank])}: "
                "an op gave different results on ranks that share a shard."
            )
    ids = np.concatenate([row_id[rank] for rank in first])
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    if len(repeated := ids[1:][ids[1:] == ids[:-1]]):
        raise DagError(repeated_ids(some(repeated), source.rowset))
    counts = [len(row_id[rank]) for rank in first]
    return RowTable(
        ids,
        np.concatenate([weight[rank] for rank in first])[order],
        np.repeat(np.arange(len(first)), counts)[order],
        np.concatenate([np.arange(count) for count in counts])[order],
    )


def assign(
    rows: RowTable,
    source: Layout,
    target: Layout,
    held: Mapping[int, np.ndarray | None],
    row_cost: RowCost,
) -> list[np.ndarray]:
    """The rows of each target shard, as indices into `rows`.

    held: target rank -> row ids that it already has in the target layout, which then stay as they are; None
    on all ranks when the layout is empty. Then rows go by target.split, ascending on each shard. Where they
    are balanced, they stay on ranks that have them as far as that goes. A row of unknown length (weight -1)
    costs 1.
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
        shard = _balance_batches(rows, source, target, row_cost)
    order = np.argsort(shard, kind="stable")
    return np.split(order, np.searchsorted(shard[order], np.arange(1, target.num_shards)))


def _balance_batches(rows: RowTable, source: Layout, target: Layout, row_cost: RowCost) -> np.ndarray:
    """The shard of each row [N]: of about equal cost in every mini-batch."""
    cost, group, shared = row_costs(rows.row_id, rows.weight, target.split, row_cost)
    near = homes(source, target)
    shard = np.zeros(len(rows), dtype=np.int64)
    step = target.mini_batch_rows or max(len(rows), 1)
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        mine = cost[part], group[part], shared[part]
        shard[part] = balance(*mine, starts(*mine, rows.shard[part], near), target.num_shards)
    return shard


def row_costs(
    row_id: np.ndarray, weight: np.ndarray, split: str, row_cost: RowCost
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What rows are balanced by, [n] each: their cost, their group, and the cost that rows of a group share.

    weight: see RowTable.
    """
    tokens = weight[:, 0]
    cost = np.where(tokens < 0, 1, row_cost(np.maximum(tokens, 0)))
    if split == "cost":
        return cost, row_id, np.zeros_like(cost)
    return cost, weight[:, 1], np.where(tokens < 0, 0, row_cost(np.maximum(weight[:, 2], 0)))


def homes(source: Layout, target: Layout) -> list[tuple[int, ...]]:
    """Of each source shard, the target shards of ranks that hold it: its rows need not move to get there."""
    there = dict(zip(target.ranks, target.shards, strict=True))
    found: list[set[int]] = [set() for _ in range(source.num_shards)]
    for rank, shard in zip(source.ranks, source.shards, strict=True):
        if rank in there:
            found[shard].add(there[rank])
    return [tuple(sorted(shards)) for shards in found]


def starts(
    cost: np.ndarray,
    group: np.ndarray,
    shared: np.ndarray,
    shard: np.ndarray,
    near: Sequence[tuple[int, ...]],
) -> np.ndarray:
    """The target shard that has each row already, NOWHERE if none has; of several, balanced over these.

    shard: the source shard of each row. near: homes.
    """
    start = np.array([shards[0] if shards else NOWHERE for shards in near])[shard]
    for of, shards in enumerate(near):
        if len(shards) > 1 and len(mine := np.flatnonzero(shard == of)):
            assigned = assign_groups(cost[mine], group[mine], shared[mine], len(shards))
            start[mine] = np.array(shards)[assigned]
    return start


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


def split_groups(
    group_id: np.ndarray, num_shards: int, first_row: int = 0, total: int | None = None
) -> np.ndarray:
    """The shard of each row [N]: contiguous runs of whole groups, cut as near to N/num_shards rows as can be.

    group_id: [N] int64, of rows sorted by row_id; the rows of a group need not be adjacent. Groups are taken
    in the order of their first rows. first_row, total: where these are part of `total` rows, how many come
    before them.
    """
    total = len(group_id) if total is None else total
    _, first, group_of_row, size = np.unique(
        group_id, return_index=True, return_inverse=True, return_counts=True
    )
    in_order = np.argsort(first)
    size = size[in_order]
    shard_of_group = np.empty(len(size), dtype=np.int64)
    shard_of_group[in_order] = shard_at(2 * (first_row + np.cumsum(size)) - size, total, num_shards)
    return shard_of_group[group_of_row]


def shard_at(twice_middle: np.ndarray, total: int, num_shards: int) -> np.ndarray:
    """The shard of groups with these middles: that before shard s is cut at row s * total / num_shards."""
    return np.searchsorted(2 * total * np.arange(1, num_shards), twice_middle * num_shards, side="right")


def first_ranks(layout: Layout) -> list[int]:
    """The lowest rank of each shard, by shard: the one that sends its rows."""
    first: dict[int, int] = {}
    for rank, shard in zip(layout.ranks, layout.shards, strict=True):
        first[shard] = min(rank, first.get(shard, rank))
    return [first[shard] for shard in range(layout.num_shards)]


def goes_to(wanted: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """The target shard of each row [N] of an assignment."""
    shard = np.empty(num_rows, dtype=np.int64)
    for number, part in enumerate(wanted):
        shard[part] = number
    return shard


def by_shard(shard: np.ndarray, position: np.ndarray, mine: np.ndarray) -> dict[int, np.ndarray]:
    """Shard -> the positions of the rows that are `mine` and go there."""
    shard, position = shard[mine], position[mine]
    order = np.argsort(shard, kind="stable")
    shards, first = np.unique(shard[order], return_index=True)
    return dict(zip(shards.tolist(), np.split(position[order], first[1:]), strict=len(shards) > 0))


def repeated_ids(row_id: str, rowset: str) -> str:
    """What is wrong with rows of one number."""
    return (
        f"row_id {row_id} of {rowset!r} occur more than once: rows are told apart by row_id. An op that "
        "makes new rows must number them."
    )


def some(row_id: np.ndarray) -> str:
    """A few ids, for messages."""
    shown = ", ".join(map(str, row_id[:5].tolist()))
    return f"{shown}, ... ({len(row_id)} rows)" if len(row_id) > 5 else shown or "none"
