"""Environments of user code: what they are given and give, and that a hostile one costs its episode only."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from siirl.agents.environments import (
    HUNG,
    INVALID,
    RAISED,
    HostedEnvironment,
    load_environment,
    reset_env,
    step_env,
)
from siirl.agents.user_thread import CallSlots
from siirl.errors import DagError, EpisodeFailed

pytestmark = pytest.mark.heavy

FILE = Path(__file__).with_name("hostile_environments.py")
TASK = {"raw_prompt": "count", "ground_truth": "5"}


def make(name, **kwargs):
    return load_environment(f"{FILE}:{name}", "node 'game'", kwargs)()


async def episode(env, steps=1, said=None, deadline_s=0.3):
    results = []
    try:
        begin = await reset_env(env, TASK, 11, deadline_s)
        for _ in range(steps):
            results.append(await step_env(env, said or {0: "2", 1: "-1"}, deadline_s))
    finally:
        problem = await env.close(deadline_s)
    return begin, results, problem


def test_an_environment_gets_task_and_seed_and_gives_texts_rewards_and_the_end():
    env = make("Counter", limit=2)
    begin, results, problem = asyncio.run(episode(env, steps=2))
    assert (begin.text_for(0), begin.text_for(1), begin.text_for(2)) == ("seed 11", "wait", "")
    assert begin.info == {"limit": 2} and problem is None
    assert [(r.text_for(0), r.rewards, r.done) for r in results] == [
        ("count 1", {0: 2.0, 1: -1.0}, False),
        ("count 2", {0: 2.0, 1: -1.0}, True),
    ]
    assert results[-1].info == {"threads": 1}  # all of its code runs in one thread
    assert type(env._env).closed == 1
    assert TASK["raw_prompt"] == "count"  # the task of other episodes


def test_plain_functions_and_a_reward_for_all_will_do():
    begin, (result,), problem = asyncio.run(episode(make("Plain")))
    assert begin.text_for(3) == "task 5" and result.rewards == 1.0
    assert problem is None


@pytest.mark.parametrize(
    "how, kind", [("raise", RAISED), ("exit", RAISED), ("block", HUNG), ("hang", HUNG), ("spin", HUNG)]
)
@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_a_failing_method_fails_the_episode_in_words(where, how, kind):
    if (where, how) == ("init", "hang"):
        return  # a constructor cannot await
    with pytest.raises(EpisodeFailed) as failure:
        asyncio.run(episode(make("FailsIn", where=where, how=how), deadline_s=0.1))
    assert failure.value.kind == kind
    assert f"FailsIn.{'step' if where == 'step' else 'reset'}" in str(failure.value)
    if how == "raise":
        assert f"ValueError: broken in {where}" in str(failure.value)
        assert "hostile_environments.py, line" in str(failure.value)


@pytest.mark.parametrize("how", ["raise", "exit", "block", "hang", "spin"])
def test_a_failing_close_is_told_and_fails_nothing(how):
    _, results, problem = asyncio.run(episode(make("FailsIn", where="close", how=how), deadline_s=0.1))
    assert len(results) == 1 and problem is not None and problem.startswith("FailsIn.close")


@pytest.mark.parametrize("method", ["make", "reset"])
def test_an_environment_that_is_still_being_made_when_its_episode_is_cancelled_is_closed(method):
    began, go_on, closed = threading.Event(), threading.Event(), []

    class Slow:
        def __init__(self):
            self.linger("make")

        def reset(self, task, seed):
            self.linger("reset")
            return ""

        def close(self):
            closed.append(threading.current_thread().name)

        def linger(self, where):
            if where == method:
                began.set()
                go_on.wait(5)

    async def cancelled():
        task = asyncio.ensure_future(episode(HostedEnvironment(Slow, "Slow"), deadline_s=5))
        while not began.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert closed == ["env-Slow"]


@pytest.mark.parametrize("waits_for", ["close", "a place"])
def test_an_environment_whose_episode_is_cancelled_while_it_closes_is_closed_once(waits_for):
    began, go_on, closed = threading.Event(), threading.Event(), []

    class Slow:
        def reset(self, task, seed):
            return ""

        def close(self):
            began.set()
            go_on.wait(5)
            closed.append(threading.current_thread().name)

    async def cancelled():
        places = CallSlots(1)
        slow = HostedEnvironment(Slow, "Slow", places)
        await slow.reset({}, 0, 5)
        if waits_for == "a place":
            held = places.place()
            await held.acquire()
            asyncio.get_running_loop().call_later(0.05, held.release)
        task = asyncio.ensure_future(slow.close())
        while waits_for == "close" and not began.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert closed == ["env-Slow"]


@pytest.mark.parametrize(
    "where, answers",
    [
        ("reset", "none number pair"),
        ("step", "none number pair done_text nan infinite huge word true nan_of_one agent_name no_text info"),
    ],
)
def test_answers_of_the_wrong_kind_fail_the_episode(where, answers):
    for answer in answers.split():
        with pytest.raises(EpisodeFailed) as failure:
            asyncio.run(episode(make("Gives", answer=answer, where=where)))
        assert failure.value.kind == INVALID, answer
        assert f"Gives.{where} gave" in str(failure.value)


def test_looking_at_a_hostile_answer_fails_the_episode_only():
    with pytest.raises(EpisodeFailed, match="RuntimeError: do not"):
        asyncio.run(episode(make("Gives", answer="hostile")))


def test_hanging_environments_do_not_delay_the_others():
    async def all_of_them():
        hostile = [make("FailsIn", where="step", how=how) for how in ("block", "hang", "spin") * 2]
        good = [make("Counter") for _ in range(50)]
        start = time.monotonic()
        bad = asyncio.gather(*(episode(env, deadline_s=2.0) for env in hostile), return_exceptions=True)
        await asyncio.gather(*(episode(env, steps=3, deadline_s=2.0) for env in good))
        took = time.monotonic() - start
        return took, await bad

    took, failures = asyncio.run(all_of_them())
    assert took < 2.0  # the good ones were done before the deadline of the hostile ones
    assert [failure.kind for failure in failures] == [HUNG] * 6


def test_at_most_max_concurrent_environments_run_at_once_in_any_method():
    make_one = load_environment(f"{FILE}:Crowd", "node 'game'", max_concurrent=3)

    async def crowd():
        return await asyncio.gather(*(episode(make_one(), deadline_s=60.0) for _ in range(12)))

    for _ in range(2):  # each step has an event loop of its own
        played = asyncio.run(crowd())
        assert max(result.info["most"] for _, (result,), _ in played) == 3
        assert {problem for _, _, problem in played} == {None}


def test_a_deadline_begins_when_there_is_a_place():
    leave = threading.Event()
    make_one = load_environment(f"{FILE}:Waits", "node 'game'", {"event": leave}, max_concurrent=1)

    async def second_waits_for_first():
        first, second = make_one(), make_one()
        for env in (first, second):
            await reset_env(env, TASK, 0, 60.0)
        steps = [asyncio.create_task(step_env(first, {}, 60.0))]
        await asyncio.sleep(0)
        steps.append(asyncio.create_task(step_env(second, {}, 1.0)))
        await asyncio.wait(steps, timeout=1.3)
        leave.set()
        return await asyncio.gather(*steps)

    assert all(result.done for result in asyncio.run(second_waits_for_first()))


def test_code_that_spins_is_ended():
    env = make("FailsIn", where="step", how="spin")
    with pytest.raises(EpisodeFailed):
        asyncio.run(episode(env, deadline_s=0.1))
    env._thread._thread.join(5)
    assert not env._thread._thread.is_alive()


def test_gymnasium_environments_are_recognised_by_their_methods():
    begin, results, _ = asyncio.run(episode(make("Guess", letters="xy"), said={4: " y\n"}))
    assert begin.text_for(4) == "5: guess"
    assert (results[0].text_for(4), results[0].rewards, results[0].done) == ("won", 1.0, True)
    begin, results, _ = asyncio.run(episode(make("Corridor"), steps=2, said={0: "not 1 but 2"}))
    assert begin.text_for(0) == "0" and [r.text_for(0) for r in results] == ["2", "4"]
    assert [r.done for r in results] == [False, True]
    _, results, _ = asyncio.run(episode(make("Patience", steps=2), steps=2, said={0: "x"}))
    assert [r.done for r in results] == [False, True]  # cut off is an end as well


@pytest.mark.parametrize("said", ["left", "9", "-1", "9" * 5000])
def test_an_action_that_a_gymnasium_game_does_not_have_is_told_so(said):
    _, (result,), _ = asyncio.run(episode(make("Corridor"), said={0: said}))
    assert result.text_for(0) == "Answer with a whole number from 0 to 3." and not result.done


def test_a_gymnasium_environment_takes_one_action():
    with pytest.raises(EpisodeFailed, match="agents \\[0, 1\\] act at once"):
        asyncio.run(episode(make("Guess")))


@pytest.mark.parametrize(
    "reference, kwargs, words",
    [
        ("nowhere.py:Plain", {}, "there is no file 'nowhere.py'"),
        ("no_such_package.games:Plain", {}, "cannot be imported"),
        (f"{FILE}:Nobody", {}, "has no 'Nobody'"),
        (f"{FILE}:function", {}, "not a class"),
        (str(FILE), {}, "names no class"),
        (f"{FILE}:NoStep", {}, "it has no method step"),
        (f"{FILE}:LacksTask", {}, r"reset\(self, seed\) lacks task, .*whose reset is no coroutine"),
        (
            f"{FILE}:WrongArity",
            {},
            r"reset\(self, task\) cannot be called as reset\(self, task, seed\); step",
        ),
        (f"{FILE}:Counter", {"limits": 3}, r"cannot be called with env_kwargs \(limits\)"),
        (f"{FILE}:Gives", {}, r"cannot be called with env_kwargs \(no arguments\)"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_it_is_called(reference, kwargs, words):
    with pytest.raises(DagError, match=f"node 'game'.*{words}"):
        load_environment(reference, "node 'game'", kwargs)
