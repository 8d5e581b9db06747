"""A delay line: prompts that are loaded ahead, what there is of each, and who leaves some steps later.

Of a prompt there is a group of work: n responses (rollouts_in_flight.py), or n episodes
(episodes_in_flight.py), each of which knows the step of its first token.

With dynamic sampling a step has several rounds, and each gives the groups that the batch still lacks: the
step_size of them in the first round, as many as the filter has dropped in the next ones. So the filter never
keeps a group for a later step, a group trains in the step in which it leaves the line, and whoever leaves the
line within the bound trains within it. The last step gives the groups that were loaded first, and no others
have begun by then; prompts that a batch of the loader had too many stay unread, and are counted.

Shards load whole batches and give parts of them: the groups that leave are assigned to the shards in turn, so
that each has loaded all that it must give. All load the same batches. Where groups are dropped
(rollout.stale=drop), the shard that lacks the most says how many, and what the others have too many waits.

The bound (rollout.max_lag, L): a row that trains in step k has no token sampled before step k - L. It is
held by waiting: the groups that were begun first leave first, and a step ends only when those that stay can
leave in time, as many in each step as are sure to leave (the earliest deadline goes first). As what stays is
the surplus, at most L times as many, that is always so once all are complete. The same is asked of each round
of a step that has several: what a later one gives is not counted on.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, Protocol, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.buffer import ORDER, RowBuffer, rows_of_state
from siirl.data.loader import PromptLoader, assignment_order
from siirl.data.rows import take_rows
from siirl.errors import DataError

Oldest = Mapping[int, int]
"""Group -> the step of its oldest token; that of now if it has none yet."""


def leaving(num_open: Mapping[int, int], oldest: Oldest, batch: int) -> list[int]:
    """Of the groups that are complete, the `batch` that were begun first, ascending.

    num_open: group -> how much of it is not complete.
    """
    complete = [group for group, left in num_open.items() if not left]
    return sorted(sorted(complete, key=lambda group: (oldest[group], group))[:batch])


def is_enough(
    num_open: Mapping[int, int], oldest: Oldest, batch: int, steady: int, step: int, max_lag: int
) -> bool:
    """Whether a batch is complete, and what stays can leave in time: with `steady` groups leaving in each of
    the next steps, none has to wait until it is too old.
    """
    if not any(num_open.values()):
        return True
    chosen = leaving(num_open, oldest, batch)
    if len(chosen) < batch:
        return False
    ages = [step - oldest[group] for group in num_open.keys() - set(chosen)]
    return all(sum(age + later >= max_lag for age in ages) <= later * steady for later in range(max_lag))


class Unit(Protocol):
    """One of the n of a prompt: a response, or an episode."""

    @property
    def first_step(self) -> int | None:
        """The training step in which its first token was sampled; None without one."""
        ...


Work = TypeVar("Work", bound=Unit)


class InFlight(RowBuffer, ABC, Generic[Work]):
    """The prompts of one shard that have been loaded and not been given, and the work of each.

    Each step loads as many as it gives, the first step loads more, the last ones load less. Ranks of one
    shard keep the same prompts.
    """

    def __init__(
        self,
        max_lag: int,
        surplus: float,
        batch_size: int,
        step_size: int | None = None,
        stale: str = "wait",
    ) -> None:
        """See rollout.max_lag, rollout.surplus and rollout.stale. batch_size: prompts that the loader gives
        at once, over all shards. step_size: those that train in a step, where that is another number.
        """
        super().__init__()
        self._max_lag, self._surplus, self._batch_size = max_lag, surplus, batch_size
        self._step_size, self._stale = step_size or batch_size, stale
        self._bound = max_lag if stale == "wait" else 0  # 0: what stays need not leave in time
        self._num_given = 0  # groups that have left, over all shards
        self._dropped: list[int] = []  # sample_index of groups that were given up since the last report
        self._last_batch = 0  # number of the last batch that was loaded
        self._num_loading = self._num_leaving = self._num_active = 0  # batches; groups, of this shard
        self._wanted = 0  # groups that leave now, over all shards
        self._steady = 0  # groups of this shard that leave in every step, or more
        self._group_ids: list[int] = []
        self._told = (0, 0)
        self.work: dict[int, list[Work]] = {}
        """ORDER of a group -> its n responses or episodes, where they are kept and have begun."""

    def num_missing(self, loader: PromptLoader, step: int, last_step: int, wanted: int | None = None) -> int:
        """How many batches this shard lacks for what leaves now and the surplus; drops what is too old.

        wanted: groups that leave, over all shards, where that is not the whole of a step. Each rank of the
        node asks, in every round; collective over the ranks of a shard where groups are dropped.
        """
        if self._stale == "drop":
            self._drop(self._too_old(step))
        self._wanted = wanted or self._step_size
        owners = _owners(self._batch_size, loader.num_shards)
        window = [owners[at % self._batch_size] for at in range(self._first, self._first + self._wanted)]
        self._num_leaving = window.count(loader.shard)
        before = sum(owner < loader.shard for owner in window)
        assigned = assignment_order(self._wanted, loader.mini_batch_size)
        self._group_ids = sorted(assigned[before : before + self._num_leaving].tolist())
        self._steady = _least(owners, loader.shard, self._step_size)
        ahead = min(self._surplus, last_step - step)
        self._num_active = self._num_leaving + int(ahead * self._steady)
        needed = math.ceil(self._wanted + ahead * self._step_size)
        mine = sum(owners[(self._first + at) % self._batch_size] == loader.shard for at in range(needed))
        return max(0, math.ceil((mine - len(self.orders())) / (owners.count(loader.shard) or 1)))

    def load(self, loader: PromptLoader, num_batches: int) -> TensorDict:
        """The next batches. num_batches: the most that any shard misses, so that all that begins is trained
        and all shards have read the same."""
        self._num_loading = num_batches
        return loader.next_batch(num_batches)

    @property
    def _first(self) -> int:
        """The place in a batch of the group that leaves next, over all shards."""
        return self._num_given % self._batch_size

    def give_prompts(self, orders: Sequence[int]) -> TensorDict:
        """The prompts of the groups that leave, numbered over all shards. On all ranks of the shard."""
        out = self.remove(torch.tensor(orders, dtype=torch.int64))
        out = take_rows(out, out[ORDER].argsort()).exclude(ORDER)
        out["group_id"] = torch.tensor(self._group_ids, dtype=torch.int64)
        out["row_id"] = out["group_id"].clone()
        self._num_given += self._wanted
        return out

    def num_more(self, step: int) -> int:
        """How many groups stay; after the first round of a step, how many more than after the one before."""
        told = self._told[1] if self._told[0] == step else 0
        self._told = (step, len(self.orders()))
        return self._told[1] - told

    def drain_dropped(self) -> list[int]:
        """The sample_index of each group that was given up since the last call; -1 of rows without."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def state(self) -> dict[str, Any]:
        """See RowBuffer."""
        kept = {"num_given": self._num_given, "last_batch": self._last_batch}
        return super().state() | kept | {"batch_size": self._batch_size}

    def load_state(self, states: Sequence[dict[str, Any]], shard: int, num_shards: int) -> None:
        """See RowBuffer: of as many shards as before each goes on with its own; DataError for states of
        another batch size, and for prompts of which is not told how many have left before them.
        """
        sizes = {state.get("batch_size", self._batch_size) for state in states if state["columns"]}
        if sizes - {self._batch_size}:
            raise DataError(
                f"the checkpoint holds prompts in flight of batches of {sizes.pop()}, data.train_batch_size "
                f"is {self._batch_size} (or data.gen_batch_size, with dynamic sampling): they cannot be "
                "sharded. Resume with the batch size of before."
            )
        if any(state["columns"] and "num_given" not in state for state in states):
            raise DataError(
                "the checkpoint holds prompts in flight and not how many have left before them: another "
                "version of siirl has saved it, and some would be trained twice. Resume with that version, "
                "or start over with trainer.resume_mode=disable."
            )
        self._load_work(states)
        self._num_given = max((state.get("num_given", 0) for state in states), default=0)
        self._last_batch = max((state.get("last_batch", 0) for state in states), default=0)
        super().load_state(states, shard, num_shards)
        made = next((state for state in states if state["columns"]), None)
        if self.rows is None and made is not None:
            self.rows = take_rows(rows_of_state(made), [])

    def _admitted(self, rows: TensorDict, step: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Take the prompts that were loaded, whose group_ids go on from batch to batch; of each batch its
        number and, by group_id in it, the ORDERs of its groups. The first batch of a run has number 1.
        """
        self._last_batch = self._last_batch or step - 1
        for number in range(self._num_loading):
            part = take_rows(rows, rows["group_id"] // self._batch_size == number)
            for name in ("group_id", "row_id"):
                part[name] = part[name] % self._batch_size
            self._last_batch += 1
            slots = part["group_id"].tolist()
            self.add(part)
            orders = self._orders()[-len(part) :] if len(part) else ()
            yield self._last_batch, dict(zip(slots, orders, strict=True))
        self._num_loading = 0

    def _oldest(self, order: int, step: int) -> int:
        """The step of a group's oldest token; `step` if it has none."""
        return min(one.first_step or step for one in self.work[order])

    def _too_old(self, step: int) -> list[int]:
        """The ORDERs of the groups with a token older than the bound; equal on all ranks of a shard."""
        return [order for order in self.work if self._oldest(order, step) < step - self._max_lag]

    def _may_end(self, num_open: Mapping[int, int], oldest: Callable[[], Oldest], step: int) -> bool:
        """Whether the step may end; see is_enough. oldest: asked where enough groups are complete only."""
        complete = sum(not left for left in num_open.values())
        if complete < min(self._num_leaving, len(num_open)):
            return False
        return is_enough(num_open, oldest(), self._num_leaving, self._steady, step, self._bound)

    def _chosen(self, num_open: Mapping[int, int], step: int) -> list[int]:
        """The ORDERs of the groups that leave now; all are within the bound."""
        oldest = {order: self._oldest(order, step) for order in num_open}
        found = leaving(num_open, oldest, self._num_leaving)
        ages = [step - oldest[order] for order in found]
        assert max(ages, default=0) <= self._max_lag, f"rows of {max(ages)} steps ago"
        return found

    @abstractmethod
    def _forget(self, orders: Sequence[int]) -> None:
        """Let go of what there is of these groups besides their prompts."""

    def _drop(self, orders: Sequence[int]) -> None:
        """Give groups up, their prompts too."""
        if orders:
            self._forget(orders)
            gone = self.remove(torch.tensor(orders, dtype=torch.int64))
            numbers = gone["sample_index"].tolist() if "sample_index" in gone.keys() else [-1] * len(gone)
            self._dropped += dict(zip(gone[ORDER].tolist(), numbers, strict=True)).values()

    def _load_work(self, states: Sequence[dict[str, Any]]) -> None:
        """Take what there is of all groups besides their prompts, before they are assigned to the shards."""

    def _in_turn(self, orders: Sequence[int]) -> list[int]:
        """ORDERs as they are worked on: what was begun first comes first."""
        return sorted(orders)

    def _active(self) -> list[int]:
        """The ORDERs of the groups that are in flight: those that leave and the surplus.

        While the number of shards stays the same, what is begun has the lowest ORDERs. Assigned to others it
        may lie behind what nobody has begun, and must leave before that: later it would be too old, or left
        over.
        """
        return sorted(self._in_turn(self._orders())[: self._num_active])

    def _share(self, orders: Tensor, shard: int, num_shards: int) -> Tensor:
        """See RowBuffer: assigned in the turn in which the shards will give them."""
        owners = _owners(self._batch_size, num_shards)
        in_turn = enumerate(self._in_turn(orders.tolist()), self._first)
        mine = [order for place, order in in_turn if owners[place % self._batch_size] == shard]
        return torch.tensor(sorted(mine), dtype=torch.int64)

    def _orders(self) -> list[int]:
        return self.orders().tolist()


@functools.cache
def _owners(batch_size: int, num_shards: int) -> tuple[int, ...]:
    """Which shard has each group of a batch, in the turn in which they leave: each as evenly as it can.

    A shard has as many as the loader gives it of a batch.
    """
    counts = [batch_size * (s + 1) // num_shards - batch_size * s // num_shards for s in range(num_shards)]
    places = [(Fraction(2 * i + 1, count), shard) for shard, count in enumerate(counts) for i in range(count)]
    return tuple(shard for _, shard in sorted(places))


def _least(owners: Sequence[int], shard: int, length: int) -> int:
    """The least number of groups of a shard among so many that leave in a row."""
    mine = [owner == shard for owner in owners]
    laps, rest = divmod(length, len(mine))
    sums = [0]
    for place in range(2 * len(mine)):
        sums.append(sums[-1] + mine[place % len(mine)])
    return laps * sum(mine) + min(sums[at + rest] - sums[at] for at in range(len(mine)))
