"""Episodes in flight, of agents that say what follows from seeds alone, and of an environment."""

import random
import time
from contextlib import nullcontext
from hashlib import blake2b

from episode_cases import END, Letters, speaker, stage
from in_flight_cases import Run

from siirl.agents.environments import HostedEnvironment, StepResult
from siirl.agents.episode import Episode
from siirl.agents.runner import Game, turn_seed
from siirl.agents.stream_client import StreamClient
from siirl.compiler.plan import AgentStage, EnvStage, InteractionPlan
from siirl.data.completions import Completion
from siirl.engines.rollout.base import RolloutEngine, WaveStream
from siirl.nodes.episodes_in_flight import EpisodesInFlight

POLICIES = ("agent_0.rollout", "agent_1.rollout")


def draw(*what):
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=4).digest(), "big")


def said(seed):
    """The turn of a seed: a few are long."""
    length = 30 if draw(seed) % 5 == 0 else 1 + draw(seed) % 4
    return [*(97 + draw(seed, i) % 26 for i in range(length)), END]


SAMPLED = {}  # seed of a turn -> the version of each of its tokens


def sampled(ask, tokens, version):
    """Note what was sampled of a turn; gives the tokens."""
    SAMPLED[ask.seed] = SAMPLED.get(ask.seed, [])[: ask.start] + [version] * len(tokens)
    return tokens


class Decoder:
    """A stream that gives each of its turns up to two tokens at a time."""

    def __init__(self, version, rng):
        self.version, self.rng, self.pending = version, rng, {}

    @property
    def num_pending(self):
        return len(self.pending)

    def submit(self, asks):
        for ask in asks:
            assert ask.key not in self.pending
            assert ask.prompt[len(ask.prompt) - ask.start :] == said(ask.seed)[: ask.start]
            self.pending[ask.key] = [ask, ask.start]

    def collect(self, timeout_s):
        for entry in self.pending.values():
            entry[1] += self.rng.randint(0, 2)
        ended = [key for key, (ask, end) in self.pending.items() if end >= len(said(ask.seed))]
        return [self.answer(key, "stop") for key in ended]

    def answer(self, key, reason):
        ask, end = self.pending.pop(key)
        tokens = said(ask.seed)[ask.start : end]
        assert len(tokens) <= ask.params.max_tokens
        return key, Completion(sampled(ask, tokens, self.version), [-1.0] * len(tokens), reason, self.version)

    def pause(self):
        return [self.answer(key, "paused") for key in list(self.pending)]

    def close(self):
        self.pending = {}


class Waves(RolloutEngine):
    """Says a token of each turn at a time, and counts how often; comes back where it is interrupted."""

    name, weight_version, num_steps, num_cut = "waves", 0, 0, 0

    def new_stream(self, interrupt):
        return WaveStream(self, self.wave, interrupt)

    def wave(self, requests, interrupt):
        turns = [said(request.seed)[request.start :] for request in requests]
        for done in range(1, 1 + max(map(len, turns))):
            self.num_steps += 1
            both = zip(requests, turns, strict=True)
            if interrupt([request.key for request, turn in both if len(turn) == done]):
                break
        self.num_cut += sum(len(turn) > done for turn in turns)
        reasons = ("stop" if len(turn) <= done else "paused" for turn in turns)
        parts = [
            sampled(ask, turn[:done], self.weight_version) for ask, turn in zip(requests, turns, strict=True)
        ]
        return [
            Completion(part, [-1.0] * len(part), why, self.weight_version)
            for part, why in zip(parts, reasons, strict=True)
        ]

    def weight_specs(self):
        return {}

    def load_weights(self, weights, version):
        self.weight_version = version


class SlowWaves(Waves):
    token_s = 0.0003

    def wave(self, requests, interrupt):
        def slowed(ended):
            time.sleep(self.token_s)
            return interrupt(ended)

        return super().wave(requests, slowed)


class Table:
    """What an environment says and how often it is begun; a turn that is "bad" ends its episode."""

    begun = closed = 0

    def reset(self, task, seed):
        Table.begun += 1
        self.seed, self.steps = seed, 0
        return "go"

    def step(self, actions):
        self.steps += 1
        if draw(self.seed, "fails") % 7 == 0:
            raise ValueError("no more")
        return StepResult(f"step {self.steps}", 1.0, draw(self.seed, self.steps) % 3 == 0)

    def close(self):
        Table.closed += 1


TALK = [
    stage("a", 0, following="b"),
    stage("b", 1, back_to="a", max_turns=3, until="over"),
]
AT_ONCE = [  # with one policy, so that its engine has several turns of an episode
    stage("a", 0, beside=("b",)),
    stage("b", 1, policy=0, beside=("a",), back_to=("a", "b"), max_turns=3, until="over"),
]
PLAY = [stage("a", 0, following="table"), stage("table", None, back_to="a", max_turns=3)]


