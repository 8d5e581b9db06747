"""The table of the chaos suite: who is struck, in which phase, how, and what must happen then."""

from dataclasses import dataclass

PHASES = {
    "start": "start",
    "load": "load",
    "rollout": "rollout_actor",
    "reward": "function_reward",
    "scoring": "scoring",
    "train": "actor_train",
    "weight sync": "weight_sync",
    "validation": "validation",
    "save": "checkpoint",
    "write": "write",
    "write in memory": "write in memory",
    "export": "export",
}
"""Phase -> the span of the loop that it begins with, or the place that hook/sitecustomize.py or the reward
function names. In the order in which a run that is struck several times comes to them.

write: all files of a checkpoint are there, but not its manifest; in the loop's thread. "write in memory": the
same of one in host memory, in a thread of its own.
"""

STARTS_AGAIN = "starts again"
"""All workers do, from the newest checkpoint; the cause is recorded."""
GOES_ON = "goes on"
"""No worker ends."""
COMMAND_AGAIN = "ends; the command goes on"
"""All processes end, the cause is said; the same command goes on from the newest checkpoint."""
NAMED = "ends with the cause"
"""The run ends with exit code 2 and the cause; checkpoints are whole."""
DISKS = {"disk of checkpoints": "checkpoints", "shared memory": "/dev/shm"}
"""Where each lies, in the folder of the case."""


@dataclass(frozen=True)
class Case:
    """One strike."""

    who: str
    phase: str
    how: str
    """A signal, or what happens to the disk."""
    then: str
    """What must happen: one of the words above."""
    fast: bool = False
    """Part of `make test`."""

    @property
    def name(self) -> str:
        return f"{self.who}, {self.phase}, {self.how}"

    @property
    def rank(self) -> int:
        """The rank that is held in the phase."""
        return 1 if self.who == "rank 1" else 0


STEPS = ("load", "rollout", "reward", "train", "weight sync", "validation", "save")
OF_RANK_0 = ("write", "write in memory")
"""Rank 0 alone completes a checkpoint."""
SCORING = ("load", "scoring", "train", "save")


def make_cases() -> list[Case]:
    wanted: dict[tuple[str, str, str], str] = {}

    def add(who: str, phases: tuple[str, ...], hows: tuple[str, ...], then: str) -> None:
        wanted.update({(who, phase, how): then for how in hows for phase in phases})

    add("rank 0", ("start", *STEPS, *OF_RANK_0, "export"), ("SIGKILL",), STARTS_AGAIN)
    add("rank 1", ("start", *STEPS, "export"), ("SIGKILL",), STARTS_AGAIN)
    add("launcher", ("start", *STEPS, "write", "export"), ("SIGKILL",), COMMAND_AGAIN)
    add("launcher", ("train",), ("SIGTERM",), COMMAND_AGAIN)
    add("launcher", ("start", "rollout", "train", "save", "export"), ("SIGINT", "SIGHUP"), COMMAND_AGAIN)
    add("launcher", ("start", "rollout", "train", "save", "export"), ("SIGSTOP",), GOES_ON)
    for who in ("reward worker", "reward keeper"):
        add(who, SCORING, ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM"), GOES_ON)
    add("memory keeper", ("train",), ("SIGKILL",), GOES_ON)
    add("disk of checkpoints", ("train", "save", "write"), ("full",), NAMED)
    add("shared memory", ("train", "write in memory"), ("full",), GOES_ON)
    return [Case(*strike, then, strike in FAST) for strike, then in wanted.items()]


FAST = {
    ("rank 1", "rollout", "SIGKILL"),
    ("rank 1", "weight sync", "SIGKILL"),
    ("rank 0", "train", "SIGKILL"),
    ("rank 0", "write in memory", "SIGKILL"),
    ("launcher", "train", "SIGTERM"),
    ("launcher", "train", "SIGSTOP"),
    ("reward worker", "load", "SIGKILL"),
    ("reward worker", "scoring", "SIGKILL"),
    ("reward keeper", "scoring", "SIGKILL"),
    ("reward worker", "scoring", "SIGSEGV"),
    ("reward worker", "scoring", "SIGSTOP"),
    ("memory keeper", "train", "SIGKILL"),
}
CASES = make_cases()
