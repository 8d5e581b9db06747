"""The Ray cluster of a run: found or started, measured before anything is placed on it, and reserved.

ray is imported when it is needed.
"""

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from siirl.cleanup import owned_folder
from siirl.config import Config
from siirl.deadline import Deadline
from siirl.errors import ConfigError, PlacementError
from siirl.guarded_files import MOST_BYTES, open_regular, own_secret, user_name
from siirl.launch.process import available_cores

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)
CONNECT_S = 5.0
START_S = 120.0
"""For a machine of a cluster that is started here: programs of Ray's own have to be imported until then."""
LOOK_EVERY_S = 0.5
REMIND_EVERY_S = 15.0
LONGEST_BASE = 16
"""Characters of a folder below which Ray's sockets have room for their names."""


class Stopped(Exception):
    """A signal asked the run to end while it waited for the cluster."""


@dataclass(frozen=True)
class Need:
    """What a run takes of a cluster: `nnodes` machines, on each of them that many workers."""

    nnodes: int
    workers_per_node: int
    cpus_per_worker: int
    device: str
    """trainer.device; on `auto` GPUs are needed if the cluster has any."""

    @classmethod
    def of(cls, cfg: Config) -> "Need":
        trainer = cfg.trainer
        return cls(trainer.nnodes, trainer.n_gpus_per_node, cfg.ray_init.cpus_per_worker, trainer.device)

    def gpus_per_node(self, nodes: list["Node"]) -> int:
        wanted = self.device == "cuda" or (self.device == "auto" and any(node.gpus for node in nodes))
        return self.workers_per_node if wanted else 0

    @property
    def cpus_per_node(self) -> int:
        return self.workers_per_node * self.cpus_per_worker

    def bundle(self, nodes: list["Node"]) -> dict[str, float]:
        """What is reserved on each machine."""
        gpus = self.gpus_per_node(nodes)
        return {"CPU": float(self.cpus_per_node)} | ({"GPU": float(gpus)} if gpus else {})


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive, with all its logical CPUs and GPUs, free or not."""

    node_id: str
    ip: str
    host: str
    cpus: float
    gpus: float

    @property
    def place(self) -> str:
        return f"{self.host} ({self.ip})"

    def lacks(self, need: Need, gpus: int) -> str:
        """What it has too little of, or an empty string."""
        few = ["GPUs"] * (self.gpus < gpus) + ["logical CPUs"] * (self.cpus < need.cpus_per_node)
        return "too few " + " and ".join(few) if few else ""


class MachineLost(Exception):
    """A machine left the cluster, or what ran there for this run ended, before the workers ran."""

    def __init__(self, what: str, node: Node | None = None):
        """node: which, if that is known."""
        super().__init__(what)
        self.node = node


def alive_nodes() -> list[Node]:
    """The machines of the cluster, in a fixed order: by address, then by Ray's node id."""
    import ray

    nodes = [
        Node(
            item["NodeID"],
            item["NodeManagerAddress"],
            item["NodeManagerHostname"],
            item["Resources"].get("CPU", 0.0),
            item["Resources"].get("GPU", 0.0),
        )
        for item in ray.nodes()
        if item["Alive"]
    ]
    return sorted(nodes, key=lambda node: (_address_key(node.ip), node.node_id))


def require_alive(nodes: Iterable[Node], what: str) -> None:
    """MachineLost for the first of these machines that has left, as it was to do `what`."""
    alive = {node.node_id for node in alive_nodes()}
    for node in nodes:
        if node.node_id not in alive:
            raise MachineLost(f"its machine {node.place} left the Ray cluster when it was to {what}", node)


