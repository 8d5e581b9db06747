"""Plays the user's job on this machine's CPUs, several times for a few steps, and keeps what was seen.

alone: two steps on one rank. equal: a step whose rewards are all the same. two_ranks: a step on two ranks.
resumed: killed in its second step, and gone on with. Each is a run as the local launcher starts one, but its
workers are forks of this process, which has imported everything: they begin at once.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.config import Config, to_dict
from siirl.config.load import read_config
from siirl.errors import NotSupportedError, Place, UserError
from siirl.findings import Findings
from siirl.launch.devices import machine_of
from siirl.launch.job import Job
from siirl.launch.preflight import with_template_date
from siirl.launch.rendezvous import STORE_FD, open_socket
from siirl.launch.run_folder import with_absolute_folders
from siirl.launch.survey import survey, with_choices
from siirl.model_files.run_inputs import inputs_of
from siirl.session import PlannedRun, planned
from siirl.testing.answers import Answers, read_answers
from siirl.testing.evidence import Evidence, NodeRecord, read_evidence
from siirl.testing.tiny_job import STEPS, TinyJob, tiny_job

ENTRY = "siirl.testing.trial_worker:run_worker"
DEADLINE_S = 85.0
"""Of all runs of a test together."""
POLL_S = 0.02


@dataclass(frozen=True)
class RunKind:
    """One of the runs of a test."""

    ranks: int = 1
    steps: int = STEPS
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)


PLAIN = {
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "algorithm.use_kl_in_reward": False,
    "reward_model.overlong_buffer.enable": False,
    "algorithm.filter_groups.enable": False,
}
"""What else than rewards would have a gradient, or drop the groups that have none."""
RUNS: dict[str, RunKind] = {
    "alone": RunKind(order={"twice": True}),
    "equal": RunKind(steps=1, settings=PLAIN, order={"equal": True}),
    "two_ranks": RunKind(ranks=2, steps=1, order={"twice": True}),
    "resumed": RunKind(settings={"trainer.save_freq": 1}, order={"killed_in": 2}),
}


@dataclass
class Outcome:
    """How a run ended."""

    evidence: list[Evidence]
    plan: Plan | None = None
    node_cfgs: dict[str, Config] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty: it ended well."""
    seconds: float = 0.0
    is_late: bool = False
    """It was ended as the test had no more time; `error` says so."""

    def records(self, step: int | None = None) -> list[NodeRecord]:
        """What the nodes of all ranks saw."""
        return [x for one in self.evidence for x in one.records if step in (None, x.step)]


@dataclass
class Trial:
    """The runs of a test, and the real job as it is planned. What assertions look at."""

    real: PlannedRun | None
    """None: its machine does not hold it; `refused` says why."""
    answers: Answers
    runs: dict[str, Outcome]
    folder: Path
    seconds: float = 0.0
    refused: str = ""

    @property
    def plan(self) -> Plan:
        """Of the test's own job on one rank."""
        plan = self.runs["alone"].plan
        assert plan is not None, "the run alone has been planned"
        return plan

    def cfg(self, node: str) -> Config:
        """The configuration of a node in the test."""
        return self.runs["alone"].node_cfgs[node]

    @cached_property
    def alone(self) -> Outcome:
        """The run on one rank, which most assertions look at."""
        return self.runs["alone"]


@contextlib.contextmanager
def playing(
    settings: Sequence[str],
    config_name: str = "ppo_dag_trainer",
    answers: str | None = None,
    tiny: bool = True,
    only: Sequence[str] = tuple(RUNS),
    keep: Path | None = None,
) -> Iterator[Trial]:
    """The trial of a command line; its files are there inside the context, and with `keep` afterwards.

    settings: as of `siirl run`; the first may be a workflow's file. only: the runs to play. UserError: what
    `siirl check` refuses, and what a test cannot be made of. Forks: the process should
    have no threads that compute, and no CUDA.
    """
    made = Path(tempfile.mkdtemp(prefix="siirl-test-")) if keep is None else keep.absolute()
    try:
        yield play(settings, made, config_name, answers, tiny, only)
    finally:
        if keep is None:
            shutil.rmtree(made, ignore_errors=True)


def play(
    settings: Sequence[str],
    folder: Path,
    config_name: str = "ppo_dag_trainer",
    answers: str | None = None,
    tiny: bool = True,
    only: Sequence[str] = tuple(RUNS),
) -> Trial:
    """See `playing`; the files stay in the folder."""
    start_s = time.perf_counter()
    found = Findings()
    said = read_answers(answers)
    settings = list(settings)
    if settings and "=" not in settings[0]:
        settings[0] = f"dag.workflow_path={settings[0]}"
    cfg, real, refused = read_config(settings, config_name, found), None, ""
    try:
        real = planned(cfg, True, found)
    except UserError as error:
        if any(problem.place != Place.MACHINE for problem in error.problems()):
            raise
        refused = str(error)
    _import_all()
    job = tiny_job(with_template_date(cfg), folder, tiny)
    runs = {name: _prepared(job, name, RUNS[name], said) for name in only}
    _refuse_clients(runs)
    _play_all(runs, start_s + DEADLINE_S)
    outcomes = {name: run.outcome() for name, run in runs.items()}
    return Trial(real, said, outcomes, folder, time.perf_counter() - start_s, refused)


def _refuse_clients(runs: Mapping[str, "_Run"]) -> None:
    """NotSupportedError for episodes that somebody else is to play, who does not know of the test."""
    for run in runs.values():
        for name, cfg in run.node_cfgs.items():
            if cfg.actor_rollout_ref.serve.listen and run.plan is not None and name in run.plan.nodes:
                raise NotSupportedError(
                    f"not supported yet: siirl test of node {name!r} with serve.listen=true: clients play "
                    "its episodes, and none comes to a test. Let serve.command start the program."
                )


