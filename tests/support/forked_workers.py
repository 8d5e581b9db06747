"""The workers of `run_workers`: forks of a nursery, which is the process that this runs in."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked_starts

KILL_AFTER_S = 5.0  # a worker dumps its stacks and exits at its deadline; this much later it is killed
REPORT_WITHIN_S = 1.0  # after the first failure the others may still report theirs


def serve(parent: Connection) -> None:
    """Run one job after another until the session closes the pipe."""
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
    if job["starts"]:
        forked_starts.serve_below()  # while there are no threads
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
    import torch
    import torch.distributed as dist

    from siirl.parallel.process_groups import connect_when_used

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
