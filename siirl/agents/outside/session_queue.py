"""Where clients that siirl has not started get their episodes (serve.listen): whoever has the run's token.

consumes: sessions to be played, clients that ask for one. produces: pairs of them, both first come first
served. waits for: clients, up to a deadline. unblocked by: `take`, `close`.
"""

import asyncio
import json
import logging
import os
import secrets
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.agents.outside.program import SessionInfo
from siirl.deadline import Deadline
from siirl.errors import ConfigError, UserCodeError
from siirl.guarded_files import own_secret, write_own
from siirl.observe.curve import duration

log = logging.getLogger(__name__)
LOOK_S = 0.5
TOLD_S = 60.0
"""After so long without a client the log says that the step waits."""


@dataclass(frozen=True)
class ListenAddress:
    """Where a rank listens, and who may come in."""

    host: str
    port: int
    """0: a free one."""
    file: Path
    """Where clients find address and token."""
    token: str | None
    """None: that of the file, where an earlier start has left one, or a new one."""
    idle_s: float
    """How long a client may be silent in an episode."""
    deadline_s: float
    """How long an episode may wait without any client."""


class ExternalClient:
    """A client that plays an episode from somewhere: a Program of which nothing but its requests is known."""

    output = ""

    async def ended(self) -> Any:
        """See Program: it never says so."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        """See Program: its key is no longer taken."""


class SessionQueue:
    """Episodes that wait for clients, and clients that wait for episodes. Used on one event loop."""

    def __init__(self, address: ListenAddress) -> None:
        self.address = address
        self.token = address.token or kept_token(address.file) or f"siirl-{secrets.token_urlsafe(32)}"
        self.url = ""
        self.over = False
        self._offered: deque[tuple[SessionInfo, asyncio.Future[None]]] = deque()
        self._asking: deque[asyncio.Future[SessionInfo]] = deque()
        self._playing = 0
        self._alone = Deadline(address.deadline_s)  # since when nobody has played
        self._told = False

    def open(self, url: str) -> None:
        """Write where clients find us, and say so. OSError."""
        self.url = url
        told = {"url": url, "base_url": f"{url}/v1", "token": self.token}
        write_own(self.address.file, told)
        log.info("listening for clients at %s; its token is in %s", url, self.address.file)

    async def start(self, info: SessionInfo) -> ExternalClient:
        """Offer a session until a client takes it (a Start). UserCodeError if none comes in time."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        offer = (info, taken)
        if not self._offered and not self._playing:
            self._alone.renew()
            self._told = False
        self._offered.append(offer)
        self._match()
        try:
            while not (await asyncio.wait({taken}, timeout=LOOK_S))[0]:
                self._check_alone()
        finally:
            if offer in self._offered:
                self._offered.remove(offer)
        self._playing += 1
        return ExternalClient()

    def left(self) -> None:
        """An episode that was taken is over."""
        self._playing -= 1
        self._alone.renew()
        self._told = False

    async def take(self, wait_s: float) -> SessionInfo | None:
        """The session that waits longest, as soon as there is one; None if there is none in time."""
        asking: asyncio.Future[SessionInfo] = asyncio.get_running_loop().create_future()
        self._asking.append(asking)
        self._match()
        try:
            done, _ = await asyncio.wait({asking}, timeout=0.0 if self.over else wait_s)
            return asking.result() if done and not asking.cancelled() else None
        finally:
            if asking in self._asking:
                self._asking.remove(asking)

    def close(self) -> None:
        """Tell clients that wait that there will be no more episodes."""
        self.over = True
        for asking in self._asking:
            asking.cancel()

    @property
    def missing(self) -> str:
        """What this rank waits for, in words; empty if no episode waits for a client."""
        if not self._offered:
            return ""
        number = len(self._offered)
        return f"waits for clients: {number} {'episode is' if number == 1 else 'episodes are'} not taken"

    def _match(self) -> None:
        while self._offered and self._asking:
            asking = self._asking.popleft()
            if not asking.done():
                info, taken = self._offered.popleft()
                asking.set_result(info)
                taken.set_result(None)

    def _check_alone(self) -> None:
        """Say that nobody plays; UserCodeError if that has been so for too long."""
        if self._playing:
            return
        where = f"Start one: it asks {self.url}/session, with the token in {self.address.file}"
        if self._alone.over:
            alone = duration(self._alone.passed_s)
            raise UserCodeError(
                f"no client has asked for an episode in {alone} (serve.listen): the run {self.missing}. "
                f"{where}; or raise trainer.deadline_s={self.address.deadline_s:g}."
            )
        if self._alone.passed_s > TOLD_S and not self._told:
            self._told = True
            log.warning("the run %s. %s.", self.missing, where)


def kept_token(file: Path) -> str | None:
    """The token of an earlier start of this run: clients that have it come in again.

    None if anybody else can have written or read it: who may write to the folder does not choose it.
    """
    try:
        token = json.loads(own_secret(file))["token"]
    except PermissionError as error:
        log.warning("%s: clients need a new token, which will be there", error.strerror)
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return token if isinstance(token, str) and token else None


def token_of(variable: str | None, key: str = "actor_rollout_ref.serve.token_env") -> str | None:
    """The value of the environment variable that a key names. ConfigError if it has none."""
    if variable is None:
        return None
    if not (token := os.environ.get(variable, "").strip()):
        raise ConfigError(
            f"the environment variable {variable} ({key}) is not set: clients "
            "would have nothing to show. Set it to a secret, or leave the key out: the run makes a token."
        )
    return token
