"""Turns of episodes on several engines: each episode keeps one, as siirl has it, or turns are dealt in turn.

    python benchmarks/routing_engines.py [--gpu] [--engines 2] [--rounds 3] [--engine vllm] [key=value ...]

Episodes are those of agents_async.py (1 to 12 turns, a tool after each), played by siirl's runner on real
engines, one on each GPU. kept: what an episode has read before is in its engine's cache. in turn: whatever
turn comes next goes to the next engine, as behind a balancer that knows nothing of episodes. Both play
episodes of the same turns, lengths and latencies with prompts of their own, one after the other in each
round; nothing is trained. Two kinds:

long: answers of tools are long (--shown tokens) and turns are short, as of an agent that reads files;
short: the other way round, as in agents_async.py.

tokens_per_s: sampled. prefix_hits: share of the tokens of prompts that were in the cache of vLLM. Goal, of
long: 1.3x. Engines have prefix caches of blocks, on a CPU of 128 tokens. CPU: a model of 4 small layers, all
engines on the same cores. --gpu: the shape of Qwen3-1.7B (A), or 0.6B (--shape B). Further keys go to the
engines. Writes benchmarks/results/routing_engines_<device>.json (--out for another place), after every
round (report_file.py).
"""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from agents_async_errands import Errands
from agents_pool import SMALL
from gpu_use import GpuUse
from grpo_gpu import HERE, SHAPES, make_model
from report_file import Report, end_by_signals
from safetensors.torch import load_file
from transformers import AutoTokenizer

from siirl.agents.contexts import Limits
from siirl.agents.environments import HostedEnvironment
from siirl.agents.episode import Episode
from siirl.agents.policy import Policy
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Game, Speaker, run_all
from siirl.agents.stream_client import StreamClient
from siirl.compiler.plan import AgentStage, EnvStage, InteractionPlan, ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.base import RolloutEngine
from siirl.observe.metrics import Metrics
from siirl.parallel.dims import ParallelDims

MOST_TURNS = 12


@dataclass(frozen=True)
class InTurn(Speaker):
    """Each turn goes to the next engine."""

    turns: Iterator[int] = field(default_factory=itertools.count)

    def policy_of(self, episode: Episode) -> Policy:
        engines = (self.policy, *self.more)
        return engines[next(self.turns) % len(engines)]


WAYS: dict[str, type[Speaker]] = {"in turn": InTurn, "kept": Speaker}


def main() -> int:
    end_by_signals()
    args = arguments()
    out = args.out or HERE / "results" / f"routing_engines_{'gpu' if args.gpu else 'cpu'}.json"
    kinds = {"long": (args.shown, args.short), "short": (args.short, args.turn_tokens)}
    kinds = {name: kinds[name] for name in args.kinds}
    report = Report(out, dict.fromkeys(kinds, args.rounds), engines=args.engines, keys=args.keys)
    report |= {name: getattr(args, name) for name in ("engine", "episodes", "prompt_tokens", "mean_s")}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        begin_s = time.perf_counter()
        make_model(Path(temporary), shape_of(args))
        with ThreadPoolExecutor(args.engines) as pool:
            started = list(
                pool.map(lambda number: loaded_engine(args, temporary, number), range(args.engines))
            )
        engines = [stack.enter_context(closing(engine)) for engine in started]
        use = stack.enter_context(closing(GpuUse()))
        report["start_s"] = round(time.perf_counter() - begin_s, 1)
        tokenizer = AutoTokenizer.from_pretrained(temporary)
        play(args, engines, tokenizer, InTurn, 2 * args.engines, (args.short, args.short), 0)  # warm
        for round_number, (kind, sizes) in itertools.product(range(args.rounds), kinds.items()):
            for way in sorted(WAYS, reverse=round_number % 2 == 1):
                begin_s = time.time()
                found = play(args, engines, tokenizer, WAYS[way], args.episodes, sizes, 1 + round_number)
                found["busy"] = use.shares([(begin_s, time.time())])
                print(f"round {round_number + 1}, {kind}, {way}: {found}", flush=True)
                report.setdefault(kind, {}).setdefault(way, []).append(found)
            rates = {
                way: sum(one["tokens_per_s"] for one in report[kind][way]) / (round_number + 1)
                for way in WAYS
            }
            report[kind]["ratio"] = round(rates["kept"] / rates["in turn"], 3)
            report.count(kind, round_number + 1)
    for kind in kinds:
        print(f"{kind}: episodes that keep their engine have {report[kind]['ratio']:.2f}x the tokens/s")
    report.finish()
    return 0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="vllm")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="A", help="with --gpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=["long", "short"], default=["long", "short"])
    parser.add_argument("--episodes", type=int, help="of a round; by default 8, on a GPU 64")
    parser.add_argument("--prompt-tokens", type=int, help="by default 64, on a GPU 2048")
    parser.add_argument("--shown", type=int, help="tokens of a long answer; by default 256, on a GPU 2000")
    parser.add_argument("--short", type=int, help="tokens of a short turn, or answer; by default 8 and 24")
    parser.add_argument("--turn-tokens", type=int, help="of a long turn; by default 32, on a GPU 200")
    parser.add_argument("--mean-s", type=float, default=0.1, help="of a tool")
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args(words)
    sizes = {"episodes": (8, 64), "prompt_tokens": (64, 2048), "shown": (256, 2000)}
    for name, (cpu, gpu) in {**sizes, "short": (8, 24), "turn_tokens": (32, 200)}.items():
        if getattr(args, name) is None:
            setattr(args, name, gpu if args.gpu else cpu)
    return args


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    return SHAPES[args.shape] if args.gpu else SMALL | {"max_position_embeddings": 8192}


