"""Weights by shards: each rank sends what others keep of its rectangles, and gets what it keeps.

Who sends what is planned once, of what all ranks say that they hold and keep (shard_plan.py). A sync has a
number of rounds; in each all pairs of ranks are equally far with what one sends the other, so all links are
full until the end, and the parts of a tensor that several ranks have arrive at about the same time. What a
rank sends on for others it sends one round after it came. In a sync no rank has more of a tensor than its own
rectangles and two rounds' worth of others' on their way.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.engines.train.pieces import Piece
from siirl.engines.weights.bucket import DTYPES, Copies, Entry, Named, empty_bucket, pack, room, unpack
from siirl.engines.weights.shard_plan import (
    AlikeTensors,
    Box,
    Ranks,
    Transfer,
    box_size,
    largest_loads,
    overlap,
    plan_transfers,
)
from siirl.errors import WeightSyncError
from siirl.observe.spans import phase, waiting

ROUND_BYTES = 256 << 20
"""The busiest rank sends or gets about so much in a round."""
PART_BYTES = 16 << 20
"""A larger rectangle is cut."""

Pieces = Mapping[str, Sequence[Piece]]
"""Name of a tensor -> rectangles of it."""
Kept = Mapping[str, tuple[str, Sequence[Box]]]
"""Name of a tensor -> the type in which an engine keeps it, and which rectangles of it."""


class Part(NamedTuple):
    """A rectangle of one tensor."""

    name: str
    box: Box
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.box)

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.shape, self.dtype)

    @property
    def room(self) -> int:
        return room(self.entry.num_bytes)


Rounds = list[list[Part]]
"""Parts in the order in which they lie in the messages of each round."""


class Message(NamedTuple):
    """Parts side by side."""

    parts: list[Part]
    entries: list[Entry]
    size: int

    @classmethod
    def of(cls, parts: list[Part]) -> "Message":
        return cls(parts, [part.entry for part in parts], sum(part.room for part in parts))


Messages = dict[int, Message]
"""Rank of the group -> what goes there, or comes from there."""


class ShardSync:
    """This rank's part of the syncs of a trainer and the engines of some ranks."""

    def __init__(self, held: Pieces | None, kept: Kept | None, group: Any, device: str | None) -> None:
        """Collective over the group. WeightSyncError on all its ranks if something that is kept is nowhere.

        held: what the trainer has on this rank; copies of it may be on other ranks. kept: what the engine
        wants. None: this rank cannot say so, which is an error on all ranks. device: type of the trainer's;
        None: there is none here.
        """
        self._group, self._ranks = group, dist.get_process_group_ranks(group)
        self._kept = dict(kept or {})
        mine = None if held is None or kept is None else (boxes_of(held), self._kept, device)
        told: list[Any] = [None] * len(self._ranks)
        with waiting():
            dist.all_gather_object(told, mine, group=group)
        try:
            if lacking := [rank for rank, one in zip(self._ranks, told, strict=True) if one is None]:
                raise ValueError(f"ranks {lacking} do not know which parts of tensors they have")
            self.device: str = next(found for *_, found in told if found is not None)
            groups = alike([one[:2] for one in told])
            transfers = plan_transfers(groups)
        except ValueError as error:
            raise WeightSyncError(f"weights cannot be sent by shards: {error}") from error
        dtypes = {name: dtype for _, wanted, _ in told for name, (dtype, _) in wanted.items()}
        with waiting():  # a batch of messages may not be what some ranks of a group of NCCL's begin with
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self._me = dist.get_rank(group)
        self._views: tuple[Pieces, dict[tuple[int, int], list[Tensor | None]]] = {}, {}
        self._relays = any(one.relayed and one.target == self._me for one in transfers)
        self._sent, self._received = self._rounds_of(transfers, groups, dtypes)
        self.fullest_bytes = max(largest_loads(transfers))
        """That the busiest rank sends or gets from others in each sync."""
        self.whole_bytes = sum(_whole_bytes(group) for group in groups)
        """One copy of all tensors."""

    @cached_property
    def arriving(self) -> Rounds:
        """What this rank gets, also from itself, in the order in which `rounds` gives it.

        Always one object: engines see by it what they have been told.
        """
        return [[part for message in each.values() for part in message.parts] for each in self._received]

    @torch.no_grad()
    def rounds(
        self, held: Pieces, memory: Callable[[int, int], Tensor] | None = None
    ) -> Iterator[list[tuple[Part, Tensor]]]:
        """What this rank keeps, round by round: views of memory that is the next but one's. Collective over
        the group, each rank to its end.

        held: the same rectangles as when this was planned. memory: where a round's bytes are to lie, by the
        number of the round, and how many they are.
        """
        if self.device == "cuda":
            with phase("wait_for_device"):
                torch.cuda.synchronize()  # whoever wrote the weights, on whichever stream
        came: dict[Part, Tensor] = {}  # in the last round, if any of it is to be sent on
        for number, (parts, messages) in enumerate(zip(self.arriving, self._received, strict=True)):
            size = sum(message.size for message in messages.values())
            flat = memory(number, size) if memory else empty_bucket((), self.device, size)
            with phase("send_shards"):
                self._exchange(number, held, came, flat)
            entries = (entry for message in messages.values() for entry in message.entries)
            arrived = [(part, tensor) for part, (_, tensor) in zip(parts, unpack(entries, flat), strict=True)]
            came = dict(arrived) if self._relays else {}
            yield arrived

    def whole(self, held: Pieces) -> Iterator[Named]:
        """The tensors of a rank that keeps each whole, once all parts have come. Collective as `rounds`."""
        sizes = {name: box_size(box) for name, (_, (box,)) in self._kept.items()}
        found: dict[str, tuple[Tensor, int]] = {}
        for arrived in self.rounds(held):
            for part, tensor in arrived:
                if box_size(part.box) == sizes[part.name]:
                    yield part.name, tensor
                    continue
                (box,) = self._kept[part.name][1]
                whole, left = found.get(part.name) or (
                    tensor.new_empty([end for _, end in box]),
                    sizes[part.name],
                )
                whole[tuple(slice(*ends) for ends in part.box)] = tensor
                found[part.name] = whole, left - box_size(part.box)
                if found[part.name][1] == 0:
                    yield part.name, found.pop(part.name)[0]

    @torch.no_grad()
    def run(self, held: Pieces, kept: Pieces) -> None:
        """Bring what the trainer has to where this process keeps it. Collective over the group."""
        for arrived in self.rounds(held):
            copies = Copies()
            for part, tensor in arrived:
                copies.add(_place(part, kept), tensor)
            copies.run()

    def _exchange(self, number: int, held: Pieces, came: Mapping[Part, Tensor], flat: Tensor) -> None:
        """A message to each rank that gets any more, and one from each that sends any more, side by side."""
        works, at = [], 0
        for rank, message in self._received[number].items():
            into, at = flat[at : at + message.size], at + message.size
            if rank == self._me:
                self._pack((number, rank), message, held, came, into)
            else:
                works.append(dist.P2POp(dist.irecv, into, self._ranks[rank], self._group))
        for rank, message in self._sent[number].items():
            packed = empty_bucket((), self.device, message.size)
            self._pack((number, rank), message, held, came, packed)
            works.append(dist.P2POp(dist.isend, packed, self._ranks[rank], self._group))
        if works:
            with waiting():
                for work in dist.batch_isend_irecv(works):
                    work.wait()

    def _pack(
        self,
        key: tuple[int, int],
        message: Message,
        held: Pieces,
        came: Mapping[Part, Tensor],
        flat: Tensor,
    ) -> None:
        """key: the round, and the rank to which the message goes. Views of the same `held` are made once."""
        if self._views[0] is not held:
            self._views = held, {}
        views = self._views[1]
        if key not in views:
            views[key] = [None if part in came else _place(part, held) for part in message.parts]
        found = zip(message.parts, views[key], strict=True)
        named = [(part.name, came[part] if view is None else view) for part, view in found]
        pack(named, message.entries, flat)

    def _rounds_of(
        self, transfers: Sequence[Transfer], groups: Sequence[AlikeTensors], dtypes: Mapping[str, str]
    ) -> tuple[list[Messages], list[Messages]]:
        """What this rank sends, and what it gets, in each round. All ranks take pairs of them in one order,
        so that parts lie alike where they are sent and where they come."""
        num_rounds = max(1, -(-max(_largest_totals(transfers)) // ROUND_BYTES))
        num_with_relays = num_rounds + any(one.relayed for one in transfers)
        sent: list[dict[int, list[Part]]] = [defaultdict(list) for _ in range(num_with_relays)]
        received: list[dict[int, list[Part]]] = [defaultdict(list) for _ in range(num_with_relays)]
        pairs: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for one in transfers:
            pairs[one.source, one.target].append(one)
        me = self._me
        for (source, target), each in sorted(pairs.items()):
            if me not in (source, target) and not any(me in one.relayed for one in each):
                continue
            parts = [(part, one.relayed) for one in each for part in _parts(one, groups, dtypes)]
            total, at = sum(part.room for part, _ in parts), 0
            for part, relayed in parts:
                number = at * num_rounds // total  # the same share of a pair's bytes in each round
                at += part.room
                if target == me:
                    received[number][source].append(part)
                    for rank in relayed:
                        sent[number + 1][rank].append(part)
                elif source == me:
                    sent[number][target].append(part)
                if me in relayed:
                    received[number + 1][target].append(part)
        made = [
            [{rank: Message.of(one) for rank, one in x.items()} for x in each] for each in (sent, received)
        ]
        return made[0], made[1]


class ArrivingParts:
    """What a rank keeps, round by round, for an engine in whose memory it arrives; see ShardSync.rounds."""

    def __init__(self, sync: ShardSync, held: Pieces) -> None:
        self.memory: Callable[[int, int], Tensor] = lambda number, size: empty_bucket((), sync.device, size)
        """The engine's. Where that has failed before it said so: anywhere, but where the others send to."""
        self._rounds = sync.rounds(held, lambda number, size: self.memory(number, size))

    def __iter__(self) -> Iterator[Any]:
        return self._rounds


def alike(told: Sequence[tuple[dict[str, list[Box]], Kept]]) -> list[AlikeTensors]:
    """The tensors that somebody keeps, by where they lie. told: what each rank holds, and what it keeps.

    ValueError if ranks keep a tensor in several types.
    """
    held: dict[str, dict[Box, Ranks]] = defaultdict(dict)
    wanted: dict[str, dict[Box, Ranks]] = defaultdict(dict)
    dtypes: dict[str, str] = {}
    for rank, (holds, keeps) in enumerate(told):
        for name, boxes in holds.items():
            for box in boxes:
                held[name][box] = (*held[name].get(box, ()), rank)
        for name, (dtype, boxes) in keeps.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise ValueError(f"{name} is kept as {dtypes[name]} and as {dtype}")
            for box in boxes:
                wanted[name][box] = (*wanted[name].get(box, ()), rank)
    names: dict[Any, list[str]] = defaultdict(list)
    for name, boxes in wanted.items():
        size = DTYPES[dtypes[name]].itemsize
        names[size, tuple(sorted(held[name].items())), tuple(sorted(boxes.items()))].append(name)
    return [
        AlikeTensors(tuple(each), size, dict(sources), dict(targets))
        for (size, sources, targets), each in names.items()
    ]


def boxes_of(pieces: Pieces) -> dict[str, list[Box]]:
    """Which rectangles they are."""
    return {name: [_box(piece) for piece in each if piece.local.numel()] for name, each in pieces.items()}


def _box(piece: Piece) -> Box:
    return tuple((begin, begin + size) for begin, size in zip(piece.offset, piece.local.shape, strict=True))


def _whole_bytes(group: AlikeTensors) -> int:
    """Of the tensors of a group, which begin at 0 and end with what is held last."""
    ends = [max(ends) for ends in zip(*([end for _, end in box] for box in group.held), strict=True)]
    return math.prod(ends) * group.item_bytes * len(group.names)


def _largest_totals(transfers: Sequence[Transfer]) -> tuple[int, int]:
    """Bytes that a rank sends others at most, and that a rank gets at most, also from itself."""
    received: dict[int, int] = defaultdict(int)
    for one in transfers:
        for rank in (one.target, *one.relayed):
            received[rank] += one.num_bytes
    return largest_loads(transfers)[0], max(received.values(), default=0)


def _parts(one: Transfer, groups: Sequence[AlikeTensors], dtypes: Mapping[str, str]) -> Iterator[Part]:
    """What a transfer brings, each of PART_BYTES at most."""
    group = groups[one.group]
    boxes = list(_cut(one.box, PART_BYTES // group.item_bytes))
    for name in group.names[one.first : one.first + one.count]:
        for box in boxes:
            yield Part(name, box, dtypes[name])


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """A rectangle in parts of so many elements at most, cut along its first axes."""
    if box_size(box) <= limit or not box:
        yield box
        return
    (begin, end), rest = box[0], box[1:]
    step = limit // max(1, box_size(rest))
    if step:
        for first, last in itertools.pairwise([*range(begin, end, step), end]):
            yield ((first, last), *rest)
        return
    for row in range(begin, end):
        for part in _cut(rest, limit):
            yield ((row, row + 1), *part)


def _place(part: Part, pieces: Pieces) -> Tensor:
    """Where a rectangle is in memory: in the piece that has all of it."""
    for piece in pieces[part.name]:
        if overlap(part.box, _box(piece)) == part.box:
            edges = zip(part.box, piece.offset, strict=True)
            return piece.local[tuple(slice(begin - first, end - first) for (begin, end), first in edges)]
    raise WeightSyncError(f"{part.name} does not lie where it was when the weights' way was planned")
