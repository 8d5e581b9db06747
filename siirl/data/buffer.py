"""Rows that a node keeps between rounds and steps, on the rank where they were made."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.rows import DTYPES, make_rows, object_column, objects, take_rows, widened
from siirl.errors import DataError

_MOST = 1 << 20
"""More rows than there are at one place."""


def number_anew(rows: TensorDict, place_B: Tensor) -> None:
    """Replace row_id and, of an interaction, episode_id (also in extra_info), by ids that are unique.

    place_B: where what a row belongs to (its group, its draw) stands among those of all ranks, int64 [B]. The
    new ids follow (place, old id); rows of equal place and equal old episode_id stay one episode.
    """
    rows["row_id"] = _within(place_B, rows["row_id"])
    if "episode_id" not in rows.keys():
        return
    rows["episode_id"] = _within(place_B, rows["episode_id"])
    if "extra_info" in rows.keys():
        numbered = zip(objects(rows, "extra_info"), rows["episode_id"].tolist(), strict=True)
        rows.set("extra_info", object_column([info | {"episode_id": number} for info, number in numbered]))


def _within(place_B: Tensor, id_B: Tensor) -> Tensor:
    """place * _MOST + 0, 1, ... for the distinct ids at each place, ascending."""
    pair_P2, index_B = torch.unique(torch.stack([place_B, id_B], -1), dim=0, return_inverse=True)
    place_P = pair_P2[:, 0].contiguous()
    number_P = torch.arange(len(place_P)) - torch.searchsorted(place_P, place_P)
    return (place_P * _MOST + number_P)[index_B]


ORDER = "buffer_order"
"""Column of the buffer: the place of a row's group among all groups ever kept, over all ranks."""
_ROUND = 1 << 32


class RowBuffer:
    """Whole groups of rows in the order in which they came: by round, and by group_id within a round.

    Ranks that hold the same shard keep equal buffers. No communication.
    """

    def __init__(self) -> None:
        self.rows: TensorDict | None = None
        self.num_rounds = 0

    def add(self, rows: TensorDict) -> None:
        """Keep the rows of one round, maybe none; every rank calls it in every round."""
        rows = rows.clone(recurse=False)
        rows[ORDER] = rows["group_id"] + self.num_rounds * _ROUND
        self.num_rounds += 1
        self.rows = rows if self.rows is None else concat_rows([self.rows, rows])

    def orders(self) -> Tensor:
        """The ORDER of each group that this rank keeps, ascending."""
        return torch.empty(0, dtype=torch.int64) if self.rows is None else self.rows[ORDER].unique()

    def take(self, chosen: Tensor) -> TensorDict:
        """Remove and return the rows of the groups whose ORDER is in `chosen` (ascending), numbered anew.

        group_id becomes the place of the group in `chosen`; row_id and episode_id follow (group_id, old id).
        """
        out = self.remove(chosen)
        group_B = torch.searchsorted(chosen, out[ORDER].contiguous())
        number_anew(out, group_B)
        out["group_id"] = group_B
        return out.exclude(ORDER)

    def remove(self, chosen: Tensor) -> TensorDict:
        """Remove and return the rows of the groups whose ORDER is in `chosen`, with that column."""
        assert self.rows is not None, "no round was collected on this rank"
        wanted_B = torch.isin(self.rows[ORDER], chosen)
        out, self.rows = take_rows(self.rows, wanted_B), take_rows(self.rows, ~wanted_B)
        return out

    def close(self) -> None:
        """Release what is behind the rows; nothing by default."""
        return None

    def state(self) -> dict[str, Any]:
        """The rows as JSON values, for a checkpoint."""
        columns = {}
        for name in self.rows.keys() if self.rows is not None else ():
            column = self.rows.get(name)
            if isinstance(column, Tensor):
                dtype = next(known for known, kind in DTYPES.items() if kind == column.dtype)
                columns[name] = {"dtype": dtype, "values": column.tolist()}
            else:
                columns[name] = {"dtype": "object", "values": objects(self.rows, name)}
        return {"num_rounds": self.num_rounds, "columns": columns}

    def load_state(self, states: Sequence[dict[str, Any]], shard: int, num_shards: int) -> None:
        """Keep this shard's part of what the shards of an earlier run kept: whole groups, in order.

        states: those that `state` gave, in the order of the shards. Of as many shards as before each goes on
        with its own: else rows would be trained in other micro-batches, and sums be rounded otherwise.
        """
        parts = {at: rows for at, state in enumerate(states) if len(rows := rows_of_state(state))}
        self.num_rounds = max((state["num_rounds"] for state in states), default=0)
        if not parts:
            return
        if len(states) == num_shards and shard in parts:
            self.rows = parts[shard]
            return
        rows = concat_rows(list(parts.values()))
        none = torch.empty(0, dtype=torch.int64)
        is_reassigned = len(states) != num_shards
        mine = self._share(rows[ORDER].unique(), shard, num_shards) if is_reassigned else none
        self.rows = take_rows(rows, torch.isin(rows[ORDER], mine))

    def _share(self, orders: Tensor, shard: int, num_shards: int) -> Tensor:
        """The part of a shard of the ORDERs that all keep."""
        first, last = (len(orders) * s // num_shards for s in (shard, shard + 1))
        return orders[first:last]


def rows_of_state(state: dict[str, Any]) -> TensorDict:
    columns = {}
    for name, column in state["columns"].items():
        values = column["values"]
        if column["dtype"] == "object":
            columns[name] = object_column(values)
        else:
            columns[name] = torch.tensor(values, dtype=DTYPES[column["dtype"]])
    return make_rows(columns)


def concat_rows(parts: Sequence[TensorDict]) -> TensorDict:
    """Rows of equal columns, one part after the other; [B, width] columns are padded to the widest."""
    out = TensorDict({}, batch_size=[sum(len(part) for part in parts)])
    for name in parts[0].keys():
        columns = [part.get(name) for part in parts]
        if not isinstance(columns[0], Tensor):
            out.set(name, object_column([value for part in parts for value in objects(part, name)]))
            continue
        if columns[0].ndim > 1:
            width = max(column.shape[1] for column in columns)
            columns = [widened(column, name, width) for column in columns]
        out.set(name, torch.cat(columns))
    return out


def require_none(node: str, states: list[dict[str, Any]]) -> None:
    """DataError if a checkpoint holds prompts of a node that keeps none in this run: they would be lost."""
    if any(state["columns"] for state in states):
        raise DataError(
            f"the checkpoint holds prompts of node {node!r} in flight, and this run has no staleness: "
            "they would be lost. Resume with actor_rollout_ref.rollout.max_lag=1 and rollout.surplus=0, "
            "which trains them first, or with the max_lag of before."
        )
