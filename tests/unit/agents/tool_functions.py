"""Tools of a user, for tests/unit/agents/test_tools.py."""

import asyncio
import time


def add(a, b, episode, offset=0):
    episode["calls"] = episode.get("calls", 0) + 1
    return a + b + offset


async def slow(seconds):
    await asyncio.sleep(seconds)
    return f"slept {seconds}"


def bad(how):
    if how == "raise":
        raise KeyError("nothing there")
    if how == "block":
        time.sleep(2)
    while how == "spin":
        pass


class Counting:
    """At most two at once; says how many there were."""

    max_concurrent = 2

    def __init__(self, step: int = 1):
        self.running = self.most = 0
        self.step = step
        self.schema = {"type": "function", "function": {"name": "counting", "parameters": {"type": "object"}}}

    async def __call__(self, arguments, episode):
        self.running += self.step
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.05)
        self.running -= self.step
        return str(self.most)


class NoTool:
    def __call__(self):
        return ""
