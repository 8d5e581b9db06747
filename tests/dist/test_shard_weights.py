"""Weights for an engine of several ranks: what its workers are told to read is there, on every rank."""

import time

import torch
import torch.distributed as dist
from dist_harness import run_workers

from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.weights import engine_loader
from siirl.engines.weights import in_place as writing
from siirl.engines.weights.engine_loader import EngineWeights
from siirl.engines.weights.in_place import WeightsInPlace
from siirl.engines.weights.shared_buffer import open_buffer

CPU = torch.device("cpu")
SPECS = {"a": ((64, 16), torch.float32), "b": ((3, 5), torch.float32)}


class Workers:
    """An engine whose workers read the buffers of both ranks, as those of GPUs do."""

    def __init__(self):
        self.seen, self.owed, self.writes_in_place = [], [], False

    def tell(self, event):
        return event.tell(self)

    def call(self, method, **arguments):
        self.settle()
        if method == "update":
            self.read(arguments["bucket"])
        return "" if method == "finish_update" else None

    def post(self, message):
        """It reads as late as it may."""
        self.owed.append(message)

    def settle(self, but_last=0):
        until = len(self.owed) - but_last
        owed, self.owed = self.owed[:until], self.owed[until:]
        for message in owed:
            if message.method != "begin_writing":
                self.read(message.arguments["filling"])

    def read(self, told):
        places = told["place"]["all"]
        size = told["size"] if "size" in told else told["place"]["size"]
        first = told["starts"][0] if "starts" in told else told["begin"]
        data = [open_buffer(place, size, CPU)[first : first + 4] for place in places]
        self.seen.append([float(values.view(torch.float32)) for values in data])


def late_weights(rank, value):
    if rank:
        time.sleep(0.3)
    for name, (shape, dtype) in SPECS.items():
        time.sleep(0.05 * rank)
        yield name, (value + torch.arange(shape[0], dtype=dtype))[:, None].expand(shape)


def updates(rank, world_size):
    """What the workers saw in each update, on the first rank; the other one always fills its buffer late."""
    for module in (engine_loader, writing):
        module.joined_places = lambda places: {"all": places}
    writing.BUCKET_BYTES = 2048  # the first tensor fills its halves twice
    shard, process = EngineShard((0, 1), dist.group.WORLD), Workers() if rank == 0 else None
    parts = ("engine", SPECS, CPU, False, shard)
    by_loaders, in_place = EngineWeights(*parts), WeightsInPlace(*parts, whole=False)
    for value, sent in enumerate((by_loaders, in_place, in_place), 1):
        sent.replace(process, late_weights(rank, 100.0 * value))
    return process and process.seen


def test_workers_read_what_each_rank_has_put_into_its_buffer_not_what_lay_there_or_comes_next():
    """They read as late as they may: while the next piece is put into the other half."""
    seen, _ = run_workers(updates, 2)
    first_rows = [100.0, 200.0, *(300.0 + row for row in (0, 16, 32, 48, 0))]
    assert seen == [[row, row] for row in first_rows]
