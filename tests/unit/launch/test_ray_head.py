"""A Ray cluster whose head is gone is named before Ray ends the driver."""

import socket
import time

import pytest

from siirl.launch import ray_watch
from siirl.launch.ray_watch import HeadLost, HeadWatch


def test_a_head_that_takes_connections_is_there_and_one_that_does_not_is_named(monkeypatch):
    monkeypatch.setattr(ray_watch, "HEAD_EVERY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        watch = HeadWatch(address, patience_s=0.5)
        time.sleep(0.6)
        watch.look()
    watch.look()
    time.sleep(0.6)
    with pytest.raises(HeadLost, match=rf"head of the Ray cluster, {address}, has taken no connections"):
        watch.look()
