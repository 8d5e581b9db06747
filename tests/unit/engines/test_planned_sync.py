"""A sync by a plan: every rank takes part in every broadcast, whatever fails; what arrives is what was sent.

Ranks are threads, and broadcasts go through memory: each waits until its sender has come.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from siirl.engines.weights import planned_sync
from siirl.engines.weights.bucket import Entry, empty_bucket
from siirl.engines.weights.planned_sync import BucketPlan, GaveUp, PlannedSync

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


class Group:
    """A process group, as one rank has it."""

    def __init__(self, rank, sent):
        self.rank, self.sent, self.count = rank, sent, 0


class Network:
    """Broadcasts within each set of ranks, in the order in which each of them takes part."""

    def __init__(self):
        self.changed, self.groups, self.left = threading.Condition(), {}, []

    def group(self, rank, ranks):
        with self.changed:
            return Group(rank, self.groups.setdefault(ranks, {}))

    def broadcast(self, flat, src, group, async_op):
        number, group.count = group.count, group.count + 1
        self.left.append((group.rank, number))
        if group.rank == src:
            with self.changed:
                group.sent[number] = flat
                self.changed.notify_all()
        return Work(self, flat, group, number, src)


class Work:
    def __init__(self, network, flat, group, number, src):
        self.network, self.flat, self.group, self.number, self.src = network, flat, group, number, src

    def wait(self):
        with self.network.changed:
            came = self.network.changed.wait_for(lambda: self.number in self.group.sent, timeout=5)
        assert came, f"rank {self.group.rank} waits for broadcast {self.number}, which does not come"
        if self.group.rank != self.src:
            self.flat.copy_(self.group.sent[self.number])
        self.network.left.remove((self.group.rank, self.number))


def some_weights(rng):
    draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
    made = []
    for number in range(rng.randint(1, 20)):
        shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
        dtype = rng.choice(DTYPES)
        made.append((f"w{number}", (torch.randn(shape, generator=draw) * 9).to(dtype)))
    return made


def plan_of(rng, weights):
    entries, buckets = [Entry.of(*named) for named in weights], []
    while entries:
        size = rng.randint(1, 4)
        buckets.append(tuple(entries[:size]))
        entries = entries[size:]
    return BucketPlan(tuple(buckets), "cpu", ("any",))


def exported(weights, fails_at):
    for number, named in enumerate(weights):
        if number == fails_at:
            raise RuntimeError("out of memory")
        yield named


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_come_to_the_end_and_none_takes_what_a_sender_gave_up(seed, monkeypatch):
    rng, network = random.Random(seed), Network()
    monkeypatch.setattr(planned_sync.dist, "broadcast", network.broadcast)
    ranks = list(range(rng.randint(2, 6)))
    sources = tuple(sorted(rng.sample(ranks, rng.randint(1, len(ranks) - 1))))
    receivers = tuple(rank for rank in ranks if rank not in sources)
    weights = some_weights(rng)
    plan, in_flight = plan_of(rng, weights), rng.randint(1, 4)
    head = sources[0]
    fails = {rank: rng.randrange(len(weights)) for rank in sources if rng.random() < 0.3}
    lies = {rank for rank in sources if rank not in fails and rng.random() < 0.15}

    def run(rank):
        sync = PlannedSync(plan, head, network.group(rank, tuple(ranks)), rank, in_flight)
        if rank in receivers:
            stream = sync.received()
        else:
            own = [*weights, ("more", torch.zeros(2))] if rank in lies else weights
            stream = sync.sent(exported(own, fails.get(rank)))
        came = []
        try:
            for name, tensor in stream:
                came.append((name, tensor.clone()))
        except GaveUp as error:
            return str(error), came
        return "", came

    with ThreadPoolExecutor(len(ranks)) as pool:
        told = list(pool.map(run, ranks))
    assert not network.left, "broadcasts were begun and not ended"
    for rank, (failure, came) in zip(ranks, told, strict=True):
        assert bool(failure) == (rank in fails or rank in lies) or rank in receivers
        if not failure:
            same_as(came, weights)
    broken = head in fails
    for rank in receivers:
        failure, came = told[rank]
        assert bool(failure) == broken and ("out of memory" in failure) == broken
        same_as(came, weights[: len(came)])


@pytest.mark.parametrize("seed", range(10))
def test_joined_buckets_have_the_same_tensors_in_order_and_no_two_neighbours_fit_together(seed):
    rng = random.Random(seed)
    plan, limit = plan_of(rng, some_weights(rng)), rng.choice([64, 200, 100_000])
    buckets = planned_sync.joined(plan.buckets, limit)
    assert [entry for bucket in buckets for entry in bucket] == [e for bucket in plan.buckets for e in bucket]
    sizes = [len(empty_bucket(bucket, "cpu")) for bucket in buckets]
    assert all(size <= limit or bucket in plan.buckets for size, bucket in zip(sizes, buckets, strict=True))
    firsts = [len(empty_bucket(next(b for b in plan.buckets if b[0] == x[0]), "cpu")) for x in buckets]
    assert all(before + first > limit for before, first in zip(sizes, firsts[1:], strict=False))


def test_what_another_plan_has_sent_is_not_taken(monkeypatch):
    network = Network()
    monkeypatch.setattr(planned_sync.dist, "broadcast", network.broadcast)
    weights = [("a", torch.ones(2)), ("b", torch.ones(3))]
    one, other = (
        BucketPlan(tuple((Entry.of(*w),) for w in weights), "cpu", (made,)) for made in ("one", "other")
    )
    syncs = [
        PlannedSync(plan, 0, network.group(rank, (0, 1)), rank, 1) for rank, plan in enumerate((one, other))
    ]
    assert len(list(syncs[0].sent(iter(weights)))) == 2
    with pytest.raises(GaveUp, match="rank 0 sends other buckets than those of the first sync"):
        list(syncs[1].received())


def same_as(came, weights):
    assert [name for name, _ in came] == [name for name, _ in weights]
    for (_, found), (_, wanted) in zip(came, weights, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
