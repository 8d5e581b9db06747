"""What generates the turns of an agent: an engine here, one on other ranks, or a script in a test."""

from typing import Protocol

from siirl.data.completions import Completion, SamplingParams
from siirl.data.seen import NO_IMAGES, Seen

STOP_STRING = "stop_string"
"""finish_reason of a turn that ended at a text that a program named: no stop token is in it."""
ENDED = ("stop", STOP_STRING)
"""finish_reason of turns that came to an end of their own."""


class Policy(Protocol):
    """Generates turns; many calls are open at once. The result depends on weights and arguments alone."""

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: int, seen: Seen = NO_IMAGES
    ) -> Completion:
        """One turn after the tokens `prompt`. params: with n = 1. seen: the images among the tokens.

        EpisodeFailed costs the episode; any other error ends the run.
        """
        ...
