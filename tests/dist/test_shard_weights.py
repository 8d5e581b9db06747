"""Weights for an engine of several ranks: what its workers are told to read is there, on every rank."""

import time

import torch
import torch.distributed as dist
from dist_harness import run_workers

from siirl.engines.rollout.served import engine_weights, weights_in_place
from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.engine_weights import EngineWeights
from siirl.engines.rollout.served.shared_buffer import open_buffer
from siirl.engines.rollout.served.weights_in_place import WeightsInPlace

CPU = torch.device("cpu")
SPECS = {"a": ((64,), torch.float32), "b": ((3, 5), torch.float32)}


class Workers:
    """An engine whose workers read the buffers of both ranks, as those of GPUs do."""

    def __init__(self):
        self.seen = []

    def act(self, kind, action, again=None, key=None):
        return action(self)

    def call(self, method, **arguments):
        if method == "finish_writing":
            self.read(arguments["filling"])
        return "" if method == "finish_update" else None

    def post(self, message):
        assert message.method == "begin_writing"

    def ask(self, message, again=None):
        self.read(message.arguments.get("bucket") or message.arguments["filling"])

    def read(self, told):
        places = told["place"]["all"]
        size = told["size"] if "size" in told else told["place"]["size"]
        self.seen.append([float(open_buffer(place, size, CPU)[:4].view(torch.float32)) for place in places])


def late_weights(rank, value):
    if rank:
        time.sleep(0.3)
    for name, (shape, dtype) in SPECS.items():
        yield name, torch.full(shape, value, dtype=dtype)


def updates(rank, world_size):
    """What the workers saw in each update, on the first rank; the other one always fills its buffer late."""
    for module in (engine_weights, weights_in_place):
        module.joined_places = lambda places: {"all": places}
    shard, process = EngineShard((0, 1), dist.group.WORLD), Workers() if rank == 0 else None
    parts = ("engine", SPECS, CPU, False, shard)
    by_loaders, in_place = EngineWeights(*parts), WeightsInPlace(*parts, whole=False)
    for value, sent in enumerate((by_loaders, in_place, in_place), 1):
        sent.replace(process, late_weights(rank, float(value)), False)
    return process and process.seen


def test_no_worker_is_told_to_read_a_buffer_before_its_rank_has_filled_it():
    seen, _ = run_workers(updates, 2)
    assert seen == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
