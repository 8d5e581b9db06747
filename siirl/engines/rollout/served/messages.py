"""What is said to an engine elsewhere, and by it: in a process of this worker, or served by another rank.

A worker and the process of its engine say most of these; ranks that play episodes and a rank that serves
their engine say Hello, Submit, Pause, Done, Finished, Unanswered, Alive and Failed (`../remote.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from siirl.data.completions import Completion, Key, Request
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


class Score(Message):
    """Answered by Scored: what the model says of each row of tokens, from its start on."""

    rows: Sequence[Sequence[int]]
    starts: list[int]
    top_k: int


class Submit(Message):
    """Let requests join those that run. Each is answered by itself, by and by, in a Finished."""

    requests: list[Request]
    """To a process under keys "STREAM_number", with the seeds of their samples."""
    adapter: str | None = None

    def packed(self) -> "Submit":
        """As it is sent: of the samples of a prompt, one after the other, the first alone has it."""
        before: Sequence[int] | None = None
        requests = []
        for request in self.requests:
            requests.append(replace(request, prompt=()) if request.prompt is before else request)
            before = request.prompt
        return Submit(requests, self.adapter)

    def unpacked(self) -> list[Request]:
        """The requests of what `packed` gave; none has an empty prompt."""
        requests: list[Request] = []
        for request in self.requests:
            requests.append(request if request.prompt else replace(request, prompt=requests[-1].prompt))
        return requests


class Pause(Message):
    """End requests that were submitted, unless they have completed. A process answers by Paused, a rank by
    what it says of each."""

    names: list[str] | None = None
    """None: all that the sender has submitted."""


class Abort(Message):
    """Forget all requests that were submitted. Answered by Done."""


class Stop(Message):
    """End the process. Not answered."""


class Answer(msgspec.Struct, frozen=True):
    """A response that the engine has completed."""

    key: Key
    """Of its request."""
    completion: Completion
    """Of a process with the engine's finish_reason, and weight_version UNKNOWN: its worker counts the
    versions."""
    num_cached_tokens: int = 0
    """Of the prompt, in the prefix cache."""


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
    """The answer to a message that could be followed; of a rank, that it closes its stream."""

    result: Any = None


class Paused(Message):
    """The answer to Pause: what there is of each request that had not completed, maybe no token."""

    answers: list[Answer]


class Finished(Message):
    """Submitted requests that have completed."""

    answers: list[Answer]
    stats: dict[str, float] = msgspec.field(default_factory=dict)
    """Of a process; none while others run."""


class Unanswered(Message):
    """A submitted request that failed alone."""

    key: Key
    reason: str
    """Of its EpisodeFailed."""
    why: str
    """The kind of its EpisodeFailed."""


class Alive(Message):
    """The sender works: said about every second by a rank, and while it generates by the thread of a process
    that runs the engine."""

    progress: str = ""


class Beat(Message):
    """Sent about every second by a thread of its own: the process lives, whatever its engine does."""


class Failed(Message):
    """The answer to a message that failed; of a rank, that it cannot go on."""

    text: str
    user_error: bool = False
    """What is wrong is the user's to change."""
    of_stream: bool = True
    """It is the end of all requests that were submitted."""


class Hello(Message):
    """Which rank opens a stream."""

    rank: int


FromWorker = Start | Call | Score | Submit | Pause | Abort | Stop
FromEngine = Done | Scored | Paused | Finished | Alive | Beat | Failed
FromClient = Hello | Submit | Pause | Alive | Failed | Done
FromServer = Finished | Unanswered | Alive | Failed
