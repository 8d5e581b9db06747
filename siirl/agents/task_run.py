"""A task of a folder (siirl/data/task_folders.py) in a sandbox: its environment, commands, and tests."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from siirl.data.task_folders import (
    FOLDER_KEY,
    HARBOR,
    Task,
    read_task,
    reward_in,
    reward_of_pytest,
)
from siirl.errors import DagError, EpisodeFailed, SandboxError
from siirl.sandbox.open_sandbox import open_sandbox
from siirl.sandbox.sandboxes import (
    MIB,
    Build,
    ExecResult,
    Sandbox,
    SandboxSettings,
    missing_here,
)

DIED, UNREWARDED = "sandbox_died", "tests_unrewarded"
"""Kinds of EpisodeFailed: a sandbox that cannot be made or ended, and tests that said nothing."""
LOGS = "/logs/verifier"
PREPARE = f"rm -rf /tests/* {LOGS}/*; mkdir -p /tests {LOGS} /logs/agent"
MOST_OUTPUT_BYTES = 4 * MIB
"""Of the tests."""


@contextmanager
def _living() -> Iterator[None]:
    """A sandbox that dies fails its episode, which then has no reward."""
    try:
        yield
    except SandboxError as error:
        raise EpisodeFailed(f"its sandbox is lost: {error}", DIED) from error


class TaskRun:
    """A task that is being worked on. For the thread that made it alone; see Sandbox."""

    def __init__(self, row: Mapping[str, Any], sandbox: Mapping[str, Any] | None = None) -> None:
        """row: of the dataset. sandbox: the settings; what they leave open is as the task says.

        EpisodeFailed if it cannot be begun.
        """
        extra = row.get("extra_info")
        if not isinstance(extra, dict) or FOLDER_KEY not in extra:
            raise EpisodeFailed(
                "the row is no task: name a folder of tasks in data.train_files (docs/environments.md)",
                "env_raised",
            )
        self.task = read_task(Path(extra[FOLDER_KEY]))
        self.settings = settings_for(self.task, sandbox)
        with _living():
            self._sandbox: Sandbox = open_sandbox(self.settings, build_of(self.task))

    def exec(self, command: str, time_s: float | None = None) -> ExecResult:
        """Run a command of the agent. EpisodeFailed if the sandbox is lost."""
        with _living():
            return self._sandbox.exec(command, time_s)

    def solve(self) -> ExecResult:
        """Run the reference solution."""
        with _living():
            self._sandbox.put(self.task.solution)
            return self._sandbox.exec("bash /solution/solve.sh", self.task.tests_s)

    def score(self) -> float:
        """Run the tests: their reward, 0 if they took too long. EpisodeFailed if they said nothing of it."""
        task = self.task
        script = "test.sh" if task.layout == HARBOR else "run-tests.sh"
        with _living():
            self._sandbox.exec(PREPARE)
            self._sandbox.put(task.tests)
            ended = self._sandbox.exec(
                f"bash /tests/{script}", task.tests_s, task.tests_env, MOST_OUTPUT_BYTES
            )
            if ended.timed_out:
                return 0.0
            written = [self._sandbox.get(f"{LOGS}/reward.{end}") for end in ("txt", "json")]
        texts = [None if one is None else one.decode("utf-8", "replace") for one in written]
        try:
            reward = reward_in(*texts) if task.layout == HARBOR else reward_of_pytest(ended.output)
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
        except ValueError as error:
            told = ended.output.strip()[-500:]
            raise EpisodeFailed(
                f"the tests of {task.folder.name}: {error}. They printed: {told}", UNREWARDED
            ) from None
        return reward

    def close(self) -> None:
        """End the sandbox."""
        self._sandbox.close()


def check_sandbox(given: Mapping[str, Any], who: str) -> None:
    """DagError for settings of a sandbox that say nothing, or of one that cannot be made here."""
    try:
        problem = problem_of(SandboxSettings.of(given, who))
    except ValueError as error:
        raise DagError(str(error)) from error
    if problem:
        raise DagError(f"{who}: {problem}")


def problem_of(settings: SandboxSettings) -> str | None:
    """Why a sandbox cannot be made here, and the fix; None if it can, or each task has its image."""
    if settings.image is None and settings.kind != "local":
        return missing_here(settings)
    try:
        with open_sandbox(settings) as box:
            box.exec("true")
    except SandboxError as error:
        return str(error)
    return None


def settings_for(task: Task, sandbox: Mapping[str, Any] | None) -> SandboxSettings:
    """The settings, with what the task says where they say nothing."""
    settings = SandboxSettings.of(sandbox)
    given = sandbox or {}
    if task.memory_mb is not None and "memory_mb" not in given:
        settings = dataclasses.replace(settings, memory_mb=task.memory_mb)
    if task.image is not None and settings.image is None and settings.kind != "local":
        settings = dataclasses.replace(settings, image=task.image)
    return settings


def build_of(task: Task) -> Build | None:
    """What its Dockerfile says."""
    of = task.dockerfile
    return of and Build(of.folder, of.workdir, of.env, of.files)


def bash_of(said: str) -> str:
    """The command in what an agent said: its last fenced block, or all of it without one."""
    parts = said.split("```")
    if len(parts) < 3:
        return said.strip()
    block = parts[-2 if len(parts) % 2 else -1]
    first, newline, rest = block.partition("\n")
    return (rest if newline and " " not in first.strip() else block).strip()


def shown(result: ExecResult, time_s: float) -> str:
    """What an agent reads of a command."""
    ended = f"no end within {time_s:g} s" if result.timed_out else f"exit code {result.exit_code}"
    cut = ", the rest of the output is dropped" if result.cut else ""
    return f"{result.output.rstrip()}\n({ended}{cut})".lstrip("\n")


TASKS = "sandbox:tasks"
MOST_COMMANDS = 30


MOST_STEPS = 8
"""Turns with calls of tools in an episode of NeMo-Gym, unless env_kwargs.max_steps says another number."""


def check_turns(path: str, env_kwargs: Mapping[str, Any], max_turns: int, who: str) -> None:
    """DagError for a loop that ends before an environment's last step, which gives the reward."""
    if path != TASKS and not path.startswith("nemo_gym:"):
        return
    key, default = ("max_commands", MOST_COMMANDS) if path == TASKS else ("max_steps", MOST_STEPS)
    most = env_kwargs.get(key, default)
    if isinstance(most, int) and max_turns < most:
        raise DagError(
            f"{who}: loop.max_turns = {max_turns} ends an episode before env_kwargs.{key} = {most}, "
            f"after which it is rewarded: it would have no reward. Set max_turns to {most} or more, or "
            f"{key} to {max_turns}."
        )


