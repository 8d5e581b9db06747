"""Transport: moves rows between layouts, from rank to rank within the route's own process group.

A reshard has three parts, each at a fixed position on every rank of the route:
1. all ranks agree on a few numbers, among them whether they have brought rows the same way before;
2. if not, they find out which rows go where, and from whom rows come to each (siirl.data.transfer_plan);
3. ranks that trade send each other parcels: ids, and the columns side by side, object columns as JSON.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.compiler.plan import RoutePlan
from siirl.data.assign import RowCost, split_weights
from siirl.data.header import ColumnSpec, Header, Specs, check_of, common_specs
from siirl.data.parcels import Parcel, join, pack, unpack
from siirl.data.route_comm import RouteComm, RouteSides, sides_of
from siirl.data.store import Column, FieldStore
from siirl.data.transfer_plan import Agreed, TransferPlan, plan_transfer
from siirl.errors import DagError
from siirl.parallel.process_groups import ProcessGroupManager, name_ranks
from siirl.types import FieldKey, Layout

NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Brought:
    """How rows came from one layout to another: so columns that follow find their way, there or back."""

    source_ids: np.ndarray | None
    """This rank's there; None: the layout is not on it."""
    target_ids: np.ndarray | None
    leaving: dict[int, np.ndarray]
    """See TransferPlan."""
    arrived: dict[int, np.ndarray]
    """Source shard -> the positions of its rows among those of this rank in the target."""

    def back(self) -> "Brought":
        return Brought(self.target_ids, self.source_ids, self.arrived, self.leaving)


class Transport:
    """Executes the reshards of a plan on this rank. sent_bytes: what left this rank since the start."""

    def __init__(self, groups: ProcessGroupManager, device: torch.device, row_cost: RowCost):
        """device: where rows are packed and sent from: CUDA means NCCL, the CPU gloo."""
        self.sent_bytes = 0
        self.pairwise = device.type == "cpu"
        """Parcels go from rank to rank; else in one all-to-all, as NCCL connects whole groups."""
        self._groups = groups
        self._device = device
        self._row_cost = row_cost

    def exchange(
        self, store: FieldStore, keys: Sequence[FieldKey], route: RoutePlan, source: Layout, target: Layout
    ) -> None:
        """Copy columns from layout route.source to layout route.target in the stores of the route's ranks.

        Collective over route.ranks, the union of both layouts' ranks; all pass the same keys. Rows stay
        where the target layout already has them, by the row_id there of keys[0].agent, else of an agent whose
        rows pair up with its own. Into an empty layout they go by target.split, in ascending row_id on each
        shard; row_id and group_id (or the lengths) of keys[0].agent must then be in the source layout. Ranks
        of one target shard get the same rows. Columns of unequal width are padded as FIELDS declares (other
        fields: right, zero). Columns that other ranks have sent from a GPU land on the transport's device,
        others on the CPU, and their object values have gone through JSON. Where a rank's rows are those that
        it had, columns are shared as they are. DagError if the ranks' rows contradict each other;
        DeadlineError after the groups' timeout; AssertionError for columns in the target without a row_id,
        beside which rows would be assigned anew.
        """
        talk = self._talk(route)
        sides = sides_of(source, target, talk.rank)
        columns = [store.column(key, route.source) for key in keys] if sides.source_shard is not None else []
        specs = tuple(ColumnSpec.of(key.name, column) for key, column in zip(keys, columns, strict=False))
        mine = self._header(store, keys[0].agent, route, sides)
        known = _known(store, mine, route, sides)
        agreed = _agree(mine, specs, known, keys, talk)
        if agreed.known and known is not None:
            transfer = TransferPlan(known.leaving, tuple(known.arrived))
        else:
            transfer = plan_transfer(mine, agreed, sides, talk, self._row_cost)
        parts = self._bring(columns, specs, mine.row_id, transfer, sides, talk)
        if not set(target.ranks) <= set(source.ranks):
            specs = talk.donated(specs, agreed.donor)
        row_id, arrived = None, {}
        if sides.target_shard is not None:
            columns, row_id, arrived = join(
                parts, columns, specs, len(mine.row_id), mine.held, self._device, target.rowset
            )
            for agent in dict.fromkeys(key.agent for key in keys):
                theirs = {
                    key.name: column for key, column in zip(keys, columns, strict=True) if key.agent == agent
                }
                store.put(TensorDict(theirs, batch_size=[len(row_id)]), agent, route.target, theirs)
        own = None if sides.source_shard is None else mine.row_id
        store.routes[route.source, route.target] = Brought(own, row_id, transfer.leaving, arrived)

    def _talk(self, route: RoutePlan) -> RouteComm:
        return RouteComm(self._groups, route)

    def _header(self, store: FieldStore, agent: int, route: RoutePlan, sides: RouteSides) -> Header:
        """This rank's rows."""

        def column(name: str) -> np.ndarray | None:
            key = FieldKey(agent, name), route.source
            return store.column(*key).cpu().numpy() if key in store else None

        row_id = np.empty(0, dtype=np.int64)
        if sides.source_shard is not None:
            row_id = store.column(FieldKey(agent, "row_id"), route.source).cpu().numpy()
        weight = split_weights(sides.target.split, row_id, column)
        held = None if sides.target_shard is None else _order(store, agent, route)
        return Header(row_id, weight, held)

    def _bring(
        self,
        columns: Sequence[Column],
        specs: Specs,
        row_id: np.ndarray,
        transfer: TransferPlan,
        sides: RouteSides,
        talk: RouteComm,
    ) -> dict[int, Parcel]:
        """The rows of my target shard, by source shard; those that this rank has already are not packed."""
        outgoing: dict[int, Tensor] = {}
        for shard, positions in transfer.leaving.items():
            if receivers := sides.receivers(shard):
                packed = pack(columns, specs, row_id, positions, self._device)
                self.sent_bytes += packed.row_bytes * len(receivers)
                outgoing |= dict.fromkeys(receivers, packed.data)
        parts: dict[int, Parcel] = {}
        senders: dict[int, int] = {}
        for shard in transfer.coming:
            if shard != sides.source_shard:
                senders[sides.first[shard]] = shard
            else:
                own = next(part for to, part in transfer.leaving.items() if to == sides.target_shard)
                parts[shard] = Parcel(row_id[own], specs, columns, own)
        trades = np.array([bool(outgoing or senders)], dtype=np.int64)
        if self.pairwise or talk.reduce(trades, dist.ReduceOp.MAX)[0]:
            for rank, data in talk.swap(outgoing, [*senders], "rows", self._device, self.pairwise).items():
                parts[senders[rank]] = unpack(data)
        return dict(sorted(parts.items()))


