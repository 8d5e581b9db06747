"""Responses that go on from step to step: nothing is lost, nothing is trained twice, nothing is too old."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl.data.loader import PromptLoader
from siirl.engines.rollout.base import Completion, RolloutEngine, SamplingParams
from siirl.engines.rollout.sampling import derive_seed, later_seed, uniforms
from siirl.errors import DataError, EpisodeFailed, RolloutError
from siirl.nodes.in_flight import RolloutsInFlight, Taken

pytestmark = pytest.mark.heavy

MOST = 40
PARAMS = SamplingParams(max_tokens=MOST)


class Prompts:
    """A dataset whose prompt number i is the token i + 1."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def rows(self, indices):
        return [{"prompt_ids": [int(i) + 1], "prompt_length": 1, "sample_index": int(i)} for i in indices]


def cut(completion, length):
    if len(completion.token_ids) <= length:
        return completion
    return replace(
        completion,
        token_ids=completion.token_ids[:length],
        log_probs=completion.log_probs[:length],
        finish_reason="paused",
    )


class FakeEngine(RolloutEngine):
    """Draws tokens from the seed alone; a response ends at a token below its prompt's chance to stop."""

    name, weight_version = "fake", 0

    def run_wave(self, requests, interrupt):
        """One token of each at a time."""
        whole = [self.one(request) for request in requests]
        for done in range(1, MOST + 1):
            ended = [at for at, one in enumerate(whole) if len(one.token_ids) == done]
            if ended and interrupt(ended):
                return [cut(one, done) for one in whole]
        return whole

    def one(self, request):
        most = request.params.max_tokens
        seed = later_seed(derive_seed(request.seed, request.sample), request.start)
        numbers = uniforms([seed], most)[:, 0]
        chance = 0.02 if request.prompt[0] % 5 == 0 else 0.3  # a long tail
        length = next((i + 1 for i, u in enumerate(numbers) if u < chance), None)
        tokens = [int(u * 1e9) for u in numbers[:length]]
        reason = "length" if length is None else "stop"
        return Completion(tokens, [0.0] * len(tokens), reason, self.weight_version)

    def generate(self, prompts, params, seeds):
        raise NotImplementedError

    def weight_specs(self):
        return {}

    def load_weights(self, weights, version):
        self.weight_version = version


class Job:
    """The rollouts of a run on some shards, without the rest of it."""

    def __init__(self, shards, batch, n, max_lag, surplus, steps, prompts=64):
        self.lag = (n, max_lag, surplus, batch)
        self.shards, self.batch, self.steps, self.ahead = shards, batch, steps, math.ceil(surplus)
        self.loaders = [PromptLoader(Prompts(prompts), batch, s, shards, seed=3) for s in range(shards)]
        self.engines = [FakeEngine() for _ in range(shards)]
        self.kept = [RolloutsInFlight(engine, *self.lag) for engine in self.engines]
        self.step, self.trained, self.lags, self.restarted = 0, [], [], 0

    def advance(self):
        """One step; the rows of all shards, as (prompt, tokens of each response)."""
        self.step += 1
        ids = []
        for loader, kept, engine in zip(self.loaders, self.kept, self.engines, strict=True):
            engine.weight_version = self.step
            rows = loader.next_batch(kept.batches_to_load(self.ahead, self.step, self.steps))
            kept.admit(rows, self.step, lambda batch, slot: 1000 * batch + slot)
            taken = Taken.decode(json.loads(json.dumps(kept.sample(PARAMS, self.step).encode())))
            self.restarted += taken.num_restarted
            groups = kept.give(taken)
            ids += groups["group_id"].tolist()
            n = self.lag[0]
            for at, prompt in enumerate(groups["sample_index"].tolist()):
                responses = taken.responses[at * n : at * n + n]
                self.trained.append((prompt, *(tuple(one.token_ids) for one in responses)))
                self.lags += [self.step - one.first_step for one in responses]
                for one in responses:
                    assert one.versions == sorted(one.versions) and one.versions[0] == one.first_step
        assert sorted(ids) == list(range(self.batch)), "group ids of a step are those of a batch"

    def state(self):
        return json.dumps([[kept.state() for kept in self.kept], self.loaders[0].state_dict()])

    def resume(self, step, text):
        states, position = json.loads(text)
        self.step = step
        for shard, (kept, loader) in enumerate(zip(self.kept, self.loaders, strict=True)):
            kept.load_state(states, shard, self.shards)
            loader.load_state_dict(position)