class TaskEnvironment:
    """The environment of a folder of tasks: env_path sandbox:tasks. One agent acts, a command in each turn.

    sandbox: settings of siirl/sandbox/sandboxes.py. max_commands: after so many the tests run, as they do
    when the agent says `submit`. intro: what it reads before its first turn, besides the instruction. read:
    "file.py:fn", whose fn(text, info) gives the command in what it said.
    """

    def __init__(
        self,
        name: str,
        sandbox: dict[str, Any] | None = None,
        max_commands: int = MOST_COMMANDS,
        submit: str = "submit",
        intro: str | None = None,
        read: str | None = None,
    ) -> None:
        if name != "tasks":
            raise ValueError(f"sandbox:{name} is none: write sandbox:tasks.")
        if max_commands < 1:
            raise ValueError(f"max_commands={max_commands}: it must be at least 1.")
        self._given, self._most, self._submit = sandbox, max_commands, submit
        self._settings = SandboxSettings.of(sandbox)
        self._intro = INTRO.format(submit=submit) if intro is None else intro
        self._read: Callable[[str, dict[str, Any]], str] | None = None
        if read is not None:
            from siirl.user_code.load_object import load_object

            self._read = load_object(read, "env_kwargs.read")
        self._run: TaskRun | None = None
        self._num_commands = 0

    def problem(self) -> str | None:
        """Why the sandbox cannot be made here, and the fix; None if it can, or each task has its image."""
        return problem_of(self._settings)

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """Start the sandbox of the row's task."""
        self._run, self._num_commands = TaskRun(task, self._given), 0
        return self._intro

    def step(self, actions: dict[int, str]) -> tuple[str, float, bool, dict[str, Any]]:
        """Run a command, or the tests. ValueError if several agents act."""
        if len(actions) != 1:
            raise ValueError(f"agents {list(actions)} act at once: a task takes one command")
        assert self._run is not None
        (said,) = actions.values()
        command = bash_of(said) if self._read is None else self._read(said, {})
        told, info = "", dict[str, Any](command=command)
        if command != self._submit:
            self._num_commands += 1
            result = self._run.exec(command)
            told, info["exit_code"] = shown(result, self._run.settings.time_s), result.exit_code
            if self._num_commands < self._most:
                return told, 0.0, False, info
        return told, self._run.score(), True, info

    def close(self) -> None:
        """End the sandbox."""
        if self._run is not None:
            self._run.close()
            self._run = None


INTRO = (
    "Say one shell command in each turn, in a block of ```bash. When you are done, say {submit}: tests run."
)
