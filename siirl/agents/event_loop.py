"""Event loops in which episodes are played: in a thread of its own, and such that a Ctrl-C is heeded."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

WAKE_S = 0.5
Result = TypeVar("Result")


class LoopThread:
    """An event loop that runs all the time, in a thread of its own, until `close`."""

    def __init__(self) -> None:
        self._loop: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="episodes", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` gives, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop.result()).result()

    def close(self) -> None:
        """Cancel all tasks and wait for their ends. Idempotent."""
        if self._thread.is_alive():
            self._loop.result().call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _serve(self) -> None:
        async def until_closed() -> None:
            self._loop.set_result(asyncio.get_running_loop())
            await self._closed.wait()

        asyncio.run(until_closed())


async def interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives; a Ctrl-C is heeded within WAKE_S even if nothing else happens in the event loop.

    Python handles a signal between two instructions: of one that comes just before the loop goes to sleep it
    hears when the loop wakes.
    """

    async def wake() -> None:
        while True:
            await asyncio.sleep(WAKE_S)

    waking = asyncio.create_task(wake())
    try:
        return await work
    finally:
        waking.cancel()