def whole_run(*arguments):
    job = Job(*arguments)
    while job.step < job.steps:
        job.advance()
    return job


CASES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0, 1),
    st.integers(1, 9),
)


@settings(max_examples=40, deadline=None)
@given(CASES)
def test_all_that_is_loaded_is_trained_once_within_the_bound_and_uncut(case):
    shards, batch, n, max_lag, share, steps = case
    plain = whole_run(shards, batch, n, 1, 0.0, steps)
    assert set(plain.lags) <= {0}, "without a surplus every step ends what it begins"
    lagging = whole_run(shards, batch, n, max_lag, share * max_lag, steps)
    assert Counter(lagging.trained) == Counter(plain.trained)
    assert max(lagging.lags) <= max_lag and lagging.restarted == 0
    assert all(not len(kept.orders()) for kept in lagging.kept)


def test_long_responses_go_on_and_short_ones_do_not_wait():
    lagging = whole_run(2, 8, 2, 2, 2.0, 12)
    assert {0, 1, 2} == set(lagging.lags)


@settings(max_examples=40, deadline=None)
@given(CASES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_run_that_is_killed_and_resumed_on_any_number_of_shards_trains_the_same(case, other_shards, rng):
    shards, batch, n, max_lag, share, steps = case
    arguments = (batch, n, max_lag, share * max_lag, steps)
    whole = whole_run(shards, *arguments)
    job, saved = Job(shards, *arguments), (0, None, [])
    for _ in range(rng.randint(1, steps)):
        job.advance()
        if rng.random() < 0.5:
            saved = (job.step, job.state(), list(job.trained))
    for resumed_shards in (shards, other_shards):
        resumed = Job(resumed_shards, *arguments)
        if saved[1] is not None:
            resumed.resume(*saved[:2])
        while resumed.step < steps:
            resumed.advance()
        assert Counter(saved[2] + resumed.trained) == Counter(whole.trained)
        assert max(resumed.lags, default=0) <= max_lag
        if resumed_shards == shards:
            assert saved[2] + resumed.trained == whole.trained and resumed.restarted == 0


def test_a_smaller_bound_after_a_resume_begins_what_is_too_old_anew():
    job = Job(1, 8, 2, 3, 3.0, 12)
    for _ in range(6):
        job.advance()
    resumed = Job(1, 8, 2, 1, 1.0, 12)
    resumed.resume(6, job.state())
    while resumed.step < 12:
        resumed.advance()
    assert resumed.restarted > 0 and max(resumed.lags) <= 1
    assert Counter(job.trained + resumed.trained) == Counter(whole_run(1, 8, 2, 3, 3.0, 12).trained)


def test_another_number_of_responses_begins_groups_anew_and_another_batch_is_refused():
    job = Job(1, 8, 2, 1, 1.0, 6)
    job.advance()
    more = Job(1, 8, 3, 1, 1.0, 6)
    more.resume(1, job.state())
    more.advance()
    assert all(len(responses) == 3 for _, *responses in more.trained)
    other = Job(1, 4, 2, 1, 1.0, 6)
    with pytest.raises(DataError, match=r"batches of 8, data\.train_batch_size is 4"):
        other.resume(1, job.state())


def test_what_the_engine_cannot_run_ends_the_step():
    job = Job(1, 2, 1, 1, 1.0, 3)
    job.engines[0].check_requests = lambda requests, pending: {
        requests[0].key: EpisodeFailed("its prompt has 9 tokens too many", kind="request")
    }
    with pytest.raises(RolloutError, match="9 tokens too many"):
        job.advance()