def check_versions(row, episode_seed, agent):
    """Each token that an agent said has the version that sampled it, what it read has none."""
    assert [turn < 0 for turn in row.turn_ids] == [version < 0 for version in row.versions]
    for turn in set(row.turn_ids) - {-1}:
        said_in = [version for version, at in zip(row.versions, row.turn_ids, strict=True) if at == turn]
        assert said_in == SAMPLED[turn_seed(episode_seed, agent, turn)]


def over(episode):
    return episode.seed % 3 < episode.visits["b"]


def game_of(stages, functions):
    def game(lines):
        spoken = [one for one in stages if isinstance(one, AgentStage)]
        speakers = {one.node: speaker(lines[POLICIES[one.policy]][0]) for one in spoken}
        acts = any(isinstance(one, EnvStage) for one in stages)
        make_env = (lambda: HostedEnvironment(Table, "Table")) if acts else None
        return Game(InteractionPlan("a", tuple(stages), POLICIES, 9), speakers, functions, make_env, 5.0)

    return game


class Episodes(Run):
    """Of interactions."""

    exact = True
    """The staleness that is told is that of the oldest token; else at least that."""

    sampled_here = True
    """Engines are in this process."""

    def __init__(
        self, shards, batch, n, max_lag, surplus, steps, stages=TALK, functions=None, speed=1, stale="wait"
    ):
        super().__init__(shards, batch, n, steps, prompts=64)
        self.stages = stages
        self.policy_of = {one.agent: one.policy for one in stages if isinstance(one, AgentStage)}
        self.game = game_of(stages, functions or {"over": over})
        self.kept = [EpisodesInFlight(max_lag, surplus, batch, stale=stale) for _ in range(shards)]
        self.rng = random.Random(speed)

    def begin(self, prompts, batches):
        found = []
        rows = zip(prompts["sample_index"].tolist(), prompts["group_id"].tolist(), batches, strict=True)
        for prompt, slot, batch in rows:
            task = {"raw_prompt": [{"role": "user", "content": f"{prompt}"}]}
            tokens = Letters().encode(f"u:{prompt}{chr(END)}a:")
            seeds = [draw(batch, slot, sample) for sample in range(self.n)]
            found.append(
                [(Episode(slot * self.n + i, slot, i, seed, task), tokens) for i, seed in enumerate(seeds)]
            )
        return found

    def stream_clients(self):
        return {name: (StreamClient(lambda: Decoder(self.step, self.rng), name, 10.0),) for name in POLICIES}

    def open_clients(self):
        return nullcontext(self.stream_clients())

    def versions(self):
        """Of the engines' weights, where that is known."""
        return {}

    def advance(self):
        """One step; the rows of all shards, as (prompt, conversation of each episode)."""
        self.step += 1
        ids, both = [], list(zip(self.loaders, self.kept, strict=True))
        missing = max(kept.num_missing(loader, self.step, self.steps) for loader, kept in both)
        for loader, kept in both:
            kept.admit(kept.load(loader, missing), self.step)
            self.given_up += len(kept.drain_dropped())
            left = kept.play(self.open_clients, self.game, self.begin, self.step, self.versions())
            self.partial, self.restarted = (
                self.partial + left.num_partial,
                self.restarted + left.num_restarted,
            )
            ids += left.prompts["group_id"].tolist()
            self.check(left)
        assert sorted(ids) == list(range(self.batch)), "group ids of a step are those of a batch"

    def check(self, left):
        self.lags += left.staleness
        for at, prompt in enumerate(left.prompts["sample_index"].tolist()):
            group = left.played[at * self.n : at * self.n + self.n]
            slot = int(left.prompts["group_id"][at])
            assert [one.episode.episode_id for one in group] == [slot * self.n + i for i in range(self.n)]
            assert {one.episode.group_id for one in group} == {slot}
            said = [tuple(m.content for m in one.episode.messages) for one in group]
            assert all(one[0] == f"{prompt}" for one in said)
            self.trained.append((prompt, *said))
        for lag, one in zip(left.staleness, left.played, strict=True):
            versions = [v for context in one.contexts.values() for row in context.rows for v in row.versions]
            age = self.step - min(v for v in versions if v >= 0)
            assert age == lag or (age < lag and not self.exact), "that of the oldest token"
            for agent, context in one.contexts.items():
                for row in context.rows:
                    steps = left.step_of[POLICIES[self.policy_of[agent]]]
                    assert all(steps[version] == version for version in row.versions if version >= 0)
                    if self.sampled_here:
                        check_versions(row, one.episode.seed, agent)

    def close(self):
        for kept in self.kept:
            kept.close()
