"""A port that a test holds is given to nobody by chance, and to the server that names it."""

import socket

import pytest
from held_ports import held_port, is_listening


def test_a_held_port_is_free_for_the_server_that_names_it_again_and_again():
    with held_port() as port:
        for _ in range(2):
            assert not is_listening(port)
            with socket.create_server(("127.0.0.1", port)) as server:
                assert is_listening(port)
                server.accept()[0].close()
        with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True):
            assert is_listening(port)


def test_a_held_port_is_nobody_elses():
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with held_port() as second:
            assert second != port
