"""Turns at once: agents of one episode that speak while others do, as no edge of the DAG orders them.

consumes: an episode, and nodes that run now. produces: what they said, in the order of the DAG. waits for:
their turns. unblocked by: the turns that a node waits for, not by those beside it.

A node sees the episode as it was when all began, and what was said since by the nodes that it waits for. So
what is said depends on edges and seeds, not on who is faster. Numbers of turns, of which seeds are made, are
kept free for the most turns that each node may have, in the order of the DAG.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from siirl.agents.contexts import ContextFull
from siirl.agents.episode import Episode
from siirl.compiler.plan import StagePlan
from siirl.errors import EpisodeFailed

OF_AN_EPISODE = (EpisodeFailed, ContextFull)
"""Errors that end one episode: what does not wait for that node is said nevertheless, whoever is faster."""


async def speak_at_once(
    episode: Episode,
    stages: Sequence[StagePlan],
    speak: Callable[[StagePlan, Episode], Awaitable[None]],
    most_turns: Mapping[str, int],
) -> tuple[str, BaseException] | None:
    """Run these nodes, in the order of the DAG, each as soon as those that it waits for are done.

    speak: one node's turn in the episode as that node sees it. most_turns: of each node. Returns the first
    that failed, in their order, and why. Raises whatever is none of OF_AN_EPISODE; then all are over.
    """
    order = [stage.node for stage in stages]
    parents = {node: [stage.node for stage in stages if node in stage.following] for node in order}
    above: dict[str, set[str]] = {}
    firsts: dict[str, int] = {}
    for node in order:
        above[node] = set(parents[node]).union(*(above[parent] for parent in parents[node]))
        firsts[node], episode.turns = episode.turns, episode.turns + most_turns[node]
    tasks: dict[str, asyncio.Task[None]] = {}
    seen: dict[
        str, tuple[Episode, int]
    ] = {}  # node -> the episode as it sees it, and messages before its own

    def said(nodes: Sequence[str]) -> list[Any]:
        return [one for node in nodes if node in seen for one in seen[node][0].messages[seen[node][1] :]]

    async def run(stage: StagePlan) -> None:
        for parent in parents[stage.node]:
            await asyncio.shield(tasks[parent])
        before = [node for node in order if node in above[stage.node]]
        own = replace(
            episode,
            messages=[*episode.messages, *said(before)],
            turns=firsts[stage.node],
            visits=_visited(episode, [*before, stage.node]),
        )
        seen[stage.node] = own, len(own.messages)
        await speak(stage, own)

    for stage in stages:
        tasks[stage.node] = asyncio.create_task(run(stage))
    await _over(list(tasks.values()))
    episode.messages += said(order)
    episode.visits = _visited(episode, list(seen))
    errors = ((node, tasks[node].exception()) for node in order)
    return next(((node, error) for node, error in errors if error is not None), None)


def _visited(episode: Episode, nodes: Sequence[str]) -> dict[str, int]:
    return episode.visits | {node: episode.visits.get(node, 0) + 1 for node in nodes}


async def _over(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Until all have ended. Raises what one raises that ends more than its episode; the others are ended."""
    left = set(tasks)
    try:
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
            for error in (task.exception() for task in tasks if task in done):
                if error is not None and not isinstance(error, OF_AN_EPISODE):
                    raise error
    finally:
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
