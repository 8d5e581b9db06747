"""Where the ranks of a run meet: a store on a socket that is held from the moment its port is known.

Whoever starts the ranks opens the socket, tells all of them its port, and hands the socket on to rank 0. A
port that is freed and bound again could be another program's in between.

torchrun's agents keep their store while they start workers again, and workers of an earlier attempt have left
their addresses there: a rank that reads one of them before it is replaced waits for a process that is gone.
So each attempt has the keys below a prefix of its own.
"""

import errno
import os
import socket
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from siirl.deadline import Deadline
from siirl.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store, TCPStore

STORE_FD = "SIIRL_STORE_FD"
"""Variable of rank 0's environment: the descriptor of the socket, which it inherits."""
WAITING = 1024
"""Ranks that may wait to be let in at once."""
POLL_S = 0.02


def open_socket(host: str) -> socket.socket:
    """A socket that listens on a free port of an address; ranks that come early wait in it."""
    return socket.create_server((host, 0), backlog=WAITING)


def keeps_store(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent serves the store of the ranks, and so holds MASTER_PORT itself.

    It does unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set; other programs that set its variables do not.
    """
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_port(env: Mapping[str, str] = os.environ) -> None:
    """ConfigError: this process is to be rank 0 and to serve the store, and cannot at MASTER_PORT.

    The port is bound, not listened on: ranks that come early are to find nobody there.
    """
    if env["RANK"] != "0" or keeps_store(env) or STORE_FD in env:
        return
    port = env["MASTER_PORT"]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (ValueError, OverflowError):
            raise ConfigError(
                f"MASTER_PORT={port!r} is no port: ranks meet there. Set a number from 1024 to 65535."
            ) from None
        except OSError as error:
            raise _taken(port, error) from error


def _taken(port: int | str, error: OSError) -> ConfigError:
    why = (
        "is in use by another program"
        if error.errno == errno.EADDRINUSE
        else f"cannot be opened ({error.strerror})"
    )
    return ConfigError(
        f"MASTER_PORT={port} {why} on {socket.gethostname()}: the ranks could not meet there. Set another "
        "MASTER_PORT for all ranks, or end what listens there."
    )


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
        raise _taken(port, OSError(errno.EADDRINUSE, "")) from error


def attempt_store(store: "Store", rank: int, world_size: int, timeout: timedelta) -> "PrefixStore":
    """A store that outlives attempts, for the ranks that run now. Called by all of them.

    DeadlineError where some do not come.

    Each rank says hello under a name that nobody has had; rank 0 answers each name with the attempt's, until
    all ranks have come in. A greeting that an earlier process has left is answered too, and nobody reads it.
    Numbers of restarts would not do: agents of several machines count them differently.
    """
    from torch.distributed import PrefixStore

    if rank == 0:
        attempt = uuid.uuid4().hex
        _welcome(store, attempt, world_size, timeout)
    else:
        name = uuid.uuid4().hex
        store.set(f"hello/{rank}", name)
        store.wait([f"welcome/{name}"], timeout)
        attempt = store.get(f"welcome/{name}").decode()
        store.set(f"here/{attempt}/{rank}", "")
    return PrefixStore(attempt, store)


def _welcome(store: "Store", attempt: str, world_size: int, timeout: timedelta) -> None:
    wait = Deadline(timeout.total_seconds())
    missing, answered = set(range(1, world_size)), set()
    while True:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]) and (name := store.get(f"hello/{rank}")) not in answered:
                answered.add(name)
                store.set(f"welcome/{name.decode()}", attempt)
            if store.check([f"here/{attempt}/{rank}"]):
                missing.remove(rank)
        if not missing:
            return
        if wait.over:
            shown = ", ".join(map(str, sorted(missing)[:20]))
            raise DeadlineError(
                f"{len(missing)} of {world_size} ranks did not start within {wait.wait_s:g} s "
                f"(trainer.deadline_s): {shown}. Look at their machines' logs of torchrun."
            )
        time.sleep(POLL_S)