def loaded_engine(args: argparse.Namespace, model_dir: str, number: int) -> RolloutEngine:
    """The engine of a GPU, with the weights of the model."""
    rollout = "actor_rollout_ref.rollout"
    longest = args.prompt_tokens + MOST_TURNS * (args.short + max(args.shown, args.turn_tokens))
    keys = [
        f"{rollout}.name={args.engine}",
        f"actor_rollout_ref.model.path={model_dir}",
        f"{rollout}.max_model_len={longest + 64}",
        f"{rollout}.max_num_seqs={args.episodes}",
        f"{rollout}.free_cache_engine=False",
        f"trainer.output_dir={model_dir}/outputs_{number}",
    ]
    if args.gpu:
        keys += [f"{rollout}.enforce_eager=False", f"{rollout}.gpu_memory_utilization=0.7"]
    else:
        keys += [f"{rollout}.dtype=float32", "trainer.device=cpu"]
    name = f"agent_{number}.rollout"
    plan = ModelPlan(name, 0, "rollout", args.engine, "lm", False, (0,), ParallelDims(1), "rollout", ())
    device = torch.device("cuda", number) if args.gpu else torch.device("cpu")
    if args.gpu:
        torch.cuda.set_device(device)  # of this thread
    engine = make_rollout_engine(plan, load_config([*keys, *args.keys]), None, device)
    state = load_file(Path(model_dir) / "model.safetensors", str(device))
    engine.load_weights([(key, state[key]) for key in engine.weight_specs()], version=0)
    return engine


def play(
    args: argparse.Namespace,
    engines: Sequence[RolloutEngine],
    tokenizer: Any,
    kind: type[Speaker],
    episodes: int,
    sizes: tuple[int, int],
    seed: int,
) -> dict[str, Any]:
    """A round. sizes: tokens of a tool's answer and of a turn. seed: of the episodes."""
    shown, turn_tokens = sizes
    renderer, words = ChatRenderer(tokenizer, {}), range(len(tokenizer) - 2)
    rng, chats = random.Random(f"{seed} {shown} {kind.__name__}"), []  # neither finds the other's in a cache
    for _ in range(episodes):
        drawn = rng.choices(words, k=args.prompt_tokens)
        chats.append([{"role": "user", "content": "".join(f"{chr(97 + i % 26)}{i:x} " for i in drawn)}])
    numbered = enumerate(chats)
    first = 1000 * seed + shown
    started = [Episode(i, i, 0, first * episodes + i, {"raw_prompt": chat}) for i, chat in numbered]
    prompts = [renderer.start(chat)[0] for chat in chats]
    plan = InteractionPlan("agent", STAGES, ("agent_0.rollout",), MOST_TURNS)
    for engine in engines:
        engine.drain_metrics()
    begin_s = time.perf_counter()
    with ExitStack() as stack:
        policies = [stack.enter_context(StreamClient(one.stream, one.name, 600.0)) for one in engines]
        params = SamplingParams(max_tokens=turn_tokens, ignore_eos=True)
        limits = Limits(1 << 20, 1 << 20, turn_tokens)
        speaker = kind(policies[0], params, renderer, limits, more=tuple(policies[1:]))
        game = Game(plan, {"agent": speaker}, {}, lambda: hosted(args.mean_s, shown), 600.0)
        played = run_all(game, started, prompts)
    seconds = time.perf_counter() - begin_s
    assert not any(one.kind or one.full for one in played), [one.episode.error for one in played][:1]
    said = [m.info["tokens"] for one in played for m in one.episode.messages if m.agent is not None]
    found: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "turns": len(said),
        "tokens_per_s": round(sum(said) / seconds, 1),
    }
    counted = Metrics()
    for engine in engines:
        counted.merge(engine.drain_metrics())
    hits = counted.values().get("rollout/prefix_cache_hits")
    return found if hits is None else found | {"prefix_hits": round(hits, 3)}


def hosted(mean_s: float, shown: int) -> HostedEnvironment:
    return HostedEnvironment(lambda: Errands(mean_s, MOST_TURNS, shown), "Errands")


STAGES = (
    AgentStage("agent", 0, ("tool",), (), MOST_TURNS, None, None, 0, True),
    EnvStage("tool", 0, (), ("agent",), MOST_TURNS, None, None, True, True),
)

if __name__ == "__main__":
    raise SystemExit(main())
