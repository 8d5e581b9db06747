"""Runs a job by the command that users type, strikes it as cases say, and looks at what is left of it."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_cases import (
    COMMAND_AGAIN,
    CUT,
    DISKS,
    HALF,
    JUMPS_S,
    NAMED,
    OUT_OF_MEMORY,
    PARALLEL,
    PHASES,
    SAID,
    STARTS_AGAIN,
    TWO,
    Case,
)
from chaos_services import HOOK, LOST, SERVICES, Service
from fixtures_tiny import make_tiny_model_dir
from job_harness import ROOT, Finished, Inputs, audited, overrides
from ray_machines import RayMachines

from siirl.checkpoint import files
from siirl.engines.rollout.served.engine_parts import find_parts
from siirl.engines.rollout.served.engine_process import SERVER
from siirl.launch.standby import NAME as STANDBY

STEPS, FEW_STEPS = 24, 11
"""Of the longest chains, and of those of `make test`."""
KEYS = (
    *("trainer.n_gpus_per_node=2", "trainer.logger=[console]", "trainer.deadline_s=300"),
    *("trainer.save_freq=2", "trainer.memory_checkpoint_freq=1", "trainer.overwrite=true"),
    *("trainer.test_freq=3", "trainer.val_before_train=False", "trainer.ledger=rows"),
    *("reward_model.num_workers=1", "custom_reward_function.timeout_s=2"),
)
"""Disk in even steps, memory in odd ones, validation in every third."""
ON_RAY = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.launcher=ray", "ray_init.wait_s=20")
LOCAL_ONLY = "trainer.memory_checkpoint_freq=1"
ON_VLLM = (
    "trainer.n_gpus_per_node=1",
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=64"),
    "actor_rollout_ref.rollout.max_engine_restarts=100",
)
IN_PARALLEL = (*("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"),)
REWARD = '''

import sitecustomize

share = compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A sample in flight is a phase of its own."""
    sitecustomize.reach("scoring")
    return share(data_source, solution_str, ground_truth, extra_info)
