"""How much time interactions save when no sample waits for the others at the end of a turn.

    python benchmarks/interaction.py [--engines hf vllm] [--out interaction.json]

Two agents with one policy talk in turn, an environment answers each turn after a fixed delay. The lengths of
responses vary 10 times: log-uniform between --shortest tokens and 10 times as many, for each turn of each
sample. "barrier": a turn begins when all samples have ended the one before; "free": as soon as its own sample
is ready. Same prompts, same lengths, same engine, same number of tokens. Goal: free is at least 1.5x faster.

worker_cpu_s: processor time of this process, barrier and free, which other programs on the machine hardly
change; the vLLM engine has a process of its own.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fixtures_tiny import make_tiny_model_dir
from transformers import AutoModelForCausalLM

from siirl.agents.policy import Generated, Policy
from siirl.agents.pump import Pump
from siirl.config import load_config
from siirl.dag.plan import ModelPlan
from siirl.engines.registry import make_rollout_engine
from siirl.engines.rollout.base import Request, RolloutEngine, SamplingParams
from siirl.parallel.dims import ParallelDims

VOCAB, PROMPT, OBSERVATION = 64, 16, 4
MODEL = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "layers": 2, "mlp": 128}


class TurnBarrier:
    """A policy whose turns begin together: when every sample has asked for its next one."""

    def __init__(self, policy: Policy, num_samples: int) -> None:
        self._policy, self._barrier = policy, asyncio.Barrier(num_samples)

    async def generate(self, prompt: list[int], params: Any, seed: int) -> Generated:
        await self._barrier.wait()
        return await self._policy.generate(prompt, params, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["hf", "vllm"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    lengths = [
        [round(options.shortest * 10 ** rng.random()) for _ in range(options.turns)]
        for _ in range(options.samples)
    ]
    results: dict[str, Any] = {
        name: getattr(options, name) for name in ("samples", "turns", "shortest", "repeats")
    } | {"model": MODEL, "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model_dir(folder, vocab=VOCAB, max_positions=4096, init_std=0.2, tokenizer=False, **MODEL)
        for name in options.engines:
            results[name] = compare(name, folder, lengths, options.delays, options.repeats)
    results["load_after"] = os.getloadavg()[0]
    text = json.dumps(results, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def compare(
    name: str, model_dir: str, lengths: list[list[int]], delays: list[float], repeats: int
) -> list[dict[str, Any]]:
    """Seconds of both ways, the medians of interleaved repeats, for each delay of the environment."""
    engine = loaded_engine(name, model_dir)
    found = []
    try:
        seconds(engine, [row[:1] for row in lengths], 0.0, barrier=False)  # warm
        for delay_s in delays:
            cpu: dict[bool, list[float]] = {True: [], False: []}
            runs = []
            for _ in range(repeats):
                pair = []
                for barrier in (True, False):
                    start_s = time.process_time()
                    pair.append(seconds(engine, lengths, delay_s, barrier))
                    cpu[barrier].append(time.process_time() - start_s)
                runs.append(pair)
            barrier_s, free_s = (statistics.median(times) for times in zip(*runs, strict=True))
            found.append(
                {
                    "environment_s": delay_s,
                    "barrier_s": round(barrier_s, 2),
                    "free_s": round(free_s, 2),
                    "speedup": round(barrier_s / free_s, 2),
                    "worker_cpu_s": [round(statistics.median(cpu[barrier]), 2) for barrier in (True, False)],
                    "tokens_per_s": round(sum(map(sum, lengths)) / free_s),
                    "runs": [[round(value, 2) for value in run] for run in runs],
                }
            )
            print(name, found[-1], file=sys.stderr, flush=True)
    finally:
        engine.close()
    return found


def seconds(engine: RolloutEngine, lengths: list[list[int]], delay_s: float, barrier: bool) -> float:
    """Wall time of all episodes; lengths[sample][turn]: tokens of a response."""

    async def all_episodes(policy: Policy) -> None:
        policy = TurnBarrier(policy, len(lengths)) if barrier else policy
        await asyncio.gather(*(episode(policy, i, row, delay_s) for i, row in enumerate(lengths)))

    start_s = time.perf_counter()
    with Pump(engine.stream, Request, engine.name, 600.0) as policy:
        asyncio.run(all_episodes(policy))
    return time.perf_counter() - start_s


async def episode(policy: Policy, sample: int, lengths: list[int], delay_s: float) -> None:
    """One conversation: turns of the given lengths, and what the environment says to each."""
    rng = random.Random(sample)
    say: Callable[[int], list[int]] = lambda count: [rng.randrange(2, VOCAB) for _ in range(count)]  # noqa: E731
    context = say(PROMPT)
    for turn, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        said = await policy.generate(context, params, 1000 * sample + turn)
        assert len(said.token_ids) == length
        await asyncio.sleep(delay_s)
        context = [*context, *said.token_ids, *say(OBSERVATION)]


def loaded_engine(name: str, model_dir: str) -> RolloutEngine:
    cfg = load_config(
        [
            f"actor_rollout_ref.rollout.name={name}",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.max_model_len=2048",
            "actor_rollout_ref.rollout.max_num_seqs=64",
            f"trainer.output_dir={model_dir}/outputs",
        ]
    )
    plan = ModelPlan("agent_0.rollout", 0, "rollout", name, "lm", False, (0,), ParallelDims(1), "rollout", ())
    engine = make_rollout_engine(plan, cfg, None, torch.device("cpu"))
    state = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    engine.load_weights([(key, state[key]) for key in engine.weight_specs()], version=0)
    return engine


if __name__ == "__main__":
    main()
