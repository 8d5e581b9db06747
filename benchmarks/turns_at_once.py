"""How much time an interaction saves when agents that no edge orders speak at once.

    python benchmarks/turns_at_once.py [--engines hf vllm] [--episodes 4] [--debaters 3] [--rounds 3]

A debate: so many debaters with one policy, so many rounds, with the runner, contexts and engines of a real
interaction. "in_turn": the debaters of a round are a chain, each waits for the one before. "at_once": no edge
orders them, as in dag_templates/debate_rounds.yaml. Same number of turns and tokens; what a debater reads
differs, as one of a chain also reads what was said before it in the round. Lengths of turns vary 10 times,
log-uniform from --shortest tokens. The fewer episodes an engine has at once, the more it gains by several
turns of each: with many, it decodes as many rows either way.

Speedup: wall seconds in turn / at once, median over --repeats of interleaved pairs. cpu_s: processor time of
this process and the engine's. Writes benchmarks/results/turns_at_once_cpu.json (--out for another place).
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from interaction import HERE, MODEL, MOST_TOKENS, cpu_seconds, loaded_engine
from report_file import Report, end_by_signals

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fixtures_tiny import make_tiny_model_dir
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from siirl.agents.contexts import Limits
from siirl.agents.episode import Episode
from siirl.agents.policy import Policy
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Game, Speaker, run_all, turn_seed
from siirl.agents.stream_client import StreamClient
from siirl.compiler.plan import AgentStage, InteractionPlan
from siirl.data.completions import Completion, SamplingParams
from siirl.data.seen import NO_IMAGES, Seen
from siirl.engines.rollout.base import RolloutEngine


class Lengths:
    """A policy whose turns have lengths by episode, agent and round."""

    def __init__(self, policy: Policy, options: argparse.Namespace, seed: int) -> None:
        self._policy, rng = policy, random.Random(seed)
        turns = [
            (agent, turn * options.debaters + agent)
            for turn in range(options.rounds)
            for agent in range(options.debaters)
        ]
        self._tokens = {
            turn_seed(episode, agent, turn): round(options.shortest * 10 ** rng.random())
            for episode in range(options.episodes)
            for agent, turn in turns
        }

    async def generate(self, prompt: list[int], params: Any, seed: int, seen: Seen = NO_IMAGES) -> Completion:
        return await self._policy.generate(prompt, replace(params, max_tokens=self._tokens[seed]), seed, seen)


def debate(options: argparse.Namespace, at_once: bool) -> InteractionPlan:
    names = tuple(f"debater_{agent}" for agent in range(options.debaters))
    stages = tuple(
        AgentStage(
            name,
            agent,
            () if at_once else names[agent + 1 : agent + 2],
            (names if at_once else names[:1]) if agent == options.debaters - 1 else (),
            options.rounds,
            None,
            None,
            0,
            True,
            beside=tuple(other for other in names if other != name) if at_once else (),
        )
        for agent, name in enumerate(names)
    )
    return InteractionPlan(names[0], stages, ("agent_0.rollout",), options.rounds * options.debaters)


def play(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    seed: int,
    at_once: bool,
) -> tuple[float, float, int]:
    """Wall and processor seconds of all episodes, and the tokens that they said."""
    chats = [[{"role": "user", "content": f"debate {number}"}] for number in range(options.episodes)]
    episodes = [Episode(number, number, 0, number, {"raw_prompt": chat}) for number, chat in enumerate(chats)]
    renderer, plan = ChatRenderer(tokenizer, {}), debate(options, at_once)
    prompts = [renderer.start(chat)[0] for chat in chats]
    before = time.perf_counter(), cpu_seconds(engine)
    with StreamClient(engine.stream, engine.name, 600.0) as policy:
        speaker = Speaker(
            Lengths(policy, options, seed),
            SamplingParams(1, ignore_eos=True),
            renderer,
            Limits(MOST_TOKENS, MOST_TOKENS),
        )
        played = run_all(Game(plan, {stage.node: speaker for stage in plan.speaking}), episodes, prompts)
    seconds = time.perf_counter() - before[0], cpu_seconds(engine) - before[1]
    assert not any(one.kind or one.full for one in played)
    tokens = [
        message.info["tokens"]
        for one in played
        for message in one.episode.messages
        if message.agent is not None
    ]
    assert len(tokens) == options.episodes * options.rounds * options.debaters
    return *seconds, sum(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["hf", "vllm"])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--debaters", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "turns_at_once_cpu.json")
    options = parser.parse_args()
    end_by_signals()
    results = Report(options.out, dict.fromkeys(options.engines, options.repeats))
    results |= {name: getattr(options, name) for name in ("episodes", "debaters", "rounds", "shortest")}
    results |= {"model": MODEL | {"layers": options.layers}, "cores": len(os.sched_getaffinity(0))}
    results["load_before"] = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model_dir(folder, max_positions=MOST_TOKENS, init_std=0.2, **MODEL, layers=options.layers)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for name in options.engines:
            engine = loaded_engine(name, folder)
            try:
                play(engine, tokenizer, options, 99, True)  # warm
                compare(engine, tokenizer, options, results, name)
            finally:
                engine.close()
    results["load_after"] = os.getloadavg()[0]
    results.finish()
    print(results.text())


def compare(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    results: Report,
    name: str,
) -> None:
    """Interleaved pairs on one engine."""
    runs = []
    for repeat in range(options.repeats):
        in_turn, at_once = (play(engine, tokenizer, options, repeat, how) for how in (False, True))
        assert in_turn[2] == at_once[2]
        runs.append((in_turn, at_once))
        results[name] = {
            "speedup": round(statistics.median(a[0] / b[0] for a, b in runs), 2),
            "in_turn_s": round(statistics.median(a[0] for a, _ in runs), 2),
            "at_once_s": round(statistics.median(b[0] for _, b in runs), 2),
            "cpu_s": [round(statistics.median(run[how][1] for run in runs), 2) for how in (0, 1)],
            "tokens": [run[0][2] for run in runs],
            "runs": [[round(one[0], 2) for one in run] for run in runs],
        }
        results.count(name, repeat + 1)
        print(name, results[name], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
