"""Ray clusters of two machines, both of them this one: side by side, or with a cable between them."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_lock import cluster_here, ray_to_ourselves

NETWORK = "10.213.{}.{}"
JOIN_S = 60
ALIVE = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
print(sum(node["Alive"] for node in ray.nodes()))
"""
CABLE = """
set -e
ip netns add "$1"
ip link add "$1" type veth peer name eth0 netns "$1"
ip address add "$2/30" dev "$1"
ip link set "$1" up
ip -n "$1" address add "$3/30" dev eth0
ip -n "$1" link set eth0 up
ip -n "$1" link set lo up
"""


def can_lay_cables() -> bool:
    return os.geteuid() == 0 and not os.system("(ip netns list && unshare -n true) > /dev/null 2>&1")


@dataclass(frozen=True)
class RayMachines:
    """A cluster. The run's driver is on the first machine."""

    address: str
    gcs_pid: int
    cable: str = ""
    """The name of the network interface, if the second machine has a network of its own."""

    def cut(self) -> None:
        subprocess.run(["ip", "link", "set", self.cable, "down"], check=True)


@contextlib.contextmanager
def side_by_side() -> Iterator[RayMachines]:
    with _cluster() as cluster:
        cluster.add_node(num_cpus=2, include_dashboard=False)
        cluster.add_node(num_cpus=2, include_dashboard=False)
        yield RayMachines(cluster.address, _gcs_pid(cluster))


@contextlib.contextmanager
def with_a_cable() -> Iterator[RayMachines]:
    """The second machine is in a network namespace, joined to the first one by a pair of interfaces."""
    name = f"chaos{os.getpid() % 100_000}"
    first, second = (NETWORK.format(os.getpid() % 250, host) for host in (1, 2))
    subprocess.run(["sh", "-c", CABLE, "sh", name, first, second], check=True)
    try:
        with _cluster() as cluster:
            cluster.add_node(num_cpus=2, include_dashboard=False, node_ip_address=first)
            ray = [str(Path(sys.executable).with_name("ray")), "start", f"--address={cluster.address}"]
            ray += [f"--node-ip-address={second}", "--num-cpus=2", "--block"]
            away = subprocess.Popen(
                ["ip", "netns", "exec", name, *ray], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                _await_machines(cluster.address, 2)
                yield RayMachines(cluster.address, _gcs_pid(cluster), name)
            finally:
                away.terminate()
                away.wait(60)
    finally:
        subprocess.run(["ip", "link", "delete", name], check=False)
        subprocess.run(["ip", "netns", "delete", name], check=False)


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    with ray_to_ourselves(), cluster_here() as cluster:
        yield cluster


def _await_machines(address: str, count: int) -> None:
    """Asked by another process, so that this one is no driver."""
    words = [sys.executable, "-c", ALIVE, address]
    deadline = time.monotonic() + JOIN_S
    while (done := subprocess.run(words, capture_output=True, text=True)).stdout.strip() != str(count):
        assert time.monotonic() < deadline, done


def _gcs_pid(cluster: Any) -> int:
    (server,) = cluster.head_node.all_processes["gcs_server"]
    return server.process.pid