def _import_all() -> None:
    """What every fork needs, before the first; and no threads that a fork would lack."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    torch.set_num_threads(1)
    from siirl.engines.train.fsdp import fsdp_engine  # noqa: F401
    from siirl.testing import trial_worker  # noqa: F401


@dataclass
class _Run:
    """A run on its way: its worker processes, one attempt after the other."""

    name: str
    kind: RunKind
    job: Job | None
    plan: Plan | None
    node_cfgs: dict[str, Config]
    error: str = ""
    is_late: bool = False
    pids: dict[int, int] = field(default_factory=dict)
    """Rank -> process."""
    attempts: int = 0
    begun_s: float = 0.0
    ended_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return bool(self.error) or (self.attempts > 0 and not self.pids)

    def start(self) -> None:
        """Fork its workers."""
        assert self.job is not None
        self.attempts += 1
        self.begun_s = self.begun_s or time.perf_counter()
        self.job.prepare()
        with open_socket("127.0.0.1") as server:
            for rank in range(self.job.world_size):
                self.pids[rank] = _forked(self.job, rank, server)

    def look(self) -> None:
        """Take note of workers that have ended; start a run again that was to be killed."""
        for rank, pid in list(self.pids.items()):
            if self.pids.get(rank) != pid:  # ended with a peer
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.pids[rank]
                self.ended_s = time.perf_counter()
                if (
                    status
                    and not self.error
                    and not (self.kind.order.get("killed_in") and self.attempts == 1)
                ):
                    self.error = self.cause(status)
                    self.end()
        if self.kind.order.get("killed_in") and self.attempts == 1 and not self.pids and not self.error:
            assert self.job is not None
            order = self.job.extra["order"] | {"killed_in": 0}
            self.job = dataclasses.replace(self.job, extra={"order": order})
            self.start()

    def cause(self, status: int) -> str:
        """Why a worker failed, in its own words."""
        assert self.job is not None
        for rank in range(self.job.world_size):
            with contextlib.suppress(OSError, ValueError, KeyError):
                record = json.loads(self.job.error_path(rank).read_text())
                where = f"node {record['node']!r}, step {record['step']}: " if record.get("node") else ""
                return f"{where}{record['error']}"
        log = self.job.log_path(0)
        last = log.read_text(errors="replace").strip().splitlines()[-3:] if log.exists() else []
        return f"a worker ended with status {status}: {' | '.join(last)}"

    def end(self) -> None:
        """End what is left of it."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, 9)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.pids = {}

    def outcome(self) -> Outcome:
        """What there is of it."""
        folder = self.job.output_path if self.job is not None else None
        evidence = read_evidence(folder) if folder is not None and folder.is_dir() else []
        seconds = self.ended_s - self.begun_s
        return Outcome(evidence, self.plan, self.node_cfgs, self.error, seconds, self.is_late)


def _prepared(job: TinyJob, name: str, kind: RunKind, answers: Answers) -> _Run:
    """A run that can start; or one that cannot, with the reason."""
    found = Findings()
    try:
        cfg = with_absolute_folders(job.config(name, kind.ranks, kind.steps, kind.settings))
        seen = survey(cfg, found)
        found.close()
        seen = with_choices(seen, machine_of(cfg, "local", here=True))
    except UserError as error:
        return _Run(name, kind, None, None, {}, str(error))
    assert seen.plan is not None, "without a plan there is a problem"
    order = {"answers": {who: [list(turns) for turns in rows] for who, rows in answers.said.items()}}
    order |= {"source": answers.source, **kind.order}
    output = cfg.trainer.output_dir
    written = Job(
        to_dict(seen.cfg),
        seen.plan.to_json(),
        output,
        seen.plan.world_size,
        seen.plan.world_size,
        extra={"order": order},
        entry=ENTRY,
        run_id=f"test {name}",
        inputs=dataclasses.asdict(inputs_of(seen.cfg, seen.plan)),
    )
    return _Run(name, kind, written, seen.plan, dict(seen.node_cfgs))


def _play_all(runs: Mapping[str, _Run], deadline_s: float) -> None:
    """Play them side by side, as many as there are cores; what is late is ended."""
    cores = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    waiting = [run for run in runs.values() if not run.error]
    active: list[_Run] = []
    try:
        while waiting or active:
            busy = sum(run.kind.ranks for run in active)
            if waiting and (not active or busy + waiting[0].kind.ranks <= cores):
                active.append(waiting.pop(0))
                active[-1].start()
            for run in active:
                run.look()
            active = [run for run in active if not run.is_over]
            if time.perf_counter() > deadline_s:
                for run in [*active, *waiting]:
                    run.error = (
                        f"the run {run.name!r} was not done {DEADLINE_S:g} s after the test began: this "
                        "machine is too busy"
                    )
                    run.is_late = True
                    run.end()
                return
            time.sleep(POLL_S)
    finally:
        for run in active:
            run.end()


def _forked(job: Job, rank: int, server: Any) -> int:
    """The process of a worker: a fork of this one, which does what a worker of the launcher does."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        log = os.open(job.log_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w", 1), os.fdopen(os.dup(2), "w", 1)
        port = server.getsockname()[1]
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": job.world_size,
            "LOCAL_WORLD_SIZE": job.world_size,
        }
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        if rank == 0:
            os.environ[STORE_FD] = str(os.dup(server.fileno()))
        from siirl.launch.worker_entry import ProcessPlace, run_rank

        code = run_rank(job, ProcessPlace(rank, rank, job.world_size, job.world_size), watched=True)
    except BaseException as error:  # noqa: BLE001 - the edge of the process
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
