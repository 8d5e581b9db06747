"""How long a run is going to take at least, as its launcher can tell from outside. No torch."""

import json
import time
from collections.abc import Callable

from siirl.launch.job import Job
from siirl.observe.position import read_position
from siirl.observe.run_progress import PROGRESS_FILE

LOOK_S = 1.0


class Pace:
    """Of one attempt: how fast its steps follow each other, and how many are to come."""

    def __init__(self, job: Job, now_s: Callable[[], float] = time.monotonic):
        self._job, self._now_s = job, now_s
        self._looked_s: float | None = None
        self._first: tuple[int, float] | None = None
        self._left_s = 0.0

    def left_s(self) -> float:
        """The least time that the steps behind the current one take, were they as fast as those so far.

        0 where nothing is known yet. The step that runs counts as done, so it cannot look slower than it is.
        """
        now_s = self._now_s()
        if self._looked_s is not None and now_s < self._looked_s + LOOK_S:
            return self._left_s
        self._looked_s = now_s
        position = read_position(self._job.position_path(0))
        if position is None or position.step < 1:
            return self._left_s
        first, since_s = self._first = self._first or (position.step, now_s)
        step_s = (now_s - since_s) / (position.step - first + 1)
        self._left_s = max(0, self._total_steps() - position.step) * step_s
        return self._left_s

    def _total_steps(self) -> int:
        """Of the run, as rank 0 has said; 0: it has not."""
        try:
            lines = (self._job.output_path / PROGRESS_FILE).read_text(encoding="utf-8").splitlines()
            events = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return 0
        own = [event for event in events if event.get("run_id") == self._job.run_id]
        return next((event["total_steps"] or 0 for event in own if event.get("event") == "begin"), 0)
