"""A thread that owns an engine's stream of requests and turns it into awaitable turns: the usual Policy."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from siirl.agents.policy import Generated
from siirl.errors import DeadlineError, EpisodeFailed, RolloutError

POLL_S = 0.002
"""Longest wait for an answer before new requests are looked for."""


class Answer(Protocol):
    """What a stream says to a request: the engine's Completion."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    weight_version: int


class Stream(Protocol):
    """What the pump needs of an engine's RolloutStream."""

    @property
    def num_pending(self) -> int: ...

    def submit(self, requests: Sequence[Any]) -> None: ...

    def collect(self, timeout_s: float) -> list[tuple[Any, Any]]: ...

    def close(self) -> None: ...


@dataclass
class Waiter:
    """A coroutine that waits for its turn to be generated, on its own event loop."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generated]

    def tell(self, result: Generated | BaseException) -> None:
        """From any thread. A coroutine that was cancelled hears nothing."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._settle, result)

    def _settle(self, result: Generated | BaseException) -> None:
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class Pump:
    """Policy over a stream. Consumes what `generate` asks, from any event loop; produces what it awaits.

    Its thread waits for requests while none is pending, else for answers, POLL_S at a time. `close` ends it.
    An error of the stream ends it too: it reaches everybody who waits, and everybody who asks afterwards. Use
    it as a context, or close it.
    """

    def __init__(
        self,
        open_stream: Callable[[], Stream],
        make_request: Callable[..., Any],
        name: str,
        deadline_s: float,
    ) -> None:
        """open_stream: called, like the stream, in the pump's thread (`engine.stream`).

        make_request: the stream's request of (key, prompt, params, seed). name: of the policy, for messages.
        deadline_s: how long `close` waits for a call of the stream to return.
        """
        self._open_stream, self._make_request = open_stream, make_request
        self._name, self._deadline_s = name, deadline_s
        self._news = threading.Condition()
        self._asked: list[Any] = []
        self._waiters: dict[int, Waiter] = {}
        self._num_asked = 0
        self._end: BaseException | None = None  # why nobody is answered any more
        self._thread = threading.Thread(target=self._run, name=f"pump of {name}", daemon=True)
        self._thread.start()

    async def generate(self, prompt: list[int], params: Any, seed: int) -> Generated:
        """See Policy. Raises what the stream raised; RolloutError after `close`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generated] = loop.create_future()
        with self._news:
            if self._end is not None:
                raise self._end
            key, self._num_asked = self._num_asked, self._num_asked + 1
            self._asked.append(self._make_request(key, prompt, params, seed))
            self._waiters[key] = Waiter(loop, future)
            self._news.notify()
        return await future

    def close(self) -> None:
        """End the thread; whoever still waits gets a RolloutError. Idempotent.

        DeadlineError if a call of the stream does not return.
        """
        with self._news:
            self._end = self._end or RolloutError(f"the stream of policy {self._name!r} is closed")
            self._news.notify()
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the stream of policy {self._name!r} did not return within {self._deadline_s:g} s of its "
                "closing: its engine hangs. Raise trainer.deadline_s if its steps take that long."
            )

    def __enter__(self) -> "Pump":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _run(self) -> None:
        """The thread: everything about the stream happens here."""
        try:
            stream = self._open_stream()
            try:
                while self._pass_on(stream):
                    self._answer(stream.collect(POLL_S))
            finally:
                stream.close()
        except BaseException as error:  # the edge of the thread: raised again by those who wait
            with self._news:
                self._end = error
        with self._news:
            waiters, self._waiters = list(self._waiters.values()), {}
        for waiter in waiters:
            waiter.tell(self._end)

    def _pass_on(self, stream: Stream) -> bool:
        """Submit what was asked since; waits while there is nothing to do. False: it is over."""
        with self._news:
            self._news.wait_for(lambda: self._asked or stream.num_pending or self._end is not None)
            if self._end is not None:
                return False
            asked, self._asked = self._asked, []
        if asked:
            stream.submit(asked)
        return True

    def _answer(self, answers: Sequence[tuple[int, Answer | EpisodeFailed]]) -> None:
        with self._news:
            waiters = [self._waiters.pop(key) for key, _ in answers]
        for waiter, (_, said) in zip(waiters, answers, strict=True):
            if isinstance(said, EpisodeFailed):
                waiter.tell(said)
                continue
            waiter.tell(Generated(said.token_ids, said.log_probs, said.finish_reason, said.weight_version))