def shortage(need: Need, nodes: list[Node]) -> str:
    """Why the run cannot fit on these machines even if they were idle, with the numbers; empty if it can."""
    gpus = need.gpus_per_node(nodes)
    fit = sum(not node.lacks(need, gpus) for node in nodes)
    if fit >= need.nnodes:
        return ""
    asked = (f"{gpus} GPUs and " if gpus else "") + f"{need.cpus_per_node} logical CPUs"
    lines = [
        f"the Ray cluster is smaller than asked: trainer.nnodes={need.nnodes} x trainer.n_gpus_per_node="
        f"{need.workers_per_node} needs {need.nnodes} machine(s) with {asked} each "
        f"(ray_init.cpus_per_worker={need.cpus_per_worker}); it has {len(nodes)}, of which {fit} will do:"
    ]
    for node in nodes:
        has = f"{node.gpus:g} GPUs, {node.cpus:g} logical CPUs"
        lines.append(f"  {node.host} ({node.ip}): {has}: {node.lacks(need, gpus) or 'enough'}")
    lines.append(
        "Start more machines (`ray start --address=HEAD:6379`, with --num-cpus and --num-gpus if it counts "
        "them wrongly), lower trainer.nnodes or trainer.n_gpus_per_node, or wait longer: ray_init.wait_s."
    )
    return "\n".join(lines)


