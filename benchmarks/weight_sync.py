"""Weights from a trainer into a vLLM engine: by vLLM's loaders, and written in place.

    python benchmarks/weight_sync.py [--shapes 1.7B 0.6B] [--blocks 2] [--syncs 4] [--tokens 384]
        [--replace-weights in_place_checked] [--max-engine-restarts 0] [--weight-buffer-gib 4]
        [--apart] [--cpu]

One process: an FSDP2 trainer of fp32 master weights, an engine in bf16 that sleeps between rollouts, and the
link between them, as in a run. A block is --syncs steps: sleep, move the weights, wake, sync, generate
--prompts x 8 responses of --tokens tokens. Blocks by loaders and in place take turns, in one engine. The
first sync, which finds the places, is told apart. At the end both ways bring the same weights, and the
parameters and greedy answers must be equal. By loaders is what rollout.replace_weights=by_loaders does, in
place what --replace-weights says.

--apart: two processes with a device each, two GPUs over NCCL: the trainer alone on rank 0, the engine alone
on rank 1, where it is resident. Three ways take turns, a sync each, --blocks x --syncs of them: buckets that
are announced by headers and vLLM's loaders (as every first sync goes), shards and the loaders, shards and in
place (what further ones do by default). Told are the seconds of the slowest rank, and where
each rank spent them: a phase has those of the phases in it, too (put: receive; load: wait_for_engine). At the
end each way replaces weights of another sign that the first one has brought.

Writes benchmarks/results/weight_sync_<device>.json, or weight_sync_apart_<device>.json (--out for another
place), after every sync that counts (report_file.py); "equal" comes last. --cpu: a small shape, over gloo.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from grpo_gpu import REPOSITORY, SHAPES, machine, make_model
from report_file import Report, end_by_signals, on_change, run_job, run_ranks, write

from siirl.compiler.plan import LinkPlan, ModelPlan
from siirl.config import Config, load_config
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.train.fsdp.fsdp_engine import FSDPEngine
from siirl.engines.weights.engine_loader import EngineWeights
from siirl.engines.weights.link import make_link
from siirl.observe.spans import Observer, observing
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroupManager, connect_when_used

NAMED = {"0.6B": SHAPES["B"], "1.7B": SHAPES["A"]}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}  # fmt: skip
WAYS = ("loaders", "in_place")
APART = ("headers_loaders", "shards_loaders", "shards_in_place")
READ = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight")


def main() -> int:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=NAMED, default=["1.7B", "0.6B"])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=384)
    ways = ("in_place", "in_place_checked")
    parser.add_argument("--replace-weights", choices=ways, default=ways[0])
    parser.add_argument(
        "--max-engine-restarts", type=int, default=2, help="0: no copy of the weights is kept"
    )
    parser.add_argument("--weight-buffer-gib", help="rollout.weight_buffer_gib")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a shape, and the file of what is found
    args = parser.parse_args()
    if args.one:
        (of_shape_apart if args.apart else of_shape)(args, args.one[0], Path(args.one[1]))
        return 0
    name = f"weight_sync{'_apart' * args.apart}_{'cpu' if args.cpu else 'gpu'}.json"
    out = args.out or REPOSITORY / "benchmarks" / "results" / name
    shapes, ways = ["small"] if args.cpu else args.shapes, APART if args.apart else WAYS
    asked = {f"{shape} {way}": args.blocks * args.syncs for shape in shapes for way in ways}
    report = Report(out, asked, **machine(), shapes={})
    with tempfile.TemporaryDirectory() as temporary:
        for shape in shapes:
            found, log = Path(temporary, f"{shape}.json"), Path(temporary, f"{shape}.log")
            words = [sys.executable, __file__, *sys.argv[1:], "--one", shape, str(found)]
            seen = on_change(found, lambda shape=shape, found=found: tell(report, shape, found))
            with log.open("w") as file:
                status = run_job(words, seen, stdout=file, stderr=subprocess.STDOUT)
            if status:
                print(log.read_text()[-12000:])
                return status
            print_shape(shape, report["shapes"][shape])
    report.finish()
    return 0


def tell(report: Report, shape: str, found: Path) -> None:
    """Put what was found of a shape so far into the report."""
    report["shapes"][shape] = told = json.loads(found.read_text())
    for way in APART if "shards_loaders" in told else WAYS:
        report.count(f"{shape} {way}", len(told[way]["sync_s"]))


def print_shape(shape: str, found: dict[str, Any]) -> None:
    print(f"{shape}: first sync {found['first_sync_s']:.3f} s; equal: {found['equal']}", flush=True)
    for way in APART if "shards_loaders" in found else WAYS:
        for name, values in found[way].items():
            if name == "where":
                continue
            each = " ".join(f"{value:.4g}" for value in values)
            print(f"  {way:15s} {name:10s} median {statistics.median(values):8.4f}   {each}", flush=True)
        for rank, phases in enumerate(found[way].get("where", ())):
            told = ", ".join(f"{name} {seconds:.4f}" for name, seconds in phases.items())
            print(f"    rank {rank}, medians: {told}", flush=True)


def of_shape(args: argparse.Namespace, shape: str, out: Path) -> None:
    """Times of both ways, with a trainer and an engine of this shape."""
    device = torch.device("cpu" if args.cpu else "cuda:0")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    backend = "gloo" if args.cpu else "cpu:gloo,cuda:nccl"
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", SMALL if args.cpu else NAMED[shape])
        trainer, rollout, link = build(args, folder, device, ProcessGroupManager([(0,)], backend, 120))
        try:
            measure(args, trainer, rollout, link, lambda found: write(out, json.dumps(found)))
        finally:
            rollout.close()


def build(args: argparse.Namespace, folder: Path, device: torch.device, groups: ProcessGroupManager) -> tuple:
    cfg = configuration(args, folder, device)
    engine = make_rollout_engine(model_plan("rollout", 0), cfg, groups, device)
    trainer = FSDPEngine(model_plan("actor", 0), cfg, groups, device)
    trainer.version = 1
    plan = LinkPlan("agent_0.sync", "agent_0.actor", "agent_0.rollout", (0,), "local")
    return trainer, engine, make_link(plan, trainer, engine, groups, folder / "never")


def configuration(args: argparse.Namespace, folder: Path, device: torch.device) -> Config:
    rollout = "actor_rollout_ref.rollout"
    return load_config(
        [
            f"actor_rollout_ref.model.path={folder}/model",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            f"{rollout}.name=vllm",
            f"{rollout}.dtype=bfloat16",
            f"{rollout}.replace_weights={args.replace_weights}",
            f"{rollout}.max_engine_restarts={args.max_engine_restarts}",
            f"{rollout}.weight_buffer_gib={args.weight_buffer_gib or 'null'}",
            f"{rollout}.max_model_len=2048",
            f"{rollout}.max_num_seqs=512",
            f"{rollout}.max_num_batched_tokens=16384",
            f"{rollout}.gpu_memory_utilization=0.5",
            f"{rollout}.enforce_eager={args.cpu}",
            f"trainer.device={device.type}",
            f"trainer.output_dir={folder}/out",
            "trainer.deadline_s=400",
        ]
    )


def model_plan(role: Any, rank: int) -> ModelPlan:
    kind, trains = ("fsdp", True) if role == "actor" else ("vllm", False)
    dims = ParallelDims(1)
    return ModelPlan(f"agent_0.{role}", 0, role, kind, "lm", trains, (rank,), dims, role, (role,))


def of_shape_apart(args: argparse.Namespace, shape: str, out: Path) -> None:
    """Times of three ways, with a trainer on one rank and an engine on another."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(of_rank, (args, shape, folder, out), 2, "spawn")


