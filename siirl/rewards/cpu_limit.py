"""A limit on the processor time of a computation: unlike wall time, a busy machine does not use it up."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from siirl.errors import ScoreTimeoutError

AGAIN_S = 0.2  # processor time until a library that has swallowed the interruption is interrupted again

_num_interrupted = 0


class _Interrupted(BaseException):
    """Raised in the middle of a computation; no Exception, because libraries catch those."""


@contextlib.contextmanager
def cpu_limit(seconds: float, what: str) -> Iterator[None]:
    """Run the block for at most `seconds` of processor time of this process; not nested, main thread only.

    ScoreTimeoutError, which names `what`, when they are used up. A single call into C is not interrupted.
    """
    armed, fired = True, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        if armed:
            fired = True
            raise _Interrupted

    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)
        try:
            yield
        finally:
            armed = False
    except _Interrupted:
        pass
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if fired:
        global _num_interrupted
        _num_interrupted += 1
        raise ScoreTimeoutError(f"{what} took more than {seconds:g} s of processor time")


def was_interrupted() -> bool:
    """Whether a computation of this process was interrupted: a library's caches may be half filled since."""
    return _num_interrupted > 0