@contextlib.contextmanager
def connected(cfg: Config, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """A connection to the cluster, closed at the end, as is a cluster that was started for the run.

    A caller that is connected already keeps its connection. ConfigError: no ray, or no cluster where one is
    expected.
    """
    _check_installed(cfg)
    import ray

    if ray.is_initialized():
        yield
        return
    # What is started here reports nothing, and has time to start on a machine that is busy (30 s by default).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(int(1000 * START_S)))
    need, address = Need.of(cfg), check_cluster(cfg, env)
    options: dict = {"address": address or "local"}
    if address is None:
        cpus = cfg.ray_init.num_cpus or max(available_cores(), need.cpus_per_node)
        options |= {"num_cpus": cpus, "include_dashboard": False}
    elif cfg.ray_init.num_cpus is not None:
        log.warning("ray_init.num_cpus has no effect: the cluster at %s is there already.", address)
    with contextlib.ExitStack() as stack:
        folder = None
        if address is None:
            stack.enter_context(_own_token())
            folder = None if env.get("RAY_TMPDIR") else stack.enter_context(_private_folder())
        try:
            ray.init(**options, _temp_dir=folder, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            fix = "" if "RAY_AUTH_MODE" in env else " If it asks for a token, set RAY_AUTH_MODE=token."
            raise ConfigError(
                f"the Ray cluster at {options['address']} cannot be used: {error}.{fix}"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """A token for a cluster that is started for the run alone, in the environment, unless there is one.

    Ray would write one into the home folder, for all users to read, and every later cluster would ask for it.
    """
    name, has_own = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH" in os.environ
    with contextlib.suppress(OSError):
        has_own = has_own or bool(own_secret(Path.home() / ".ray" / "auth_token"))
    if has_own or name in os.environ:
        yield
        return
    os.environ[name] = secrets.token_hex(32)
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    """Where the files and sockets of a cluster lie that is started for the run alone.

    Ray lets all users write into its folder, also to rename what is in it: this one is in a folder of this
    user's. OSError if none can be made.
    """
    base = tempfile.gettempdir()
    path, lock = owned_folder("siirl_ray_", base if len(base) <= LONGEST_BASE else "/tmp")
    with lock:
        try:
            yield f"{path}/ray"
        finally:
            shutil.rmtree(path, ignore_errors=True)


def check_cluster(cfg: Config, env: Mapping[str, str] = os.environ) -> str | None:
    """host:port of the cluster to use; None: one machine, without one. ConfigError as of `connected`."""
    _check_installed(cfg)
    address, nnodes = find_address(cfg, env), cfg.trainer.nnodes
    if address is None and nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes={nnodes}, but no Ray cluster was found: RAY_ADDRESS and "
            "ray_init.address are not set, and none runs on this machine. Run `ray start --head` here "
            "and `ray start --address=...` on the others first (examples/lib/launch.sh does both), or "
            "start the run with torchrun on each machine."
        )
    return address


def _check_installed(cfg: Config) -> None:
    if importlib.util.find_spec("ray") is None:
        trainer = cfg.trainer
        raise ConfigError(
            f"trainer.launcher={trainer.launcher} with trainer.nnodes={trainer.nnodes} means Ray, which is "
            "not installed. Install it (pip install ray), or use torchrun."
        )


def find_address(cfg: Config, env: Mapping[str, str] = os.environ) -> str | None:
    """host:port of the cluster to use; None if the run has to start its own.

    Ray itself waits two minutes for an address where nothing listens and then ends the process: it is tried
    first. ConfigError: nothing listens there.
    """
    asked = cfg.ray_init.address or env.get("RAY_ADDRESS")
    if asked == "local":
        return None
    if asked and asked != "auto":
        name = "ray_init.address" if cfg.ray_init.address else "RAY_ADDRESS"
        if "://" in asked:
            raise ConfigError(
                f"{name}={asked}: Ray Client is not supported: outputs would not reach this machine. Give "
                "host:port, and start the run on a machine of the cluster (`ray job submit` does)."
            )
        problem = _unreachable(asked)
        if problem:
            raise ConfigError(
                f"{name}={asked}: no Ray cluster answers there: {problem}. Start it (`ray start --head "
                "--port=6379`), or correct the address (host:port)."
            )
        return asked
    recorded = Path(env.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        with os.fdopen(open_regular(recorded), "rb") as file:
            owner, running = os.fstat(file.fileno()).st_uid, file.read(MOST_BYTES).decode().strip()
    except (OSError, ValueError):
        return None
    if not running or _unreachable(running):
        return None
    if owner not in (os.geteuid(), 0):  # who starts it gets the run's code and environment
        found = f"{recorded} names a Ray cluster at {running}, but belongs to {user_name(owner)}"
        log.warning("%s: it is not used. If it is meant, set ray_init.address=%s.", found, running)
        return None
    return running


def reserve(need: Need, wait_s: float, await_one: Callable[[object, float], bool]) -> "PlacementGroup":
    """Reserve a bundle on each of `nnodes` different machines; PlacementError, with the numbers, if it fails.

    await_one(ref, timeout_s): waits for a Ray object, False when it did not come; raises Stopped. Waits up to
    `wait_s` for machines to join, and again for devices to become free.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    nodes = _wait_for_nodes(need, wait_s, await_one)
    bundle = need.bundle(nodes)
    strategy = "STRICT_SPREAD" if need.nnodes > 1 else "STRICT_PACK"
    group = placement_group([bundle] * need.nnodes, strategy=strategy, name="siirl")
    try:
        if await_one(group.ready(), max(wait_s, LOOK_EVERY_S)):
            return group
        if problem := shortage(need, alive_nodes()):
            raise PlacementError(problem)
        free, whole = ray.available_resources(), ray.cluster_resources()
        shown = ", ".join(f"{free.get(kind, 0):g} of {whole.get(kind, 0):g} {kind}s" for kind in bundle)
        raise PlacementError(
            f"the Ray cluster has the {need.nnodes} machine(s) that the run needs, but not free: {bundle} on "
            f"each was not to be had within {wait_s:g} s (ray_init.wait_s); free now: {shown}. Other jobs "
            "hold the rest: end them (`ray status`, `ray list placement-groups`), or wait longer."
        )
    except BaseException:
        remove_placement_group(group)
        raise


def bundle_nodes(group: "PlacementGroup", first: str) -> list[tuple[int, Node]]:
    """(bundle, machine) in the order of ranks: machine `first` if it takes part, then by address.

    MachineLost: one has left since it was reserved.
    """
    from ray.util import placement_group_table

    places = placement_group_table(group)["bundles_to_node_id"]
    nodes = alive_nodes()
    order = {node.node_id: index for index, node in enumerate(nodes)}
    if any(node_id not in order for node_id in places.values()):
        raise MachineLost("a machine left the Ray cluster as soon as it was reserved")
    placed = [(int(bundle), nodes[order[node_id]]) for bundle, node_id in places.items()]
    return sorted(placed, key=lambda item: (item[1].node_id != first, order[item[1].node_id]))


def _wait_for_nodes(need: Need, wait_s: float, await_one: Callable[[object, float], bool]) -> list[Node]:
    wait, reminds, told = Deadline(wait_s), Deadline(REMIND_EVERY_S), False
    while problem := shortage(need, nodes := alive_nodes()):
        if wait.over:
            raise PlacementError(problem)
        if reminds.due() or not told:
            log.info("waiting up to %.0f s more: %s", wait.left_s, problem.splitlines()[0])
            told = True
        await_one(None, LOOK_EVERY_S)
    return nodes


def _address_key(ip: str) -> tuple[str, ...]:
    return tuple(part.zfill(3) for part in ip.split("."))


def _unreachable(address: str) -> str:
    """Why nothing answers at host:port; empty if something does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "it is not host:port"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
            return ""
    except OSError as error:
        return str(error)


LOST_AFTER_S = 18.0
"""The driver gives up an actor, or the head. Actors answer within a second; Ray itself may need minutes."""
SUSPECT_S, CUT_OFF_S = 10.0, LOST_AFTER_S + 2.0
"""Not asked for so long, an actor tries the head; counts as cut off. By then the driver has given it up."""
HEAD_EVERY_S, HEAD_CONNECT_S = 3.0, 1.0


class HeadLost(PlacementError):
    """The head of the cluster is gone: Ray can do nothing more for this run."""


class HeadWatch:
    """Asks now and then whether the head of the cluster, at host:port, takes connections.

    Ray itself says nothing for a minute, and then ends the process of the driver.
    """

    def __init__(self, address: str, patience_s: float = LOST_AFTER_S):
        self._address = address
        self._silent, self._asks = Deadline(patience_s), Deadline(HEAD_EVERY_S)

    def look(self) -> None:
        """HeadLost: it has taken none for too long."""
        if not self._asks.over:
            return
        silent_s = self._silent.passed_s  # as it is asked: a refusal takes time, too
        host, _, port = self._address.rpartition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), HEAD_CONNECT_S),
        ):
            self._silent.renew()
            silent_s = 0.0
        self._asks.renew()
        if silent_s > self._silent.wait_s:
            raise HeadLost(
                f"the head of the Ray cluster, {self._address}, has taken no connections for {silent_s:.0f} "
                "s: its GCS has ended, or its machine is gone. The workers have been ended. Start the "
                "cluster again; then the same command goes on from the last checkpoint (trainer.save_freq)."
            )


class CutOff:
    """Tells an actor that its machine is cut off: the driver asks nothing, and the head takes no connections.

    One of them alone is no reason: a driver may stand still, and a head be started again.
    """

    def __init__(self, head: str):
        self._address = head
        self._unasked = Deadline(SUSPECT_S)
        self._head: HeadWatch | None = None

    def asked(self) -> None:
        """The driver has asked something."""
        self._unasked.renew()
        self._head = None

    def look(self) -> str:
        """Why the machine counts as cut off; empty if it does not."""
        if not self._unasked.over:
            return ""
        head = self._head = self._head or HeadWatch(self._address, CUT_OFF_S - SUSPECT_S)
        try:
            head.look()
        except HeadLost:
            unasked_s = self._unasked.passed_s
            if unasked_s >= CUT_OFF_S:
                return (
                    f"this machine is cut off: the driver of the run has asked nothing for {unasked_s:.0f} "
                    f"s, and the head of the Ray cluster, {self._address}, takes no connections"
                )
        return ""
