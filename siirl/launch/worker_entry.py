"""The entry of every worker process, started by the local launcher or by torchrun."""

import argparse
import contextlib
import faulthandler
import fcntl
import gc
import getpass
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siirl.access import is_public, own_host
from siirl.command_line import EXIT_USER_ERROR
from siirl.compiler.backends import backend_of
from siirl.compiler.plan import Plan
from siirl.config import Config, from_dict
from siirl.errors import ConfigError
from siirl.guarded_files import own_folder
from siirl.launch.failure import UNRECORDED, describe_exception, write_failure
from siirl.launch.job import Job, ProcessPlace
from siirl.launch.rendezvous import attempt_store, keeps_store, store_of_ranks
from siirl.launch.standby import stand_by
from siirl.model_files.local_models import with_local_models
from siirl.model_files.run_inputs import RunInputs, began_with, begin_with
from siirl.observe.heartbeat import start_heartbeat
from siirl.observe.logs import setup_logging
from siirl.observe.position import read_position

if TYPE_CHECKING:
    import torch

CODE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch looks for the folder of its compiled code."""
KERNEL_CACHE = "TRITON_CACHE_DIR"
"""Where Triton looks for that of its kernels, and of how it tuned them."""


def main(argv: list[str] | None = None) -> int:
    """Run one rank of the job in --job."""
    parser = argparse.ArgumentParser(description="one worker of a siirl run; started by the launcher")
    parser.add_argument("--job", required=True, type=Path)
    parser.add_argument("--standby", type=int, help="a socket, on which to wait for the word to be a worker")
    given = parser.parse_args(argv)
    if given.standby is not None:
        stand_by(given.standby, lambda: _import_all(Job.read(given.job)))
    watched = _end_with_launcher()
    return run_rank(Job.read(given.job), ProcessPlace.from_env(os.environ), watched)


def run_rank(job: Job, place: ProcessPlace, watched: bool = False) -> int:
    """Run this rank to its end. On an exception: leave a failure record, say so, end the process at once.

    At once, because peers blocked in a collective with this rank notice only when it is gone. watched: our
    launcher waits for this process and will show a user error itself.
    """
    start_heartbeat(place.rank)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        setup_logging(place.rank, job.log_dir)
        _run(job, place)
    except Exception as error:  # noqa: BLE001 - the edge of the process
        failure = describe_exception(error, place.rank, read_position(job.position_path(place.rank)))
        is_told = write_failure(job.error_path(place.rank), failure)
        if not failure.user_error:
            where = f"[rank {place.rank}, node {failure.node}, step {failure.step}]"
            told = "" if watched or failure.error in failure.traceback else failure.error
            print(f"{where} {failure.traceback}{told}", file=sys.stderr)
        elif not (watched and is_told):
            print(f"siirl: {failure.error}", file=sys.stderr)
        _exit_now((EXIT_USER_ERROR if is_told else UNRECORDED) if failure.user_error else 1)
    return 0


def _import_all(job: Job) -> None:
    """What a worker imports before its first step, as far as the plan tells."""
    with no_collection():
        import_module("torch.distributed")
        import_module("transformers.utils.logging")
        import_module("siirl.parallel.process_groups")
        _load_entry(job.entry)
        for model in Plan.from_json(job.plan).models.values():
            import_module(backend_of(model).engine.partition(":")[0])
        if import_module("torch").cuda.is_initialized():
            os._exit(0)  # a package takes a device as it is imported: who waits holds none


def _run(job: Job, place: ProcessPlace) -> None:
    with no_collection():
        import torch.distributed as dist
        from transformers.utils.logging import disable_progress_bar

        from siirl.parallel.host_threads import set_host_threads
        from siirl.parallel.process_groups import connect_when_used

        entry = _load_entry(job.entry)
    disable_progress_bar()
    cfg = from_dict(job.config)
    begin_with(RunInputs(**job.inputs))
    if place.rank == 0:
        refuse_changed(cfg)
    plan = with_local_models(cfg, Plan.from_json(job.plan), cached_first=True)
    os.environ.update(cuda_variables(plan, place.rank, os.environ))
    os.environ.update(compile_cache(os.environ))
    device = pick_device(cfg.trainer.device, place)
    set_host_threads(device)
    refuse_public(cfg)
    timeout = timedelta(seconds=cfg.trainer.deadline_s)
    connect_when_used()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_store(place, timeout),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    entry(cfg, plan, place.rank, place.world_size, device, job)
    dist.destroy_process_group()


def refuse_changed(cfg: Config) -> None:
    """ConfigError if a model or a dataset is another one than when the run began; code is kept.

    An attempt after the first would read it and be another run.
    """
    inputs = began_with()
    changed = {name: path for name, path in inputs.changed().items() if not inputs.is_kept(name)}
    if changed and not cfg.trainer.resume_changed:
        listed = "".join(f"\n  {name}: {path}" for name, path in changed.items())
        raise ConfigError(
            f"what the run reads was changed since it began: its workers would go on with other data or "
            f"other weights.{listed}\nPut back what was there; or set trainer.resume_changed=true; or start "
            "another run (trainer.output_dir)."
        )


def refuse_public(cfg: Config) -> None:
    """ConfigError if ranks would meet on an address of the internet, and nobody said that this is safe."""
    with contextlib.suppress(OSError):  # of a name that nobody knows: torch says so
        host = own_host()
        if is_public(host) and not cfg.trainer.behind_firewall:
            raise ConfigError(
                f"this worker would listen on {host}, an address of the internet, for the other machines: "
                "torch and NCCL ask nobody for a token, and who connects can run code here. Use addresses of "
                "a private network (torchrun: --master-addr; Ray: --node-ip-address), or keep others out "
                "by a firewall and set trainer.behind_firewall=true."
            )


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Import what is large without the garbage collector: it would look through all modules again and again,
    for a fifth of the time that they take, and find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cuda_variables(plan: Plan, rank: int, env: Mapping[str, str]) -> dict[str, str]:
    """What the models of this rank want CUDA to be told before it starts, less what env says already."""
    wanted: dict[str, str] = {}
    for model in plan.models.values():
        if rank in model.ranks:
            wanted |= backend_of(model).environment(model.dims)
    return {name: value for name, value in wanted.items() if name not in env}


def compile_cache(env: Mapping[str, str]) -> dict[str, str]:
    """Where torch and Triton keep the code that they compile, unless env says it: folders that are this
    user's alone.

    Torch takes a folder of a known name in that for temporary files, whoever has made it, and runs what is
    in it. Triton's is its own, said beforehand: torch would give each device another one as soon as it
    compiles, and what was tuned before, or by other ranks, would be tuned again.
    """
    found = {}
    if CODE_CACHE not in env:
        names = [Path(tempfile.gettempdir()), Path.home() / ".cache"]
        own = own_folder(*(folder / f"torchinductor_{user_id()}" for folder in names))
        found[CODE_CACHE] = str(own or tempfile.mkdtemp(prefix="siirl-compiled-"))
    if KERNEL_CACHE not in env:
        kernels = own_folder(Path(env.get("TRITON_HOME") or Path.home(), ".triton", "cache"))
        found[KERNEL_CACHE] = str(kernels or Path(env.get(CODE_CACHE) or found[CODE_CACHE], "triton"))
    return found


def user_id() -> str:
    """The name of this user, as torch has it in names of folders."""
    try:
        return re.sub(r"[^\w.-]", "_", getpass.getuser())
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def pick_device(wanted: str, place: ProcessPlace) -> "torch.device":
    """This rank's device. auto: a GPU for each rank of this machine if it has GPUs, else the CPU.

    ConfigError: GPUs are there or asked for, but fewer are visible than this machine has ranks.
    """
    import torch

    visible = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and not visible):
        return torch.device("cpu")
    if visible < place.local_world_size:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ConfigError(
            f"trainer.device={wanted} with trainer.n_gpus_per_node={place.local_world_size}, but {visible} "
            f"GPU(s) are visible here (CUDA_VISIBLE_DEVICES: {shown}): each rank needs its own. Set "
            f"{f'trainer.n_gpus_per_node={visible}, or ' if visible else ''}trainer.device=cpu."
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _store(place: ProcessPlace, timeout: timedelta) -> Any:
    """The rendezvous store: torchrun's, or that of the launcher's socket."""
    import torch.distributed as dist

    if keeps_store():
        kept = next(iter(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout)))[0]
        return attempt_store(kept, place.rank, place.world_size, timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return store_of_ranks(address, port, place.rank, place.world_size, timeout)


def _load_entry(name: str) -> Callable[..., None]:
    module, function = name.split(":")
    return getattr(import_module(module), function)


def _end_with_launcher() -> bool:
    """End this process and all that it started when the launcher is gone, even if it was killed.

    A thread blocks on the reading end of a pipe whose only writer is the launcher; where this process is
    stopped then, as one that is about to say where it hangs, the kernel ends it. False: no launcher to watch.
    """
    lifeline_fd = os.environ.pop("SIIRL_LIFELINE_FD", None)
    if lifeline_fd is None:
        return False

    def wait() -> None:
        os.read(int(lifeline_fd), 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        own_fd = os.open(f"/proc/self/fd/{lifeline_fd}", os.O_RDONLY)  # workers share the other one
        fcntl.fcntl(own_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(own_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own_fd, fcntl.F_SETFL, fcntl.fcntl(own_fd, fcntl.F_GETFL) | os.O_ASYNC)
    return True


def _exit_now(code: int) -> None:
    with contextlib.suppress(OSError):  # of a full disk
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
