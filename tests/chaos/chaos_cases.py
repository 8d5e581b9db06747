"""The table of the chaos suite: who is struck, in which phase, how, and what must happen then."""

from dataclasses import dataclass

from chaos_services import LOST, REWARD_SERVICE, SERVICES, TOOL_SERVER, TOOL_URL

PHASES = {
    "start": "start",
    "load": "load",
    "rollout": "rollout_actor",
    "tool": "tool",
    "reward": "function_reward",
    "scoring": "scoring",
    "train": "actor_train",
    "weight sync": "weight_sync",
    "half a sync": "half a sync",
    "validation": "validation",
    "save": "checkpoint",
    "write": "write",
    "write in memory": "write in memory",
    "export": "export",
}
"""Phase -> the span of the loop that it begins with, or the place that hook/sitecustomize.py, the reward
function or a service names. In the order in which a run that is struck several times comes to them.

"half a sync": an engine has begun to replace its weights.
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
"""The run ends with the cause; checkpoints are whole."""
DISKS = {"disk of checkpoints": "checkpoints", "shared memory": "/dev/shm", "output folder": "out"}
"""Where each lies, in the folder of the case."""
SAID = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    "Ray raylet": "the Ray cluster is smaller than asked",
    "Ray GCS": "the head of the Ray cluster",
    "Ray machine": "the Ray cluster (is smaller than asked|has the 2 machine)",
    REWARD_SERVICE: "reward function remote failed on .*/score gave no usable answer after",
    TOOL_URL: "the MCP server 'http.*/mcp' has been away for",
}
"""What happens to a disk, or who is lost -> what is said of it."""
PARALLEL = "parallel vLLM"
"""Whose names begin so: processes of an engine of two ranks, and these ranks."""
TWO = "two vLLM"
"""Whose names begin so: ranks with an engine each."""
JUMPS_S = {"a day ahead": 86400, "a day back": -86400}
"""Of the clock that all processes of the run read."""


@dataclass(frozen=True)
class Case:
    """One strike."""

    who: str
    phase: str
    how: str
    """A signal, or what happens to the disk, the clock, or the memory that a rank may have."""
    then: str
    """What must happen: one of the words above."""
    least_step: int = 0
    """It is in this step or a later one."""

    @property
    def fast(self) -> bool:
        """Part of `make test`."""
        return (self.who, self.phase, self.how) in FAST

    @property
    def name(self) -> str:
        return f"{self.who}, {self.phase}, {self.how}"

    @property
    def job(self) -> str:
        """The kind of job: "local", or what it runs on or asks."""
        kinds = ("Ray", "vLLM", PARALLEL, TWO, "standby", *SERVICES)
        return next((kind for kind in kinds if self.who.startswith(kind)), "local")

    @property
    def rank(self) -> int:
        """The rank that is held in the phase."""
        second = ("rank 1", f"{TWO} rank 1", f"{PARALLEL} rank 1", *BESIDE_STANDBYS, *RAY_PARTS)
        return 1 if self.who in second else 0

    @property
    def strikes_rank_of_engine(self) -> bool:
        """One of two that share an engine, not a process of the engine."""
        return self.who.startswith(f"{PARALLEL} rank")

    @property
    def node(self) -> str:
        """What the record of the attempt says of the phase."""
        return PHASES["weight sync" if self.phase == HALF else self.phase]


HALF = "half a sync"
STEPS = ("load", "rollout", "reward", "train", "weight sync", "validation", "save")
OF_RANK_0 = ("write", "write in memory")
"""Rank 0 alone completes a checkpoint."""
SPREAD = ("start", "rollout", "train", "weight sync", "validation", "save")
CUT = "network cut"
OUT_OF_MEMORY = "memory limit"
"""Of a control group: the kernel's out-of-memory killer comes."""
SCORING = ("load", "scoring", "train", "save")