'''
MEASURED = re.compile(
    r"time|perf/|memory/|.*_s$|weight_sync/|reward/(timeout|tried_again|worker_death|worker_leak)$|rollout/engine_restarts"
)
"""Metrics that differ between two runs of the same command, or say what came of a reward worker; a new engine
gets weights that an older one has already."""
ROUNDED, ROUNDED_BY = re.compile(r"actor/rollout_log_prob_diff"), 1e-5
"""How a rollout rounds depends on which turns share a batch: log-probs differ by less than this."""
PATIENCE_S = 240
ENDED_S = 90
"""How long the run's processes may take to end: alone 5 s, or 30 s on a machine of a Ray cluster that hears
of no other."""
NEWS_S = 1.5
"""How long Ray's driver takes to hear where a worker is."""
NAMED_S = 30.0
"""How long it may take until it is recorded who was struck."""
STOPPED_S = 1.0
"""How long a launcher is stopped, while the run goes on to its next steps."""
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGKILL": -9, "SIGSEGV": -11}
UNSAID = ("SIGKILL", "SIGSEGV")
"""Signals after which a launcher says nothing."""
AT_REST_S = 2.0
CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")
LEFT_BYTES = 512 << 10
"""Of memory, for a rank under a limit: less than it needs to go on."""


def make_inputs(folder: Path) -> Inputs:
    made = Inputs.make(folder)
    made.reward.write_text(made.reward.read_text() + REWARD)
    make_tiny_model_dir(folder / "vllm", init_std=0.2, head_dim=32)  # its CPU attention has no smaller heads
    return made


def keys_of(kind: str, inputs: Inputs, ray_address: str = "", folder: Path | str = "") -> list[str]:
    """What sets a kind of job apart; a key that comes twice counts as it comes last."""
    if kind == "Ray":
        hook = f"+ray_init.env_vars.CHAOS_DIR={folder}"  # else Ray does not bring it to the workers
        mine = [*ON_RAY, f"ray_init.address={ray_address}", hook]
        return [*(key for key in KEYS if key != LOCAL_ONLY), *mine]
    model = f"actor_rollout_ref.model.path={inputs.model.parent / 'vllm'}"
    if kind == PARALLEL:
        return [*KEYS, *ON_VLLM, *IN_PARALLEL, model]
    if kind == TWO:
        return [*KEYS, *ON_VLLM, "trainer.n_gpus_per_node=2", model]
    return [*KEYS, *ON_VLLM, model] if kind == "vLLM" else list(KEYS)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gives, less what time it took."""

    metrics: list[dict[str, Any]]
    weights: dict[str, Any]

    @classmethod
    def read(cls, output: Path) -> "Result":
        """Of a run whose ledger proves what became of each row, over all its attempts."""
        done = Finished.read(output)
        audited(done)
        lines = [{name: x for name, x in line.items() if not MEASURED.match(name)} for line in done.lines]
        return cls(lines, done.weights())

    def check_equal(self, other: "Result") -> None:
        assert len(self.metrics) == len(other.metrics) >= FEW_STEPS
        for line, expected in zip(self.metrics, other.metrics, strict=True):
            rounded = {name: x for name, x in expected.items() if ROUNDED.match(name)}
            assert line == expected | {name: pytest.approx(x, abs=ROUNDED_BY) for name, x in rounded.items()}
        assert self.weights.keys() == other.weights.keys() and len(self.weights) > 5
        assert all(tensor.equal(other.weights[name]) for name, tensor in self.weights.items())


DISK = """
mkdir -p "$1"; [ "$1" = /dev/shm ] && size=8m || size=24m
mount -t tmpfs -o size=$size tmpfs "$1" || exit 99
disk=$1 copy=$2; shift 2
"$@"; code=$?
rm -f "$disk/filler"; cp -r "$disk/." "$copy"; exit $code
"""
"""Runs a command with a small disk at $1, whose files are copied to $2 in the end."""


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int64_t jump(void) {
    static volatile int64_t *shared;
    static int64_t none;
    if (!shared) {
        char path[4096];
        const char *folder = getenv("CHAOS_DIR");
        snprintf(path, sizeof path, "%s/clock", folder ? folder : "");
        int file = open(path, O_RDONLY | O_CLOEXEC);
        void *mapped = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        shared = mapped == MAP_FAILED ? &none : mapped;
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return code;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""A library between programs and the clock of the day: it adds the seconds in CHAOS_DIR/clock, 8 bytes."""


def make_clock(folder: Path) -> Path:
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


class Chaos:
    """A job in a folder, struck again and again. disk: where it has a small one of its own, if it has.

    with_clock: its clock can be changed. kind: of the job; cluster: where it runs, if that is Ray.
    """

    def __init__(
        self,
        inputs: Inputs,
        folder: Path,
        disk: str = "",
        with_clock: bool = False,
        kind: str = "local",
        cluster: RayMachines | None = None,
        steps: int = STEPS,
    ):
        self.folder, self.output, self._disk = folder, folder / "out", folder / disk
        self._cluster = cluster
        self._clock = make_clock(folder) if with_clock else None
        self.checkpoints = self.output / "checkpoints"
        if disk == "checkpoints":
            self.checkpoints = self._disk
        address = cluster.address if cluster else ""
        keys = [*keys_of(kind, inputs, address, folder), f"trainer.total_training_steps={steps}"]
        keys.append(f"trainer.default_local_dir={self.checkpoints}")
        self._service = Service(kind, folder) if kind in SERVICES else None
        if self._service is not None:
            keys += self._service.keys
        self.keys = overrides(inputs, self.output, *keys)
        self._words = [sys.executable, "-m", "siirl.main_dag", *self.keys]
        if disk:
            self._words = ["unshare", "-m", "sh", "-c", DISK, "sh", *self._words]
            self._words[6:6] = [str(self._disk), str(folder / "copy")]
        self._shared_before = shared_memory()
        self._number = 0
        self._groups: list[Path] = []
        self._kind = kind
        self._standbys_struck = False
        """Since the ranks were started."""
        self.took_s: list[float] = []
        """Of each strike, in order: until what was struck was done, or all processes had ended."""

    def run(self, cases: Sequence[Case] = ()) -> Result:
        """All cases, one after another; then the run must end well and leave nothing."""
        if cases:
            self._arm(cases[0])
        job = self._start()
        try:
            for number, case in enumerate(cases, 1):
                job = self._strike(job, case, next(iter(cases[number:]), None))
            code = job.wait(PATIENCE_S)
            assert code == 0 and "leaked" not in self.console, self.console
        finally:
            left = self._end(job)
        assert left == [], f"orphans: {left}"
        self._check_nothing_is_left()
        return Result.read(self.output)

    @property
    def console(self) -> str:
        return (self.folder / "console").read_text()

    def _start(self) -> subprocess.Popen:
        paths = [str(HOOK), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "CHAOS_DIR": str(self.folder)}
        if self._kind == "standby":
            environment["CHAOS_STANDBYS"] = "1"
        if self._clock:
            (self.folder / "clock").write_bytes(bytes(8))
            environment["LD_PRELOAD"] = str(self._clock)
        with (self.folder / "console").open("ab") as file:
            return subprocess.Popen(
                self._words, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file
            )

    def _arm(self, case: Case | None) -> None:
        """Say where the next strike is to be, if there is one; not before what the last one cost is done."""
        path, self._number = self.folder / "strike.json", self._number + 1
        if case is None:
            path.unlink()
            return
        wanted = {"number": self._number, "phase": PHASES[case.phase], "rank": case.rank}
        wanted["step"] = case.least_step
        path.with_suffix(".new").write_text(json.dumps(wanted))
        os.replace(path.with_suffix(".new"), path)

    def _strike(self, job: subprocess.Popen, case: Case, following: Case | None) -> subprocess.Popen:
        """Strike where the job is held, and see that it goes on as it must; the job of now."""
        reached = self.folder / f"reached_{self._number}"
        self._wait_until(reached.exists, job, f"the phase of {case.name}")
        held, failed = json.loads(reached.read_text()), self.attempts()
        knows = case.phase not in ("scoring", "tool", HALF)
        step = held["step"] if knows else self.steps_done() + 1
        if case.job == "Ray":
            time.sleep(NEWS_S)
        if case.least_step:
            self._wait_until(lambda: self._is_saved(held["step"] - 1), job, "the checkpoint before it")
        standbys = self._await_standbys(job) if case.job == "standby" and not self._standbys_struck else []
        engines = self.engines() if case.job == TWO or case.strikes_rank_of_engine else {}
        struck_s, struck_at_s = time.monotonic(), time.time()
        if case.who in DISKS:
            self._strike_disk(held["pid"], case.how)
        elif case.who == "clock":
            self._move_clock(JUMPS_S[case.how])
        elif case.how == CUT:
            self._cluster.cut()
        elif case.how == OUT_OF_MEMORY:
            self._limit_memory(held["pid"])
        else:
            victims = self._victims(job, case, held["pid"])
            assert victims, case.name
            for pid in victims:
                os.kill(pid, signal.SIGKILL if case.how == LOST else signal.Signals[case.how])
            if self._service is not None:
                self._service.struck(case.how)
        self._standbys_struck = case.who == "standby"
        (self.folder / f"struck_{self._number}").touch()
        if (case.who, case.how) == ("launcher", "SIGSTOP"):
            time.sleep(STOPPED_S)
            os.kill(job.pid, signal.SIGCONT)
        if case.then == COMMAND_AGAIN:
            assert job.wait(PATIENCE_S) == CODES[case.how], self.console
            assert case.how in UNSAID or f"siirl: stopped by {case.how}" in self.console
            assert self._left(ENDED_S) == [], case.name
            self._check_checkpoints()
            self.took_s.append(time.monotonic() - struck_s)
            self._arm(following)
            return self._start()
        if case.then == NAMED:
            assert job.wait(PATIENCE_S) == (1 if case.how == LOST else 2), self.console
            if case.how == LOST:
                assert re.search(rf"(?m)^siirl: the run failed.*{SAID[case.who]}", self.console), self.console
            elif case.job == "Ray":
                assert re.search(f"(siirl|Error): {SAID[case.who]}", self.console), self.console
            else:
                what = "the checkpoint of step " if case.who == "disk of checkpoints" else ""
                assert re.search(f"(?m)^siirl: {what}.*{SAID[case.how]}", self.console), self.console
            self.took_s.append(time.monotonic() - struck_s)
            return job
        if case.then == STARTS_AGAIN:
            self._wait_until(lambda: len(self.attempts()) > len(failed), job, f"the end of {case.name}")
            attempt = self.attempts()[-1]
            self._check_attempt(case, step, attempt)
            assert attempt["ended_s"] - struck_at_s < NAMED_S, (case, attempt)
            self._wait_until(
                lambda: all(process.name() != STANDBY for process in standbys),
                job,
                "what stood by to be ranks",
            )
        if case.phase == "export":
            self._wait_until(lambda: job.poll() is not None, None, case.name)
        else:
            self._wait_until(lambda: self.steps_done() >= max(step, 1), job, f"the step of {case.name}")
        self.took_s.append(time.monotonic() - struck_s)
        if engines:
            assert not engines.keys() & self.engines().keys(), "those of before end with their ranks"
        if case.then != STARTS_AGAIN:
            assert self.attempts() == failed, case.name
        self._arm(following)
        return job

    def _is_saved(self, step: int) -> bool:
        """On disk or in memory: a thread beside the steps writes it."""
        memory = json.loads((self.output / "job.json").read_text())["memory_dir"]
        return any(
            (files.step_folder(root, step) / files.MANIFEST).is_file()
            for root in (self.checkpoints, Path(memory))
        )

    def _strike_disk(self, held: int, how: str) -> None:
        """Fill the disk, as the process that is held sees it, or have it take nothing more."""
        if how == "read-only":  # as a mount above it: files that are open stay so
            bind = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
            words = ["nsenter", f"--mount=/proc/{held}/ns/mnt", "sh", "-c", bind, "sh", str(self._disk)]
            subprocess.run(words, check=True)
            return
        filler = Path(f"/proc/{held}/root{self._disk}/filler")
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while file.write(bytes(1 << 16)):
                file.flush()

    def _move_clock(self, seconds: int) -> None:
        with (self.folder / "clock").open("r+b") as file:
            (before,) = struct.unpack("=q", file.read())
            file.seek(0)
            file.write(struct.pack("=q", before + seconds))

    def _limit_memory(self, held: int) -> None:
        """From now on it may have a little more than nothing: what it holds already is not counted."""
        group = CONTROL_GROUPS / f"siirl_chaos_{os.getpid()}_{self._number}"
        group.mkdir()
        self._groups.append(group)
        (group / "memory.limit_in_bytes").write_text(str(LEFT_BYTES))
        (group / "cgroup.procs").write_text(str(held))

    def run_to_the_cause(self, case: Case) -> None:
        """One strike that the run cannot get over: it must say so, and leave nothing half done."""
        assert case.then == NAMED
        self._arm(case)
        job = self._start()
        try:
            job = self._strike(job, case, None)
        finally:
            left = self._end(job)
        assert left == [], f"orphans: {left}"
        if case.who in DISKS:
            copy = self.folder / "copy"
            self.checkpoints = copy if self._disk == self.checkpoints else copy / "checkpoints"
        self._check_checkpoints()

    def _check_attempt(self, case: Case, step: int, attempt: dict[str, Any]) -> None:
        """The record names who was struck, where, and how."""
        causes = {"SIGSTOP": "it was stopped by a signal", OUT_OF_MEMORY: "killed by SIGKILL"}
        causes |= {"Ray actor": "its actor died"}
        if case.job == PARALLEL and not case.strikes_rank_of_engine:
            how, part = ("stopped", "killed")[case.how == "SIGKILL"], case.who.split()[-1]
            named = f"RolloutError: rollout engine .*VLLM::(EngineC|W){part[1:]}.*: {how} by signal"
            assert re.match(named, attempt["cause"]) and attempt["node"] == PHASES[case.phase], attempt
            return
        cause = causes.get(case.how, causes.get(case.who, f"killed by {case.how}"))
        assert attempt["cause"].startswith(cause), (case, attempt)
        if case.who == "both ranks" and attempt["rank"] != case.rank:
            return  # whose end was seen first; the other one may be anywhere
        assert attempt["rank"] == case.rank, (case, attempt)
        if case.how == OUT_OF_MEMORY:  # it may go on for a while
            told = "the kernel's OOM killer ended"  # recorded first, then said
            self._wait_until(lambda: told in self.console, None, told)
        elif not case.phase.startswith("write"):
            assert (attempt["node"], attempt["step"]) == (case.node, step), (case, attempt)

    def _victims(self, job: subprocess.Popen, case: Case, held: int) -> list[int]:
        match case.who:
            case "launcher" | "standby's launcher":
                return [job.pid]
            case "reward worker" | "reward keeper":
                scorers = self._processes("siirl.rewards.scoring_process")
                pids = {process.pid for process in scorers if process.environ()["RANK"] == str(case.rank)}
                worker = case.who == "reward worker"
                return [pid for pid in pids if (psutil.Process(pid).ppid() in pids) == worker]
            case _ if self._service is not None:
                return self._service.victims(psutil.Process(held), case.phase)
            case "Ray driver":
                return [job.pid]
            case "Ray actor":
                return [psutil.Process(held).ppid()]
            case "Ray raylet":
                return [psutil.Process(psutil.Process(held).ppid()).ppid()]
            case "Ray GCS":
                return [self._cluster.gcs_pid]
            case "vLLM engine":
                return [process.pid for process in self._processes(SERVER)]
            case _ if case.job == PARALLEL and not case.strikes_rank_of_engine:
                (server,) = self._processes(SERVER)
                name = "VLLM::EngineCore" if case.who.endswith("core") else "VLLM::Worker_TP1"
                return [
                    one.pid
                    for one in server.children(recursive=True)
                    if "".join(one.cmdline()).strip() == name
                ]
            case "both ranks":
                return [held, *(process.pid for process in self._ranks() if process.pid != held)]
            case "standby":
                return [process.pid for process in self._standbys()]
            case "memory keeper":
                return [process.pid for process in self._processes("siirl-keeper")]
        return [held]

    def engines(self) -> dict[int, float]:
        """Those that run, with what vLLM has started for them: their numbers, and when they were started."""
        servers = self._processes(SERVER)
        parts = [part for server in servers for part in find_parts(server.pid)]
        return {process.pid: process.create_time() for process in (*servers, *parts)}

    def _processes(self, word: str = "") -> list[psutil.Process]:
        """Of this job, with a word in their command: by their environment, wherever they hang."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = variables_of(process.pid).get("CHAOS_DIR") == str(self.folder)
                if mine and word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def _standbys(self) -> list[psutil.Process]:
        return [process for process in self._processes("--standby") if process.name() == STANDBY]

    def _await_standbys(self, job: subprocess.Popen) -> list[psutil.Process]:
        """Those of both ranks, which have imported all that they need: they work no more."""

        def work_s() -> list[float]:
            return [sum(process.cpu_times()[:2]) for process in self._standbys()]

        def all_wait() -> bool:
            before = work_s()
            time.sleep(AT_REST_S)
            return len(before) == 2 and before == work_s()

        self._wait_until(all_wait, job, "the processes that stand by")
        return self._standbys()

    def _ranks(self) -> list[psutil.Process]:
        found = self._processes("siirl.launch.worker_entry")
        return [process for process in found if process.name() != STANDBY]

    def _left(self, patience_s: float) -> list[str]:
        """The job's processes that do not end by themselves."""
        _, left = psutil.wait_procs(self._processes(), timeout=patience_s)
        return [str(process) for process in left if process.status() != psutil.STATUS_ZOMBIE]

    def _end(self, job: subprocess.Popen) -> list[str]:
        """End the job; the processes that outlived it, which are killed."""
        job.kill()
        job.wait()
        if self._service is not None:
            self._service.close()
        left = self._left(ENDED_S)
        for process in self._processes():
            process.kill()
        for group in self._groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        return left

    def _check_nothing_is_left(self) -> None:
        self._check_checkpoints()
        root = self.checkpoints
        assert not [path for path in root.iterdir() if path.suffix in (".tmp", ".old", ".deleted")]
        made, deadline = shared_memory() - self._shared_before, time.monotonic() + 60
        while made := {name for name in made & shared_memory() if not in_use(name)}:
            assert time.monotonic() < deadline, f"left in shared memory: {made}"
            time.sleep(0.2)

    def _check_checkpoints(self) -> None:
        """Each one that has its name is whole."""
        root = self.checkpoints
        for step in files.saved_steps(root) if root.exists() else ():
            files.verify(files.step_folder(root, step))

    def attempts(self) -> list[dict[str, Any]]:
        """Those that failed."""
        path = self.output / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def steps_done(self) -> int:
        path = self.output / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def _wait_until(self, what: Callable[[], bool], job: subprocess.Popen | None, word: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            ended = job is not None and job.poll() is not None
            if ended and what():
                return
            assert not ended and time.monotonic() < deadline, f"waited for {word}\n{self.console}"
            time.sleep(0.02)


def variables_of(pid: int) -> dict[str, str]:
    """The environment of a process; psutil reads none of one that has given itself a title, as vLLM's."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def shared_memory() -> set[str]:
    """What lies there now, but for Python's locks, as tqdm's in vLLM: 32 bytes that stay if the process that
    looks after them is killed with its group."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


def in_use(name: str, besides: Container[int] = ()) -> bool:
    """Whether a process that lives, of another number than these, has it open or mapped, or names it: another
    test's."""
    return any(name in text for text in _texts_of_processes(besides))


def _texts_of_processes(besides: Container[int]) -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) in besides:
            continue
        for file in ("maps", "cmdline"):
            with contextlib.suppress(OSError):
                yield (folder / file).read_text(errors="replace")
        with contextlib.suppress(OSError):
            yield " ".join(os.readlink(link) for link in (folder / "fd").iterdir())
