"""Whether the head of a Ray cluster is there: drivers look, and actors that nobody asks any more.

No ray is imported here.
"""

import contextlib
import socket
import time

from siirl.errors import PlacementError

LOST_AFTER_S = 18.0
"""The driver gives up an actor, or the head. Actors answer within a second; Ray itself may need minutes."""
SUSPECT_S, CUT_OFF_S = 10.0, LOST_AFTER_S + 2.0
"""Not asked for so long, an actor tries the head; counts as cut off. By then the driver has given it up."""
HEAD_EVERY_S, HEAD_CONNECT_S = 3.0, 1.0


class HeadLost(PlacementError):
    """The head of the cluster is gone: Ray can do nothing more for this run."""


class HeadWatch:
    """Asks now and then whether the head of the cluster, at host:port, takes connections.

    Ray itself says nothing for a minute, and then ends the process of the driver.
    """

    def __init__(self, address: str, patience_s: float = LOST_AFTER_S):
        self._address, self._patience_s = address, patience_s
        self._answered_s = self._asked_s = time.monotonic()

    def look(self) -> None:
        """HeadLost: it has taken none for too long."""
        now_s = time.monotonic()
        if now_s - self._asked_s < HEAD_EVERY_S:
            return
        host, _, port = self._address.rpartition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), HEAD_CONNECT_S),
        ):
            self._answered_s = now_s
        self._asked_s = time.monotonic()
        if (silent_s := now_s - self._answered_s) > self._patience_s:
            raise HeadLost(
                f"the head of the Ray cluster, {self._address}, has taken no connections for {silent_s:.0f} "
                "s: its GCS has ended, or its machine is gone. The workers have been ended. Start the "
                "cluster again; then the same command goes on from the last checkpoint (trainer.save_freq)."
            )


class CutOff:
    """Tells an actor that its machine is cut off: the driver asks nothing, and the head takes no connections.

    One of them alone is no reason: a driver may stand still, and a head be started again.
    """

    def __init__(self, head: str):
        self._address = head
        self._asked_s = time.monotonic()
        self._head: HeadWatch | None = None

    def asked(self) -> None:
        """The driver has asked something."""
        self._asked_s, self._head = time.monotonic(), None

    def look(self) -> str:
        """Why the machine counts as cut off; empty if it does not."""
        if time.monotonic() - self._asked_s < SUSPECT_S:
            return ""
        head = self._head = self._head or HeadWatch(self._address, CUT_OFF_S - SUSPECT_S)
        try:
            head.look()
        except HeadLost:
            unasked_s = time.monotonic() - self._asked_s
            if unasked_s >= CUT_OFF_S:
                return (
                    f"this machine is cut off: the driver of the run has asked nothing for {unasked_s:.0f} "
                    f"s, and the head of the Ray cluster, {self._address}, takes no connections"
                )
        return ""