def of_rank(rank: int, args: argparse.Namespace, shape: str, temporary: str, out: Path) -> None:
    folder, device = Path(temporary), torch.device("cpu")
    if not args.cpu:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    connect_when_used()
    backend = "gloo" if args.cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    groups = ProcessGroupManager([(0,), (1,), (0, 1)], backend, 400)
    if rank == 0:
        make_model(folder / "model", SMALL if args.cpu else NAMED[shape])
    meet()
    cfg = configuration(args, folder, device)
    trainer = FSDPEngine(model_plan("actor", 0), cfg, groups, device) if rank == 0 else None
    rollout: Any = None if trainer else make_rollout_engine(model_plan("rollout", 1), cfg, groups, device)
    if trainer is not None:
        trainer.version = 1
    plan = LinkPlan("agent_0.sync", "agent_0.actor", "agent_0.rollout", (0, 1), "broadcast")
    try:
        links = {way: make_link(plan, trainer, rollout, groups, folder) for way in APART}
        links[APART[0]]._may_shard = False
        said: Callable[[dict[str, Any]], None] = lambda found: write(out, json.dumps(found))  # noqa: E731
        Apart(args, trainer, rollout, links).measure(said if rank == 0 else lambda _: None)
    finally:
        if rollout is not None:
            rollout.close()
    dist.destroy_process_group()


