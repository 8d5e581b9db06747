"""What routing turns by load could gain over episodes that keep their engine: at most, and by a rule.

    python benchmarks/routing.py [--engines 4] [--episodes 16 64] [--seeds 6]

Episodes are those of agents_async.py: 1 to 12 turns with a tool of log-normal latency after each, and turns
of
log-normal length (median 150 tokens). siirl's own code plays them on a clock that jumps to the next event, by
engines of which SPEEDS tells the times: of a decode step, more of each turn in it, and of a token that is
read because it is not in their cache. So no other program changes the numbers.

kept: each episode keeps an engine, as siirl does it. by load: a turn goes where its cache is, unless another
engine has less to do by more than reading costs. pooled: one engine with the throughput of all, which has no
imbalance; nothing that chooses among engines is faster. Writes benchmarks/results/routing.json (--out for
another place).
"""

import argparse
import asyncio
import random
import selectors
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from episode_cases import END, Letters, speaker, stage
from report_file import Report, end_by_signals

from siirl.agents.contexts import Limits
from siirl.agents.environments import HostedEnvironment, Observation, StepResult
from siirl.agents.episode import Episode
from siirl.agents.runner import Game, Speaker, run_all
from siirl.compiler.plan import InteractionPlan
from siirl.data.completions import Completion

MEDIAN, MOST = 150, 2000


@dataclass(frozen=True)
class Speed:
    """Of an engine, and of the tools."""

    decode_s: float
    turn_s: float
    read_s: float
    tool_s: float


SPEEDS = {"like a CPU": Speed(0.002, 0.008, 0.0005, 0.2), "like an H200": Speed(0.008, 0.0004, 0.00006, 2.0)}


class Jumping(selectors.SelectSelector):
    """Waits for nothing: a wait moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


class Engine:
    """Decodes all its turns together; each read token delays all of them."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.left: dict[asyncio.Future[None], float] = {}
        self.cached: dict[str, int] = {}
        self.news = asyncio.Event()

    async def decode(self) -> None:
        while True:
            if not self.left:
                self.news.clear()
                await self.news.wait()
            steps = max(1.0, min(min(self.left.values()), 8.0))
            await asyncio.sleep(steps * (self.speed.decode_s + self.speed.turn_s * len(self.left)))
            for turn in list(self.left):
                self.left[turn] -= steps
                if self.left[turn] <= 0:
                    del self.left[turn]
                    turn.set_result(None)

    async def generate(self, prompt: list[int], params: Any, seed: int, seen: Any = None) -> Completion:
        tokens = min(MOST, round(random.Random(seed).lognormvariate(0, 0.9) * MEDIAN) + 1)
        begin = "".join(map(chr, prompt[:12]))  # the episode's number is there
        read = len(prompt) - min(len(prompt), self.cached.get(begin, 0))
        self.cached[begin] = len(prompt) + tokens
        turn = asyncio.get_running_loop().create_future()
        self.left[turn] = tokens + read * self.speed.read_s / self.speed.decode_s
        self.news.set()
        await turn
        return Completion([ord("x")] * (tokens - 1) + [END], [-1.0] * tokens, "stop", 0)


class Errands(HostedEnvironment):
    """As agents_async_errands.py, on the clock of the loop."""

    def __init__(self, mean_s: float) -> None:
        super().__init__(lambda: None, "errands")
        self.mean_s = mean_s

    async def reset(self, task: dict[str, Any], seed: int, deadline_s: float) -> Observation:
        self.rng = random.Random(seed)
        self.turns = self.rng.randint(1, 12)
        return Observation("")

    async def step(self, actions: Any, deadline_s: float) -> StepResult:
        await asyncio.sleep(self.mean_s * self.rng.lognormvariate(-0.5, 1.0))
        self.turns -= 1
        return StepResult("more", 0.0, self.turns == 0)

    async def close(self, deadline_s: float = 0.0) -> None:
        return None


@dataclass(frozen=True)
class ByLoad(Speaker):
    """A turn goes where it is done first, as far as that is known."""

    homes: dict[int, Engine] = field(default_factory=dict)

    def policy_of(self, episode: Episode) -> Engine:
        def cost_s(engine: Engine) -> float:
            speed, reads = engine.speed, 0 if engine is home else episode.state.get("tokens", 200)
            return sum(engine.left.values()) * speed.turn_s + reads * speed.read_s * (1 + len(engine.left))

        home = self.homes.get(episode.episode_id)
        engine = min((self.policy, *self.more), key=lambda one: (cost_s(one), one is not home))
        self.homes[episode.episode_id] = engine
        said = sum(message.info.get("tokens", 0) for message in episode.messages)
        episode.state["tokens"] = 200 + said
        return engine


def tokens_per_s(kind: type[Speaker], speed: Speed, num_engines: int, count: int, first_seed: int) -> float:
    """Of `count` episodes, from the first to the last turn."""
    selector = Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    stages = [stage("a", 0, following="env"), stage("env", None, back_to="a", max_turns=12)]
    plan = InteractionPlan("a", tuple(stages), ("agent_0.rollout",), 12)
    episodes = []
    for number in range(count):
        task = {"raw_prompt": [{"role": "user", "content": f"{number:08d}" + "q" * 200}], "extra_info": None}
        episodes.append(Episode(number, number, 0, first_seed * count + number, task))
    prompts = [Letters().encode(f"u:{one.task['raw_prompt'][0]['content']}{chr(END)}a:") for one in episodes]

    def play(work: Any) -> Any:
        async def everything() -> Any:
            tasks = [asyncio.create_task(engine.decode()) for engine in engines]
            played = await work
            for task in tasks:
                task.cancel()
            return played

        return loop.run_until_complete(everything())

    async def made() -> list[Engine]:
        return [Engine(speed) for _ in range(num_engines)]

    engines = loop.run_until_complete(made())
    plain = speaker(engines[0], Limits(10_000, 100_000), more=tuple(engines[1:]))
    params = replace(plain.params, max_tokens=MOST)
    who = kind(**vars(plain) | {"params": params})
    game = Game(plan, {"a": who}, {}, lambda: Errands(speed.tool_s), 5.0)
    played = run_all(game, episodes, prompts, play)
    assert all(one.kind is None and one.episode.done for one in played)
    said = sum(
        message.info["tokens"] for one in played for message in one.episode.messages if message.agent == 0
    )
    loop.close()
    return said / selector.now


def main() -> int:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--episodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "routing.json")
    args = parser.parse_args()
    cases = {
        f"{name}, {count} episodes": (speed, count)
        for name, speed in SPEEDS.items()
        for count in args.episodes
    }
    report = Report(args.out, dict.fromkeys(cases, args.seeds), engines=args.engines)
    for name, (speed, count) in cases.items():
        pooled = replace(speed, turn_s=speed.turn_s / args.engines, read_s=speed.read_s / args.engines)
        ways = {"kept": (Speaker, speed, args.engines), "by load": (ByLoad, speed, args.engines)}
        ways["pooled"] = (Speaker, pooled, 1)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for seed in range(args.seeds):
            for way, how in ways.items():
                rates[way].append(tokens_per_s(*how, count, seed))
            report.count(name, seed + 1)
        means = {way: statistics.mean(found) for way, found in rates.items()}
        told = {
            way: {"tokens_per_s": round(rate), "ratio": round(rate / means["kept"], 3)}
            for way, rate in means.items()
        }
        report.update({name: told})
        print(f"{name}: {told}", flush=True)
    report.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
