"""Episodes that go on from step to step: nothing is lost, trained twice, too old, cut, or begun again."""

import _thread
import asyncio
import json
import random
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import pytest
from episode_cases import END, Letters, speaker, stage
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl.agents.environments import HostedEnvironment, StepResult
from siirl.agents.episode import Episode
from siirl.agents.runner import Game, turn_seed
from siirl.agents.stream_client import StreamClient
from siirl.compiler.plan import AgentStage, EnvStage, InteractionPlan
from siirl.data.completions import Completion
from siirl.data.loader import PromptLoader
from siirl.engines.rollout.base import RolloutEngine, WaveStream
from siirl.errors import DataError, RolloutError, UserCodeError
from siirl.nodes.episodes_in_flight import EpisodesInFlight

pytestmark = pytest.mark.heavy

POLICIES = ("agent_0.rollout", "agent_1.rollout")


class Prompts:
    """A dataset whose prompt number i is the token i + 1."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def rows(self, indices):
        return [{"prompt_ids": [int(i) + 1], "prompt_length": 1, "sample_index": int(i)} for i in indices]


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
            assert ask.kv_version < self.version if ask.start else ask.kv_version is None
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


class Job:
    """The interactions of a run on some shards, without the rest of it."""

    exact = True
    """The staleness that is told is that of the oldest token; else at least that."""

    def __init__(
        self, shards, batch, n, max_lag, surplus, steps, stages=TALK, functions=None, speed=1, stale="wait"
    ):
        self.shards, self.batch, self.n, self.steps = shards, batch, n, steps
        self.stages = stages
        self.policy_of = {one.agent: one.policy for one in stages if isinstance(one, AgentStage)}
        self.game = game_of(stages, functions or {"over": over})
        self.loaders = [PromptLoader(Prompts(64), batch, s, shards, seed=3) for s in range(shards)]
        self.kept = [EpisodesInFlight(max_lag, surplus, batch, stale=stale) for _ in range(shards)]
        self.rng = random.Random(speed)
        self.step, self.trained, self.lags, self.partial, self.restarted = 0, [], [], 0, 0
        self.dropped = 0

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
            self.dropped += len(kept.drain_dropped())
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
                    check_versions(row, one.episode.seed, agent)

    def state(self):
        return json.dumps([[kept.state() for kept in self.kept], self.loaders[0].state_dict()])

    def resume(self, step, text):
        states, position = json.loads(text)
        self.step = step
        for shard, (kept, loader) in enumerate(zip(self.kept, self.loaders, strict=True)):
            kept.load_state(states, shard, self.shards)
            loader.load_state_dict(position)

    def close(self):
        for kept in self.kept:
            kept.close()

    def finish(self):
        while self.step < self.steps:
            self.advance()
        self.close()
        return self


CASES = st.tuples(
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0, 1),
    st.integers(1, 6),
)


@settings(max_examples=12, deadline=None)
@given(CASES, st.sampled_from([TALK, AT_ONCE]))
def test_all_that_is_loaded_is_trained_once_within_the_bound_and_uncut(case, stages):
    shards, batch, n, max_lag, share, steps = case
    plain = Job(shards, batch, n, 1, 0.0, steps, stages).finish()
    assert set(plain.lags) <= {0} and not plain.partial, "without a surplus every step ends what it begins"
    lagging = Job(shards, batch, n, max_lag, share * max_lag, steps, stages, speed=2).finish()
    assert Counter(lagging.trained) == Counter(plain.trained)
    assert max(lagging.lags) <= max_lag and lagging.restarted == 0
    assert all(not len(kept.orders()) for kept in lagging.kept)


def test_long_episodes_go_on_and_short_ones_do_not_wait():
    lagging = Job(2, 8, 2, 2, 2.0, 10).finish()
    assert {0, 1, 2} == set(lagging.lags) and lagging.partial


@settings(max_examples=8, deadline=None)
@given(CASES, st.sampled_from(["restart", "drop"]), st.sampled_from([TALK, PLAY]))
def test_episodes_that_are_too_old_begin_anew_or_are_given_up(case, stale, stages):
    """Within the bound, each prompt once; environments end with their episodes."""
    shards, batch, n, max_lag, share, steps = case
    Table.begun = Table.closed = 0
    job = Job(shards, batch, n, max_lag, share * max_lag, steps, stages, speed=3, stale=stale)
    while job.step < steps:
        job.advance()
    waiting = sum(len(kept.orders()) for kept in job.kept)
    job.close()
    prompts = [prompt for prompt, *_ in job.trained]
    assert len(prompts) == steps * batch and max(job.lags) <= max_lag
    assert Table.begun == Table.closed
    if stale == "drop":
        read = job.kept[0].state()["last_batch"] * batch
        assert job.restarted == 0 and read == len(prompts) + waiting + job.dropped
        assert max(Counter(prompts).values()) <= 1 + (read - 1) // (64 // batch * batch)
    else:
        plain = Job(shards, batch, n, 1, 0.0, steps, stages).finish()
        assert Counter(job.trained) == Counter(plain.trained) and waiting == job.dropped == 0


class Stuck(Decoder):
    """Begins a few turns, and goes on with them in every fourth step only."""

    def collect(self, timeout_s):
        stuck = {key for key, (ask, _) in self.pending.items() if draw(ask.seed, "stuck") % 12 == 0}
        before = {key: self.pending[key][1] for key in stuck if self.version % 4}
        for key in before:
            self.pending[key][1] = -99
        answers = super().collect(timeout_s)
        for key, end in before.items():
            self.pending[key][1] = max(end, 1)
        return answers


@pytest.mark.parametrize("stale", ["restart", "drop"])
def test_a_step_does_not_wait_for_episodes_that_it_restarts_or_drops(stale):
    job = Job(1, 6, 1, 1, 1.0, 8, PLAY, stale=stale)
    job.stream_clients = lambda: {
        name: (StreamClient(lambda: Stuck(job.step, job.rng), name, 10.0),) for name in POLICIES
    }
    for _ in range(8):
        job.advance()
    job.close()
    assert (job.dropped if stale == "drop" else job.restarted) > 1


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


def in_waves(stages, *arguments):
    """A job of one shard whose engine works inside `collect`, and the engine."""
    job, engine = Job(1, *arguments, stages), Waves()

    def stream_clients():
        engine.weight_version = job.step
        silent = StreamClient(lambda: Decoder(job.step, job.rng), POLICIES[1], 10.0)
        waves = StreamClient(lambda: engine.stream(job.kept[0].may_end), POLICIES[0], 10.0, 0.05)
        return {POLICIES[0]: (waves,), POLICIES[1]: (silent,)}

    job.stream_clients = stream_clients
    return job.finish(), engine


@pytest.mark.parametrize("stages", [PLAY, AT_ONCE], ids=["in turn", "at once"])
def test_an_engine_that_works_in_waves_ends_one_when_the_step_may_be_over(stages):
    plain, waiting = in_waves(stages, 8, 2, 1, 0.0, 8)
    # Environments are threads: in one run all may end in time.
    several = [in_waves(stages, 8, 2, 2, 2.0, 8) for _ in range(2)]
    for lagging, _ in several:
        assert Counter(lagging.trained) == Counter(plain.trained)
    assert waiting.num_cut == 0 and sum(engine.num_cut for _, engine in several) > 20
    assert sum(lagging.partial for lagging, _ in several) > 10
    assert any(2 in lagging.lags for lagging, _ in several)
    assert sum(engine.num_steps for _, engine in several) < 2 * 0.8 * waiting.num_steps


class Apart(Job):
    """A job whose engines have devices of their own: they go on while others train."""

    exact = False

    def __init__(self, batch, n, max_lag, surplus, steps, stages, stale):
        super().__init__(1, batch, n, max_lag, surplus, steps, stages, speed=4, stale=stale)
        self.kept = [EpisodesInFlight(max_lag, surplus, batch, stale=stale, runs_in_background=True)]
        self.engines = {name: SlowWaves() for name in POLICIES}

    @contextmanager
    def open_clients(self):
        with ExitStack() as opened:
            yield {
                name: (opened.enter_context(StreamClient(partial(engine.stream, *how), name, 10.0)),)
                for name, engine in self.engines.items()
                for how in [(self.kept[0].may_end, True)]
            }

    def versions(self):
        """New weights come, after some training, while turns are said; now and then somebody validates."""
        time.sleep(self.rng.random() / 50)
        if self.rng.random() < 0.3:
            self.kept[0].pause()
            assert self.kept[0].run(asyncio.sleep(0, "validated")) == "validated"
        for engine in self.engines.values():
            with engine.streams_held():
                engine.load_weights((), self.step)
        return dict.fromkeys(POLICIES, self.step)


class SlowWaves(Waves):
    token_s = 0.0003

    def wave(self, requests, interrupt):
        def slowed(ended):
            time.sleep(self.token_s)
            return interrupt(ended)

        return super().wave(requests, slowed)


@settings(max_examples=10, deadline=None)
@given(CASES, st.sampled_from(["wait", "wait", "restart", "drop"]), st.sampled_from([TALK, PLAY]))
def test_episodes_that_go_on_while_others_train_are_trained_once_within_the_bound(case, stale, stages):
    """Whatever new weights, validations and the ends of steps find half said."""
    _, batch, n, max_lag, share, steps = case
    Table.begun = Table.closed = 0
    job = Apart(batch, n, max_lag, share * max_lag, steps, stages, stale)
    while job.step < steps:
        job.advance()
    waiting = sum(len(kept.orders()) for kept in job.kept)
    job.close()
    assert Table.begun == Table.closed and max(job.lags) <= max_lag
    assert len(job.trained) == steps * batch
    if stale != "drop":
        plain = Job(1, batch, n, 1, 0.0, steps, stages).finish()
        assert Counter(job.trained) == Counter(plain.trained) and waiting == 0


def test_what_is_said_between_two_steps_is_there_at_once():
    job = Apart(4, 2, 2, 2.0, 6, PLAY, "wait")
    job.engines[POLICIES[0]].token_s = 0.005  # so that the step ends before all is said
    job.advance()
    job.engines[POLICIES[0]].num_steps, open_before = 0, sum(job.kept[0]._num_open.values())
    deadline = time.monotonic() + 10
    while sum(job.kept[0]._num_open.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_before > 0 and sum(job.kept[0]._num_open.values()) == 0
    said = job.engines[POLICIES[0]].num_steps
    job.kept[0].num_missing(job.loaders[0], 2, 2)  # the last step: nothing begins
    left = job.kept[0].play(job.open_clients, job.game, job.begin, 2, job.versions())
    assert len(left.prompts) == 4 and job.engines[POLICIES[0]].num_steps == said > 0
    job.close()


def test_an_error_between_two_steps_ends_the_next_one():
    routed = [PLAY[0], replace(PLAY[1], until="over")]
    job = Apart(2, 1, 2, 2.0, 12, routed, "wait")  # most episodes begin once it is broken
    job.game = game_of(routed, {"over": lambda episode: broken.is_set() and 1 / 0})
    broken = threading.Event()
    job.advance()
    broken.set()
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        while job.step < 12:
            job.advance()


def test_environments_are_begun_and_closed_once_and_one_that_fails_costs_its_episode():
    Table.begun = Table.closed = 0
    several = [
        Job(1, 6, 2, 2, 2.0, 8, PLAY).finish() for _ in range(4)
    ]  # threads: in one all may end in time
    assert Table.begun == Table.closed == 4 * 6 * 2 * 8 and sum(one.partial for one in several) > 5
    plain = Job(1, 6, 2, 1, 0.0, 8, PLAY).finish()
    assert all(Counter(one.trained) == Counter(plain.trained) for one in several)


def test_another_batch_size_is_refused():
    job = Job(1, 8, 2, 1, 1.0, 6)
    job.advance()
    job.close()
    with pytest.raises(DataError, match=r"batches of 8, data\.train_batch_size is 4"):
        Job(1, 4, 2, 1, 1.0, 6).resume(1, job.state())


def test_prompts_in_flight_that_do_not_say_how_many_have_left_are_refused():
    job = Job(1, 8, 2, 1, 1.0, 6)
    job.advance()
    job.close()
    states, position = json.loads(job.state())
    untold = [{name: value for name, value in state.items() if name != "num_given"} for state in states]
    with pytest.raises(DataError, match=r"not how many have left.*resume_mode=disable"):
        Job(1, 8, 2, 1, 1.0, 6).resume(1, json.dumps([untold, position]))


def test_an_error_of_the_users_code_ends_the_step_and_all_environments():
    Table.begun = Table.closed = 0
    routed = [PLAY[0], replace(PLAY[1], until="over")]
    job = Job(1, 4, 2, 1, 1.0, 3, routed, {"over": lambda episode: 1 / 0})
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        job.advance()
    assert Table.begun == Table.closed > 0


def test_an_error_of_an_engine_ends_the_step():
    class Dead(Decoder):
        def collect(self, timeout_s):
            raise RolloutError("engine 'x' died")

    job = Job(1, 4, 2, 1, 1.0, 3)
    job.stream_clients = lambda: {
        name: (StreamClient(lambda: Dead(1, job.rng), name, 10.0),) for name in POLICIES
    }
    with pytest.raises(RolloutError, match="engine 'x' died"):
        job.advance()


@pytest.fixture
def interruptible():
    """Whoever starts the tests may have had their process ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("asleep", [True, False], ids=["while it sleeps", "just before it sleeps"])
def test_an_interruption_by_the_user_is_prompt_and_closes_the_environments(asleep, interruptible):
    class Silent(Decoder):
        def collect(self, timeout_s):
            if self.pending and once.acquire(blocking=False):
                if asleep:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # where Ctrl-C arrives
                else:  # noted, as by a signal that no call is interrupted by
                    _thread.interrupt_main()
            return []

    once = threading.Lock()
    Table.begun = Table.closed = 0
    job = Job(1, 4, 2, 1, 1.0, 3, PLAY)
    stream_clients = {name: (StreamClient(lambda: Silent(1, job.rng), name, 10.0),) for name in POLICIES}
    job.stream_clients = lambda: stream_clients
    with pytest.raises(KeyboardInterrupt):
        job.advance()
    for (stream_client,) in stream_clients.values():
        stream_client.close()
    assert Table.begun == Table.closed > 0
