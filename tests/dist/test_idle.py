"""Idle seconds: of two ranks that meet, the one that comes first waits for the other."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers

from siirl.algorithms.row_cost import row_cost
from siirl.compiler.plan import RoutePlan
from siirl.data.rows import make_rows
from siirl.data.store import FieldStore
from siirl.data.transport import Transport
from siirl.nodes.context import sum_over_ranks
from siirl.nodes.mini_batches import global_positions
from siirl.observe.metrics import Metrics
from siirl.observe.spans import Observer, observing
from siirl.parallel.process_groups import ProcessGroupManager
from siirl.types import FieldKey, Layout

LATE_S = 0.4
NAMES = ("row_id", "group_id", "response_ids")


def receive_rows(rank):
    """Rows go from rank 0 to rank 1."""
    source, target = Layout((0,), (0,), "agent_0.samples"), Layout((1,), (0,), "agent_0.samples")
    transport = Transport(ProcessGroupManager(((0, 1),), "gloo", 60), torch.device("cpu"), row_cost)
    store = FieldStore(60)
    if rank == 0:
        rows = make_rows({"row_id": [0, 1], "group_id": [0, 1], "response_ids": [[3], [4, 5]]})
        store.put(rows, 0, "source", NAMES)
    keys = [FieldKey(0, name) for name in NAMES]
    yield
    transport.exchange(store, keys, RoutePlan("route", "source", "target", (0, 1)), source, target)


def add_up(rank):
    """A sum over the ranks of a node."""
    yield
    sum_over_ranks(SimpleNamespace(is_shard_leader=True, group=dist.group.WORLD), torch.ones(1))


def number(rank):
    """The places of rows among those of all ranks."""
    yield
    global_positions(torch.tensor([rank]), dist.group.WORLD)


MEETINGS = (receive_rows, add_up, number)


def idle_seconds(rank, world_size, late):
    """Of each meeting, what this rank has waited there; `late` comes later than the other."""
    found = []
    for meeting in MEETINGS:
        observer = Observer()
        with observing(observer):
            meet = meeting(rank)
            next(meet)
            dist.barrier()
            if rank == late:
                time.sleep(LATE_S)
            next(meet, None)
            metrics = Metrics()
            observer.drain_idle(metrics)
            assert metrics.values()["perf/idle_s"] == metrics.values()["perf/idle_s_max"]
            found.append(metrics.values()["perf/idle_s"])
            observer.drain_idle(again := Metrics())
            assert again.values()["perf/idle_s"] == 0, "it is told once"
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_the_rank_that_comes_first_is_idle_until_the_other_comes(late):
    waited = run_workers(idle_seconds, 2, late)
    for first_s, late_s in zip(waited[1 - late], waited[late], strict=True):
        assert first_s > 0.8 * LATE_S
        assert late_s < first_s - 0.5 * LATE_S
