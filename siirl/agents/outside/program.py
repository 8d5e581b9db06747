"""What plays one episode from outside: a shell command in a process of its own, or a function in a thread."""

import asyncio
import math
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from siirl.agents.user_thread import Hung, Raised, UserThread
from siirl.errors import EpisodeFailed
from siirl.sandbox import kept_command

KEPT_COMMAND = str(Path(kept_command.__file__).resolve())
HOST = "127.0.0.1"
MOST_OUTPUT_BYTES = 4096
MOST_LINES = 12
READ_BYTES = 1 << 16
EXITED, RAISED = "program_exited", "program_raised"
"""Kinds of EpisodeFailed."""


@dataclass(frozen=True)
class SessionInfo:
    """What a program needs to play its episode."""

    url: str
    """http://HOST:PORT, below which /task and /reward are."""
    base_url: str
    """That of an OpenAI client."""
    api_key: str
    """Of the episode, and of no other."""
    task: dict[str, Any]
    """The row of the dataset, as GET /task gives it."""


class Program(Protocol):
    """Something that plays one episode now. Used on one event loop."""

    async def ended(self) -> Any:
        """Wait until it ends by itself: the reward that it gives, or None. EpisodeFailed if it failed."""
        ...

    async def end(self) -> None:
        """End what is left of it. Idempotent."""
        ...

    @property
    def output(self) -> str:
        """The end of what it has printed, to be added to a message; empty if it has printed nothing."""
        ...


Start = Callable[[SessionInfo], Any]
"""A coroutine function that starts a Program."""


class Routine:
    """A function of a SessionInfo, plain or a coroutine, in a thread; what it returns is the reward."""

    def __init__(self, function: Callable[[SessionInfo], Any], session: SessionInfo) -> None:
        self._thread = UserThread("program")
        self._call = lambda: function(session)

    async def ended(self) -> Any:
        """See Program."""
        try:
            return await self._thread.call(math.inf, self._call, _plain)
        except Raised as error:
            raise EpisodeFailed(f"its program raised {error.trace}", RAISED) from None
        except Hung:  # we have given it up
            return None

    async def end(self) -> None:
        """See Program: broken off at its next line of Python."""
        self._thread.abandon()

    @property
    def output(self) -> str:
        """See Program: it prints where siirl does."""
        return ""


class Command:
    """A running shell command.

    Its keeper (siirl/sandbox/keeper.py) ends all that it has started, also when this process is killed.
    """

    def __init__(self, process: asyncio.subprocess.Process, pipe: socket.socket) -> None:
        self._process, self._pipe = process, pipe
        self._output: deque[bytes] = deque()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, command: str, session: SessionInfo) -> "Command":
        """Start a command; its environment says whom to ask, as clients of OpenAI and Anthropic read it."""
        environment = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.url,
            "ANTHROPIC_API_KEY": session.api_key,
            "SIIRL_URL": session.url,
            "SIIRL_SESSION": session.api_key,
            "NO_PROXY": HOST,
            "no_proxy": HOST,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", KEPT_COMMAND, str(theirs.fileno()), command),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        return cls(process, ours)

    async def ended(self) -> None:
        """See Program."""
        if code := await self._process.wait():
            raise EpisodeFailed(f"its program {how_it_ended(code)}", EXITED)

    async def end(self) -> None:
        """See Program: all that it has started is killed."""
        self._pipe.close()
        await self._process.wait()
        await self._reading

    @property
    def output(self) -> str:
        """See Program."""
        text = b"".join(self._output)[-MOST_OUTPUT_BYTES:].decode(errors="replace")
        lines = text.strip().splitlines()[-MOST_LINES:]
        return "\n".join(["", "It printed last:", *lines]) if lines else ""

    async def _read(self) -> None:
        """Keep the last MOST_OUTPUT_BYTES of its output, whatever it prints."""
        stream = self._process.stdout
        assert stream is not None
        kept = 0
        while chunk := await stream.read(READ_BYTES):
            self._output.append(chunk)
            kept += len(chunk)
            while kept - len(self._output[0]) >= MOST_OUTPUT_BYTES:
                kept -= len(self._output.popleft())


def _plain(value: Any) -> Any:
    """What a function has returned, as numbers, mappings and texts, whose methods are not its own."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or isinstance(value, bool):
        return value
    return float(value) if isinstance(value, Real) else repr(value)[:80]


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    names = {number.value: number.name for number in signal.Signals}
    if code < 0:
        return f"was ended by {names.get(-code, f'signal {-code}')}"
    in_shell = f" ({names[code - 128]})" if code - 128 in names else ""
    return f"ended with exit code {code}{in_shell}"
