"""Tools of a user, for tests/unit/agents/test_tools.py."""

import asyncio
import threading


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
        MET.wait()
    while how == "spin":
        pass


MET = threading.Event()


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


class Meeting:
    """Answers when as many calls as `size` are in it; then it lets go of those that block."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, action=MET.set, timeout=20)
        self.schema = {"type": "function", "function": {"name": "meeting", "parameters": {"type": "object"}}}

    async def __call__(self, arguments, episode):
        await asyncio.to_thread(self.barrier.wait)
        return "met"


class NoTool:
    def __call__(self):
        return ""
