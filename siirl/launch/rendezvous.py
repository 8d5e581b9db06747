"""Where the ranks of a run meet: a store on a socket that is held from the moment its port is known.

Whoever starts the ranks opens the socket, tells all of them its port, and hands the socket on to rank 0. A
port that is freed and bound again could be another program's in between.
"""

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_FD = "SIIRL_STORE_FD"
"""Variable of rank 0's environment: the descriptor of the socket, which it inherits."""
WAITING = 1024
"""Ranks that may wait to be let in at once."""


def open_socket(host: str) -> socket.socket:
    """A socket that listens on a free port of an address; ranks that come early wait in it."""
    return socket.create_server((host, 0), backlog=WAITING)


def store_of_ranks(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> "TCPStore":
    """The store. Every rank calls it; rank 0 serves it, on the socket that it inherited if there is one."""
    from torch.distributed import TCPStore

    inherited = os.environ.pop(STORE_FD, None)
    descriptor = {} if inherited is None else {"master_listen_fd": int(inherited)}
    return TCPStore(host, port, world_size, rank == 0, timeout=timeout, **descriptor)