def _agree(
    mine: Header, specs: Specs, known: Brought | None, keys: Sequence[FieldKey], talk: RouteComm
) -> Agreed:
    """One all-reduce of a few words. DagError on all ranks if they are at different reshards, or have columns
    that cannot be joined."""
    num, route = len(mine.row_id), talk.route
    step = zlib.crc32(f"{route.name} {[str(key) for key in keys]}".encode())
    check = check_of(specs)
    words = [
        step,
        -step,
        check if num else NEVER,
        -check if num else NEVER,
        known is None,
        mine.held is not None,
        num,
        len(mine.words),
        mine.row_id.max() if num else NEVER,
        -mine.row_id.min() if num else NEVER,
        (num + 1 << 32) - talk.rank if specs else 0,
    ]
    words = talk.reduce(np.array(words, dtype=np.int64), dist.ReduceOp.MAX)
    if words[0] != -words[1]:
        raise DagError(
            f"route {route.name}: {name_ranks(route.ranks)} are not at the same reshard of the same columns. "
            "All ranks must run the same plan."
        )
    if words[6] and words[2] != -words[3]:
        seen = talk.gather_specs(specs if num else ())
        common_specs(seen, [rank for rank, theirs in seen.items() if theirs])
    unknown, held, most_rows, num_words, last, first, donor = words[4:].tolist()
    return Agreed(not unknown, bool(held), most_rows, num_words, -first, last, -donor % (1 << 32))


def _known(store: FieldStore, mine: Header, route: RoutePlan, sides: RouteSides) -> Brought | None:
    """How these very rows came there, or back, before; None where this rank knows no such thing."""
    there = store.routes.get((route.source, route.target))
    back = store.routes.get((route.target, route.source))
    for found in (there, back and back.back()):
        if (
            found is not None
            and (sides.source_shard is None or _equal(found.source_ids, mine.row_id))
            and (sides.target_shard is None or _equal(found.target_ids, mine.held))
        ):
            return found
    return None


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def _order(store: FieldStore, agent: int, route: RoutePlan) -> np.ndarray | None:
    """The row ids that this rank has in the target of a route, which rows that come follow; None if empty."""
    there = store.fields(route.target)
    orders = [key for key in there if key.name == "row_id"]
    assert orders or not there, (
        f"route {route.name}: layout {route.target!r} holds {', '.join(map(str, there))} without row_id: "
        "rows that come would move again, and columns of one row be those of different rows. A plan keeps "
        "the row_id of a layout until the last reshard into it, so this is a bug of siirl."
    )
    if not orders:
        return None
    own = FieldKey(agent, "row_id")
    return store.column(own if own in orders else orders[0], route.target).cpu().numpy()
