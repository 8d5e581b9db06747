"""Requests that were accepted outlive the server: a file of each, until it is answered.

A client that was told the id of a request asks for the answer by it, and sends the request no second time. So
it is kept before the id is told. A server that begins again takes what is kept as if it came anew; what has
been answered by then counts once, as any number does that comes again. A file that was cut off by the end of
the process is of a request whose id nobody was told. Samples are not kept: their clients send them again.

On the server's thread.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from siirl.agents.outside.content import BadRequest
from siirl.service.rest_answers import BODY, TENANT


class KeptRequest(dict):
    """One that is taken again; as handlers read requests."""

    def __init__(self, id: tuple[str, int], path: str, tenant: str, body: bytes) -> None:
        """id: its lane and number."""
        super().__init__({TENANT: tenant, BODY: body})
        self.id, self.path, self.content_length = id, path, len(body)


class AcceptedRequests:
    """Those in a folder."""

    def __init__(self, folder: Path, is_answered: Callable[[str], bool]) -> None:
        """is_answered: whether the one with this id needs to be kept no more."""
        self._folder, self._is_answered = folder, is_answered
        self._numbers: dict[str, list[int]] = {}
        """Those of each lane that have a file."""

    def add(self, lane: str, number: int, request: web.Request) -> None:
        """Keep one, and drop those of its lane that are answered. OSError if that cannot be."""
        if not 0 <= number < 1 << 63:
            raise BadRequest(f"{number} is no number of a request")
        if lane not in self._numbers:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        numbers = self._numbers.setdefault(lane, [])
        for one in [one for one in numbers if self._is_answered(f"{lane}:{one}")]:
            self.drop(lane, one)
        if number not in numbers:
            told = (request.path, request[TENANT], request[BODY])
            self._path(lane, number).write_bytes(msgspec.msgpack.encode(told))
            numbers.append(number)

    def drop(self, lane: str, number: int) -> None:
        """Keep one no more."""
        self._path(lane, number).unlink(missing_ok=True)
        if number in self._numbers.get(lane, ()):
            self._numbers[lane].remove(number)

    def forget(self, session: str) -> None:
        """Those of a session that is over."""
        for lane in [lane for lane in self._numbers if lane.startswith(f"{session}:")]:
            del self._numbers[lane]
        for path in self._folder.glob(f"{session}:*"):
            path.unlink(missing_ok=True)

    def read(self) -> list[KeptRequest]:
        """What an earlier server has left, each lane's in the order of its numbers."""
        found: list[KeptRequest] = []
        for path in self._folder.glob("*:*"):
            lane, _, number = path.name.rpartition(":")
            with contextlib.suppress(msgspec.DecodeError):
                told = msgspec.msgpack.decode(path.read_bytes(), type=tuple[str, str, bytes])
                found.append(KeptRequest((lane, int(number)), *told))
                self._numbers.setdefault(lane, []).append(int(number))
                continue
            path.unlink()
        return sorted(found, key=lambda one: one.id)

    def _path(self, lane: str, number: int) -> Path:
        return self._folder / f"{lane}:{number}"
