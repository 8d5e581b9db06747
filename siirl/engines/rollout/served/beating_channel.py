"""An engine process says every second that it lives, whatever its engine does."""

import select
import socket
import threading
import time
from typing import Any

from siirl.engines.rollout.channel import Channel, ChannelClosed, Message
from siirl.engines.rollout.served.messages import Beat

BEAT_EVERY_S = 1.0


class BeatingChannel(Channel):
    """The engine's end of its connection: several threads may send, one of which sends a Beat a second.

    A beat waits for nobody: while another message is being sent, or the worker has not read enough of what
    was sent before, it is left out. So a worker that does not listen finds some beats later, never too many.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        super().__init__(sock, receives)
        self._sending = threading.Lock()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, message: Message) -> None:
        """See Channel."""
        with self._sending:
            super().send(message)

    def _beat(self) -> None:
        room = select.poll()
        room.register(self.fileno(), select.POLLOUT)
        while True:
            time.sleep(BEAT_EVERY_S)
            if not self._sending.acquire(blocking=False):
                continue
            try:
                if room.poll(0):
                    super().send(Beat())
            except ChannelClosed:
                return
            finally:
                self._sending.release()
