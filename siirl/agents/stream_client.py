"""A thread that owns an engine's stream of requests and turns it into awaitable turns: the usual Policy."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from siirl.data.completions import PAUSED, Completion, Key, Request, SamplingParams
from siirl.data.seen import NO_IMAGES, Seen
from siirl.errors import DeadlineError, EpisodeFailed, RolloutError

POLL_S = 0.002
"""Longest wait for an answer before new requests are looked for."""


class Stream(Protocol):
    """What the client needs of an engine's RolloutStream."""

    @property
    def num_pending(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None: ...

    def collect(self, timeout_s: float) -> Sequence[tuple[Key, Completion | EpisodeFailed]]: ...

    def pause(self) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """What `collect` would give of everything that is pending, complete or "paused"."""
        ...

    def close(self) -> None: ...


Waiter = asyncio.Future[Completion]
"""A coroutine waits for it, on its own event loop."""


class StreamClient:
    """Policy over a stream. Consumes what `generate` asks, from any event loop; produces what it awaits.

    Its thread waits for requests while none is pending, else for answers, POLL_S at a time. What coroutines
    ask in one round of their loop is submitted at once, and a loop wakes once for all answers that have come
    together: engines read prompts together, and a wake-up costs as much as a small turn. `close` ends it.
    An error of the stream ends it too: it reaches everybody who waits, and everybody who asks afterwards. Use
    it as a context, or close it.
    """

    def __init__(
        self,
        open_stream: Callable[[], Stream],
        name: str,
        deadline_s: float,
        patience_s: float = 0.0,
    ) -> None:
        """open_stream: called, like the stream, in the client's thread (`engine.stream`).

        name: of the policy.
        deadline_s: how long `close` waits for a call of the stream to return. patience_s: how long it waits,
        after answers, for what comes of them, before it lets the stream go on: one that works inside
        `collect` would read everything that is pending anew.
        """
        self._open_stream, self._name = open_stream, name
        self._deadline_s, self._patience_s = deadline_s, patience_s
        self._news = threading.Condition()
        self._asked: list[Request] = []  # since the last round of their loop
        self._round: asyncio.AbstractEventLoop | None = None
        self._ready: list[Request] = []  # for the thread to submit
        self._waiters: dict[Key, Waiter] = {}
        self._numbers = count()
        self._end: BaseException | None = None  # why nobody is answered any more
        self._pausing = False
        self._thread = threading.Thread(target=self._run, name=f"client of {name}", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        seen: Seen = NO_IMAGES,
        start: int = 0,
    ) -> Completion:
        """See Policy; errors of `ask`. start: see Request."""
        return await self.ask(Request(next(self._numbers), prompt, params, seed, start=start, seen=seen))

    async def ask(self, request: Request) -> Completion:
        """What the stream answers. Raises what it raised; RolloutError after `close`."""
        loop = asyncio.get_running_loop()
        future: Waiter = loop.create_future()
        with self._news:
            if self._end is not None:
                raise self._end
            if not self._asked or self._round is not loop:
                self._round = loop
                loop.call_soon(self._pass_round)
            self._asked.append(request)
            self._waiters[request.key] = future
        return await future

    def pause(self) -> None:
        """Close, and take back what is pending: whoever waits gets what there is of it, which may be nothing,
        with finish_reason "paused". Errors as of `close`; those of the stream reach whoever waits.
        """
        self._pausing = True
        self.close()

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

    def __enter__(self) -> "StreamClient":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _run(self) -> None:
        """The thread: everything about the stream happens here."""
        try:
            stream = self._open_stream()
            try:
                while self._pass_on(stream):
                    if self._answer(stream.collect(POLL_S)):
                        self._wait_for_news()
                if self._pausing:
                    self._answer(stream.pause())
            finally:
                stream.close()
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again by those who wait
            with self._news:
                self._end, self._pausing = error, False
        with self._news:
            waiters, self._waiters = list(self._waiters.values()), {}
        end = Completion([], [], PAUSED, -1) if self._pausing else self._end
        _tell([(waiter, end) for waiter in waiters])

    def _wait_for_news(self) -> None:
        """Wait for new requests or the end, as long as there is patience."""
        if self._patience_s:
            with self._news:
                self._news.wait_for(lambda: self._ready or self._end is not None, self._patience_s)

    def _pass_round(self) -> None:
        """Let the thread have what was asked in this round of an event loop."""
        with self._news:
            self._ready += self._asked
            self._asked = []
            self._news.notify()

    def _pass_on(self, stream: Stream) -> bool:
        """Submit what was asked since; waits while there is nothing to do. False: it is over."""
        with self._news:
            self._news.wait_for(lambda: self._ready or stream.num_pending or self._end is not None)
            if self._end is not None:
                return False
            ready, self._ready = self._ready, []
        if ready:
            stream.submit(ready)
        return True

    def _answer(self, answers: Sequence[tuple[Key, Completion | EpisodeFailed]]) -> bool:
        """Tell whoever waits; whether there was something to tell."""
        with self._news:
            told = [(self._waiters.pop(key), said) for key, said in answers]
        _tell(told)
        return bool(told)


def _tell(results: Sequence[tuple[Waiter, Completion | BaseException | None]]) -> None:
    """Settle futures from any thread, those of a loop by one wake-up. Cancelled ones hear nothing."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = {}
    for waiter, result in results:
        by_loop.setdefault(waiter.get_loop(), []).append((waiter, result))
    for loop, settled in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, settled)


def _settle(results: Sequence[tuple[Waiter, Completion | BaseException]]) -> None:
    for waiter, result in results:
        if waiter.done():
            continue
        if isinstance(result, BaseException):
            waiter.set_exception(result)
        else:
            waiter.set_result(result)
