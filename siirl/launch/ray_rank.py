"""One rank of a Ray run, as its launcher knows it."""

import time
from dataclasses import dataclass, field
from typing import Any

from siirl.launch.failure import Death
from siirl.launch.health import Process
from siirl.launch.ray_actor import Host
from siirl.launch.ray_cluster import Node
from siirl.observe.heartbeat import Beat
from siirl.observe.position import Position


@dataclass
class Rank:
    """One rank, seen from here: its actor, where that is, and what has arrived of its worker."""

    rank: int
    actor: Any
    node: Node
    host: Host
    log_offset: int = 0
    fetched: int = 0
    """Bytes of output that have arrived."""
    replied_s: float = field(default_factory=time.monotonic)
    """When the actor last answered."""
    position: Position | None = None
    beat: Beat | None = None
    process: Process | None = None
    """The last two: as of the last answer."""
    pending: Any = None
    """The question that the actor has not answered yet."""
    ended: int | None = None
    """The worker's exit status."""
    death: Death | None = None
    lost: bool = False
    """The actor is gone or does not answer."""

    @property
    def place(self) -> str:
        return f"{self.host.name} ({self.node.ip})"
