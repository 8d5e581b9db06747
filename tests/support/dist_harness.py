"""Runs a function on several gloo processes: the one way in which tests start workers.

Importing torch takes seconds, so one process (the nursery) imports it once per test session and forks the
workers of each call from there: every worker is fresh, and starts in milliseconds.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from siirl.parallel.process_groups import connect_when_used

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "tensordict",
    "transformers.models.qwen3.modeling_qwen3",
    "hydra",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "pandas",  # pyarrow imports it where it is installed
    "siirl.dag_worker.training",
    "siirl.engines.train.fsdp.fsdp_engine",
    "siirl.engines.rollout.hf.hf_rollout",
    "siirl.launch.input_checks",
    "siirl.main_dag",
    "siirl.nodes.actor_train",
    "siirl.nodes.function_reward",
    "siirl.nodes.log_prob",
)
PRELOAD_ON_CPU = ("siirl.engines.train.megatron.engine",)
"""Where there is CUDA, importing it might initialise CUDA, which forks do not survive."""
KILL_AFTER_S = 5.0  # a worker dumps its stacks and exits at its deadline; this much later it is killed
REPORT_WITHIN_S = 1.0  # after the first failure the others may still report theirs


class WorkerFailure(RuntimeError):
    """A worker raised, died, or passed the deadline; the message holds each failing rank's traceback."""


def run_workers(
    fn: Callable[..., Any], world_size: int, *args: Any, deadline_s: float = 60, backend: str | None = "gloo"
) -> list[Any]:
    """Call fn(rank, world_size, *args) in world_size processes of one process group; return their results.

    fn must be importable (a module-level function); args and results must be picklable. Each worker has one
    thread, the environment of the caller, and the default process group initialised. With NCCL in `backend`,
    rank r uses CUDA device r. backend None: no process group, but the environment of a process that torchrun
    has started. WorkerFailure, with tracebacks, if a worker raises, dies or is late.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=deadline_s), wait_for_workers=False)
    job = {
        "call": pickle.dumps((fn, args)),
        "world_size": world_size,
        "port": store.port,
        "deadline_s": deadline_s,
        "backend": backend,
        "environ": dict(os.environ),
        "path": list(sys.path),
        "cwd": os.getcwd(),
    }
    nursery = _nursery()
    try:
        nursery.send(job)
        if not nursery.poll(deadline_s + 2 * KILL_AFTER_S + 60):
            raise WorkerFailure(
                f"{fn.__name__}: no answer within {deadline_s} s and the time to kill its workers"
            )
        kind, result = nursery.recv()
    except BaseException:
        _close_nursery()
        raise
    if kind == "failed":
        raise WorkerFailure(f"{fn.__name__} on {world_size} workers failed.\n{result}")
    return [pickle.loads(of_rank) for of_rank in result]


_open: list[tuple[BaseProcess, Connection]] = []


def _nursery() -> Connection:
    if not _open:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), name="test-nursery")
        process.start()
        theirs.close()
        _open.append((process, ours))
    return _open[0][1]


@atexit.register
def _close_nursery() -> None:
    while _open:
        process, connection = _open.pop()
        connection.close()
        process.join(KILL_AFTER_S)
        if process.is_alive():
            process.kill()


def _serve(parent: Connection) -> None:
    """The nursery's loop: import once, then run one job after another until the session closes the pipe."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other way to ask for CUDA spoils it for forks
    for module in PRELOAD if torch.cuda.is_available() else (*PRELOAD, *PRELOAD_ON_CPU):
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no worker looks for garbage in what all share
    while True:
        try:
            job = parent.recv()
        except EOFError:
            return
        parent.send(_run_job(job))


def _run_job(job: dict[str, Any]) -> tuple[str, Any]:
    """Fork the workers, collect their results: ("done", one pickle per rank) or ("failed", text)."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers: dict[int, BaseProcess] = {}
        pipes: dict[int, Connection] = {}
        for rank in range(job["world_size"]):
            pipes[rank], theirs = context.Pipe(duplex=False)
            workers[rank] = context.Process(
                target=_work, args=(rank, job, theirs, folder), name=f"worker-{rank}"
            )
            workers[rank].start()
            theirs.close()
            with contextlib.suppress(ProcessLookupError):
                os.setpgid(workers[rank].pid, 0)  # so that what a worker starts goes with it
        try:
            results, failures = _collect(pipes, workers, job["deadline_s"], Path(folder))
        finally:
            for worker in workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.join()
    if failures:
        return "failed", "\n".join(failures)
    return "done", [results[rank] for rank in sorted(results)]


def _collect(
    pipes: dict[int, Connection], workers: dict[int, BaseProcess], deadline_s: float, folder: Path
) -> tuple[dict[int, bytes], list[str]]:
    results: dict[int, bytes] = {}
    failures: list[str] = []
    end = time.monotonic() + deadline_s + KILL_AFTER_S
    waiting = dict(pipes)
    while waiting and (left := end - time.monotonic()) > 0:
        ready = set(wait(list(waiting.values()), left))
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            kind, result = _receive(waiting.pop(rank), workers[rank], folder / str(rank))
            if kind == "done":
                results[rank] = result
            else:
                failures.append(f"--- rank {rank} {result}")
                end = min(end, time.monotonic() + REPORT_WITHIN_S)
    if waiting and not failures:
        failures.append(f"ranks {sorted(waiting)} ignored the deadline of {deadline_s} s")
    return results, failures


def _receive(pipe: Connection, worker: BaseProcess, stacks: Path) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        worker.join(REPORT_WITHIN_S)
        dump = stacks.read_text() if stacks.exists() else ""
        return "failed", f"died without a result, exit code {worker.exitcode}\n{dump}"


def _work(rank: int, job: dict[str, Any], answer: Connection, folder: str) -> None:
    """One worker: set up the process, call the function, answer."""
    with open(Path(folder) / str(rank), "w") as stacks:
        faulthandler.dump_traceback_later(job["deadline_s"], exit=True, file=stacks)
        try:
            _prepare(rank, job)
            fn, args = pickle.loads(job["call"])
            result = fn(rank, job["world_size"], *args)
            answer.send(("done", pickle.dumps(result)))
        except BaseException:  # noqa: BLE001 - the edge of the process
            answer.send(("failed", f"raised\n{traceback.format_exc()}"))
        answer.close()
        faulthandler.cancel_dump_traceback_later()
    time.sleep(
        job["deadline_s"]
    )  # peers may still be talking to this rank: the nursery ends all of them together
    os._exit(0)


def _prepare(rank: int, job: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(job["environ"])
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    if job["backend"] is None:
        os.environ.update(_torchrun_variables(rank, job))
    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if job["backend"] is None:
        return
    if "nccl" in job["backend"]:
        torch.cuda.set_device(rank)
    connect_when_used()
    dist.init_process_group(
        job["backend"],
        store=dist.TCPStore("127.0.0.1", job["port"], None, False),
        rank=rank,
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["deadline_s"]),
    )


def _torchrun_variables(rank: int, job: dict[str, Any]) -> dict[str, str]:
    """What torchrun tells the processes that it starts on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job["world_size"]),
        "LOCAL_WORLD_SIZE": str(job["world_size"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store runs in the process that called run_workers
    }
