"""Addresses of machines: which is ours, and who reaches it."""

import ipaddress
import os
import socket


def own_host() -> str:
    """This machine's address towards the others of the run; the loopback device where the run is local.

    OSError if the first machine's name is unknown or nothing leads there.
    """
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, address = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_public(address: str) -> bool:
    """Whether it is an address of the internet."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:
        return False
