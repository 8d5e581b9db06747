"""What was said, answered and shown in an episode so far: from a checkpoint it brings the episode back.

The episode is played again with the seeds that it had. Turns and answers of tools come from the transcript; a
turn that was cut goes on from its tokens. The environment is reset and takes the same actions, and must show
what it showed, by hash. So must what is read before each turn.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from siirl.agents.tools import ToolResponse
from siirl.errors import EpisodeFailed

if TYPE_CHECKING:
    from siirl.data.completions import PartialCompletion
    from siirl.data.seen import Seen

REPLAYABLE = "replayable"
"""Attribute of an environment's class: the same seed and actions bring it to the same state."""


class Transcript:
    """Of one episode. Written by it alone, in its event loop."""

    def __init__(self, replayable: bool = True) -> None:
        self.replayable = replayable
        """Whether what has happened can be brought back."""
        self.first_step: int | None = None
        """The training step in which its first token was sampled."""
        self.last_step: int | None = None
        self.was_replayed = False
        """It was brought back from a checkpoint."""
        self._turns: dict[int, tuple[str, PartialCompletion]] = {}  # seed -> hash of what was read, the turn
        self._answers: dict[int, dict[str, Any]] = {}  # turn -> tools' answers, and episode.state after them
        self._shown: list[str] = []  # hash of each answer of the environment
        self._num_shown = 0  # since the episode began
        self._expected: set[tuple[str, int]] = set()  # what has not come again
        self._caught_up = asyncio.Event()

    @property
    def is_behind(self) -> bool:
        """Whether something that it holds has not come again."""
        return bool(self._expected)

    async def caught_up(self) -> None:
        """Until the episode is where it was, or is over."""
        if self._expected:
            await self._caught_up.wait()

    def begin_again(self) -> None:
        """Forget all: the episode starts over."""
        self._turns, self._answers, self._shown, self._num_shown = {}, {}, [], 0
        self._expected, self.was_replayed = set(), False
        self.first_step = self.last_step = None

    def over(self) -> None:
        """The episode has ended: nothing comes again."""
        self._caught_up.set()

    def turn(self, seed: int, prompt: Sequence[int], seen: "Seen", most: int) -> "PartialCompletion":
        """What there is of a turn, to be extended. most: tokens that it may have.

        EpisodeFailed if what is read before it is not what it was.
        """
        from siirl.data.completions import (
            PartialCompletion,  # here: commands read this file's constants without torch
        )

        read, known = _hash(list(prompt), seen.images), self._turns.get(seed)
        if ("turn", seed) in self._expected and known is not None:
            whole = known[1].finish_reason is not None
            if known[0] != read or not (whole or len(known[1].token_ids) < most):
                self._differs("what is read before a turn")
            self._met("turn", seed)
        elif known is None or known[0] != read:
            known = self._turns[seed] = read, PartialCompletion()
        if known[1].finish_reason is None:
            self._caught_up.set()
        return known[1]

    async def answers(
        self, turn: int, state: dict[str, Any], ask: Callable[[], Awaitable[list[ToolResponse]]]
    ) -> list[ToolResponse]:
        """What tools answer to the calls of a turn. state: the episode's, which tools may write."""
        if ("answers", turn) in self._expected:
            self._met("answers", turn)
            known = json.loads(json.dumps(self._answers[turn]))
            state.clear()
            state.update(known["state"])
            return [ToolResponse(**{**one, "images": tuple(one["images"])}) for one in known["responses"]]
        given = await ask()
        self._answers[turn] = {"responses": [asdict(one) for one in given], "state": self._plain(state)}
        return given

    def show(self, *what: Any) -> None:
        """The environment has answered. EpisodeFailed if that is not what it was."""
        shown, at = _hash(*what), self._num_shown
        self._num_shown += 1
        if ("shown", at) in self._expected:
            if self._shown[at] != shown:
                self._differs("what the environment shows")
            self._met("shown", at)
        else:
            self._shown.append(shown)

    def state(self) -> dict[str, Any] | None:
        """As JSON values, for a checkpoint; None if it cannot be brought back."""
        if not self.replayable:
            return None
        return {
            "turns": [[str(seed), read, part.state()] for seed, (read, part) in self._turns.items()],
            "answers": [[turn, answer] for turn, answer in self._answers.items()],
            "shown": list(self._shown),
            "steps": [self.first_step, self.last_step],
        }

    @classmethod
    def of_state(cls, state: dict[str, Any] | None) -> "Transcript":
        """What `state` gave; an empty one of None."""
        from siirl.data.completions import PartialCompletion

        made = cls()
        if state is not None:
            made._turns = {
                int(seed): (read, PartialCompletion.of_state(part)) for seed, read, part in state["turns"]
            }
            made._answers = {turn: answer for turn, answer in state["answers"]}
            made._shown = state["shown"]
            made.first_step, made.last_step = state["steps"]
            held = {"turn": made._turns, "answers": made._answers, "shown": range(len(made._shown))}
            made._expected = {(kind, key) for kind, keys in held.items() for key in keys}
            made.was_replayed = bool(made._expected)
        return made

    def _met(self, kind: str, key: int) -> None:
        self._expected.remove((kind, key))
        if not self._expected:
            self._caught_up.set()

    def _plain(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of JSON values; of others the episode cannot be brought back."""
        try:
            copied = json.loads(json.dumps(state))
            self.replayable &= copied == state
        except (TypeError, ValueError, RecursionError):
            copied, self.replayable = {}, False
        return copied

    def _differs(self, what: str) -> None:
        raise EpisodeFailed(f"{what} is not what it was before the checkpoint", "replay")


def _hash(*what: Any) -> str:
    return blake2b(repr(what).encode(), digest_size=16).hexdigest()
