"""Transport: moves rows between layouts over the collectives of the route's own process group.

A reshard has three parts, each at a fixed position on every rank of the route:
1. headers: all ranks gather row ids, the group or length of each row, and the shapes of the columns (gloo);
2. every rank computes from them, alone, the same assignment of rows to ranks (siirl.data.assign);
3. if any row has to move, one all-to-all of bytes with all tensor columns of a row side by side, and one of
   JSON if there are object columns.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from siirl.compiler.plan import RoutePlan
from siirl.data.assign import Moves, assign, plan_moves, split_weights, stays_in_place, tabulate
from siirl.data.header import ColumnSpec, Header, common_specs
from siirl.data.rows import object_column, object_element, objects, widened
from siirl.data.store import Column, FieldStore
from siirl.errors import DagError, DeadlineError, WorkerError
from siirl.observe.spans import phase, waiting
from siirl.parallel.process_groups import ProcessGroupManager, name_ranks
from siirl.types import FieldKey, Layout

HEADER_WORDS = 8192
"""What the ranks of a group together gather in the first round; a second follows if a header needs more."""
LEAST_WORDS = 64
"""Of one rank: enough for about 64 rows and ten columns."""

RowCost = Callable[[np.ndarray], np.ndarray]
"""Tokens [N] -> cost [N]; the engines' own, handed in because data does not import algorithms."""


