"""Syncs by shards with ranks that are threads: what comes, who sends it, and what NCCL asks of messages."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from siirl.engines.train.pieces import Piece
from siirl.engines.weights import shard_sync
from siirl.engines.weights.shard_plan import largest_loads
from siirl.engines.weights.shard_sync import ArrivingParts, ShardSync, boxes_of


class Network:
    """What shard_sync uses of torch.distributed, where a group is a rank of threads; their global ranks are
    10 higher. As over NCCL: the first that a group does all of its ranks do, and messages match by their
    order."""

    isend, irecv = "send", "receive"

    def __init__(self, world):
        self.world, self.begun = world, set()
        self.meeting = threading.Barrier(world, timeout=10)
        self.objects = [None] * world
        self.changed, self.messages, self.sent = threading.Condition(), {}, [0] * world

    def get_process_group_ranks(self, group):
        return [10 + rank for rank in range(self.world)]

    def get_rank(self, group):
        return group

    def all_gather_object(self, found, mine, group):
        self.objects[group] = mine
        self.meeting.wait()
        found[:] = self.objects
        self.meeting.wait()

    def all_reduce(self, tensor, group):
        self.begun.add(group)
        self.meeting.wait()

    def P2POp(self, act, tensor, peer, group):
        assert tensor.is_contiguous() and tensor.numel() and peer - 10 != group
        return SimpleNamespace(act=act, tensor=tensor, peer=peer - 10, me=group)

    def batch_isend_irecv(self, works):
        assert len(self.begun) == self.world, "a communicator is made by all of its ranks"
        assert len({(work.act, work.peer) for work in works}) == len(works), "one message for each pair"
        for work in works:
            if work.act == self.isend:
                with self.changed:
                    self.messages.setdefault((work.me, work.peer), []).append(work.tensor.clone())
                    self.sent[work.me] += work.tensor.nbytes
                    self.changed.notify_all()
        return [SimpleNamespace(wait=lambda: [self._receive(work) for work in works])]

    def _receive(self, work):
        if work.act == self.isend:
            return
        queue = (work.peer, work.me)
        with self.changed:
            assert self.changed.wait_for(lambda: self.messages.get(queue), timeout=10), f"{queue} waits"
            work.tensor.copy_(self.messages[queue].pop(0))


def cut(rng, tensor, parts):
    """A tensor in so many rectangles along one axis, some maybe without elements."""
    axis = rng.randrange(tensor.dim())
    edges = [0, *sorted(rng.choices(range(tensor.shape[axis] + 1), k=parts - 1)), tensor.shape[axis]]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        offset = tuple(begin if place == axis else 0 for place in range(tensor.dim()))
        pieces.append(Piece(tensor.narrow(axis, begin, end - begin), offset))
    return pieces


def layouts(rng):
    """What each rank holds of some tensors, and what it keeps: engines of one to three ranks each."""
    sources, engine_ranks = rng.randint(1, 3), rng.randint(1, 3)
    world = sources + engine_ranks * rng.randint(1, 5)
    first = rng.choice([sources, sources, max(0, world - engine_ranks * 2)])
    weights = {
        f"w{n}": torch.randn([rng.randint(1, 12) for _ in range(rng.randint(1, 3))]) for n in range(12)
    }
    held, kept = [{} for _ in range(world)], [{} for _ in range(world)]
    for name, tensor in weights.items():
        for rank, piece in enumerate(cut(rng, tensor, sources)):
            held[rank][name] = [piece]
        parts = cut(rng, tensor, engine_ranks) if engine_ranks > 1 and rng.random() < 0.8 else None
        for rank in range(first, world):
            kept[rank][name] = [parts[(rank - first) % engine_ranks] if parts else Piece(tensor, (0,) * 3)]
    for each in kept:
        for name, ((like, offset),) in each.items():
            each[name] = [Piece(torch.full_like(like, torch.nan), offset[: like.dim()])]
    return weights, held, kept


@pytest.mark.parametrize("seed", range(30))
def test_what_comes_is_what_is_kept_in_each_sync(seed, monkeypatch):
    monkeypatch.setattr(shard_sync, "ROUND_BYTES", 700)
    monkeypatch.setattr(shard_sync, "PART_BYTES", 160)
    weights, held, kept = layouts(random.Random(seed))
    network = Network(len(held))
    monkeypatch.setattr(shard_sync, "dist", network)
    again = threading.Barrier(len(held), timeout=10)

    def run(rank):
        boxes = {name: ("torch.float32", each) for name, each in boxes_of(kept[rank]).items()}
        sync = ShardSync(held[rank], boxes, rank, "cpu" if held[rank] else None)
        for _ in range(2):
            sync.run(held[rank], kept[rank])
            for name, ((local, offset),) in kept[rank].items():
                ends = zip(offset, local.shape, strict=True)
                assert torch.equal(local, weights[name][tuple(slice(a, a + n) for a, n in ends)])
            if again.wait() == 0:
                for tensor in weights.values():
                    tensor.mul_(-2)
            again.wait()
        assert sync.arriving is sync.arriving, "an engine that is told of it again takes memory again"
        return sync.fullest_bytes

    with ThreadPoolExecutor(len(held)) as pool:
        (fullest,) = {*pool.map(run, range(len(held)))}
    assert not any(network.messages.values())
    room = 2 * 15 * 12 * len(held) ** 2
    assert max(network.sent) <= 2 * fullest + room, "and room to start anywhere"


@pytest.mark.parametrize(("sources", "engines"), [(1, 2), (1, 7), (2, 8), (4, 3)])
def test_no_rank_sends_much_more_than_one_gets_where_many_want_the_same(sources, engines, monkeypatch):
    """One trainer does not send all engines all weights: they send on to each other what they got."""
    made = []
    planned = shard_sync.plan_transfers
    monkeypatch.setattr(shard_sync, "plan_transfers", lambda groups: made.append(planned(groups)) or made[-1])
    world = sources + engines
    monkeypatch.setattr(shard_sync, "dist", Network(world))
    weights = {f"w{n}": torch.randn(64, 3) for n in range(5)} | {"head": torch.randn(640, 3)}

    def run(rank):
        held, kept = {}, {}
        for name, tensor in weights.items():
            rows = len(tensor) // sources
            if rank < sources:
                held[name] = [Piece(tensor[rank * rows : (rank + 1) * rows], (rank * rows, 0))]
            else:
                kept[name] = ("torch.float32", [((0, len(tensor)), (0, 3))])
        sync = ShardSync(held, kept, rank, "cpu" if held else None)
        arrived = dict(sync.whole(held))
        assert all(torch.equal(arrived[name], tensor) for name, tensor in weights.items() if kept)

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(run, range(world)))
    sent, received = largest_loads(made[0])
    assert received == sum(tensor.nbytes for tensor in weights.values())
    assert sent <= 1.25 * received


def test_what_an_engine_that_failed_does_not_take_comes_to_the_device_of_the_trainers():
    """Where others send from a GPU nothing can come to the host's memory."""
    asked = []

    class Sync:
        device = "meta"

        def rounds(self, held, memory):
            asked.append(memory(0, 32))
            yield []

    assert list(ArrivingParts(Sync(), {})) == [[]]
    assert asked[0].device.type == "meta" and asked[0].nbytes == 32
