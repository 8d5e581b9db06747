"""How much time interactions save when no sample waits for the others at the end of a turn.

    python benchmarks/interaction.py [--layers 28] [--engines vllm]
    python benchmarks/interaction.py --gpu [--size 0.6B]

Two agents with one policy talk in turn and an environment answers, with the runner, contexts, engines and
environment threads of a real interaction. "free": each sample goes on as soon as it is ready. "barrier": the
same, but a turn begins when all samples have ended the one before. Same prompts, lengths, seeds and tokens.
The lengths of responses vary 10 times between samples, log-uniform between --shortest tokens and 10 times as
many:

turn: each turn of each sample has a length of its own;
sample: a sample has one length for all its turns. The longest sample then decides how long both ways take
    (unless there are more samples than the engine runs at once), so little can be gained, whatever one does.

decode_steps: of the batch at least, with barriers and without, which follow from the lengths alone. cpu_s:
processor time of this process and the engine's, barrier and free, which other programs on the machine hardly
change. Each repeat draws lengths of its own, and numbers are medians of them.

On a CPU the model is narrow and has --layers layers, as many as Qwen3-0.6B by default: a step's cost of each
layer then has about the share that it has in real models. --gpu: the shapes of Qwen3 (--size) in bf16, random
weights. Goal: 1.5x for lengths by turn.

Writes benchmarks/results/interaction_<device>.json (--out for another place), after each delay of the
environment (report_file.py).
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from grpo_gpu import COMMON, HERE, SHAPES, make_model
from report_file import Report, end_by_signals

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fixtures_tiny import make_tiny_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from siirl.agents.contexts import Limits
from siirl.agents.environments import HostedEnvironment
from siirl.agents.episode import Episode
from siirl.agents.policy import Policy
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Game, Speaker, run_all, turn_seed
from siirl.agents.stream_client import StreamClient
from siirl.compiler.plan import AgentStage, EnvStage, InteractionPlan, ModelPlan
from siirl.config import load_config
from siirl.data.completions import Completion, SamplingParams
from siirl.data.seen import NO_IMAGES, Seen
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.base import RolloutEngine
from siirl.parallel.dims import ParallelDims

AGENTS = 2
MOST_TOKENS = 8192
MAX_ROWS = {"cpu": 64, "cuda": 256}
"""On a GPU, vLLM captures CUDA graphs of up to twice as many tokens: rows and the prompts that join them."""
READ_TOKENS = 32
"""Of a turn besides the response, at most. An episode that does not fit leaves the others at a barrier."""
MODEL = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "mlp": 128}
SIZES = {
    "0.6B": COMMON | SHAPES["B"],
    "1.7B": COMMON | SHAPES["A"],
    "8B": COMMON
    | {"num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False}
    | {"hidden_size": 4096, "intermediate_size": 12288},
}
Lengths = list[list[int]]  # of the response in [sample][turn]


class Lecture:
    """A policy whose responses have the given lengths, by the seed of the turn; barrier: before each turn."""

    def __init__(self, policy: Policy, lengths: Lengths, barrier: bool) -> None:
        self._policy = policy
        self._tokens = {
            turn_seed(sample, turn % AGENTS, turn): length
            for sample, row in enumerate(lengths)
            for turn, length in enumerate(row)
        }
        self._barrier = asyncio.Barrier(len(lengths)) if barrier else None

    async def generate(self, prompt: list[int], params: Any, seed: int, seen: Seen = NO_IMAGES) -> Completion:
        if self._barrier is not None:
            await self._barrier.wait()
        return await self._policy.generate(prompt, replace(params, max_tokens=self._tokens[seed]), seed, seen)


class Slow:
    """An environment that needs its time."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def reset(self, task: dict, seed: int) -> str:
        return ""

    def step(self, actions: dict[int, str]) -> tuple[str, float, bool]:
        if self._delay_s:
            time.sleep(self._delay_s)
        return "go", 0.0, False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--size", choices=SIZES, default="0.6B", help="with --gpu")
    parser.add_argument("--layers", type=int, default=28, help="without --gpu")
    parser.add_argument("--engines", nargs="+", default=["vllm"])
    parser.add_argument("--vary", nargs="+", default=["turn", "sample"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=4)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.05])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_by_signals()
    out = options.out or HERE / "results" / f"interaction_{'gpu' if options.gpu else 'cpu'}.json"
    results = Report(out, dict.fromkeys(options.engines, len(options.vary) * len(options.delays)))
    results |= {name: getattr(options, name) for name in ("samples", "turns", "shortest")}
    sizes = SIZES[options.size] if options.gpu else MODEL | {"layers": options.layers}
    results |= {"model": sizes, "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    if options.gpu:
        results["device"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        if options.gpu:
            make_model(Path(folder), sizes)
        else:
            make_tiny_model_dir(folder, max_positions=MOST_TOKENS, init_std=0.2, **sizes)
        for name in options.engines:
            compare(name, folder, options, results)
    results["load_after"] = os.getloadavg()[0]
    results.finish()
    print(results.text())


def compare(name: str, model_dir: str, options: argparse.Namespace, results: Report) -> None:
    """Both ways on one engine: medians of interleaved pairs, by what varies and the environment's delay."""
    engine = loaded_engine(name, model_dir, "cuda" if options.gpu else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    results[name] = found = []
    try:
        for vary in options.vary:
            draws = [drawn(vary, options, repeat) for repeat in range(options.repeats)]
            play(engine, tokenizer, [row[:2] for row in draws[0]], 0.0, barrier=False)  # warm
            for delay_s in options.delays:
                pairs = [
                    [play(engine, tokenizer, lengths, delay_s, barrier) for barrier in (True, False)]
                    for lengths in draws
                ]
                found.append(summary(vary, delay_s, draws, pairs))
                results.count(name, len(found))
                print(name, found[-1], file=sys.stderr, flush=True)
    finally:
        engine.close()


def drawn(vary: str, options: argparse.Namespace, seed: int) -> Lengths:
    """Lengths between the shortest and 10 times as many tokens."""
    rng = random.Random(seed)
    rows = []
    for _ in range(options.samples):
        factors = [10 ** rng.random() for _ in range(options.turns)]
        rows.append(
            [
                round(options.shortest * factors[turn if vary == "turn" else 0])
                for turn in range(options.turns)
            ]
        )
    longest = max(sum(row) + READ_TOKENS * len(row) for row in rows)
    if longest > MOST_TOKENS:
        raise SystemExit(
            f"an episode may need {longest} tokens, {MOST_TOKENS} fit: lower --turns or --shortest"
        )
    return rows


def summary(
    vary: str, delay_s: float, draws: list[Lengths], pairs: list[list[tuple[float, float]]]
) -> dict[str, Any]:
    """Medians of (wall, processor) seconds of pairs (barrier, free), one for each draw of lengths."""
    (barrier_s, barrier_cpu_s), (free_s, free_cpu_s) = (
        [statistics.median(values) for values in zip(*runs, strict=True)] for runs in zip(*pairs, strict=True)
    )
    steps = [(sum(map(max, zip(*rows, strict=True))), max(map(sum, rows))) for rows in draws]
    num_tokens = statistics.mean(sum(map(sum, rows)) for rows in draws)
    return {
        "vary": vary,
        "environment_s": delay_s,
        "decode_steps": steps,
        "decode_steps_ratio": round(statistics.median(barrier / free for barrier, free in steps), 2),
        "barrier_s": round(barrier_s, 2),
        "free_s": round(free_s, 2),
        "speedup": round(statistics.median(barrier[0] / free[0] for barrier, free in pairs), 2),
        "cpu_s": [round(barrier_cpu_s, 2), round(free_cpu_s, 2)],
        "tokens_per_s": round(num_tokens / free_s),
        "runs": [[round(seconds, 2) for seconds, _ in pair] for pair in pairs],
    }


def play(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, lengths: Lengths, delay_s: float, barrier: bool
) -> tuple[float, float]:
    """Wall and processor seconds of an episode for each row of lengths."""
    chats = [[{"role": "user", "content": f"sample {sample}: what now?"}] for sample in range(len(lengths))]
    episodes = [Episode(sample, sample, 0, sample, {"raw_prompt": chat}) for sample, chat in enumerate(chats)]
    renderer = ChatRenderer(tokenizer, {})
    prompts = [renderer.start(chat)[0] for chat in chats]
    plan = talk(len(lengths[0]))
    before = time.perf_counter(), cpu_seconds(engine)
    with StreamClient(engine.stream, engine.name, 600.0) as policy:
        lecture = Lecture(policy, lengths, barrier)
        speaker = Speaker(lecture, SamplingParams(1, ignore_eos=True), renderer, Limits(1 << 20, 1 << 20))
        speakers = {stage.node: speaker for stage in plan.speaking}
        game = Game(plan, speakers, make_env=lambda: HostedEnvironment(lambda: Slow(delay_s), "Slow"))
        played = run_all(game, episodes, prompts)
    seconds = time.perf_counter() - before[0], cpu_seconds(engine) - before[1]
    assert not any(one.kind or one.full for one in played)
    said = [[m.info["tokens"] for m in one.episode.messages if m.agent is not None] for one in played]
    assert said == lengths
    return seconds


def talk(turns: int) -> InteractionPlan:
    """Agent, environment, agent, environment, and again: so many turns in all."""
    rounds = turns // AGENTS
    stages = (
        AgentStage("first", 0, ("game",), (), rounds, None, None, 0, True),
        EnvStage("game", 0, ("second",), (), rounds, None, None, True, True),
        AgentStage("second", 1, ("end",), (), rounds, None, None, 0, True),
        EnvStage("end", 0, (), ("first",), rounds, None, None, True, True),
    )
    return InteractionPlan("first", stages, ("agent_0.rollout",), turns)


def cpu_seconds(engine: RolloutEngine) -> float:
    """Processor time of this process, and of the engine's if it has one."""
    process = getattr(engine, "_process", None)
    if process is None:
        return time.process_time()
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loaded_engine(name: str, model_dir: str, device: str = "cpu") -> RolloutEngine:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rollout = "actor_rollout_ref.rollout"
    keys = [
        f"{rollout}.name={name}",
        f"actor_rollout_ref.model.path={model_dir}",
        f"{rollout}.dtype={str(dtype).removeprefix('torch.')}",
        f"{rollout}.max_model_len={MOST_TOKENS}",
        f"{rollout}.max_num_seqs={MAX_ROWS[device]}",
        f"trainer.output_dir={model_dir}/outputs",
    ]
    if device == "cuda":
        keys += [f"{rollout}.enforce_eager=False", f"{rollout}.gpu_memory_utilization=0.5"]
    cfg = load_config(keys)
    plan = ModelPlan("agent_0.rollout", 0, "rollout", name, "lm", False, (0,), ParallelDims(1), "rollout", ())
    engine = make_rollout_engine(plan, cfg, None, torch.device(device))
    state = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).state_dict()
    engine.load_weights([(key, state[key]) for key in engine.weight_specs()], version=0)
    return engine


if __name__ == "__main__":
    main()
