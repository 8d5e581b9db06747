"""Which engines are fit for another worker, and what is done with them before."""

import pytest

from siirl.engines.rollout.served.server import Renewal
from siirl.errors import RolloutError

SLEEP = ("sleep", {"keeps_weights": True})
WAKE_WEIGHTS, WAKE_CACHE = ("wake", {"part": "weights"}), ("wake", {"part": "kv_cache"})
SYNC = [("begin_update", {}), ("update", {}), ("finish_update", {"keeps_kv": False})]


class Engine:
    """Notes what is done with it."""

    def __init__(self):
        self.done = []

    def renew(self):
        self.done.append("renew")

    def sleep(self, keeps_weights):
        self.done.append(f"sleep {keeps_weights}")


def after(*told):
    """What a worker has told an engine, all of which was done."""
    renewal = Renewal()
    for method, arguments in told:
        assert renewal.begins(method)
        renewal.done(method, arguments)
    return renewal


FIT = {
    "nothing": ([], ["renew"]),
    "weights, and never asleep": (SYNC, ["renew"]),
    "asleep": ([SLEEP], ["renew"]),
    "awake again": ([SLEEP, WAKE_WEIGHTS, *SYNC, WAKE_CACHE], ["renew", "sleep True"]),
    "asleep again": ([SLEEP, WAKE_WEIGHTS, *SYNC, WAKE_CACHE, SLEEP], ["renew"]),
}


@pytest.mark.parametrize(("told", "expected"), FIT.values(), ids=FIT)
def test_an_engine_forgets_and_sleeps_as_it_was_last_told_to(told, expected):
    engine, renewal = Engine(), after(*told)
    assert renewal.renew(engine) and engine.done == expected
    sleeps = SLEEP in told
    assert renewal.begins("sleep") == (not sleeps), "asleep already"
    assert renewal.begins("sleep"), "once only"


UNFIT = {
    "weights half replaced": SYNC[:2],
    "an update that has begun": SYNC[:1],
    "the cache asleep": [SLEEP, WAKE_WEIGHTS, *SYNC],
    "the weights asleep": [SLEEP, WAKE_CACHE],
}


@pytest.mark.parametrize("told", UNFIT.values(), ids=UNFIT)
def test_what_is_half_done_is_not_fit(told):
    engine = Engine()
    assert not after(*told).renew(engine) and engine.done == []


def test_without_an_engine_and_after_an_error_of_its_own_there_is_none():
    assert not Renewal().renew(None)
    assert not Renewal().renew(object()), "it cannot forget"
    renewal = Renewal()
    renewal.sound = False
    assert not renewal.renew(Engine())


def test_an_update_that_begins_counts_before_it_is_done():
    renewal = Renewal()
    assert renewal.begins("begin_update") and not renewal.renew(Engine())


def test_nothing_is_sampled_before_a_sync_of_the_next_worker_is_complete():
    renewal = after(*SYNC)
    renewal.check_weights()
    for _ in range(2):
        renewal.renew(Engine())
        for told in SYNC:
            with pytest.raises(RolloutError, match="a sync comes first"):
                renewal.check_weights()
            renewal.begins(told[0])
            renewal.done(*told)
        renewal.check_weights()
