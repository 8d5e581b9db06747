"""Weights by shards: each rank sends what others keep of its rectangles, and gets what it keeps.

Who sends what is planned once, of what all ranks say that they hold and keep (shard_plan.py). In a sync no
rank has more of a tensor than its own rectangles and some buckets of others' on their way.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.engines.train.pieces import Piece
from siirl.engines.weights.bucket import Copies, Entry, empty_bucket, pack, room, unpack
from siirl.engines.weights.shard_plan import AlikeTensors, Box, Ranks, Transfer, overlap, plan_transfers
from siirl.errors import WeightSyncError
from siirl.observe.spans import waiting

BUCKET_BYTES = 64 << 20
"""What a rank sends another one at a time; a larger rectangle goes alone."""

Pieces = Mapping[str, Sequence[Piece]]
"""Name of a tensor -> rectangles of it."""


class _Part(NamedTuple):
    """A rectangle of one tensor."""

    name: str
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.box)


class ShardSync:
    """This rank's part of the syncs of a trainer and the engines of some ranks."""

    def __init__(
        self, held: Pieces, kept: Pieces, dtype: torch.dtype, group: Any, device: torch.device
    ) -> None:
        """Collective over the group. WeightSyncError on all its ranks if something that is kept is nowhere.

        held: what the trainer has on this rank; copies of it may be on other ranks. kept: what the engine
        wants, in the type in which weights are sent. `run` is called with the same rectangles.
        """
        self._dtype, self._group, self._device = dtype, group, device
        self._ranks = dist.get_process_group_ranks(group)
        told: list[Any] = [None] * len(self._ranks)
        with waiting():
            dist.all_gather_object(told, (_boxes(held), _boxes(kept)), group=group)
        try:
            groups = alike(told, dtype.itemsize)
            transfers = plan_transfers(groups)
        except ValueError as error:
            raise WeightSyncError(f"weights cannot be sent by shards: {error}") from error
        me = dist.get_rank(group)
        sent: dict[int, list[_Part]] = defaultdict(list)
        received: dict[int, list[_Part]] = defaultdict(list)
        for one in transfers:
            if one.source == me:
                sent[one.target] += _parts(one, groups)
            if one.target == me:
                received[one.source] += _parts(one, groups)
        self._local = sent.pop(me, [])
        received.pop(me, None)
        self._sent = {rank: self._buckets(parts) for rank, parts in sorted(sent.items())}
        self._received = {rank: self._buckets(parts) for rank, parts in sorted(received.items())}
        self.sent_bytes = sum(one.num_bytes for one in transfers if one.source == me != one.target)
        """In each sync."""

    @torch.no_grad()
    def run(self, held: Pieces, kept: Pieces) -> None:
        """Bring what the trainer has to where the engine keeps it. Collective over the group."""
        copies = Copies()
        for part in self._local:
            copies.add(_place(part, kept), _place(part, held))
        copies.run()
        rounds = max((len(each) for each in (*self._sent.values(), *self._received.values())), default=0)
        for number in range(rounds):
            self._round(number, held, kept)

    def _round(self, number: int, held: Pieces, kept: Pieces) -> None:
        """One bucket to each rank that gets any more, and one from each that sends any more."""
        works, arriving = [], []
        for rank, buckets in self._received.items():
            if number < len(buckets):
                entries = self._entries(buckets[number])
                flat = empty_bucket(entries, self._device)
                arriving.append((buckets[number], entries, flat))
                works.append(dist.P2POp(dist.irecv, flat, self._ranks[rank], self._group))
        for rank, buckets in self._sent.items():
            if number < len(buckets):
                entries = self._entries(buckets[number])
                flat = empty_bucket(entries, self._device)
                pack([(part.name, _place(part, held)) for part in buckets[number]], entries, flat)
                works.append(dist.P2POp(dist.isend, flat, self._ranks[rank], self._group))
        if works:
            with waiting():
                for work in dist.batch_isend_irecv(works):
                    work.wait()
        copies = Copies()
        for parts, entries, flat in arriving:
            for part, (_, tensor) in zip(parts, unpack(entries, flat), strict=True):
                copies.add(_place(part, kept), tensor)
        copies.run()

    def _entries(self, parts: Iterable[_Part]) -> list[Entry]:
        return [Entry(part.name, part.shape, str(self._dtype)) for part in parts]

    def _buckets(self, parts: Iterable[_Part]) -> list[list[_Part]]:
        """In their order, up to BUCKET_BYTES together."""
        buckets: list[list[_Part]] = []
        filled = 0
        for part in parts:
            size = room(torch.Size(part.shape).numel() * self._dtype.itemsize)
            if not buckets or filled + size > BUCKET_BYTES:
                buckets.append([])
                filled = 0
            buckets[-1].append(part)
            filled += size
        return buckets


def alike(
    told: Sequence[tuple[dict[str, list[Box]], dict[str, list[Box]]]], item_bytes: int
) -> list[AlikeTensors]:
    """The tensors that somebody keeps, by where they lie. told: what each rank holds, and what it keeps."""
    held: dict[str, dict[Box, Ranks]] = defaultdict(dict)
    wanted: dict[str, dict[Box, Ranks]] = defaultdict(dict)
    for rank, sides in enumerate(told):
        for found, boxes_of in zip((held, wanted), sides, strict=True):
            for name, boxes in boxes_of.items():
                for box in boxes:
                    found[name][box] = (*found[name].get(box, ()), rank)
    names: dict[Any, list[str]] = defaultdict(list)
    for name, boxes in wanted.items():
        names[tuple(sorted(held[name].items())), tuple(sorted(boxes.items()))].append(name)
    return [
        AlikeTensors(tuple(each), item_bytes, dict(sources), dict(targets))
        for (sources, targets), each in names.items()
    ]


def _boxes(pieces: Pieces) -> dict[str, list[Box]]:
    return {name: [_box(piece) for piece in each if piece.local.numel()] for name, each in pieces.items()}


def _box(piece: Piece) -> Box:
    return tuple((begin, begin + size) for begin, size in zip(piece.offset, piece.local.shape, strict=True))


def _parts(one: Transfer, groups: Sequence[AlikeTensors]) -> list[_Part]:
    names = groups[one.group].names[one.first : one.first + one.count]
    return [_Part(name, one.box) for name in names]


def _place(part: _Part, pieces: Pieces) -> Tensor:
    """Where a rectangle is in memory: in the piece that has all of it."""
    for piece in pieces[part.name]:
        if overlap(part.box, _box(piece)) == part.box:
            edges = zip(part.box, piece.offset, strict=True)
            return piece.local[tuple(slice(begin - first, end - first) for (begin, end), first in edges)]
    raise WeightSyncError(f"{part.name} does not lie where it was when the weights' way was planned")
