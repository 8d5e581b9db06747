"""What goes on from step to step: nothing is lost, nothing is trained twice, nothing is too old.

First what holds of responses and of episodes alike, then what is of responses alone; what is of episodes
alone is in test_episodes_in_flight.py.
"""

import functools
import json
from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random
from types import SimpleNamespace

import pytest
from episodes_in_flight_cases import AT_ONCE, Episodes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_flight_cases import CASES
from rollouts_in_flight_cases import MOST, OwnDevices, Rollouts, cut, is_kept

from siirl.config.load import load_config
from siirl.data.loader import PromptLoader
from siirl.dialect.dialect import Dialect, StopToken
from siirl.errors import DataError, EpisodeFailed, RolloutError
from siirl.nodes.context import OpContext, StepInfo
from siirl.nodes.generate import rollout
from siirl.nodes.rollouts_in_flight import RolloutsInFlight
from siirl.observe.metrics import Metrics

pytestmark = pytest.mark.heavy
KINDS = {
    "responses": Rollouts,
    "episodes": Episodes,
    "turns at once": functools.partial(Episodes, stages=AT_ONCE),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(CASES)
def test_all_that_is_loaded_is_trained_once_within_the_bound_and_uncut(kind, case):
    shards, batch, n, max_lag, share, steps = case
    plain = KINDS[kind](shards, batch, n, 1, 0.0, steps).finish()
    assert set(plain.lags) <= {0} and not plain.partial, "without a surplus every step ends what it begins"
    more = {} if kind == "responses" else {"speed": 2}
    lagging = KINDS[kind](shards, batch, n, max_lag, share * max_lag, steps, **more).finish()
    assert Counter(lagging.trained) == Counter(plain.trained)
    assert max(lagging.lags) <= max_lag and lagging.restarted == 0
    assert all(not len(kept.orders()) for kept in lagging.kept)


@pytest.mark.parametrize("kind", ["responses", "episodes"])
def test_long_ones_go_on_and_short_ones_do_not_wait(kind):
    lagging = KINDS[kind](2, 8, 2, 2, 2.0, 10).finish()
    assert {0, 1, 2} == set(lagging.lags) and lagging.partial


@pytest.fixture(params=["responses", "episodes"])
def begun_run(request):
    """After a step: what makes such runs, and the state of one."""
    job = KINDS[request.param](1, 8, 2, 1, 1.0, 6)
    job.advance()
    job.close()
    return KINDS[request.param], job.state()


def test_another_batch_size_is_refused(begun_run):
    make, state = begun_run
    with pytest.raises(DataError, match=r"batches of 8, data\.train_batch_size is 4"):
        make(1, 4, 2, 1, 1.0, 6).resume(1, state)


def test_prompts_in_flight_that_do_not_say_how_many_have_left_are_refused(begun_run):
    make, state = begun_run
    states, position = json.loads(state)
    untold = [{name: value for name, value in one.items() if name != "num_given"} for one in states]
    with pytest.raises(DataError, match=r"not how many have left.*resume_mode=disable"):
        make(1, 8, 2, 1, 1.0, 6).resume(1, json.dumps([untold, position]))


@settings(max_examples=12, deadline=None)
@given(CASES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_run_that_is_killed_and_resumed_on_any_number_of_shards_trains_the_same(case, other_shards, rng):
    shards, batch, n, max_lag, share, steps = case
    arguments = (batch, n, max_lag, share * max_lag, steps)
    whole = Rollouts(shards, *arguments).finish()
    job, saved = Rollouts(shards, *arguments), (0, None, [])
    for _ in range(rng.randint(1, steps)):
        job.advance()
        if rng.random() < 0.5:
            saved = (job.step, job.state(), list(job.trained))
    for resumed_shards in (shards, other_shards):
        resumed = Rollouts(resumed_shards, *arguments)
        if saved[1] is not None:
            resumed.resume(*saved[:2])
        while resumed.step < steps:
            resumed.advance()
        assert Counter(saved[2] + resumed.trained) == Counter(whole.trained)
        assert max(resumed.lags, default=0) <= max_lag
        if resumed_shards == shards:
            assert saved[2] + resumed.trained == whole.trained and resumed.restarted == 0


def test_a_smaller_bound_after_a_resume_begins_what_is_too_old_anew():
    job = Rollouts(1, 8, 2, 3, 3.0, 12)
    for _ in range(6):
        job.advance()
    resumed = Rollouts(1, 8, 2, 1, 1.0, 12)
    resumed.resume(6, job.state())
    while resumed.step < 12:
        resumed.advance()
    assert resumed.restarted > 0 and max(resumed.lags) <= 1
    assert Counter(job.trained + resumed.trained) == Counter(Rollouts(1, 8, 2, 3, 3.0, 12).finish().trained)


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_each_token_has_the_version_that_sampled_it_and_padding_has_none(max_lag):
    n, steps = 2, 6
    job = Rollouts(1, 8, n, max_lag or 1, max_lag, steps)
    (engine,), (kept,), (loader,) = job.engines, job.kept, job.loaders
    keys = (f"n={n}", f"response_length={MOST}", f"max_lag={max_lag}")
    cfg = load_config([f"actor_rollout_ref.rollout.{key}" for key in keys])
    several = 0
    for step in range(1, steps + 1):
        engine.weight_version = 10 * step
        rows = kept.load(loader, kept.num_missing(loader, step, steps))
        dialect = Dialect("a model", (StopToken(1, "<eos>", ("tokenizer",)),))
        node = SimpleNamespace(plan=SimpleNamespace(agent=0), cfg=cfg, dialect=dialect)
        ctx = OpContext(node, StepInfo(step, False), None, Metrics(), None)
        out = rollout(ctx, rows, engine, kept)
        samples = zip(out["prompt_ids"][:, 0].tolist(), (out["row_id"] % n).tolist(), strict=True)
        expected = [engine.sampled[sample] for sample in samples]
        width = out["response_ids"].shape[1]
        assert out["weight_version"].tolist() == [one + [-1] * (width - len(one)) for one in expected]
        assert out["response_length"].tolist() == list(map(len, expected))
        ages = [step - version // 10 for one in expected for version in one]
        assert ctx.metrics.values()["rollout/token_staleness"] == pytest.approx(sum(ages) / len(ages))
        several += sum(len(set(one)) > 1 for one in expected)
    assert (several > 0) == (max_lag > 0)


@pytest.mark.parametrize("max_lag", [1, 2])
def test_what_decodes_on_while_others_train_is_trained_once_within_the_bound(max_lag):
    """The age of a response of which nothing is told yet is that of its request."""
    batch, n, steps, decoded_on = 8, 2, 7, 0
    job = Rollouts(1, batch, n, max_lag, max_lag, steps)
    engine = job.engines[0] = OwnDevices()
    job.kept = [RolloutsInFlight(engine, *job.lag, runs_in_background=True)]
    while job.step < steps:
        stream = engine._stream
        if stream is not None and stream.num_pending:
            before = [len(versions) for _, _, versions in stream.running.values()]
            stream.decode()  # while the trainer trains
            decoded_on += sum(len(v) for _, _, v in stream.running.values()) - sum(before)
        job.advance()
    assert decoded_on > 20 and max(job.lags) <= max_lag and job.restarted == 0
    assert len(job.trained) == batch * steps
    assert Counter(job.trained) == Counter(Rollouts(1, batch, n, 1, 0.0, steps).finish().trained)


def test_another_number_of_responses_begins_groups_anew():
    job = Rollouts(1, 8, 2, 1, 1.0, 6)
    job.advance()
    more = Rollouts(1, 8, 3, 1, 1.0, 6)
    more.resume(1, job.state())
    more.advance()
    assert all(len(responses) == 3 for _, *responses in more.trained)


def test_what_the_engine_cannot_run_ends_the_step():
    job = Rollouts(1, 2, 1, 1, 1.0, 3)
    job.engines[0].check_requests = lambda requests, pending: {
        requests[0].key: EpisodeFailed("its prompt has 9 tokens too many", kind="request")
    }
    with pytest.raises(RolloutError, match="9 tokens too many"):
        job.advance()


SMALL = st.tuples(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(1, 3),
    st.floats(0, 1),
    st.integers(1, 5),
)
ROUNDS = st.tuples(st.integers(1, 7), st.sampled_from([0.3, 0.6, 1.0]))


def begun(job):
    """The prompts in flight of which something was sampled."""
    groups = (group for kept in job.kept for group in kept.work.values())
    return sum(any(one.token_ids for one in group) for group in groups)


def loaded(job):
    """The prompts that were read, in order."""
    again = PromptLoader(job.loaders[0].dataset, job.loaders[0].batch_size, seed=3)
    number = max((kept.state()["last_batch"] for kept in job.kept), default=0)
    return again.next_batch(number)["sample_index"].tolist()


def waiting(job):
    """The prompts that were read and not given."""
    tables = [kept.rows for kept in job.kept if kept.rows is not None]
    return [prompt for rows in tables for prompt in rows["sample_index"].tolist()]


def prompts_of(groups):
    return [prompt for prompt, *_ in groups]


@settings(max_examples=8, deadline=None)
@given(SMALL, ROUNDS)
def test_dynamic_sampling_with_a_lag_keeps_what_it_keeps_without_and_within_the_bound(case, rounds):
    shards, batch, n, max_lag, share, steps = case
    how = {"read": rounds[0], "chance": rounds[1], "prompts": 2000}
    plain = Rollouts(shards, batch, n, 1, 0.0, steps, **how).finish()
    lagging = Rollouts(shards, batch, n, max_lag, share * max_lag, steps, **how).finish()
    assert Counter(lagging.trained) == Counter(plain.trained)
    assert Counter(lagging.dropped) == Counter(plain.dropped)
    assert max(lagging.lags) <= max_lag and lagging.restarted == 0
    assert begun(lagging) == 0 and len(waiting(lagging)) < how["read"]
    assert Counter(loaded(lagging)) == Counter(
        prompts_of(lagging.trained) + prompts_of(lagging.dropped) + waiting(lagging)
    )
    if shards == 1:  # the first that vary, in the order of the loader
        sampled = sorted(plain.trained + plain.dropped, key=lambda group: loaded(plain).index(group[0]))
        assert prompts_of(sampled) == loaded(plain)[: len(sampled)]
        assert is_kept(sampled[-1], how["chance"])


@settings(max_examples=8, deadline=None)
@given(SMALL, ROUNDS, st.integers(1, 3), st.randoms(use_true_random=False))
@example((2, 2, 1, 1, 1.0, 3), (3, 1.0), 1, Random(2))  # saved with groups of a batch given, and killed
def test_dynamic_sampling_that_is_killed_and_resumed_loses_none_and_trains_none_twice(
    case, rounds, other_shards, rng
):
    shards, batch, n, max_lag, share, steps = case
    arguments = (batch, n, max_lag, share * max_lag, steps)
    how = {"read": rounds[0], "chance": rounds[1], "prompts": 2000}
    whole = Rollouts(shards, *arguments, **how).finish()
    job, saved = Rollouts(shards, *arguments, **how), (0, None, [], [])
    for _ in range(rng.randint(1, steps)):
        job.advance()
        if rng.random() < 0.5:
            saved = (job.step, job.state(), list(job.trained), list(job.dropped))
    for resumed_shards in (shards, other_shards):
        resumed = Rollouts(resumed_shards, *arguments, **how)
        if saved[1] is not None:
            resumed.resume(*saved[:2])
        while resumed.step < steps:
            resumed.advance()
        trained, dropped = saved[2] + resumed.trained, saved[3] + resumed.dropped
        assert len(trained) == steps * batch and max(resumed.lags, default=0) <= max_lag
        assert begun(resumed) == 0
        assert Counter(prompts_of(trained) + prompts_of(dropped) + waiting(resumed)) == Counter(
            loaded(resumed)
        )
        if resumed_shards == shards:
            assert (trained, dropped) == (whole.trained, whole.dropped) and resumed.restarted == 0


@pytest.mark.parametrize(("shards", "others"), [(2, 1), (3, 1), (2, 3), (3, 2), (1, 2)])
def test_what_was_begun_leaves_first_when_it_is_dealt_to_other_shards(shards, others):
    """In the order of reading it would wait behind what nobody has begun: to be left over, or too old."""
    begun_before = 0
    for batch, read, max_lag in product((2, 3), (3, 5, 6), (1, 2)):
        how = {"read": read, "prompts": 200}
        job = Rollouts(shards, batch, 1, max_lag, max_lag, 3, **how)
        job.advance()
        begun_before += begun(job)
        resumed = Rollouts(others, batch, 1, max_lag, max_lag, 3, **how)
        resumed.resume(1, job.state())
        assert begun(resumed) == begun(job)
        while resumed.step < 3:
            resumed.advance()
        assert begun(resumed) == resumed.restarted == 0 and max(resumed.lags) <= max_lag
    assert begun_before > 12


def test_rows_of_a_step_of_several_rounds_are_as_old_as_they_may_be():
    lagging = Rollouts(2, 8, 2, 2, 2.0, 12, prompts=2000, read=5, chance=0.5).finish()
    assert {0, 1, 2} == set(lagging.lags) and len(lagging.dropped) > 50


@settings(max_examples=8, deadline=None)
@given(SMALL, ROUNDS, st.booleans(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_what_is_restarted_is_within_the_bound_and_trained_once(
    case, rounds, runs_in_background, other_shards, rng
):
    """Killed at random steps: also on other shards, which keep or drop other ones of the last batch only."""
    shards, batch, n, max_lag, share, steps = case
    how = {"read": rounds[0], "chance": rounds[1], "prompts": 2000}
    plain = Rollouts(shards, batch, n, 1, 0.0, steps, **how).finish()
    arguments = (batch, n, max_lag, share * max_lag, steps)
    restarting = Rollouts(shards, *arguments, **how, stale="restart", runs_in_background=runs_in_background)
    while restarting.step < steps:
        restarting.advance()
        if rng.random() < 0.3:
            shards = rng.choice([shards, other_shards])
            resumed = Rollouts(
                shards, *arguments, **how, stale="restart", runs_in_background=runs_in_background
            )
            resumed.resume(restarting.step, restarting.state())
            resumed.trained, resumed.dropped = restarting.trained, restarting.dropped
            resumed.lags = restarting.lags
            restarting = resumed
    ours, theirs = (Counter(run.trained + run.dropped) for run in (restarting, plain))
    if other_shards == case[0]:
        assert ours == theirs and Counter(restarting.trained) == Counter(plain.trained)
    of_whole_batches = min(ours.total(), theirs.total()) // how["read"] * how["read"]
    first = set(loaded(restarting)[:of_whole_batches])
    assert max(ours.values()) == 1 and first <= set(prompts_of(ours)) & set(prompts_of(theirs))
    assert {group for group in ours if group[0] in first} <= set(theirs), "each has the tokens that it has"
    assert len(restarting.trained) == steps * batch
    assert max(restarting.lags) <= max_lag and begun(restarting) == 0


@pytest.mark.parametrize("runs_in_background", [False, True])
def test_a_step_does_not_wait_for_what_it_restarts(runs_in_background):
    more = {"runs_in_background": runs_in_background}
    waiting, restarting = (Rollouts(1, 8, 2, 1, 1.0, 12, stale=x, **more) for x in ("wait", "restart"))
    for _ in range(11):
        waiting.advance()
        restarting.advance()
    assert waiting.restarted == 0 and restarting.restarted > 2
    assert restarting.engines[0].num_steps < 0.9 * waiting.engines[0].num_steps
    waiting.advance()
    restarting.advance()
    assert Counter(restarting.trained) == Counter(waiting.trained) and max(restarting.lags) == 1


@settings(max_examples=8, deadline=None)
@given(SMALL, ROUNDS, st.booleans(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_what_is_dropped_is_replaced_and_nothing_is_trained_twice(
    case, rounds, runs_in_background, other_shards, rng
):
    """Killed at random steps: on as many shards the run goes on as if nothing had been."""
    shards, batch, n, max_lag, share, steps = case
    how = {
        "read": rounds[0],
        "chance": rounds[1],
        "prompts": 2000,
        "stale": "drop",
        "runs_in_background": runs_in_background,
    }
    arguments = (batch, n, max_lag, share * max_lag, steps)
    whole = Rollouts(shards, *arguments, **how).finish()
    job = Rollouts(shards, *arguments, **how)
    while job.step < steps:
        job.advance()
        if rng.random() < 0.3:
            shards = rng.choice([shards, other_shards])
            resumed = Rollouts(shards, *arguments, **how)
            resumed.resume(job.step, job.state())
            resumed.trained, resumed.dropped, resumed.lags = job.trained, job.dropped, job.lags
            resumed.given_up = job.given_up
            job = resumed
    for run in (whole, job):
        assert len(run.trained) == steps * batch and max(run.lags) <= max_lag
        seen = Counter(prompts_of(run.trained) + prompts_of(run.dropped) + waiting(run))
        read = Counter(loaded(run))
        assert seen <= read and (read - seen).total() == run.given_up
        assert len({kept.state()["last_batch"] for kept in run.kept}) == 1, "all have read the same"
    assert begun(whole) == 0
    # Dealt to other shards, what came in the place of a prompt that was given up may be begun and not needed.
    assert begun(job) <= (job.given_up if other_shards != case[0] else 0)
    if shards == case[0] == other_shards and not runs_in_background:
        assert (job.trained, job.dropped) == (whole.trained, whole.dropped)


@pytest.mark.parametrize("runs_in_background", [False, True])
def test_a_step_does_not_wait_for_what_it_drops(runs_in_background):
    more = {"runs_in_background": runs_in_background, "prompts": 2000}
    patient, dropping = (Rollouts(2, 8, 2, 1, 1.0, 12, stale=x, **more) for x in ("wait", "drop"))
    for _ in range(12):
        patient.advance()
        dropping.advance()
    assert patient.given_up == 0 and dropping.given_up > 4 and dropping.restarted == 0
    assert dropping.engines[0].num_steps < 0.9 * patient.engines[0].num_steps
    trained = prompts_of(dropping.trained)
    assert len(trained) == len(set(trained)) == 12 * 8 and max(dropping.lags) == 1


def test_a_shard_that_drops_nothing_reads_what_the_other_one_needs_and_keeps_it_for_later():
    """Responses of all lengths on one shard, equal ones on the other."""
    job = Rollouts(2, 4, 1, 1, 1.0, 10, prompts=2000, stale="drop")
    one = job.engines[1].one
    job.engines[1].one = lambda request: replace(cut(one(request), 1), finish_reason="stop")
    while job.step < 10:
        job.advance()
    left = [len(kept.orders()) for kept in job.kept]
    assert job.given_up > 2 and left[1] >= job.given_up > left[0]
    trained = prompts_of(job.trained)
    assert len(trained) == len(set(trained)) == 40
    assert len(loaded(job)) == len(trained) + sum(left) + job.given_up
