"""The stream_client between a stream of requests and coroutines, over a stream that answers by a script."""

import asyncio
import threading
import time
from dataclasses import dataclass

import pytest

from siirl.agents.policy import StreamGate
from siirl.agents.stream_client import StreamClient
from siirl.data.completions import Completion, Request
from siirl.errors import DeadlineError, RolloutError


@dataclass(frozen=True)
class Calls:
    """What the script reads of sampling parameters: after how many calls of `collect` it answers."""

    left: int
    n: int = 1


class Script:
    """Answers prompt [p] with [p + 1], after as many calls of `collect` as params says; -1: it fails."""

    def __init__(self):
        self.waiting, self.calls, self.threads, self.closed = {}, [], set(), 0

    @property
    def num_pending(self):
        return len(self.waiting)

    def submit(self, asks):
        self.threads.add(threading.get_ident())
        self.calls.append([ask.prompt[0] for ask in asks])
        self.waiting |= {ask.key: [ask.params.left, ask] for ask in asks}

    def collect(self, timeout_s):
        self.threads.add(threading.get_ident())
        time.sleep(0.001)
        for entry in self.waiting.values():
            entry[0] -= 1
            if entry[0] == -2:
                raise RolloutError("engine 'x' died")
        done = [key for key, (left, _) in self.waiting.items() if left == 0]
        return [
            (key, Completion([self.waiting.pop(key)[1].prompt[0] + 1], [-0.5], "stop", 3)) for key in done
        ]

    def close(self):
        self.closed += 1


def pump_of(stream, deadline_s=10.0):
    return StreamClient(lambda: stream, "agent_0", deadline_s)


async def ask_all(policy, asks):
    """Results or errors of (prompt, params), all open at once."""
    return await asyncio.gather(*(policy.generate([p], Calls(n), 0) for p, n in asks), return_exceptions=True)


def test_each_coroutine_gets_its_own_answer_from_one_thread():
    stream = Script()
    with pump_of(stream) as policy:
        answers = asyncio.run(ask_all(policy, [(10, 5), (20, 1), (30, 3), (40, 3)]))  # two come together
    assert [(a.token_ids, a.log_probs, a.finish_reason, a.weight_version) for a in answers] == [
        ([p + 1], [-0.5], "stop", 3) for p in (10, 20, 30, 40)
    ]
    assert len(stream.threads) == 1 and threading.get_ident() not in stream.threads
    assert stream.closed == 1


def test_a_turn_is_asked_while_others_run():
    stream = Script()

    async def two_turns(policy):
        first = await policy.generate([1], Calls(1), 0)
        return await policy.generate(first.token_ids, Calls(1), 0)

    async def beside_a_long_one(policy):
        long = asyncio.ensure_future(policy.generate([100], Calls(1 << 30), 0))
        answer = await two_turns(policy)
        assert not long.done()
        long.cancel()
        return answer

    with pump_of(stream) as policy:
        answer = asyncio.run(asyncio.wait_for(beside_a_long_one(policy), 10))
    assert answer.token_ids == [3]
    assert [call for call in stream.calls if 2 in call] == [[2]]


def test_an_error_reaches_all_who_wait_and_all_who_come_later():
    stream = Script()
    with pump_of(stream) as policy:
        answers = asyncio.run(ask_all(policy, [(1, 1 << 30), (2, -1), (3, 1 << 30)]))
        assert [str(error) for error in answers] == ["engine 'x' died"] * 3
        (later,) = asyncio.run(ask_all(policy, [(4, 1)]))
        assert isinstance(later, RolloutError) and "died" in str(later)
    assert stream.closed == 1


def test_a_stream_that_cannot_be_opened_is_told_to_whoever_asks():
    def broken():
        raise RolloutError("no usable weights")

    with StreamClient(broken, "agent_0", 10.0) as policy:
        (answer,) = asyncio.run(ask_all(policy, [(1, 1)]))
    assert str(answer) == "no usable weights"


