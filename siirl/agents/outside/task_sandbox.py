"""The sandbox of an episode that a program plays: POST /exec runs commands there."""

import math
from collections.abc import Mapping
from typing import Any

from siirl.agents.outside.content import BadRequest
from siirl.agents.task_run import TaskRun
from siirl.agents.user_thread import UserThread


class TaskSandbox:
    """A TaskRun in a thread of its own, for any event loop. EpisodeFailed if the sandbox is lost."""

    def __init__(self, thread: UserThread, run: TaskRun) -> None:
        self._thread, self._run = thread, run

    @classmethod
    async def open(cls, settings: Mapping[str, Any], row: Mapping[str, Any]) -> "TaskSandbox":
        """Start the sandbox of a row's task."""
        thread = UserThread("sandbox")
        try:
            return cls(thread, await thread.call(math.inf, lambda: TaskRun(row, settings)))
        except BaseException:
            thread.end()
            raise

    async def exec(self, asked: Any) -> dict[str, Any]:
        """Answer a request {"command": ..., "time_s": ...}: exit_code, output, timed_out, cut. BadRequest."""
        most_s = self._run.settings.time_s
        if not isinstance(asked, dict) or not isinstance(asked.get("command"), str):
            raise BadRequest('the body is no JSON object with "command", a text')
        time_s = asked.get("time_s", most_s)
        if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not 0 < time_s < math.inf:
            raise BadRequest(f"time_s is {time_s!r:.50}, not a number of seconds above 0")
        command = asked["command"]
        result = await self._thread.call(math.inf, lambda: self._run.exec(command, min(time_s, most_s)))
        return dict(vars(result))

    async def score(self) -> float:
        """The reward of the task's tests."""
        return await self._thread.call(math.inf, self._run.score)

    async def close(self) -> None:
        """End the sandbox. Idempotent."""
        await self._thread.call(math.inf, self._run.close)
        self._thread.end()
