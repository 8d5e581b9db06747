"""Weights from trainer ranks to rollout ranks that hold no trainer, on one machine: over gloo, or over NCCL.

    python benchmarks/weight_link.py [--sources 2] [--targets 2] [--mib 512] [--syncs 5] [--gpu]

Each rank is a process with one thread. Trainer ranks have the rows of fp32 tensors, as FSDP2 cuts them, and
send bf16. Three ways take turns, a sync each: `headers`, as every first sync goes (tensors are gathered, one
rank sends, each bucket is announced), `shards`, as later ones go, in which a target keeps its share of
each tensor's rows, as tensor parallel engines do, and gets them from who has them, and `wire`: as many bytes
in bf16, a share for each target, in one message from one trainer rank, with nothing else done. Told are the
seconds of the slowest rank, and the bytes that each rank wrote to its sockets (/proc/self/io). All weights
that arrive are compared. --gpu: a GPU for each rank, over NCCL, whose bytes are not counted. Writes
benchmarks/results/weight_link_<device>.json (--out for another place), after every turn (report_file.py).
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report_file import Report, end_by_signals, on_change, run_ranks, write
from torch import Tensor

from siirl.compiler.plan import LinkPlan
from siirl.engines.train.pieces import Piece
from siirl.engines.weights.link import make_link
from siirl.engines.weights.shard_sync import ShardSync, boxes_of
from siirl.parallel.process_groups import ProcessGroupManager, connect_when_used

REPOSITORY = Path(__file__).resolve().parents[1]
WAYS = ("headers", "shards", "wire")
LAYER = {"q": 4, "k": 2, "v": 2, "o": 4, "gate": 12, "up": 12, "down": 12, "norm": 0}
"""Matrices of a layer, by their share of it; the norm has one row."""
WIDTH = 2048
GATHERED_BYTES = 64 << 20


def shapes(mib: int) -> dict[str, tuple[int, int]]:
    """Of tensors of so many MiB in bf16."""
    layers, total = max(1, mib // 32), sum(LAYER.values())
    rows = {
        name: max(1, share * (mib << 20) // layers // total // 2 // WIDTH) for name, share in LAYER.items()
    }
    return {f"layers.{layer}.{name}": (rows[name], WIDTH) for layer in range(layers) for name in LAYER}


class Trainer:
    """A rank's rows of the weights, in fp32; each version has other ones."""

    def __init__(self, mib: int, device: torch.device, ranks: tuple[int, ...], group: Any) -> None:
        self.version, self._ranks, self._group, self._device = 0, ranks, group, device
        self._shapes = shapes(mib)
        place = dist.get_rank(group)
        self._local = {
            name: torch.ones(self._pieces(shape)[place], device=device)
            for name, shape in self._shapes.items()
        }

    def _pieces(self, shape: tuple[int, int]) -> tuple[int, ...]:
        rows = -(-shape[0] // len(self._ranks))
        return tuple(
            min(rows, max(0, shape[0] - place * rows)) * shape[1] for place in range(len(self._ranks))
        )

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (shape, torch.float32) for name, shape in self._shapes.items()}

    def export_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Gathered about GATHERED_BYTES at a time, as siirl/engines/train/fsdp/fsdp_state.py does."""
        names, size = [], 0
        for name, shape in self._shapes.items():
            names.append(name)
            size += math.prod(shape) * dtype.itemsize
            if size >= GATHERED_BYTES:
                yield from self._gathered(names, dtype)
                names, size = [], 0
        yield from self._gathered(names, dtype)

    def _gathered(self, names: list[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        if not names:
            return
        sizes = [max(self._pieces(self._shapes[name])) for name in names]
        sent = torch.zeros(sum(sizes), dtype=dtype, device=self._device)
        for name, part in zip(names, sent.split(sizes), strict=True):
            part[: len(self._local[name])] = self._local[name].to(dtype)
        received = sent.new_empty(len(self._ranks) * len(sent))
        dist.all_gather_into_tensor(received, sent, group=self._group)
        parts_of = received.view(len(self._ranks), -1).split(sizes, dim=1)
        for name, parts in zip(names, parts_of, strict=True):
            yield name, parts.reshape(-1, WIDTH)[: self._shapes[name][0]].contiguous()

    def live_weights(self) -> None:
        """It has its rows alone."""

    def held_pieces(self) -> None:
        """Links shall not go by shards here: these are a way of their own."""

    def pieces(self) -> dict[str, list[Piece]]:
        """What this rank has, as ShardSync takes it."""
        place = dist.get_rank(self._group)
        return {
            name: [Piece(local.view(-1, WIDTH), (place * -(-self._shapes[name][0] // len(self._ranks)), 0))]
            for name, local in self._local.items()
        }

    def move(self, version: int) -> None:
        self.version = version
        for place, tensor in enumerate(self._local.values()):
            tensor.fill_(version % 200 + place % 7)


class Target:
    """Copies the weights; afterwards each is held against what it must be."""

    takes, keeps, reads_live, weight_version = "merged", "all", False, -1

    def __init__(self, mib: int, device: torch.device, part: int, parts: int) -> None:
        """part: the share of rows that it keeps of `parts` where weights come by shards."""
        self._part, self._parts = part, parts
        self._specs = {name: (shape, torch.bfloat16) for name, shape in shapes(mib).items()}
        self._held = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self._specs.items()
        }

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._specs

    def expect_weights(self) -> None:
        pass

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        for name, tensor in weights:
            self._held[name].copy_(tensor)
        self.weight_version = version

    def pieces(self) -> dict[str, list[Piece]]:
        """What it keeps, as ShardSync takes it."""
        found = {}
        for name, tensor in self._held.items():
            begin, end = (len(tensor) * part // self._parts for part in (self._part, self._part + 1))
            found[name] = [Piece(tensor[begin:end], (begin, 0))]
        return found

    def check(self, of_parts: bool) -> None:
        tensors = [piece.local for (piece,) in self.pieces().values()] if of_parts else self._held.values()
        for place, tensor in enumerate(tensors):
            assert bool((tensor == tensor.new_tensor(self.weight_version % 200 + place % 7)).all())


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    connect_when_used()
    world = args.sources + args.targets
    backend, device = "gloo", torch.device("cpu")
    if args.gpu:
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    sources, everyone = tuple(range(args.sources)), tuple(range(world))
    groups = ProcessGroupManager(list(dict.fromkeys([everyone, sources])), backend, 120)
    trainer = Trainer(args.mib, device, sources, groups.get(sources)) if rank in sources else None
    mine: tuple[Any, Any] = (
        trainer,
        None if trainer else Target(args.mib, device, rank - args.sources, args.targets),
    )
    plan = LinkPlan("headers", "trainer", "rollout", everyone, "broadcast")
    link = make_link(plan, *mine, groups, Path(folder))
    pieces = [engine.pieces() if engine is not None else {} for engine in mine]
    kept = {name: ("torch.bfloat16", boxes) for name, boxes in boxes_of(pieces[1]).items()}
    shards = ShardSync(pieces[0], kept, groups.get(everyone), device.type)
    share = torch.zeros(bf16_bytes(args.mib) // args.targets // 2, dtype=torch.bfloat16, device=device)
    pushes: dict[str, Callable[[], Any]] = {
        "headers": link.push,
        "shards": partial(shards.run, *pieces),
        "wire": partial(pass_on, share, rank, args.sources, args.targets),
    }
    found: dict[str, Any] = {way: {"seconds": [], "sent": []} for way in WAYS}
    told: list[Any] = [None] * world
    version = 0
    for turn in range(args.syncs + 1):
        for way, push in pushes.items():
            version += 1
            if trainer is not None:
                trainer.move(version)
            seconds, sent = timed(push, device)
            if mine[1] is not None and way != "wire":
                mine[1].weight_version = version
                mine[1].check(way == "shards")
            if turn:  # the first one connects
                found[way]["seconds"].append(seconds)
                found[way]["sent"].append(sent)
        dist.all_gather_object(told, found)
        if rank == 0 and turn:
            write(Path(folder, "found"), json.dumps(told))


def bf16_bytes(mib: int) -> int:
    return sum(2 * math.prod(shape) for shape in shapes(mib).values())


def pass_on(share: Tensor, rank: int, sources: int, targets: int) -> None:
    """A target's share of the bytes, to each from one of the sources."""
    pairs = [(target % sources, sources + target) for target in range(targets)]
    sends = [dist.P2POp(dist.isend, share, to) for by, to in pairs if by == rank]
    receives = [dist.P2POp(dist.irecv, share, by) for by, to in pairs if to == rank]
    for work in dist.batch_isend_irecv([*sends, *receives]) if sends or receives else ():
        work.wait()


