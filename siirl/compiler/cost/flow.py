"""A rollout whose responses outlive a step (rollout.max_lag), played with the lengths of its rows. Pure.

Groups leave when all their responses are whole, those that were begun first; others take their places, and
what is in flight decodes together. So the lengths alone say how many tokens a step decodes, how many rows at
a time, what is read again after an update, and how old rows are when they are trained. A step ends when
siirl/nodes/in_flight.py says; a test holds both equal.
"""

import collections
import functools
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from siirl.compiler.cost.lengths import RowTokens, in_order

CYCLES, WARM_UP = 8, 2
"""Of 1 + max_lag steps each: that are played, of which so many first ones do not count."""


@dataclass(frozen=True)
class Flow:
    """A step of an engine, on average."""

    spans: tuple[tuple[float, float], ...]
    """(tokens decoded one after the other, rows in each)."""
    read_again: float
    """Tokens of prompts and responses that were begun in an earlier step."""
    staleness: float
    """Steps between the first token of a group and its training."""


@dataclass
class Group:
    """The responses to a prompt."""

    left: int
    """That are not whole."""
    begun: int | None = None
    """The step of its first token."""


@functools.lru_cache(maxsize=1024)
def flow(
    tokens: RowTokens, groups: int, samples: int, at_once: int, engines: int, surplus: float, max_lag: int
) -> Flow:
    """groups: that leave in a step, of one of so many engines. at_once: rows that an engine decodes."""
    lengths = itertools.cycle(in_order(tokens, groups * samples, engines))
    line: list[Group] = []
    waiting: collections.deque[tuple[Group, int]] = collections.deque()
    live: list[tuple[int, int, Group, int]] = []
    """When a row ends, by the tokens that were decoded before; a number; its group; its length."""
    spans, again, ages, now, numbers = [], [], [], 0, itertools.count()
    for step in range(CYCLES * (1 + max_lag)):
        again.append(sum(tokens.prompt + length - (end - now) for end, _, _, length in live))
        for _ in range(round((1 + surplus) * groups) - len(line)):
            line.append(Group(samples))
            waiting.extend((line[-1], length) for length in itertools.islice(lengths, samples))
        began, products, whole = now, 0, sum(not group.left for group in line)
        while whole < groups or not may_end(line, groups, step, max_lag):
            while waiting and len(live) < at_once:
                group, length = waiting.popleft()
                group.begun = step if group.begun is None else group.begun
                heapq.heappush(live, (now + length, next(numbers), group, length))
            products += (live[0][0] - now) * len(live)
            now = live[0][0]
            while live and live[0][0] == now:
                group = heapq.heappop(live)[2]
                group.left -= 1
                whole += not group.left
        spans.append((now - began, products))
        leaving = [group for group in line if not group.left][:groups]
        ages.append(fmean(step - (group.begun or 0) for group in leaving))
        gone = {id(group) for group in leaving}
        line = [group for group in line if id(group) not in gone]
    counted = (CYCLES - WARM_UP) * (1 + max_lag)
    means = [(taken / counted, products / taken) for taken, products in spans[-counted:] if taken]
    return Flow(tuple(means), fmean(again[-counted:]), fmean(ages[-counted:]))


def may_end(line: Sequence[Group], groups: int, step: int, max_lag: int) -> bool:
    """Whether so many groups are whole, and those that stay can leave before they are too old."""
    whole = [group for group in line if not group.left]
    if len(whole) < groups:
        return False
    chosen = {id(group) for group in whole[:groups]}
    ages = [step - (step if one.begun is None else one.begun) for one in line if id(one) not in chosen]
    return all(sum(age + later >= max_lag for age in ages) <= later * groups for later in range(max_lag))
