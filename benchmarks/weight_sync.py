"""Weights from a trainer into a vLLM engine on the same device: by vLLM's loaders, and written in place.

    python benchmarks/weight_sync.py [--shapes 0.6B 1.7B] [--blocks 2] [--syncs 4] [--tokens 384]
        [--replace-weights in_place_checked] [--cpu]

One process: an FSDP2 trainer of fp32 master weights, an engine in bf16 that sleeps between rollouts, and the
link between them, as in a run. A block is --syncs steps: sleep, move the weights, wake, sync, generate
--prompts x 8 responses of --tokens tokens. Blocks by loaders and in place take turns, in one engine. The
first sync, which finds the places, is told apart. At the end both ways bring the same weights, and the
parameters and greedy answers must be equal. By loaders is what rollout.replace_weights=by_loaders does, in
place what --replace-weights says.

Writes benchmarks/results/weight_sync_<device>.json (--out for another place). --cpu: a small shape.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from grpo_gpu import REPOSITORY, SHAPES, make_model

from siirl.compiler.plan import LinkPlan, ModelPlan
from siirl.config import load_config
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.links import make_link
from siirl.engines.rollout.base import SamplingParams
from siirl.engines.train.fsdp import FSDPEngine
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroupManager

NAMED = {"0.6B": SHAPES["B"], "1.7B": SHAPES["A"]}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}  # fmt: skip
WAYS = ("loaders", "in_place")
READ = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=NAMED, default=["0.6B", "1.7B"])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=384)
    ways = ("in_place", "in_place_checked")
    parser.add_argument("--replace-weights", choices=ways, default=ways[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT " + json.dumps(of_shape(args, args.one)), flush=True)
        return 0
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": commit(), **machine()}
    report["shapes"] = {}
    for shape in ["small"] if args.cpu else args.shapes:
        words = [sys.executable, __file__, *sys.argv[1:], "--one", shape]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
        if ran.returncode or not lines:
            print(ran.stdout[-4000:], ran.stderr[-8000:])
            return 1
        report["shapes"][shape] = found = json.loads(lines[0].removeprefix("RESULT "))
        print_shape(shape, found)
    place = REPOSITORY / "benchmarks" / "results" / f"weight_sync_{'cpu' if args.cpu else 'gpu'}.json"
    out = args.out or place
    out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def print_shape(shape: str, found: dict[str, Any]) -> None:
    print(f"{shape}: first sync {found['first_sync_s']:.3f} s; equal: {found['equal']}", flush=True)
    for way in WAYS:
        for name, values in found[way].items():
            each = " ".join(f"{value:.4g}" for value in values)
            print(f"  {way:9s} {name:10s} median {statistics.median(values):8.4f}   {each}", flush=True)


def of_shape(args: argparse.Namespace, shape: str) -> dict[str, Any]:
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
            return measure(args, trainer, rollout, link)
        finally:
            rollout.close()


def build(args: argparse.Namespace, folder: Path, device: torch.device, groups: ProcessGroupManager) -> tuple:
    rollout = "actor_rollout_ref.rollout"
    cfg = load_config(
        [
            f"actor_rollout_ref.model.path={folder}/model",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            f"{rollout}.name=vllm",
            f"{rollout}.dtype=bfloat16",
            f"{rollout}.replace_weights={args.replace_weights}",
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
    dims = ParallelDims(1)
    plans = [
        ModelPlan(f"agent_0.{role}", 0, role, kind, "lm", role == "actor", (0,), dims, role, (role,))
        for role, kind in (("actor", "fsdp"), ("rollout", "vllm"))
    ]
    engine = make_rollout_engine(plans[1], cfg, groups, device)
    trainer = FSDPEngine(plans[0], cfg, groups, device)
    trainer.version = 1
    plan = LinkPlan("agent_0.sync", "agent_0.actor", "agent_0.rollout", (0,), "local")
    return trainer, engine, make_link(plan, trainer, engine, groups, folder / "never")


def measure(args: argparse.Namespace, trainer: FSDPEngine, rollout: Any, link: Any) -> dict[str, Any]:
    prompts = [[2 + (row * 7919 + at * 31) % 500 for at in range(256)] for row in range(args.prompts)]
    params = SamplingParams(max_tokens=args.tokens, n=8, ignore_eos=True)
    begin = time.perf_counter()
    link.push()
    found: dict[str, Any] = {"first_sync_s": time.perf_counter() - begin}
    rollout.generate(prompts, params, range(len(prompts)))
    found |= {way: {"sync_s": [], "wake_s": [], "rollout_s": []} for way in WAYS}
    for _ in range(args.blocks):
        for way in WAYS:
            rollout._weights.by_loaders = way == "loaders"
            for _ in range(args.syncs):
                move(trainer)
                rollout.sleep()
                times = [time.perf_counter()]
                rollout.wake()
                times.append(time.perf_counter())
                link.push()
                times.append(time.perf_counter())
                rollout.generate(prompts, params, range(len(prompts)))
                times.append(time.perf_counter())
                for name, span in (("wake_s", 0), ("sync_s", 1), ("rollout_s", 2)):
                    found[way][name].append(times[span + 1] - times[span])
    found["equal"] = same_weights(trainer, rollout, link, prompts)
    return found


@torch.no_grad()
def move(trainer: FSDPEngine) -> None:
    """Other weights, as after an update."""
    live = trainer.live_weights()
    assert live is not None
    live.settle()
    for _, tensor in live:
        tensor.mul_(1.0003)
    trainer.version += 1


def same_weights(trainer: FSDPEngine, rollout: Any, link: Any, prompts: list[list[int]]) -> bool:
    """Whether both ways leave the same parameters and greedy answers."""
    seen = []
    greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    for way in ("in_place", "loaders", "in_place"):
        rollout._weights.by_loaders = way == "loaders"
        trainer.version += 1
        rollout.sleep()
        link.push()
        tensors = [part.tolist() for name in READ for part in rollout.read_tensor(name)]
        rows = rollout.generate(prompts[:8], greedy, range(len(prompts[:8])))
        seen.append((tensors, [row[0].token_ids for row in rows]))
    return seen[0] == seen[1] == seen[2]


def commit() -> str:
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, Any]:
    from grpo_gpu import machine

    return machine()


if __name__ == "__main__":
    sys.exit(main())
