"""Environments that fail in every way, for tests/unit/agents/test_environments.py."""

import asyncio
import threading
import time
from typing import ClassVar

from siirl.agents.environments import Observation, StepResult


class Counter:
    """Well behaved: counts up to `limit` and pays what agents say."""

    closed = 0

    def __init__(self, limit: int = 3):
        self.limit = limit
        self.count = 0
        self.threads = set()

    async def reset(self, task, seed):
        self.threads.add(threading.get_ident())
        task["raw_prompt"] = "spoiled"
        await asyncio.sleep(0)
        return Observation({0: f"seed {seed}", 1: "wait"}, {"limit": self.limit})

    async def step(self, actions):
        self.threads.add(threading.get_ident())
        await asyncio.sleep(0)
        self.count += 1
        rewards = {agent: float(said) for agent, said in actions.items()}
        return StepResult(
            f"count {self.count}", rewards, self.count >= self.limit, {"threads": len(self.threads)}
        )

    async def close(self):
        type(self).closed += 1


class Plain:
    """Plain functions, a tuple, one reward for all, no close."""

    def reset(self, task, seed):
        return f"task {task['ground_truth']}"

    def step(self, actions):
        return "again", 1, False


class Crowd:
    """Knows how many of them were in a method at once."""

    running = most = 0
    lock = threading.Lock()

    def reset(self, task, seed):
        self.act()
        return ""

    def step(self, actions):
        self.act()
        return "", 0.0, True, {"most": type(self).most}

    def close(self):
        self.act()

    def act(self):
        cls = type(self)
        with cls.lock:
            cls.running += 1
            cls.most = max(cls.most, cls.running)
        time.sleep(0.02)
        with cls.lock:
            cls.running -= 1


class Waits:
    """Its step waits for an event."""

    def __init__(self, event):
        self.event = event

    def reset(self, task, seed):
        return ""

    def step(self, actions):
        self.event.wait()
        return "", 0.0, True


class FailsIn:
    """Raises, exits, blocks, hangs, spins or swallows everything, in one of its methods."""

    def __init__(self, where: str = "step", how: str = "raise"):
        self.where, self.how = where, how
        self.act("init")

    async def reset(self, task, seed):
        self.act("reset")
        await self.act_async("reset")
        return "begin"

    async def step(self, actions):
        self.act("step")
        await self.act_async("step")
        return StepResult()

    async def close(self):
        self.act("close")
        await self.act_async("close")

    def act(self, where):
        if where != self.where:
            return
        if self.how == "raise":
            raise ValueError(f"broken in {where}")
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "block":
            time.sleep(3)
        while self.how == "spin":
            pass

    async def act_async(self, where):
        if where == self.where and self.how == "hang":
            await asyncio.Event().wait()


class Hostile:
    """An object that raises when anybody looks at it."""

    def __repr__(self):
        raise RuntimeError("do not look")

    def __float__(self):
        raise RuntimeError("do not weigh")


class Gives:
    """Gives what `answer` names, from reset or step."""

    answers: ClassVar = {
        "none": None,
        "number": 7,
        "pair": ("text", 1.0),
        "done_text": ("text", 1.0, "no"),
        "nan": ("text", float("nan"), False),
        "infinite": ("text", float("inf"), False),
        "huge": ("text", 10**400, False),
        "word": ("text", "much", False),
        "true": ("text", True, False),
        "nan_of_one": ("text", {0: 1.0, 1: float("nan")}, False),
        "agent_name": ("text", {"alice": 1.0}, False),
        "no_text": ({0: 5}, 1.0, False),
        "info": ("text", 1.0, False, ["no"]),
        "hostile": ("text", Hostile(), False),
    }

    def __init__(self, answer: str, where: str = "step"):
        self.answer, self.where = answer, where

    def reset(self, task, seed):
        return self.answers[self.answer] if self.where == "reset" else "begin"

    def step(self, actions):
        return self.answers[self.answer]


class Guess:
    """A Gymnasium-style text game: a letter hidden by the seed."""

    def __init__(self, letters: str = "ab"):
        self.letters = letters

    def reset(self, *, seed=None, options=None):
        self.hidden = self.letters[seed % len(self.letters)]
        return f"{options['task']['ground_truth']}: guess", {}

    def step(self, action):
        won = action == self.hidden
        return "won" if won else "no", float(won), won, False, {"hidden": self.hidden}


class Discrete:
    n, start = 4, 0


class Corridor:
    """A Gymnasium-style game of numbers, of the older four values, that always ends on the right."""

    action_space = Discrete()

    def reset(self, seed=None):
        self.at = 0
        return self.at

    def step(self, action):
        self.at += action
        return self.at, 1.0, self.at > 3, {}


class Patience:
    """A Gymnasium-style game that is cut off after `steps`, in the newer five values."""

    def __init__(self, steps: int = 1):
        self.left = steps

    def reset(self, *, seed=None):
        return "", {}

    def step(self, action):
        self.left -= 1
        return "", 0.5, False, self.left == 0, {}


class NoStep:
    def reset(self, task, seed):
        return ""


class WrongArity:
    def reset(self, task):
        return ""

    def step(self):
        return ""


def function():
    return Plain()


class LacksTask:
    async def reset(self, seed):
        return ""

    async def step(self, actions):
        return "", 0.0, True
