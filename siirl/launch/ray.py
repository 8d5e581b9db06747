"""The launcher for a Ray cluster: an actor on each device keeps a worker process, this process watches them.

Ray places the actors and carries their output home; the workers talk to each other without it. No torch; ray
is imported when a run is launched.
"""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from siirl.command_line import EXIT_USER_ERROR
from siirl.config import Config
from siirl.deadline import Deadline
from siirl.errors import ConfigError, PlacementError, UserError, joined
from siirl.launch.attempts import Attempts, Ended
from siirl.launch.failure import Death
from siirl.launch.job import Job
from siirl.launch.memory_checkpoints import RayMemory
from siirl.launch.outcome import Stop, catch_signals
from siirl.launch.output_relay import ConsoleWriter
from siirl.launch.process import KILL_GRACE_S, TERM_GRACE_S
from siirl.launch.ray_actor import Launch, RankActor, forwarded_environment
from siirl.launch.ray_cluster import (
    HeadLost,
    HeadWatch,
    MachineLost,
    Need,
    Node,
    Stopped,
    bundle_nodes,
    connected,
    require_alive,
    reserve,
)
from siirl.launch.ray_watch import Rank, RankWatch
from siirl.launch.run_folder import absolute
from siirl.launch.run_record import command_line
from siirl.launch.scaled import Scaled
from siirl.observe.position import record_end

if TYPE_CHECKING:
    from ray.exceptions import RayError

log = logging.getLogger(__name__)
TICK_S = 0.2
LOOK_S = 1.0
RESERVE_S = 5.0
START_S = 120.0  # a machine's first actor imports Python packages, perhaps from a network disk
REACH_S = 10.0
NOTICED_S, UNREACHED_S = 3.0, 30.0  # Ray sees that an actor is gone, or not reached, before it sees why
KEPT_CHILDREN = {"runtime_env": {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}}
"""Of an actor: Ray would kill the worker before the end of its actor reaches it, and what the worker started
would go on; and what looks after the folder of checkpoints in memory."""


