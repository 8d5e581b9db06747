"""Ranks that are started again on one store meet those of their own attempt, whoever comes first."""

import random
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from siirl.errors import DeadlineError
from siirl.launch.rendezvous import attempt_store

LONG = timedelta(seconds=20)


@pytest.fixture
def agent():
    """The store that torchrun's agent keeps."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(agent, rank, world_size, delay_s, met):
    """One rank: gives its address to the others, as gloo does, and reads theirs."""
    client = TCPStore("127.0.0.1", agent.port, is_master=False, timeout=LONG)
    time.sleep(delay_s)
    store = attempt_store(client, rank, world_size, LONG)
    address = f"{rank} of {id(met)}"
    store.set(f"address/{rank}", address)
    met[rank] = [store.get(f"address/{other}").decode() for other in range(world_size)]


@pytest.mark.parametrize("seed", range(5))
def test_each_attempt_has_keys_of_its_own(agent, seed):
    rng = random.Random(seed)
    kept = []  # so that no two attempts have one id
    for _ in range(4):
        if rng.random() < 0.5:  # an attempt whose ranks died after their greeting
            agent.set(f"hello/{rng.randint(1, 2)}", f"dead {rng.random()}")
        met = {}
        kept.append(met)
        ranks = [
            threading.Thread(target=start, args=(agent, rank, 3, rng.choice([0, 0.1]), met))
            for rank in range(3)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(30)
        assert set(met) == {0, 1, 2}
        assert all(found == [f"{rank} of {id(met)}" for rank in range(3)] for found in met.values())


def test_ranks_that_do_not_come_are_named(agent):
    with pytest.raises(DeadlineError, match=r"2 of 3 ranks did not start within 0.2 s .*: 1, 2\."):
        attempt_store(agent, 0, 3, timedelta(seconds=0.2))