def timed(push: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    dist.barrier()
    before, begin = written(), time.perf_counter()
    push()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, written() - before


def written() -> int:
    """Bytes that this process has written to files and sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def main() -> int:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "gpu" if args.gpu else "cpu"
    out = args.out or REPOSITORY / "benchmarks" / "results" / f"weight_link_{device}.json"
    report = Report(out, dict.fromkeys(WAYS, args.syncs), ways={})
    start = "spawn" if args.gpu else "fork"  # no process may be forked beside CUDA
    with tempfile.TemporaryDirectory() as folder:
        found, ranks = Path(folder, "found"), args.sources + args.targets
        run_ranks(worker, (args, folder), ranks, start, on_change(found, lambda: tell(report, found)))
    for way, one in report["ways"].items():
        median, each = statistics.median(one["seconds"]), " ".join(f"{x:.3f}" for x in one["seconds"])
        shares = " ".join(f"{x / 2**20:.0f}" for x in one["sent_bytes_of_ranks"])
        print(f"{way:8s} median {median:.3f} s ({each}); MiB sent by rank: {shares}", flush=True)
    report.finish()
    return 0


def tell(report: Report, found: Path) -> None:
    """Put what the ranks have found so far into the report."""
    told = json.loads(found.read_text())
    for way in WAYS:
        seconds = [max(each) for each in zip(*(rank[way]["seconds"] for rank in told), strict=True)]
        sent = [statistics.median(rank[way]["sent"]) for rank in told]
        report["ways"][way] = {"seconds": seconds, "sent_bytes_of_ranks": sent}
        report.count(way, len(seconds))


if __name__ == "__main__":
    raise SystemExit(main())