class RayTrainer:
    """Runs a job on a Ray cluster: `run` places the workers, watches them and ends them.

    Machines need siirl and the files of the run (model, data, user code) at the same paths, and may share no
    disk: the job travels with the call. Rank 0 runs on this machine if it takes part.
    """

    def __init__(self, job: Job, cfg: Config):
        self.job, self.cfg = job, cfg
        self._stop = Stop()
        self._actors: list[Any] = []
        self._nodes: list[Node] = []  # of each of them
        self._ranks: list[Rank] = []
        self._scaled = Scaled(cfg)
        self._memory = RayMemory(cfg, KEPT_CHILDREN)

    def run(self) -> int:
        """Run the job to its end; the exit code is that of `conclude`.

        Workers that died for no fault of the user's are started again, wherever there is room (see Attempts).
        PlacementError: the cluster is smaller than asked, or taken; ConfigError: there is none, or a machine
        lacks what the run needs. Nothing is left behind: actors, workers and reservation are gone.
        """
        attempts = Attempts(self.job, self._memory.newest)
        try:
            with (
                connected(self.cfg),
                catch_signals(self._stop),
                contextlib.closing(self._memory),
            ):
                attempts.run(self._attempt, self._stop)
        except Stopped:
            pass
        except KeyboardInterrupt:  # while it connected
            self._stop.numbers.append(2)
        return attempts.conclude(self._stop)

    def _attempt(self, job: Job) -> Ended:
        """Reserve, place, check, start, watch; release everything whatever happens."""
        from ray.util import remove_placement_group

        console = watch = None
        self.job = job
        self._actors, self._nodes, self._ranks = [], [], []
        job.prepare()
        group = self._reserve()
        offsets = self._log_sizes()
        try:
            self._place(group)
            self._memory.open(self._nodes, self._gather)
            port = self._check()
            console = ConsoleWriter(self.job.log_path(0))
            self._start(port, console)
            watch = RankWatch(self.job, self._ranks, console, self._stop)
            deaths = watch.until_ended()
        except MachineLost as lost:
            deaths = [self._death_by(lost)]
        except HeadLost as error:
            self._leave(error)
        finally:
            self._end_workers()
            if watch is not None:
                watch.fetch_rest()
            self._end_actors()
            remove_placement_group(group)
            if console is not None:
                console.close()
                console.show_cursor()
        return Ended(self.job, deaths, offsets)

    def _log_sizes(self) -> dict[int, int]:
        """Where this attempt begins in the log of each rank."""
        paths = {rank: self.job.log_path(rank) for rank in range(self.job.world_size)}
        return {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}

    def _death_by(self, lost: MachineLost) -> Death:
        """Of the first rank of the machine that was lost before the workers ran."""
        if lost.node is None:
            return Death(0, 1, time.time(), None, None, "a machine of the Ray cluster", str(lost))
        gone = [rank for rank, node in enumerate(self._nodes) if node.node_id == lost.node.node_id]
        for rank in self._ranks:
            rank.lost = rank.lost or rank.rank in gone
        return Death(gone[0], 1, time.time(), None, None, lost.node.host, str(lost))

    def _reserve(self) -> Any:
        """Reserve the machines, or as many as there are of them, and make the job that of so many.

        PlacementError: fewer than trainer.min_nnodes are there, or the workflow has no plan for those.
        """
        from ray.util import remove_placement_group

        whole, wait_s = Need.of(self.cfg), self.cfg.ray_init.wait_s
        problems: list[UserError] = []
        for nnodes in range(self._scaled.most, self._scaled.fewest - 1, -1):
            try:
                group = reserve(dataclasses.replace(whole, nnodes=nnodes), wait_s, self._wait)
            except PlacementError as error:
                problems.append(error)
                wait_s = min(wait_s, RESERVE_S)  # it has been waited for machines
                continue
            try:
                job = self._scaled.job(self.job, nnodes)
            except UserError as error:
                remove_placement_group(group)
                problems.append(PlacementError(f"{nnodes} of {whole.nnodes} machines do not do: {error}"))
                continue
            if problems:
                ranks = f"{job.world_size} rank{'s' * (job.world_size > 1)}"
                told = (
                    f"siirl: the run does with {nnodes} of {whole.nnodes} machines ({ranks}): {problems[0]}"
                )
                print(told.splitlines()[0], file=sys.stderr, flush=True)
            if job is not self.job:
                self.job = job
                job.prepare()
            return group
        raise joined(problems)

    def _place(self, group: Any) -> None:
        """Make the actors and give them ranks: contiguous on a machine, there in the order of its devices."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        per_node = self.job.local_world_size
        actor_class = ray.remote(RankActor)
        gpus = 1 if any(bundle.get("GPU") for bundle in group.bundle_specs) else 0
        options = {
            "num_cpus": self.cfg.ray_init.cpus_per_worker,
            "num_gpus": gpus,
            "max_concurrency": 4,
            **KEPT_CHILDREN,
        }
        for bundle, node in bundle_nodes(group, ray.get_runtime_context().get_node_id()):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            self._nodes += [node] * per_node
            for _ in range(per_node):
                self._actors.append(actor_class.options(**options, scheduling_strategy=strategy).remote())
        refs = [actor.describe.remote() for actor in self._actors]
        hosts = self._gather("start an actor", self._nodes, refs, START_S)
        for start in range(0, len(hosts), per_node):
            here = range(start, start + per_node)
            for index in sorted(here, key=lambda index: [(len(gpu), gpu) for gpu in hosts[index].gpus]):
                rank = Rank(len(self._ranks), self._actors[index], self._nodes[index], hosts[index])
                self._ranks.append(rank)

    def _check(self) -> int:
        """Check the files of every machine, and that it reaches rank 0, which opens a port; the port."""
        import ray

        first, firsts = self._ranks[0], self._ranks[:: self.job.local_world_size]
        if first.node.node_id != ray.get_runtime_context().get_node_id():
            log.info("rank 0 runs on %s: the run writes below %s there", first.place, self.job.output_dir)
        nodes = [rank.node for rank in firsts]
        deadline_s = self.cfg.trainer.deadline_s
        checks = [rank.actor.check.remote(self._launch_of(rank, 0), deadline_s) for rank in firsts]
        found = self._gather("check its files", nodes, checks, deadline_s + START_S)
        if any(found):
            places = [rank.place for rank in firsts]
            raise ConfigError(_of_machines(dict(zip(places, found, strict=True))))
        claim = first.actor.claim.remote(self._launch_of(first, 0), command_line())
        if problem := self._gather("open its output folder", nodes[:1], [claim], START_S)[0]:
            raise ConfigError(f"on {first.place}: {problem}")
        self._see_whether_amendable(first)
        address = self._meeting_address()
        (port,) = self._gather("open a port", nodes[:1], [first.actor.open_store.remote(address)], START_S)
        reaches = [rank.actor.reach.remote(address, port, REACH_S) for rank in firsts]
        problems = self._gather("reach rank 0", nodes, reaches, REACH_S + START_S)
        if any(problems):
            self._gather("answer", nodes[:1], [first.actor.describe.remote()], START_S)
        for rank, problem in zip(firsts, problems, strict=True):
            if problem:
                raise ConfigError(
                    f"{rank.place} does not reach port {port} of {first.place}, where rank 0 would wait for "
                    f"it: {problem}. Workers talk to each other on ports that the system picks: open them "
                    "between the machines."
                )
        return port

    def _see_whether_amendable(self, first: Rank) -> None:
        """Say in the job whether rank 0 finds what is asked for here, and this process its checkpoint."""
        import ray

        here = first.node.node_id == ray.get_runtime_context().get_node_id()
        root = absolute(self.cfg.trainer.default_local_dir)
        sees = first.actor.sees_folder_of.remote(self._launch_of(first, 0))
        sees = self._gather("look at its output folder", [first.node], [sees], START_S)[0]
        amendable = sees and (here or root.is_relative_to(self.job.output_path))
        if amendable != self.job.amendable:
            self.job = dataclasses.replace(self.job, amendable=amendable)
            self.job.prepare()

    def _start(self, port: int, console: ConsoleWriter) -> None:
        """Start every worker; rank 0's has a terminal if this process has one."""
        window = console.window_size() if console.is_tty else b""
        refs = []
        for rank in self._ranks:
            launch = self._launch_of(rank, port, window if rank.rank == 0 else b"")
            refs.append(rank.actor.start.remote(launch))
        self._gather("start a worker", [rank.node for rank in self._ranks], refs, START_S)

    def _meeting_address(self) -> str:
        """Where rank 0 is found: nobody else comes there where all ranks are on its machine."""
        return "127.0.0.1" if self.job.world_size == self.job.local_world_size else self._ranks[0].node.ip

    def _launch_of(self, rank: Rank, port: int, window_size: bytes = b"") -> Launch:
        import ray

        start = rank.rank - rank.rank % self.job.local_world_size
        here = self._ranks[start : start + self.job.local_world_size]
        added = {name: str(value) for name, value in self.cfg.ray_init.env_vars.items()}
        folder = self._memory.folder_on(rank.node.node_id)
        return Launch(
            job=dataclasses.replace(self.job, memory_dir=folder).to_json(),
            rank=rank.rank,
            master_addr=self._meeting_address(),
            master_port=port,
            gpus=tuple(gpu for peer in here for gpu in peer.host.gpus),
            env=forwarded_environment(os.environ) | added,
            cwd=os.getcwd(),
            window_size=window_size,
            head=ray.get_runtime_context().gcs_address,
        )

    def _leave(self, error: HeadLost) -> NoReturn:
        """End without Ray, whose calls would wait for its head, and then abort this process."""
        self._end_workers()
        self._memory.remove_folders()
        record_end(self.job.output_path, self.job.run_id, "failed", str(error))
        print(f"siirl: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_USER_ERROR)

    def _end_workers(self) -> None:
        """End the workers that still run, on all machines at once, and wait until they are gone."""
        import ray

        refs = [rank.actor.stop.remote() for rank in self._ranks if not rank.lost]
        grace = Deadline(TERM_GRACE_S + KILL_GRACE_S)
        while refs and not grace.over and not self._stop.at_once():
            refs = ray.wait(refs, num_returns=len(refs), timeout=TICK_S)[1]

    def _end_actors(self) -> None:
        """End the actors. A worker that is still there ends with its actor."""
        import ray

        for actor in self._actors:
            ray.kill(actor)

    def _wait(self, ref: Any, timeout_s: float) -> bool:
        """Wait for a Ray object, or just for `timeout_s` if it is None; whether it came. Raises Stopped."""
        import ray

        wait = Deadline(timeout_s)
        while not self._stop.numbers:
            if wait.over:
                return False
            if ref is None:
                time.sleep(min(wait.left_s, TICK_S))
            elif ray.wait([ref], timeout=min(wait.left_s, TICK_S))[0]:
                return True
        raise Stopped

    def _gather(self, what: str, nodes: Sequence[Node], refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """The results of calls to actors on these machines.

        MachineLost: a machine or its actor has gone away. PlacementError: one is late, or the call fails.
        """
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        wait, head = Deadline(timeout_s), HeadWatch(ray.get_runtime_context().gcs_address)
        for node, ref in zip(nodes, refs, strict=True):
            while not self._wait(ref, LOOK_S):
                head.look()
                require_alive(nodes, what)
                if wait.over:
                    raise PlacementError(f"{node.place} did not {what}: no answer within {timeout_s:g} s.")
            try:
                ray.get(ref)
            except RayError as error:
                failed = _failed_call(what, node, error)
                unreached = isinstance(error, ActorUnavailableError)
                noticed = Deadline(UNREACHED_S if unreached else NOTICED_S)
                while isinstance(failed, MachineLost) and not noticed.over:
                    self._wait(None, TICK_S)
                    require_alive(nodes, what)
                raise failed from error
        return ray.get(list(refs))


def _failed_call(what: str, node: Node, error: "RayError") -> Exception:
    """What is raised where a call to an actor fails: it ran and raised, or the actor went away under it."""
    from ray.exceptions import RayActorError, RaySystemError, WorkerCrashedError

    reason = str(error).strip().splitlines()[-1]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return PlacementError(
            f"{node.place} could not {what}; siirl must be installed there, as here: {reason}"
        )
    if isinstance(error, (RayActorError, RaySystemError, WorkerCrashedError)):
        return MachineLost(f"its actor on {node.place} ended when it was to {what}: {reason}", node)
    return PlacementError(f"{node.place} could not {what}: {reason}")


def _of_machines(problems: dict[str, str]) -> str:
    """What machines lack: once if it is the same on all of them."""
    if len(set(problems.values())) == 1:
        where = "on all machines" if len(problems) > 1 else f"on {next(iter(problems))}"
        return f"{where}: {next(iter(problems.values()))}"
    return "\n".join(f"on {name}: {problem}" for name, problem in problems.items() if problem)
