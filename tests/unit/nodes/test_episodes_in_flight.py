"""Episodes that go on from step to step, beside what test_in_flight.py has of them: what is too old, engines
on devices of their own, environments and errors."""

import _thread
import asyncio
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
from episodes_in_flight_cases import (
    AT_ONCE,
    PLAY,
    POLICIES,
    TALK,
    Decoder,
    Episodes,
    SlowWaves,
    Table,
    Waves,
    draw,
    game_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from in_flight_cases import CASES

from siirl.agents.stream_client import StreamClient
from siirl.data.completions import Completion, Request, SamplingParams
from siirl.errors import RolloutError, UserCodeError
from siirl.nodes.episodes_in_flight import EpisodesInFlight

pytestmark = pytest.mark.heavy
SPOKEN = SamplingParams(max_tokens=40)


@settings(max_examples=8, deadline=None)
@given(CASES, st.sampled_from(["restart", "drop"]), st.sampled_from([TALK, PLAY]))
def test_episodes_that_are_too_old_begin_anew_or_are_given_up(case, stale, stages):
    """Within the bound, each prompt once; environments end with their episodes."""
    shards, batch, n, max_lag, share, steps = case
    Table.begun = Table.closed = 0
    job = Episodes(shards, batch, n, max_lag, share * max_lag, steps, stages, speed=3, stale=stale)
    while job.step < steps:
        job.advance()
    waiting = sum(len(kept.orders()) for kept in job.kept)
    job.close()
    prompts = [prompt for prompt, *_ in job.trained]
    assert len(prompts) == steps * batch and max(job.lags) <= max_lag
    assert Table.begun == Table.closed
    if stale == "drop":
        read = job.kept[0].state()["last_batch"] * batch
        assert job.restarted == 0 and read == len(prompts) + waiting + job.given_up
        assert max(Counter(prompts).values()) <= 1 + (read - 1) // (64 // batch * batch)
    else:
        plain = Episodes(shards, batch, n, 1, 0.0, steps, stages).finish()
        assert Counter(job.trained) == Counter(plain.trained) and waiting == job.given_up == 0


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
    num_stale = 0
    for speed in range(3):  # environments are threads: in one run all may end in time
        job = Episodes(1, 6, 1, 1, 1.0, 8, PLAY, speed=speed, stale=stale)
        job.stream_clients = lambda job=job: {
            name: (StreamClient(lambda: Stuck(job.step, job.rng), name, 10.0),) for name in POLICIES
        }
        for _ in range(8):
            job.advance()
        job.close()
        num_stale += job.given_up if stale == "drop" else job.restarted
    assert num_stale > 1


def in_waves(stages, *arguments):
    """A job of one shard whose engine works inside `collect`, and the engine."""
    job, engine = Episodes(1, *arguments, stages), Waves()

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


class Apart(Episodes):
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
        plain = Episodes(1, batch, n, 1, 0.0, steps, stages).finish()
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


def test_a_turn_is_taken_back_when_its_engine_has_its_new_weights():
    """A driver may pause while the rank that answers it loads them."""
    engine, taken = Waves(), []
    stream = engine.stream(None, runs_in_background=True)
    stream.submit([Request("turn", [5], SPOKEN, seed=3)])
    pausing = threading.Thread(target=lambda: taken.extend(stream.pause()), daemon=True)
    with engine.streams_held():
        pausing.start()
        pausing.join(0.1)
        assert pausing.is_alive() and not taken
        engine.load_weights((), version=7)
    pausing.join(10)
    assert taken == [("turn", Completion([], [], "paused", 7))] and not stream.num_pending


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
    job.close()  # which `play` has done, but not a pause outside it


def test_environments_are_begun_and_closed_once_and_one_that_fails_costs_its_episode():
    Table.begun = Table.closed = 0
    several = [
        Episodes(1, 6, 2, 2, 2.0, 8, PLAY).finish() for _ in range(4)
    ]  # threads: in one all may end in time
    assert Table.begun == Table.closed == 4 * 6 * 2 * 8 and sum(one.partial for one in several) > 5
    plain = Episodes(1, 6, 2, 1, 0.0, 8, PLAY).finish()
    assert all(Counter(one.trained) == Counter(plain.trained) for one in several)


def test_an_error_of_the_users_code_ends_the_step_and_all_environments():
    Table.begun = Table.closed = 0
    routed = [PLAY[0], replace(PLAY[1], until="over")]
    job = Episodes(1, 4, 2, 1, 1.0, 3, routed, {"over": lambda episode: 1 / 0})
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        job.advance()
    assert Table.begun == Table.closed > 0


def test_an_error_of_an_engine_ends_the_step():
    class Dead(Decoder):
        def collect(self, timeout_s):
            raise RolloutError("engine 'x' died")

    job = Episodes(1, 4, 2, 1, 1.0, 3)
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
    job = Episodes(1, 4, 2, 1, 1.0, 3, PLAY)
    stream_clients = {name: (StreamClient(lambda: Silent(1, job.rng), name, 10.0),) for name in POLICIES}
    job.stream_clients = lambda: stream_clients
    with pytest.raises(KeyboardInterrupt):
        job.advance()
    for (stream_client,) in stream_clients.values():
        stream_client.close()
    assert Table.begun == Table.closed > 0
