"""Branches of an episode: several candidates of one turn, all or the best of which go on.

consumes: an episode that comes to a turn. produces: an episode of each candidate, of which it has what
follows.
waits for: with go_on=best, the scores of the other candidates. unblocked by: these come to their next such
turn, or are over.

A branch is the episode played again with the same seeds: what was said and answered before comes from its
transcript, so nothing is sampled twice, and the environment takes the same actions. The turn, and what comes
after it, has seeds of its own. Candidate 0 is the episode that branches.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from siirl.agents.transcript import Transcript
from siirl.compiler.plan import BEST, InteractionPlan, StagePlan
from siirl.errors import EpisodeFailed
from siirl.types import branch_id

Result = TypeVar("Result")


class NotChosen(Exception):
    """Another candidate of its turn goes on, so the episode is over."""


class Contest:
    """Candidates of one turn, the best of which goes on. Used in one event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: dict[int, float] = {}
        self._best: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def arrive(self, number: int, score: float) -> None:
        """A candidate has got its score; what it gets later does not count. Of equals the first is best."""
        self._scores.setdefault(number, score)
        if len(self._scores) == self._size and not self._best.done():
            self._best.set_result(max(self._scores, key=lambda one: (self._scores[one], -one)))

    async def goes_on(self, number: int, score: float) -> bool:
        """Whether this one is the best, once all have arrived."""
        self.arrive(number, score)
        return await asyncio.shield(self._best) == number


@dataclass
class Branch:
    """A way from the first turn of an episode to its end."""

    number: int = 0
    """Among those of one sample."""
    begins: int = -1
    """Its first turn of its own: what is before was said in the episode that it is a branch of."""
    path: tuple[tuple[int, int], ...] = ()
    """Of each turn where it is another candidate than 0: (turn, candidate)."""
    groups: list[tuple[int, int]] = field(default_factory=list)
    """Each turn on the way that has candidates, and the branch_id of what follows."""
    contest: Contest | None = None
    """Of the latest of these turns, where the best goes on."""

    def branch_id(self, turn: int) -> int:
        """The candidates that a turn is one of, or follows one of; -1: none."""
        return next((found for first, found in reversed(self.groups) if first <= turn), -1)


class Travels(Protocol):
    """An episode on a branch, which has come to a turn."""

    branch: Branch
    transcript: Transcript | None

    def score_since(self, turn: int) -> float:
        """What it has earned by this turn and later ones."""
        ...


class Tree(Generic[Result]):
    """All branches of one sample of a prompt."""

    def __init__(
        self,
        plan: InteractionPlan,
        episode_id: int,
        play: Callable[["Tree[Result]", Branch, Transcript], Coroutine[Any, Any, Result]],
    ) -> None:
        """episode_id: of branch 0. play: plays an episode on a branch; its transcript happens again."""
        self._plan, self._episode_id, self._play = plan, episode_id, play
        self._branches: list[asyncio.Task[Result]] = []

    async def grow(self) -> list[Result]:
        """Play the episode and all its branches. Raises what one of them raises; then all are over."""
        self._begin(Branch(), Transcript())
        played = []
        try:
            while len(played) < len(self._branches):
                played.append(await self._branches[len(played)])
        finally:
            for task in self._branches:
                task.cancel()
            await asyncio.gather(*self._branches, return_exceptions=True)
        return played

    async def reach(self, one: Travels, stage: StagePlan, visit: int, turn: int) -> None:
        """An episode comes to a turn at a stage: it branches there, if the plan says so.

        NotChosen if another candidate of an earlier turn goes on in its place.
        """
        branches, branch = stage.branches, one.branch
        if branches is None or turn <= branch.begins:
            return
        if branch.contest is not None and not await branch.contest.goes_on(
            branch.number, one.score_since(branch.groups[-1][0])
        ):
            raise NotChosen(f"another candidate of turn {branch.groups[-1][0]} went on")
        if branches.visits and visit not in branches.visits:
            return
        assert one.transcript is not None
        place, size = len(branch.groups), branches.candidates
        branch.groups.append((turn, branch_id(self._episode_id + branch.number, turn)))
        branch.contest = Contest(size) if branches.go_on == BEST else None
        for candidate in range(1, size):
            state = one.transcript.state()
            if state is None:
                raise EpisodeFailed(
                    "it branches, but what has happened cannot be brought back: tools left other than JSON "
                    "values in episode.state, or the environment is not replayable",
                    "replay",
                )
            number = self._plan.branch_number(branch.number, place, candidate)
            path = (*branch.path, (turn, candidate))
            groups, contest = list(branch.groups), branch.contest
            self._begin(Branch(number, turn, path, groups, contest), Transcript.of_state(state))

    def _begin(self, branch: Branch, transcript: Transcript) -> None:
        self._branches.append(asyncio.create_task(self._play(self, branch, transcript)))