def test_closing_ends_the_thread_and_who_waits():
    stream = Script()
    policy = pump_of(stream)

    async def close_while_waiting():
        waiting = asyncio.ensure_future(policy.generate([1], Calls(1 << 30), 0))
        await asyncio.sleep(0.01)
        policy.close()
        return await asyncio.gather(waiting, return_exceptions=True)

    (answer,) = asyncio.run(close_while_waiting())
    assert isinstance(answer, RolloutError) and "'agent_0' is closed" in str(answer)
    policy.close()
    assert stream.closed == 1 and not policy._thread.is_alive()


def test_a_pause_gives_what_there_is_of_each_turn_and_closes():
    stream = Script()
    stream.pause = lambda: [(key, Completion([9], [-1.0], "paused", 3)) for key in list(stream.waiting)]
    policy = pump_of(stream)

    async def pause_while_waiting():
        waiting = [
            asyncio.ensure_future(policy.ask(Request(f"turn {p}", [p], Calls(1 << 30), 0, start=4)))
            for p in (1, 2)
        ]
        await asyncio.sleep(0.05)
        assert [(ask.key, ask.start) for _, ask in stream.waiting.values()] == [("turn 1", 4), ("turn 2", 4)]
        late = asyncio.ensure_future(policy.generate([3], Calls(1), 0))
        await asyncio.sleep(0)
        policy.pause()
        return await asyncio.gather(*waiting, late, policy.generate([4], Calls(1), 0), return_exceptions=True)

    *paused, closed = asyncio.run(pause_while_waiting())
    assert {one.finish_reason for one in paused} == {"paused"}
    assert [one.token_ids for one in paused[:2]] == [[9], [9]] and paused[2].token_ids in ([], [9])
    assert "is closed" in str(closed) and stream.closed == 1


def test_a_stream_that_fails_while_it_is_paused_says_so_to_whoever_waits():
    stream = Script()

    def pause():
        raise RolloutError("engine 'x' died")

    stream.pause = pause
    policy = pump_of(stream)

    async def pause_while_waiting():
        waiting = asyncio.ensure_future(policy.generate([1], Calls(1 << 30), 0))
        await asyncio.sleep(0.05)
        policy.pause()
        return await asyncio.gather(waiting, return_exceptions=True)

    (answer,) = asyncio.run(pause_while_waiting())
    assert isinstance(answer, RolloutError) and "died" in str(answer)


def test_a_stream_that_never_returns_is_named_by_close():
    stream, release, hangs = Script(), threading.Event(), threading.Event()

    def collect(timeout_s):
        hangs.set()
        return release.wait(30) and []

    stream.collect = collect
    policy = pump_of(stream, deadline_s=0.1)

    async def ask():
        waiting = asyncio.ensure_future(policy.generate([1], Calls(1), 0))
        assert await asyncio.to_thread(hangs.wait, 30)
        waiting.cancel()

    asyncio.run(ask())
    with pytest.raises(DeadlineError, match=r"'agent_0' did not return within 0\.1 s"):
        policy.close()
    release.set()
    policy.close()


class Asked:
    """In the place of a StreamClient: notes what it is asked."""

    def __init__(self):
        self.keys = []

    async def ask(self, request):
        self.keys.append(request.key)
        return Completion([request.key], [-1.0], "stop", 0)


def test_who_waits_at_a_gate_that_closes_at_once_asks_when_it_is_open_again():
    """A client of before, which is closed, is asked by nobody."""

    async def turns():
        gate, before, now, told = StreamGate(), Asked(), Asked(), []
        waits = asyncio.create_task(gate.ask(Request(5, [1], Calls(1), 0), told.append))
        await asyncio.sleep(0)
        gate.open(before)
        gate.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not told and not before.keys and not gate.num_asked
        gate.open(now)
        assert (await waits).token_ids == [5]
        assert (before.keys, now.keys, told) == ([], [5], [5])

    asyncio.run(asyncio.wait_for(turns(), 10))
