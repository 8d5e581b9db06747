"""The exceptions that siirl raises on purpose: one tree, each leaf also an instance of the matching built-in.

A user error (`UserError`) is reported as its message alone, without a traceback, and ends the command with
exit code 2. Its message says what is wrong with the values, why, and the fix.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum


class Place(IntEnum):
    """Where what is wrong was written, in the order in which problems are listed."""

    COMMAND_LINE = 0
    CONFIGURATION = 1
    WORKFLOW = 2
    DATA = 3
    MODELS = 4
    REWARDS = 5
    MACHINE = 6

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class SiirlError(Exception):
    """Base of everything siirl raises on purpose."""


class UserError(SiirlError, ValueError):
    """Something the user wrote (a key, a DAG, a file) cannot work; found before the start where possible."""

    place: Place | None = None
    """Where it was written, once a check has said so."""
    breaks: tuple[str, ...] = ()
    """Full names of the keys whose values are unknown because of it."""
    parts: tuple["UserError", ...] = ()
    """The problems that it stands for, if it stands for several."""

    def problems(self) -> tuple["UserError", ...]:
        """The single problems of which this error tells: its parts, or itself."""
        return self.parts or (self,)


def joined(problems: Sequence[UserError]) -> UserError:
    """One error for several problems: of the class that all of them have, a line or more for each."""
    parts = tuple(part for problem in problems for part in problem.problems())
    if len(parts) == 1:
        return parts[0]
    shared = next(kind for kind in type(parts[0]).__mro__ if all(isinstance(part, kind) for part in parts))
    error = shared("\n".join(map(str, parts)))
    assert isinstance(error, UserError)
    error.parts = parts
    return error


def reworded(error: UserError, change: Callable[[str], str]) -> UserError:
    """The error with another text, or with another text for each of its parts."""
    parts = []
    for problem in error.problems():
        parts.append(type(problem)(change(str(problem))))
        parts[-1].place, parts[-1].breaks = problem.place, problem.breaks
    return joined(parts)


class ConfigError(UserError):
    """An unknown key, a value of the wrong type, or keys that contradict each other."""


class NotSupportedError(ConfigError):
    """A known key or value of a feature that does not exist yet; the message starts "not supported yet: "."""


class DagError(UserError):
    """The workflow is no valid DAG: cycle, unknown dependency, missing or doubly written field, bad node."""


class PlacementError(UserError):
    """Nodes cannot be placed on the cluster: ranks outside it, or parallel sizes that do not divide them."""


class DataError(UserError):
    """A dataset, tokenizer or model directory is missing, empty or malformed."""


class RewardError(SiirlError, RuntimeError):
    """A reward function failed on a sample; the message names the sample."""

    frames: str = ""
    """Where the user's code raised: its own lines alone, as Python prints them; empty: it did not."""


class ScoreTimeoutError(RewardError):
    """A built-in reward function ran out of time: there is no score, neither a right nor a wrong one."""


class EndpointError(RewardError):
    """A remote service gave no usable answer; the message names its URL and the number of tries."""


class SandboxError(SiirlError, RuntimeError):
    """A sandbox for untrusted code cannot be made, or broke; never what the code in it does."""


class RolloutError(SiirlError, RuntimeError):
    """A rollout engine failed, hung past its deadline, or broke its contract."""


class UserCodeError(RolloutError, UserError):
    """What the user wrote for episodes (an environment, a route, ...) raised, or failed all of them."""


class PeerError(RolloutError):
    """Another rank failed or went away in the middle of an interaction; the cause is to be found there."""


class EpisodeFailed(SiirlError, RuntimeError):
    """An episode cannot go on (its environment raised or hung): it is dropped and counted, the run goes on.

    kind: "env", "tool", "context", "code", ...: under what name it is counted.
    """

    def __init__(self, reason: str, kind: str = "env"):
        super().__init__(reason)
        self.kind = kind


class SamplingError(SiirlError, RuntimeError):
    """Dynamic sampling ran out of rounds before its batch was full."""


class WeightSyncError(SiirlError, RuntimeError):
    """A weight transfer was incomplete or did not match: nobody samples from stale weights."""


class CheckpointError(SiirlError, RuntimeError):
    """A checkpoint cannot be written, or none that is complete can be read."""


class StorageError(CheckpointError, UserError):
    """Files that only the user can do something about: a full disk, or checkpoints that are all damaged."""


class NumericsError(SiirlError, ArithmeticError):
    """Training produced numbers that cannot be used: gradients that are not finite, step after step."""


class RequestError(SiirlError, RuntimeError):
    """A client's request failed amid several ranks, which are no longer at one, or nobody reads requests any
    more: the run begins again. It refuses a request that ends it once more."""


class WorkerError(SiirlError, RuntimeError):
    """A worker process died or raised; the message gives host, rank, node, step and the cause."""


class DeadlineError(SiirlError, TimeoutError):
    """A wait passed its deadline; the message says who waited for whom."""