def meet() -> None:
    dist.all_reduce(torch.zeros(1))


class Apart:
    """One rank of two: it has a trainer, or an engine."""

    def __init__(
        self, args: argparse.Namespace, trainer: FSDPEngine | None, rollout: Any, links: dict[str, Any]
    ) -> None:
        self._args, self._trainer, self._rollout, self._links = args, trainer, rollout, links
        self._observer = Observer()
        self._prompts = prompts(args)
        if rollout is not None:
            self._in_place, self._by_loaders = rollout._weights, loaders_of(args, rollout)

    def measure(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Seconds of the slowest rank in each sync, and of each rank's phases: told after each turn."""
        found: dict[str, Any] = {"first_sync_s": self._sync(APART[0], in_place=True)[0]}
        mine: dict[str, list[tuple[float, dict[str, float]]]] = {way: [] for way in APART}
        told: list[Any] = [None, None]
        for turn in range(-1, self._args.blocks * self._args.syncs + 1):
            for way in APART:
                if self._trainer is not None:
                    move(self._trainer)
                took = self._sync(way)
                if turn > 0:  # a link's first one goes by headers, its second one plans and takes memory
                    mine[way].append(took)
                self._generate()
            if turn > 0:
                dist.all_gather_object(told, mine)
                tell(found | {way: slowest([each[way] for each in told]) for way in APART})
        tell(found | {way: slowest([each[way] for each in told]) for way in APART} | self._compared())

    def _sync(self, way: str, in_place: bool | None = None) -> tuple[float, dict[str, float]]:
        """One sync; the seconds of this rank, and of its phases. in_place: as the way says, unless given."""
        if self._rollout is not None:
            by_loaders = way.endswith("loaders") if in_place is None else not in_place
            self._rollout._weights = self._by_loaders if by_loaders else self._in_place
        self._observer.begin_step()
        waited_s = self._observer.idle_s
        meet()
        begin = time.perf_counter()
        with observing(self._observer), self._observer.span("sync", 0):
            self._links[way].push()
        seconds = time.perf_counter() - begin
        return seconds, {"waiting": self._observer.idle_s - waited_s} | seconds_of(self._observer)

    def _generate(self) -> None:
        if self._rollout is not None:
            params = SamplingParams(max_tokens=self._args.tokens, n=8, ignore_eos=True)
            self._rollout.generate(self._prompts, params, range(len(self._prompts)))
        meet()

    def _compared(self) -> dict[str, Any]:
        """Whether each way, over weights of another sign, leaves the same parameters and greedy answers."""
        seen = []
        greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        for way in APART:
            for used in ("headers_loaders", way):
                self._turn_signs()
                self._sync(used)
            if self._rollout is not None:
                tensors = [part.tolist() for name in READ for part in self._rollout.read_tensor(name)]
                asked = self._prompts[:8]
                rows = self._rollout.generate(asked, greedy, range(len(asked)))
                seen.append((tensors, [row[0].token_ids for row in rows]))
        found: list[Any] = [None]
        if self._rollout is not None:
            why_not = self._in_place._told_why
            found = [{"equal": all(one == seen[0] for one in seen), "why_not_in_place": why_not}]
        dist.broadcast_object_list(found, src=1)
        return found[0]

    @torch.no_grad()
    def _turn_signs(self) -> None:
        if self._trainer is not None:
            for _, tensor in self._trainer.live_weights() or ():
                tensor.neg_()
            self._trainer.version += 1


def slowest(ranks: list[list[tuple[float, dict[str, float]]]]) -> dict[str, Any]:
    """Of the syncs of each rank: the seconds of the slowest, and where each rank spent them."""
    return {
        "sync_s": [max(seconds for seconds, _ in syncs) for syncs in zip(*ranks, strict=True)],
        "where": [medians([phases for _, phases in syncs]) for syncs in ranks],
    }


def loaders_of(args: argparse.Namespace, rollout: Any) -> EngineWeights:
    """What rollout.replace_weights=by_loaders gives an engine."""
    keeps = args.max_engine_restarts > 0
    return EngineWeights(rollout.name, rollout._specs, rollout._device, keeps, rollout._shard)


def prompts(args: argparse.Namespace) -> list[list[int]]:
    return [[2 + (row * 7919 + at * 31) % 500 for at in range(256)] for row in range(args.prompts)]


def seconds_of(observer: Observer) -> dict[str, float]:
    """Of the spans of the last sync, those of one name together."""
    phases: dict[str, float] = {}
    for span in observer.spans:
        phases[span.name] = phases.get(span.name, 0.0) + span.duration_s
    return phases


def medians(syncs: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sync in syncs for name in sync)
    return {name: statistics.median(sync.get(name, 0.0) for sync in syncs) for name in names}


def measure(
    args: argparse.Namespace,
    trainer: FSDPEngine,
    rollout: Any,
    link: Any,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Both ways in turn; told after each sync, and whether they bring the same at the end."""
    params = SamplingParams(max_tokens=args.tokens, n=8, ignore_eos=True)
    asked = prompts(args)
    begin = time.perf_counter()
    link.push()
    found: dict[str, Any] = {"first_sync_s": time.perf_counter() - begin}
    rollout.generate(asked, params, range(len(asked)))
    found |= {way: {"sync_s": [], "wake_s": [], "rollout_s": []} for way in WAYS}
    phases: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    observer = Observer()
    ways = {"in_place": rollout._weights, "loaders": loaders_of(args, rollout)}
    for _ in range(args.blocks):
        for way in WAYS:
            rollout._weights = ways[way]
            for _ in range(args.syncs):
                move(trainer)
                rollout.sleep()
                times = [time.perf_counter()]
                rollout.wake()
                times.append(time.perf_counter())
                observer.begin_step()
                with observing(observer), observer.span("sync", 0):
                    link.push()
                times.append(time.perf_counter())
                phases[way].append(seconds_of(observer))
                found[way]["where"] = [medians(phases[way])]
                rollout.generate(asked, params, range(len(asked)))
                times.append(time.perf_counter())
                for name, span in (("wake_s", 0), ("sync_s", 1), ("rollout_s", 2)):
                    found[way][name].append(times[span + 1] - times[span])
                tell(found)
    tell(found | {"equal": same_weights(trainer, rollout, link, asked, ways)})


@torch.no_grad()
def move(trainer: FSDPEngine) -> None:
    """Other weights, as after an update."""
    live = trainer.live_weights()
    assert live is not None
    live.settle()
    for _, tensor in live:
        tensor.mul_(1.0003)
    trainer.version += 1


def same_weights(
    trainer: FSDPEngine, rollout: Any, link: Any, asked: list[list[int]], ways: dict[str, Any]
) -> bool:
    """Whether both ways leave the same parameters and greedy answers."""
    seen = []
    greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    for way in ("in_place", "loaders", "in_place"):
        rollout._weights = ways[way]
        trainer.version += 1
        rollout.sleep()
        link.push()
        tensors = [part.tolist() for name in READ for part in rollout.read_tensor(name)]
        rows = rollout.generate(asked[:8], greedy, range(len(asked[:8])))
        seen.append((tensors, [row[0].token_ids for row in rows]))
    return seen[0] == seen[1] == seen[2]


if __name__ == "__main__":
    sys.exit(main())
