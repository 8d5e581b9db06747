"""An engine that comes back: its process is started again when it dies or falls silent, and told again what
the one before was told.

An engine's state follows from what it was told: its weights and adapters, whether it sleeps, and the requests
without an answer. A worker notes that, in the words in which it was said, and says it again to a new process,
whatever the one before was doing; what a response draws depends on its seed and positions alone, so it
becomes what it would have been.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from siirl.data.completions import Request
from siirl.engines.rollout.channel import Message
from siirl.engines.rollout.served.engine_process import EngineLost, EngineProcess
from siirl.engines.rollout.served.journal import METHODS, Journal, Told
from siirl.engines.rollout.served.messages import Abort, Answer, Call, Finished, Pause, Start, Submit
from siirl.engines.weights.kept import MAX_RESTARTS
from siirl.errors import ConfigError, RolloutError
from siirl.observe.spans import phase

log = logging.getLogger(__name__)

WINDOW_S = 3600.0
"""Restarts are counted over this time."""
_STARTER = ThreadPoolExecutor(1, "engine-starter")
"""Starts processes. An engine ends with the thread that started it (PR_SET_PDEATHSIG), and one that a thread
of a stream has started again shall outlive the stream."""


class RecoveringEngine:
    """The engine process of a worker, with the methods of EngineProcess; a lost one is replaced.

    Each method may take as long as an engine takes to start. RolloutError if it was lost more often than
    allowed, else as EngineProcess says. Used by one thread at a time.
    """

    def __init__(
        self,
        make: Callable[[], EngineProcess],
        start: Start,
        log_path: Path,
        max_restarts: int,
        why_none: str = "",
    ) -> None:
        """Start it. make: a process, a new one if one has been killed; start: what it is told first.

        max_restarts: within WINDOW_S.
        why_none: what to say if it is lost and max_restarts is 0, instead of the key. If the first process
        dies before its engine is there, that is not tried again.
        """
        self._make, self._start, self._log_path = make, start, log_path
        self._max_restarts, self._why_none = max_restarts, why_none
        self._restarted_s: list[float] = []
        self._num_uncounted = 0
        self._journal = Journal()
        self._unanswered: dict[str, tuple[Request, str | None]] = {}
        self._salvaged: list[Finished] = []
        self._process = self._started()

    @property
    def pid(self) -> int:
        return self._process.pid

    def drain_restarts(self) -> int:
        """How often it was started again since the last call."""
        count, self._num_uncounted = self._num_uncounted, 0
        return count

    def ask(self, message: Message) -> Any:
        """See EngineProcess. For what the engine's state follows from, there is `tell`."""
        assert message.kind not in METHODS, f"{message.kind} has to be told"
        if isinstance(message, Abort):
            self._unanswered.clear()
        answer = self._held(lambda process: process.ask(message))
        if isinstance(message, Pause):
            self._answered(answer.answers)  # the others have completed before: see listen
        return answer

    def tell(self, event: Told) -> Any:
        """Tell the process something, a new one if it is lost meanwhile; and those to come. Its result."""
        result = self._held(event.tell)
        self._journal.note(event)
        return result

    def call(self, method: str, **arguments: Any) -> Any:
        """See EngineProcess and `ask`."""
        return self.ask(Call(method, arguments)).result

    def _held(self, act: Callable[[EngineProcess], Any]) -> Any:
        """What comes of it with the process, or with a new one if it is lost meanwhile."""
        while True:
            try:
                return act(self._process)
            except EngineLost as lost:
                self._restart(lost)

    def send(self, message: Submit) -> None:
        """See EngineProcess; its requests are submitted again until they are answered, paused or given up."""
        self._unanswered |= {str(request.key): (request, message.adapter) for request in message.requests}
        try:
            self._process.send(message)
        except EngineLost as lost:
            self._restart(lost)

    def listen(self, timeout_s: float) -> list[Finished]:
        """See EngineProcess."""
        found: list[Finished] = []
        while True:
            found, self._salvaged = found + self._salvaged, []
            try:
                fresh = self._process.listen(0.0 if found else timeout_s)
            except EngineLost as lost:
                self._restart(lost)
            except (RolloutError, ConfigError):
                self._unanswered.clear()
                raise
            else:
                for finished in fresh:
                    self._answered(finished.answers)
                return found + fresh

    def forget(self) -> None:
        """See EngineProcess."""
        self._salvaged = []
        self._process.forget()

    def expect(self) -> None:
        """See EngineProcess."""
        self._process.expect()

    def close(self) -> None:
        """See EngineProcess."""
        self._process.close()

    def _started(self) -> EngineProcess:
        process = _STARTER.submit(self._make).result()
        try:
            process.ask(self._start)
        except BaseException:
            process.kill()
            raise
        return process

    def _restart(self, lost: EngineLost) -> None:
        """Start a new process and bring it to where the lost one was. RolloutError if that was too often."""
        while True:
            self._check_bound(lost)
            began_s = time.monotonic()
            self._restarted_s.append(began_s)
            self._num_uncounted += 1
            for finished in self._process.forget():
                self._answered(finished.answers)
                self._salvaged.append(finished)
            log.warning(
                "%s It is started again (%d of %d times within an hour) with its weights and its %d "
                "requests; its output is in %s",
                lost.cause,
                len(self._restarted_s),
                self._max_restarts,
                len(self._unanswered),
                self._log_path,
            )
            self._process.kill()
            torch.cuda.empty_cache()  # what this worker has cached is not the engine's to take
            try:
                with phase("restart_engine"):
                    self._process = self._started()
                    for told in self._journal.told:
                        told.tell_again(self._process)
                    self._submit_again()
            except EngineLost as error:
                lost = error
                continue
            except (RolloutError, ConfigError) as error:
                raise RolloutError(f"{lost.cause} It could not be started again: {error}") from error
            log.warning("rollout engine: back after %.1f s", time.monotonic() - began_s)
            return

    def _answered(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._unanswered.pop(answer.key, None)

    def _submit_again(self) -> None:
        by_adapter: dict[str | None, list[Request]] = {}
        for request, adapter in self._unanswered.values():
            by_adapter.setdefault(adapter, []).append(request)
        self._process.expect()
        for adapter, requests in by_adapter.items():
            self._process.send(Submit(requests, adapter))

    def _check_bound(self, lost: EngineLost) -> None:
        now_s = time.monotonic()
        self._restarted_s = [at_s for at_s in self._restarted_s if now_s - at_s < WINDOW_S]
        if len(self._restarted_s) < self._max_restarts:
            return
        self._process.kill()
        if self._max_restarts:
            why = (
                f"It was started again {len(self._restarted_s)} times within an hour already, as often as "
                f"{MAX_RESTARTS}={self._max_restarts} allows. Find the cause in {self._log_path}, or raise "
                f"{MAX_RESTARTS}."
            )
        else:
            why = self._why_none or f"With {MAX_RESTARTS}=0 it is not started again."
        raise RolloutError(f"{lost.cause} {why}{lost.tail}") from lost
