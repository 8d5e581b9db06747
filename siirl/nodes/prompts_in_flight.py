"""Prompts that are loaded ahead and leave some steps later: the part of a delay line that all kinds share."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.buffer import ORDER, RowBuffer, rows_of_state
from siirl.data.rows import take_rows
from siirl.errors import DataError


class PromptsInFlight(RowBuffer):
    """The prompts of one shard that have been loaded and not been given.

    Each step loads one batch and gives one, the first step loads more, the last ones load nothing. Ranks of
    one shard keep the same prompts.
    """

    def __init__(self, max_lag: int, surplus: float, batch_size: int) -> None:
        """See rollout.max_lag and rollout.surplus. batch_size: prompts of a step, over all shards."""
        super().__init__()
        self._max_lag, self._surplus, self._batch_size = max_lag, surplus, batch_size
        self._slots: list[int] = []  # the group_ids of this shard in every batch
        self._num_loading = 0
        self.num_batches = 0
        """Batches that were loaded and not given, over all shards."""

    def batches_to_load(self, ahead: int, step: int, last_step: int) -> int:
        """How many batches the next step gets: one, more in the first step, none in the last ones, so that
        all that is ever loaded is trained."""
        wanted = min(1 + ahead, last_step - step + 1)
        self._num_loading = max(0, wanted - self.num_batches)
        return self._num_loading

    def give_prompts(self, orders: Sequence[int]) -> TensorDict:
        """The prompts of the groups that leave, with the group_ids of a batch. On all ranks of the shard."""
        out = self.remove(torch.tensor(orders, dtype=torch.int64))
        out = take_rows(out, out[ORDER].argsort()).exclude(ORDER)
        out["group_id"] = torch.tensor(self._slots, dtype=torch.int64)
        out["row_id"] = out["group_id"].clone()
        self.num_batches -= 1
        return out

    def state(self) -> dict[str, Any]:
        """See RowBuffer."""
        return super().state() | {"num_batches": self.num_batches, "batch_size": self._batch_size}

    def load_state(self, states: Sequence[dict[str, Any]], shard: int, num_shards: int) -> None:
        """See RowBuffer: of as many shards as before each goes on with its own; DataError for states of
        another batch size.
        """
        sizes = {state.get("batch_size", self._batch_size) for state in states if state["columns"]}
        if sizes - {self._batch_size}:
            raise DataError(
                f"the checkpoint holds prompts in flight of batches of {sizes.pop()}, data.train_batch_size "
                f"is {self._batch_size}: they cannot be dealt out. Resume with the batch size of before."
            )
        if len(states) == num_shards:
            super().load_state([states[shard]], 0, 1)
        else:
            super().load_state(states, shard, num_shards)
        made = next((state for state in states if state["columns"]), None)
        if self.rows is None and made is not None:
            self.rows = take_rows(rows_of_state(made), [])
        self._slots = list(self._slots_of(shard, num_shards))
        self.num_batches = max((state.get("num_batches", 0) for state in states), default=0)

    def _admitted(self, rows: TensorDict, step: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Take the prompts that were loaded, whose group_ids go on from batch to batch; of each batch its
        number and, by group_id in it, the ORDERs of its groups. The first batch of a run has number 1.
        """
        for number in range(self._num_loading):
            part = take_rows(rows, rows["group_id"] // self._batch_size == number)
            for name in ("group_id", "row_id"):
                part[name] = part[name] % self._batch_size
            batch = step + self.num_batches
            self.num_batches += 1
            self._slots = part["group_id"].tolist()
            self.add(part)
            yield (
                batch,
                dict(zip(self._slots, self._orders()[-len(part) :] if len(part) else (), strict=True)),
            )
        self._num_loading = 0

    def _active(self) -> list[int]:
        """The ORDERs of the groups that are in work: a batch and the surplus."""
        return self._orders()[: int((1 + self._surplus) * len(self._slots))]

    def _slots_of(self, shard: int, num_shards: int) -> range:
        """The group_ids of a shard in every batch, as the loader cuts it."""
        return range(self._batch_size * shard // num_shards, self._batch_size * (shard + 1) // num_shards)

    def _share(self, orders: Tensor, shard: int, num_shards: int) -> Tensor:
        """See RowBuffer: as many groups as the shard's part of whole batches, old and new ones."""
        if num_shards == 1:
            return orders
        slot = torch.arange(len(orders)) % self._batch_size
        return orders[torch.isin(slot, torch.tensor(self._slots_of(shard, num_shards)))]

    def _orders(self) -> list[int]:
        return self.orders().tolist()
