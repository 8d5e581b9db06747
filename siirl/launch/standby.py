"""In a warm standby of a worker, the next one of its rank: it imports, waits, and becomes it. No torch.

See standbys.py, which starts it.
"""

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

MOST_BYTES, MOST_FDS = 1 << 16, 8
READY, HERE = b"ready", b"here"
"""What it answers: when it has imported all, and when it has become the worker."""
NAME = "siirl-standby"
"""Of the process, for who looks at a list of them, until it is a worker."""
OWN_NAME = Path("/proc/self/comm")


def stand_by(fd: int, prepare: Callable[[], None]) -> None:
    """In such a process: prepare, and return when it is a worker, with the output and the environment of one.

    Ends the process when the launcher is gone.
    """
    channel, name = socket.socket(fileno=fd), _rename(NAME)
    told: queue.SimpleQueue[tuple[bytes, list[int]]] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(OSError):
            message, fds, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_FDS)
            if message:
                return told.put((message, fds))
        os._exit(0)

    threading.Thread(target=listen, name="standby", daemon=True).start()
    prepare()
    channel.send(READY)
    message, (output, *fds) = told.get()
    given = json.loads(message)
    os.environ.update(given["environment"])
    os.environ.update({name: str(fd) for name, fd in zip(given["fds"], fds, strict=True)})
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    _rename(name)
    channel.send(HERE)
    channel.close()


def _rename(name: str) -> str:
    """Give this process another name, where the system can; the one that it had."""
    before = ""
    with contextlib.suppress(OSError):
        before = OWN_NAME.read_text().strip()
        OWN_NAME.write_text(name)
    return before