def make_cases() -> list[Case]:
    wanted: dict[tuple[str, str, str], str] = {}

    def add(who: str, phases: tuple[str, ...], hows: tuple[str, ...], then: str) -> None:
        wanted.update({(who, phase, how): then for how in hows for phase in phases})

    add("rank 0", ("start", *STEPS, *OF_RANK_0, "export"), ("SIGKILL",), STARTS_AGAIN)
    add("rank 1", ("start", *STEPS, "export"), ("SIGKILL",), STARTS_AGAIN)
    for who in ("rank 0", "rank 1"):
        add(who, SPREAD, ("SIGSEGV", "SIGTERM"), STARTS_AGAIN)
        add(who, ("rollout", "train"), (OUT_OF_MEMORY,), STARTS_AGAIN)
    add("rank 0", ("rollout", "train", "weight sync", "save"), ("SIGSTOP",), STARTS_AGAIN)
    add("rank 1", ("start", *STEPS), ("SIGSTOP",), STARTS_AGAIN)
    add("both ranks", ("start", "rollout", "train", "weight sync", "save"), ("SIGKILL",), STARTS_AGAIN)
    add("both ranks", ("rollout", "train"), ("SIGSTOP", "SIGSEGV"), STARTS_AGAIN)
    add("launcher", ("start", *STEPS, "write", "export"), ("SIGKILL",), COMMAND_AGAIN)
    add("launcher", ("start", "rollout", "train", "save", "export"), ("SIGTERM", "SIGSEGV"), COMMAND_AGAIN)
    add("launcher", ("start", "rollout", "train", "save", "export"), ("SIGINT", "SIGHUP"), COMMAND_AGAIN)
    add("launcher", ("start", "rollout", "train", "save", "export"), ("SIGSTOP",), GOES_ON)
    for who in ("reward worker", "reward keeper"):
        add(who, SCORING, ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGTERM"), GOES_ON)
    add("memory keeper", ("train",), ("SIGKILL", "SIGSEGV", "SIGTERM"), GOES_ON)  # there is but one
    add("memory keeper", ("rollout", "train", "validation", "save", "write in memory"), ("SIGSTOP",), GOES_ON)
    add("clock", ("rollout", "train", "save", "write"), tuple(JUMPS_S), GOES_ON)
    add("disk of checkpoints", ("train", "save", "write"), ("full", "read-only"), NAMED)
    add("output folder", ("train", "save"), ("full", "read-only"), NAMED)
    add("shared memory", ("train", "write in memory"), ("full", "read-only"), GOES_ON)
    add("Ray worker", ("rollout", "save"), ("SIGKILL", "SIGSEGV"), STARTS_AGAIN)
    add("Ray worker", ("rollout", "train", "save"), ("SIGSTOP",), STARTS_AGAIN)
    add("Ray actor", ("rollout", "train"), ("SIGKILL",), STARTS_AGAIN)
    add("Ray driver", ("rollout", "save"), ("SIGKILL", "SIGTERM"), COMMAND_AGAIN)
    add("Ray raylet", ("train",), ("SIGKILL",), NAMED)
    add("Ray GCS", ("train",), ("SIGKILL",), NAMED)
    add("Ray machine", ("train",), (CUT,), NAMED)
    for phase, how in (("rollout", "SIGKILL"), ("train", "SIGSTOP")):
        add("standby", (phase,), (how,), GOES_ON)
    add("standby's rank", ("reward", "weight sync", "save"), ("SIGKILL",), STARTS_AGAIN)
    add("standby's launcher", ("export",), ("SIGKILL",), COMMAND_AGAIN)
    for how in ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP"):
        add("vLLM engine", ("rollout", "train"), (how,), GOES_ON)
    add(f"{TWO} rank 0", ("rollout",), ("SIGKILL",), STARTS_AGAIN)
    add(f"{TWO} rank 1", ("weight sync",), ("SIGKILL",), STARTS_AGAIN)
    for who in (f"{PARALLEL} rank 0", f"{PARALLEL} rank 1"):
        add(who, (HALF,), ("SIGKILL",), STARTS_AGAIN)
    for part in (f"{PARALLEL} core", f"{PARALLEL} worker"):
        add(part, ("rollout",), ("SIGKILL", "SIGSTOP"), STARTS_AGAIN)
    add(TOOL_SERVER, ("rollout", "tool", "train"), ("SIGKILL", "SIGSTOP"), GOES_ON)
    add(TOOL_URL, ("rollout", "tool", "train"), ("SIGKILL", "SIGSTOP"), GOES_ON)
    add(REWARD_SERVICE, ("reward", "scoring", "train"), ("SIGKILL", "SIGSTOP"), GOES_ON)
    add(TOOL_URL, ("tool",), (LOST,), NAMED)
    add(REWARD_SERVICE, ("scoring",), (LOST,), NAMED)
    return [Case(*strike, then, FAST.get(strike, 0)) for strike, then in wanted.items()]


BESIDE_STANDBYS = ("standby", "standby's rank")
RAY_PARTS = ("Ray worker", "Ray actor", "Ray raylet", "Ray machine")
"""Those of rank 1, on the second machine."""
FAST = {
    ("launcher", "train", "SIGTERM"): 3,
    ("rank 1", "train", "SIGKILL"): 4,
    ("reward worker", "scoring", "SIGKILL"): 0,
    ("memory keeper", "train", "SIGKILL"): 0,
}
"""Those of `make test`, in their order -> the first step in which they may be: the command then goes on from
the disk, and the next attempt from memory."""
CASES = make_cases()
FILES = {
    "rank_0": ("rank 0",),
    "rank_1": ("rank 1",),
    "both_ranks": ("both ranks",),
    "standbys": ("standby", "standby's rank", "standby's launcher"),
    "launcher": ("launcher",),
    "rewards": ("reward worker", "reward keeper"),
    "machine": (*DISKS, "clock", "memory keeper"),
    "ray": (*RAY_PARTS, "Ray driver", "Ray GCS"),
    "vllm": ("vLLM engine",),
    "parallel_vllm": (f"{PARALLEL} core", f"{PARALLEL} worker"),
    "vllm_ranks": (f"{TWO} rank 0", f"{TWO} rank 1", f"{PARALLEL} rank 0", f"{PARALLEL} rank 1"),
    "services": SERVICES,
}
"""test_chaos_FILE.py -> who is struck there. Workers of the suite take whole files: 10 minutes at most."""
