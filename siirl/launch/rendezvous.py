"""Where the ranks of a run meet: a store on a socket that is held from the moment its port is known.

Whoever starts the ranks opens the socket, tells all of them its port, and hands the socket on to rank 0. A
port that is freed and bound again could be another program's in between.
"""

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from siirl.errors import ConfigError

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
    """The store. Every rank calls it; rank 0 serves it, on the socket that it inherited if there is one.

    ConfigError: another program listens on the port.
    """
    from torch.distributed import DistNetworkError, TCPStore

    inherited = os.environ.pop(STORE_FD, None)
    descriptor = {} if inherited is None else {"master_listen_fd": int(inherited)}
    try:
        return TCPStore(host, port, world_size, rank == 0, timeout=timeout, **descriptor)
    except DistNetworkError as error:
        if rank or "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT={port} is in use by another program on {socket.gethostname()}: the ranks could not "
            "meet there. Set another MASTER_PORT for all ranks, or end what listens there."
        ) from error
