"""A thread in which the code of one environment or tool runs: user code may block, hang or raise.

consumes: calls from the event loop that runs the episodes. produces: a future for each. waits for: the next
call. unblocked by: a call, `end`, or `abandon` when a call has passed its deadline.
"""

import asyncio
import concurrent.futures
import ctypes
import functools
import inspect
import queue
import selectors
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from siirl.errors import SiirlError

Check = Callable[[Any], Any]
MOST_FRAMES, HERE = 3, str(Path(__file__).parent)
Call = tuple[concurrent.futures.Future, Callable[[], Any], Check]


class Hung(Exception):
    """A call has passed its deadline. Its thread is abandoned and takes no more calls."""


class Raised(Exception):
    """User code has raised: what, and in which line. trace: what, and its own last lines that led there."""

    def __init__(self, error: BaseException):
        super().__init__(where_raised(error))
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(HERE)][-MOST_FRAMES:]
        shown = theirs or frames[-1:]
        lines = [f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in shown]
        self.trace = "\n  ".join([_what(error), *lines])


class Abandoned(BaseException):
    """Raised inside user code that has passed its deadline, at its next line of Python."""


class CallSlots:
    """Bounds the calls that run at once: one that waits for Python's lock among many passes its deadline.

    most: 0 for any number. Each event loop has places of its own.
    """

    def __init__(self, most: int = 0):
        self._most = most
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def place(self) -> AbstractAsyncContextManager[Any]:
        """To be held during a call, whose deadline begins when the place is had: waiting is not hanging."""
        if not self._most:
            return nullcontext()
        loop = asyncio.get_running_loop()
        if loop not in self._free:
            self._free[loop] = asyncio.Semaphore(self._most)
        return self._free[loop]


def _as_it_is(result: Any) -> Any:
    return result


class UserThread:
    """Runs calls one after another, plain functions and coroutines alike, always in the same daemon thread.

    Coroutines run on an event loop of the thread, the same for all calls, so that a client that is bound to
    one keeps working; it runs during calls only. An idle thread costs some 50 kB, its loop two descriptors.
    """

    def __init__(self, name: str):
        self._name = name
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.abandoned = False

    async def call(self, deadline_s: float, function: Callable[[], Any], check: Check = _as_it_is) -> Any:
        """check(function()), its result awaited first if it is awaitable.

        check looks at the result in the same thread, as looking at a user's object runs its code. Raised,
        with a SiirlError as it is; Hung after deadline_s, or if the call says so itself.
        """
        if self.abandoned:
            raise Hung(f"{self._name} has been given up")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._calls.put((future, function, check))
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({waiting}, timeout=deadline_s)
        if not done:
            self.abandon()
            raise Hung(f"no answer within {deadline_s:g} s")
        return waiting.result()

    def abandon(self) -> None:
        """Break off what runs. Python code ends at its next line, a blocking system call when it returns."""
        self.abandoned = True
        self._calls.put(None)
        thread, loop = self._thread, self._loop
        if thread is not None and thread.ident is not None and thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned)
            )
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None)  # a loop that waits for events wakes up and sees it

    def end(self) -> None:
        """Take no more calls; what was called before is finished."""
        self._calls.put(None)

    def _serve(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                self._run(*call)
            if self._loop is not None:
                self._loop.close()
        except Abandoned:
            return

    def _run(self, future: concurrent.futures.Future, function: Callable[[], Any], check: Check) -> None:
        try:
            result = function()
            result = check(self._wait_for(result) if inspect.isawaitable(result) else result)
        except Abandoned:
            raise
        except (SiirlError, Hung) as error:
            answer = functools.partial(future.set_exception, error)
        except BaseException as error:  # noqa: BLE001 - the edge to user code: SystemExit, too
            answer = functools.partial(future.set_exception, Raised(error))
        else:
            answer = functools.partial(future.set_result, result)
        if not self.abandoned:
            answer()

    def _wait_for(self, awaitable: Any) -> Any:
        if self._loop is None:
            # poll needs no descriptor, unlike epoll: there may be thousands of environments
            self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
            # what user code left unfinished is reported by its own failure, not by asyncio
            self._loop.set_exception_handler(lambda *_: None)
        return self._loop.run_until_complete(_awaited(awaitable))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def where_raised(error: BaseException) -> str:
    """The error in one line, with the line of the code that raised it."""
    what = _what(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{what} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else what


def _what(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
