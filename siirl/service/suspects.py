"""Requests that end servers: the file of a folder that says what was being carried out when one ended.

A request that was not answered comes again from its client. One that ends the processes that carry it out (a
signal, the out-of-memory killer, an error of one of several ranks) would end each attempt. So what was being
carried out is carried out by itself when it comes again, and is refused when another attempt has ended by it.

On the worker's thread of the first rank; no communication.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

MOST_ENDS = 2
"""Attempts that have ended amid a request that is refused."""


class Suspects:
    """By id of their tickets."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "carried_out.json"
        self._file: int | None = None
        self._ends: dict[str, int] = {}
        """Amid each of them, so many attempts have ended."""

    def read(self) -> list[str]:
        """What earlier attempts have left: the requests that are suspects."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = json.loads(self._path.read_bytes().partition(b"\n")[0])
            self._ends = found["ends"] | {id: found["ends"].get(id, 0) + 1 for id in found["now"]}
            self._write([])
        return list(self._ends)

    def __contains__(self, id: str) -> bool:
        return id in self._ends

    def problem(self, id: str) -> str | None:
        """Why a request is not carried out any more."""
        if (count := self._ends.get(id, 0)) < MOST_ENDS:
            return None
        return (
            f"the server has ended {count} times while it carried out this request: it is refused. The "
            "server's log says how. Ask for less at once, or for something else"
        )

    def begin(self, ids: Sequence[str]) -> None:
        """These are carried out from now on."""
        self._write(ids)

    def end(self, ids: Sequence[str]) -> None:
        """They have been, and no attempt has ended."""
        for id in ids:
            self._ends.pop(id, None)
        self._write([])

    def forget(self, session: str) -> None:
        """The requests of a session that is over."""
        self._ends = {id: count for id, count in self._ends.items() if not id.startswith(f"{session}:")}

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, now: Sequence[str]) -> None:
        """In the place of what was there, in one go; what is longer stays behind the end of the line.

        A full disk that takes no new file costs the suspects alone.
        """
        with contextlib.suppress(OSError):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._file, json.dumps({"ends": self._ends, "now": now}).encode() + b"\n", 0)
