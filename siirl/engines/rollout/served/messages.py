"""What a worker and the process of its engine say to each other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from siirl.data.seen import Seen
from siirl.engines.rollout.base import Completion, Request, SamplingParams
from siirl.engines.rollout.channel import Message

UNKNOWN = -1
"""Weight version of what the process completes."""


class Start(Message):
    """Start the engine: the first message. Answered by Done."""

    native: str
    """Module that knows the engine's interfaces: its NativeEngine is started, with these arguments."""
    arguments: dict[str, Any]


class Call(Message):
    """Call a method of NativeEngine. Answered by Done with what it returns."""

    method: str
    arguments: dict[str, Any]

    @property
    def kind(self) -> str:
        """See Message: the method's name."""
        return self.method


class Generate(Message):
    """Answered by Generated: a response for each seed of each prompt, in this order."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    """With n = 1."""
    seeds: list[list[int]]
    adapter: str | None
    """Name of a loaded one; None: the model alone."""
    kv_version: int | None = None
    """As of the requests of a Submit."""
    seen: Sequence[Seen] = ()
    """The images of each prompt; (): none has one."""


class Score(Message):
    """Answered by Scored: what the model says of each row of tokens, from its start on."""

    rows: Sequence[Sequence[int]]
    starts: list[int]
    top_k: int


class Submit(Message):
    """Let requests join those that run. Each is answered by itself, by and by, in a Finished."""

    requests: list[Request]
    """Under keys "STREAM_number", with the seeds of their samples. In the prefix cache they find what
    requests of the same kv_version left there."""
    adapter: str | None


class Pause(Message):
    """End requests that were submitted, unless they have completed. Answered by Paused."""

    names: list[str]


class Abort(Message):
    """Forget all requests that were submitted. Answered by Done."""


class Doubt(Message):
    """What the engine holds is not whole, whatever comes next: no other worker gets it. Answered by Done."""


class Stop(Message):
    """End the process. Not answered."""


class Response(msgspec.Struct, frozen=True):
    """A response that the engine has completed."""

    name: str
    """Key of its request."""
    completion: Completion
    """With the engine's finish_reason, and weight_version UNKNOWN: the worker counts the versions."""
    num_cached_tokens: int
    """Of the prompt, in the prefix cache."""

    def at_version(self, weight_version: int) -> Completion:
        """The completion, of these weights."""
        return replace(self.completion, weight_version=weight_version)


class RowScores(msgspec.Struct, frozen=True):
    """See RolloutEngine.score: [T, 1 + K] numbers each, row by row."""

    token_ids: bytes
    """int32."""
    log_probs: bytes
    """float32."""


class Scored(Message):
    """The answer to Score."""

    rows: list[RowScores]


class Done(Message):
    """The answer to a message that could be followed."""

    result: Any = None


class Generated(Message):
    """The answer to Generate."""

    responses: list[Response]
    stats: dict[str, float]
    """See NativeEngine.stats."""


class Paused(Message):
    """The answer to Pause: what there is of each request that had not completed, maybe no token."""

    responses: list[Response]


class Finished(Message):
    """Submitted requests that a step of the engine has completed."""

    responses: list[Response]
    stats: dict[str, float]
    """None while others run."""


class Alive(Message):
    """Sent about every second by the thread that runs the engine, while it generates."""

    progress: str


class Beat(Message):
    """Sent about every second by a thread of its own: the process lives, whatever its engine does."""


class Failed(Message):
    """The answer to a message that failed."""

    text: str
    user_error: bool
    """What is wrong is the user's to change."""
    of_stream: bool
    """It is the end of all requests that were submitted."""


FromWorker = Start | Call | Generate | Score | Submit | Pause | Abort | Doubt | Stop
FromEngine = Done | Generated | Scored | Paused | Finished | Alive | Beat | Failed
