"""Weights from trainer ranks to rollout ranks that hold no trainer, on one machine: over gloo, or over NCCL.

    python benchmarks/weight_link.py [--sources 2] [--targets 2] [--mib 512] [--syncs 5] [--gpu]

Each rank is a process with one thread. Three ways take turns, a sync each: `headers`, as every first sync
goes (one rank sends, each bucket is announced); `plan`, as later ones go (rollout.weight_link=auto: one rank
sends, nothing is announced); `spread` (rollout.weight_link=spread: the trainer's ranks take turns). Told are
the seconds of the slowest rank, and the bytes that each rank wrote to its sockets (/proc/self/io). All bytes
that arrive are compared. --gpu: a GPU for each rank, over NCCL, whose bytes are not counted. Writes
benchmarks/results/weight_link_<device>.json (--out for another place).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from siirl.compiler.plan import LinkPlan, sender_groups
from siirl.engines.links import WeightLink, make_link
from siirl.parallel.process_groups import ProcessGroupManager, connect_when_used

REPOSITORY = Path(__file__).resolve().parents[1]
WAYS = {"headers": "broadcast", "plan": "broadcast", "spread": "spread"}
LAYER = {"q": 4, "k": 2, "v": 2, "o": 4, "gate": 12, "up": 12, "down": 12, "norm": 0}
"""Matrices of a layer, by their share of it; the norm is a vector."""


class Trainer:
    """Has the weights whole, and changes them in each version."""

    def __init__(self, mib: int, device: torch.device) -> None:
        self.version, self.weights, one = 0, {}, torch.ones((), dtype=torch.bfloat16, device=device)
        layers = max(1, mib // 32)
        for layer in range(layers):
            for name, share in LAYER.items():
                rows = max(1, share * (mib << 20) // layers // sum(LAYER.values()) // 4096)
                self.weights[f"layers.{layer}.{name}"] = one.repeat(rows, 2048)

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.weights.items()}

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    def move(self, version: int) -> None:
        self.version = version
        for place, tensor in enumerate(self.weights.values()):
            tensor.fill_(version + place % 7)


class Target:
    """Copies the weights; afterwards each is held against what it must be."""

    takes, reads_live, weight_version = "merged", False, -1

    def __init__(self, like: Trainer) -> None:
        self._specs = like.weight_specs()
        self._held = {name: torch.empty_like(tensor) for name, tensor in like.weights.items()}

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._specs

    def wake(self) -> None:
        pass

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        for name, tensor in weights:
            self._held[name].copy_(tensor)
        self.weight_version = version

    def check(self) -> None:
        for place, tensor in enumerate(self._held.values()):
            assert bool((tensor == tensor.new_tensor(self.weight_version + place % 7)).all())


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    connect_when_used()
    world = args.sources + args.targets
    backend, device = "gloo", torch.device("cpu")
    if args.gpu:
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    sources, receivers = tuple(range(args.sources)), tuple(range(args.sources, world))
    everyone = tuple(range(world))
    groups = ProcessGroupManager(
        list(dict.fromkeys([everyone, *sender_groups(sources, receivers)])), backend, 120
    )
    trainer = Trainer(args.mib, device)
    mine: tuple[Any, Any] = (trainer, None) if rank in sources else (None, Target(trainer))
    links = {
        way: make_link(LinkPlan(way, "trainer", "rollout", everyone, kind), *mine, groups, Path(folder))
        for way, kind in WAYS.items()
    }
    found: dict[str, Any] = {way: {"seconds": [], "sent": []} for way in WAYS}
    version = 0
    for turn in range(args.syncs + 1):
        for way, link in links.items():
            version += 1
            trainer.move(version)
            if way == "headers":
                link._plan = None
            seconds, sent = timed(link)
            if mine[1] is not None:
                mine[1].check()
            if turn:  # the first one makes the plan
                found[way]["seconds"].append(seconds)
                found[way]["sent"].append(sent)
    told = [None] * world
    dist.all_gather_object(told, found)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(told))


def timed(link: WeightLink) -> tuple[float, int]:
    dist.barrier()
    before, begin = written(), time.perf_counter()
    link.push()
    return time.perf_counter() - begin, written() - before


def written() -> int:
    """Bytes that this process has written to files and sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def main() -> int:
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
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (args, folder), args.sources + args.targets, start_method="fork")
        told = json.loads(Path(folder, "found").read_text())
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": commit, "ways": {}}
    for way in WAYS:
        seconds = [max(each) for each in zip(*(rank[way]["seconds"] for rank in told), strict=True)]
        sent = [statistics.median(rank[way]["sent"]) for rank in told]
        report["ways"][way] = {"seconds": seconds, "sent_bytes_of_ranks": sent}
        median, each = statistics.median(seconds), " ".join(f"{one:.3f}" for one in seconds)
        shares = " ".join(f"{one / 2**20:.0f}" for one in sent)
        print(f"{way:8s} median {median:.3f} s ({each}); MiB sent by rank: {shares}", flush=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