class Transport:
    """Executes the reshards of a plan on this rank. sent_bytes: what left this rank since the start."""

    def __init__(self, groups: ProcessGroupManager, device: torch.device, row_cost: RowCost):
        """device: where rows are packed and sent from: CUDA means NCCL, the CPU gloo."""
        self.sent_bytes = 0
        self._groups = groups
        self._rank = groups.rank
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
        fields: right, zero). If rows move, columns from a GPU land on the transport's device, others on the
        CPU, and object values of other ranks have gone through JSON. If none does, columns are shared as they
        are. DagError if the ranks' rows contradict each other; DeadlineError after the groups' timeout;
        AssertionError for columns in the target without a row_id, beside which rows would be dealt anew.
        """
        columns = [store.column(key, route.source) for key in keys] if self._rank in source.ranks else []
        headers = self._gather_headers(self._header(store, keys, columns, route, source, target), keys, route)
        rows = tabulate(
            {rank: headers[rank].row_id for rank in source.ranks},
            {rank: headers[rank].weight for rank in source.ranks},
            source,
        )
        held = {rank: headers[rank].held for rank in target.ranks}
        wanted = assign(rows, source, target, held, self._row_cost)
        if not stays_in_place(rows, wanted, source, target):
            specs = common_specs(headers, source.ranks)
            moves = plan_moves(self._rank, route.ranks, rows, wanted, source, target)
            columns = self._move(columns, specs, moves, route)
        if self._rank in target.ranks:
            num_rows = len(wanted[target.shard_of(self._rank)])
            for agent in dict.fromkeys(key.agent for key in keys):
                theirs = {
                    key.name: column for key, column in zip(keys, columns, strict=True) if key.agent == agent
                }
                store.put(TensorDict(theirs, batch_size=[num_rows]), agent, route.target, theirs)

    def _header(
        self,
        store: FieldStore,
        keys: Sequence[FieldKey],
        columns: list[Column],
        route: RoutePlan,
        source: Layout,
        target: Layout,
    ) -> Header:
        """This rank's header."""
        agent = keys[0].agent

        def column(name: str) -> np.ndarray | None:
            key = FieldKey(agent, name), route.source
            return store.column(*key).cpu().numpy() if key in store else None

        row_id, weight = np.empty(0, dtype=np.int64), np.empty((0, 1), dtype=np.int64)
        if self._rank in source.ranks:
            row_id = store.column(FieldKey(agent, "row_id"), route.source).cpu().numpy()
            weight = split_weights(target.split, row_id, column)
        held = _order(store, agent, route) if self._rank in target.ranks else None
        specs = tuple(ColumnSpec.of(key.name, column) for key, column in zip(keys, columns, strict=False))
        return Header(row_id, weight, held, specs)

    def _gather_headers(self, mine: Header, keys: Sequence[FieldKey], route: RoutePlan) -> dict[int, Header]:
        """The headers of all ranks of the route: one gather, or two if one does not fit into its share."""
        if len(route.ranks) == 1:
            return {self._rank: mine}
        words = mine.encode(check=crc32(f"{route.name} {[str(key) for key in keys]}".encode()))
        room = max(LEAST_WORDS, HEADER_WORDS // len(route.ranks))
        gathered = self._gather(words[:room], room, route)
        if len(np.unique(gathered[:, 1])) > 1:
            raise DagError(
                f"route {route.name}: {name_ranks(route.ranks)} are not at the same reshard of the same "
                "columns. All ranks must run the same plan."
            )
        longest = int(gathered[:, 0].max())
        if longest > room:
            gathered = self._gather(words, longest, route)
        return {rank: Header.decode(row) for rank, row in zip(route.ranks, gathered, strict=True)}

    def _gather(self, words: np.ndarray, room: int, route: RoutePlan) -> np.ndarray:
        """All ranks' words, [ranks, room] int64."""
        padded = torch.zeros(room, dtype=torch.int64)
        padded[: len(words)] = torch.from_numpy(words)
        gathered = torch.empty(len(route.ranks), room, dtype=torch.int64)
        with self._waiting(route, "headers"):
            dist.all_gather(list(gathered), padded, group=self._groups.get(route.ranks))
        return gathered.numpy()

    def _move(
        self, columns: list[Column], specs: tuple[ColumnSpec, ...], moves: Moves, route: RoutePlan
    ) -> list[Column]:
        """The columns of my target rows (none if this rank is no target). columns: [] if it is no source."""
        of_kind: dict[bool, list[int]] = {False: [], True: []}
        for place, spec in enumerate(specs):
            of_kind[spec.is_object].append(place)
        received: dict[int, Column] = {}
        for is_object, places in of_kind.items():
            if places:
                move = self._move_objects if is_object else self._move_tensors
                mine = [columns[place] for place in places] if columns else []
                moved = move(mine, [specs[place] for place in places], moves, route)
                received |= zip(places, moved, strict=True)
        return [received[place] for place in range(len(specs))]

    def _move_tensors(
        self, columns: list[Tensor], specs: list[ColumnSpec], moves: Moves, route: RoutePlan
    ) -> list[Tensor]:
        """Rows as a matrix of bytes [rows, row_bytes], all columns side by side, through one all-to-all."""
        ends = np.cumsum([spec.row_bytes for spec in specs]).tolist()
        row_bytes = ends[-1]
        leaving = torch.from_numpy(np.concatenate(moves.send))
        outgoing = torch.empty(0, row_bytes, dtype=torch.uint8, device=self._device)
        if len(leaving):
            packed = [
                _to_bytes(column.index_select(0, leaving.to(column.device)).to(self._device), spec)
                for column, spec in zip(columns, specs, strict=True)
            ]
            outgoing = torch.cat(packed, dim=1)
        arriving = outgoing.new_empty(sum(moves.receive), row_bytes)
        self._all_to_all(
            arriving.view(-1),
            outgoing.view(-1),
            [count * row_bytes for count in moves.receive],
            [len(positions) * row_bytes for positions in moves.send],
            route,
        )
        rows = arriving.index_select(0, torch.from_numpy(moves.order).to(self._device))
        return [
            _from_bytes(rows[:, end - spec.row_bytes : end], spec)
            for end, spec in zip(ends, specs, strict=True)
        ]

    def _move_objects(
        self,
        columns: list[NonTensorData | NonTensorStack],
        specs: list[ColumnSpec],
        moves: Moves,
        route: RoutePlan,
    ) -> list[NonTensorData | NonTensorStack]:
        """Object columns: the values that leave this rank as JSON; those that stay are shared."""
        elements = [_elements(column) for column in columns]
        me = route.ranks.index(self._rank)
        blobs = [
            _dump(elements, specs, positions) if len(positions) and place != me else b""
            for place, positions in enumerate(moves.send)
        ]
        arrived: list[list[NonTensorData]] = [[] for _ in specs]
        for place, blob in enumerate(self._exchange_blobs(blobs, route)):
            if place == me:
                parts = [[column[position] for position in moves.send[me]] for column in elements]
            else:
                parts = _load(blob) if blob else []
            for column, part in zip(arrived, parts, strict=False):
                column += part
        if not len(moves.order):
            return [object_column([]) for _ in specs]
        return [NonTensorStack(*[column[place] for place in moves.order]) for column in arrived]

    def _exchange_blobs(self, blobs: list[bytes], route: RoutePlan) -> list[bytes]:
        """blobs[i] goes to the i-th rank of the route; what each of them sent here. Always on the CPU."""
        sizes = torch.tensor([len(blob) for blob in blobs])
        sizes_in = torch.empty_like(sizes)
        each = [1] * len(blobs)
        self._all_to_all(sizes_in, sizes, each, each, route)
        outgoing = torch.from_numpy(np.frombuffer(bytearray(b"".join(blobs)), dtype=np.uint8))
        incoming = torch.empty(int(sizes_in.sum()), dtype=torch.uint8)
        self._all_to_all(incoming, outgoing, sizes_in.tolist(), sizes.tolist(), route)
        return [part.numpy().tobytes() for part in incoming.split(sizes_in.tolist())]

    def _all_to_all(
        self, incoming: Tensor, outgoing: Tensor, sizes_in: list[int], sizes_out: list[int], route: RoutePlan
    ) -> None:
        me = route.ranks.index(self._rank)
        self.sent_bytes += (sum(sizes_out) - sizes_out[me]) * outgoing.element_size()
        with self._waiting(route, "rows"):
            dist.all_to_all_single(
                incoming, outgoing, sizes_in, sizes_out, group=self._groups.get(route.ranks)
            )

    @contextmanager
    def _waiting(self, route: RoutePlan, what: str) -> Iterator[None]:
        """Names the route and its ranks when a collective fails or passes the deadline."""
        try:
            with phase(what), waiting():
                yield
        except RuntimeError as error:
            others = name_ranks([rank for rank in route.ranks if rank != self._rank])
            where = f"route {route.name} ({route.source} -> {route.target}): rank {self._rank}"
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                late = f"{where} waited {self._groups.timeout_s:g} s for the {what} of {others}: {error}"
                raise DeadlineError(late) from error
            raise WorkerError(f"{where} lost {others} while exchanging {what}: {error}") from error


def _order(store: FieldStore, agent: int, route: RoutePlan) -> np.ndarray | None:
    """The row ids that this rank has in the target of a route, which rows that come follow; None if empty."""
    there = store.fields(route.target)
    orders = [key for key in there if key.name == "row_id"]
    assert orders or not there, (
        f"route {route.name}: layout {route.target!r} holds {', '.join(map(str, there))} without row_id: "
        "rows that come would be dealt anew, and columns of one row be those of different rows. A plan keeps "
        "the row_id of a layout until the last reshard into it, so this is a bug of siirl."
    )
    if not orders:
        return None
    own = FieldKey(agent, "row_id")
    return store.column(own if own in orders else orders[0], route.target).cpu().numpy()


def _to_bytes(column: Tensor, spec: ColumnSpec) -> Tensor:
    """Rows as bytes, [rows, row_bytes], padded to the common width."""
    column = column.detach()
    if spec.dims:
        column = widened(column, spec.name, spec.dims[0])
    return column.reshape(len(column), math.prod(spec.dims)).contiguous().view(torch.uint8)


def _from_bytes(matrix: Tensor, spec: ColumnSpec) -> Tensor:
    shape = (len(matrix), *spec.dims)
    # Without elements, or as a part of a wider matrix, bytes have strides that no wider dtype can view.
    if matrix.numel():
        column = matrix.clone(memory_format=torch.contiguous_format).view(spec.torch_dtype).view(shape)
    else:
        column = torch.empty(shape, dtype=spec.torch_dtype, device=matrix.device)
    return column if spec.on_gpu else column.cpu()


def _elements(column: NonTensorData | NonTensorStack) -> list[NonTensorData]:
    if isinstance(column, NonTensorStack):
        return column.tensordicts
    rows = TensorDict({"values": column}, batch_size=column.batch_size)
    return list(map(object_element, objects(rows, "values")))


def _dump(elements: list[list[NonTensorData]], specs: list[ColumnSpec], positions: np.ndarray) -> bytes:
    """The values at `positions` of each column, as JSON; a value that rows share, as samples do, once.

    DagError if one is not a JSON value.
    """
    columns = []
    for column in elements:
        chosen = [column[position] for position in positions]
        distinct = {id(element): element for element in chosen}
        number = {of: place for place, of in enumerate(distinct)}
        values = [element.data for element in distinct.values()]
        columns.append((values, [number[id(element)] for element in chosen]))
    try:
        return json.dumps(columns).encode()
    except (TypeError, ValueError) as error:
        names = ", ".join(spec.name for spec in specs)
        raise DagError(
            f"a value of {names} cannot move to another rank: {error}. Object fields hold JSON values only."
        ) from error


def _load(blob: bytes) -> list[list[NonTensorData]]:
    """The columns of `_dump`, row by row."""
    columns = []
    for values, numbers in json.loads(blob):
        elements = list(map(object_element, values))
        columns.append([elements[number] for number in numbers])
    return columns
