"""What generates the turns of an agent: an engine here, one on other ranks, or a script in a test."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from siirl.data.seen import NO_IMAGES, Seen

PAUSED = "paused"
"""finish_reason of a turn that was interrupted, as engines name it: it may go on."""


STOP_STRING = "stop_string"
"""finish_reason of a turn that ended at a text that a program named: no stop token is in it."""
ENDED = ("stop", STOP_STRING)
"""finish_reason of turns that came to an end of their own."""


@dataclass(frozen=True)
class Generated:
    """The tokens of one turn."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each token, in nats, at the sampling temperature."""
    finish_reason: str
    """"stop" (a stop token was sampled, which is the last token) or "length"; from a Pump also "paused"."""
    weight_version: int
    """Of the weights that produced them, the oldest if there were several."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that produced each token, where they were not the same for all."""
    experts: bytes | None = None
    """What each token of prompt and turn but the last was computed by, as engines say it."""

    @property
    def token_versions(self) -> list[int]:
        """Of the weights that produced each token."""
        return self.versions or [self.weight_version] * len(self.token_ids)


class Policy(Protocol):
    """Generates turns; many calls are open at once. The result depends on weights and arguments alone."""

    async def generate(self, prompt: list[int], params: Any, seed: int, seen: Seen = NO_IMAGES) -> Generated:
        """One turn after the tokens `prompt`. params: the engine's SamplingParams, with n = 1. seen: the
        images among the tokens.

        EpisodeFailed costs the episode; any other error ends the run.
        """
        ...
