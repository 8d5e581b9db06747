"""The process that has imported what siirl's processes import, and forks them: what makes tests start fast.

    python tests/support/nursery.py FD PADDING

It takes orders from the socket FD: each forks another nursery, which imports more and serves on a socket that
comes along (`SERVICES`). None has threads or CUDA, so that what it forks is as a new process.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[:0] = [path for path in (os.path.dirname(__file__),) if path not in sys.path]

import forked_starts  # noqa: E402 - beside this file, which may be run by its path
import forked_workers  # noqa: E402

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    forked_starts.TORCHRUN,
    "tensordict",
    "transformers.models.qwen3.modeling_qwen3",
    "hydra",
    "peft",
    "pyarrow.pandas_compat",
    "pytest",  # files of tests have what workers do
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "pandas",  # pyarrow imports it where it is installed
    "setproctitle",
    "mcp.server.mcpserver",
    "uvicorn",
    "siirl.cli",
    "siirl.commands",
    "siirl.dag_worker.training",
    "siirl.engines.train.fsdp.fsdp_engine",
    "siirl.engines.rollout.hf.hf_rollout",
    "siirl.launch.input_checks",
    "siirl.launch.worker_entry",
    "siirl.main_dag",
    "siirl.nodes.actor_train",
    "siirl.nodes.advantage",
    "siirl.nodes.function_reward",
    "siirl.nodes.log_prob",
    "siirl.rewards.scoring_process",
)
PRELOAD_ON_CPU = ("siirl.engines.train.megatron.engine",)
"""Where there is CUDA, importing it might initialise CUDA, which forks do not survive."""
SETTINGS = (
    *("algorithm.adv_estimator=grpo", "data.train_files=/a-b/c.parquet", "custom_reward_function.path=null"),
    *("data.mixture={one:1,two:0.5}", "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.logger=[console]"),
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=3",
)
"""With most of the grammar of settings."""
BRANCHES = {
    "": (),
    "vllm": (
        "siirl.engines.rollout.vllm.native",
        "siirl.engines.rollout.served.server",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.models.qwen3",
    ),
}
"""What each imports on top. One with vLLM is of its own, as that changes settings of torch."""
HUGE, PAGE, MADV_COLLAPSE = 2 << 20, os.sysconf("SC_PAGE_SIZE"), 25


def serve_orders(channel: socket.socket) -> None:
    """Fork a nursery for each order, until the other end closes."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not message:
            return
        order = json.loads(message)
        if os.fork() == 0:
            channel.close()
            if names := BRANCHES[order["branch"]]:
                _import(names)
                _gather_memory()
            SERVICES[order["service"]](socket.socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])


def serve_jobs(channel: socket.socket) -> None:
    """Run the jobs of `run_workers`, one after another."""
    forked_workers.serve(Connection(channel.detach()))


SERVICES = forked_starts.SERVICES
SERVICES.update(orders=serve_orders, jobs=serve_jobs, starts=forked_starts.serve)


def _import(names: Collection[str]) -> None:
    gc.disable()
    with warnings.catch_warnings(action="ignore"):
        for name in names:
            with contextlib.suppress(ImportError):  # of what is not installed
                importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # no process looks for garbage in what all share


def _warm_up() -> None:
    """Compute what each process would compute as it first needs it: 0.2 of the 1.4 CPU s of a small job, and
    1.1 CPU s of a reward worker that compares formulas."""
    import train_engine_cases
    from PIL import Image
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from siirl.config import load_config
    from siirl.rewards.math_answer import math

    train_engine_cases.configured([])
    load_config(SETTINGS)
    get_checkpoint_conversion_mapping("qwen3")
    Image.preinit()
    math("", r"\boxed{\sin^2 x + \cos^2 x}", "1", None, compare_timeout_s=60.0)


def _gather_memory() -> None:
    """Have the memory that all forks share in pages of 2 MiB: a fork copies an entry for each page, and drops
    it at its end. That took 20 and 23 ms of this process's 490 MB.
    """
    libc, maps = ctypes.CDLL(None), Path("/proc/self/maps").read_text()
    for first, end in re.findall(r"^(\w+)-(\w+) rw.p \S+ \S+ 0 *(?:\[heap\])?$", maps, re.MULTILINE):
        for place in range(-(-int(first, 16) // HUGE) * HUGE, int(end, 16) - HUGE + 1, HUGE):
            held = (ctypes.c_ubyte * (HUGE // PAGE))()
            libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(HUGE), held)
            if bytes(held).count(1) > len(held) / 2:  # the rest is reserved, and may never be used
                libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


def main() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other way to ask for CUDA spoils it for forks
    import torch

    _import(PRELOAD if torch.cuda.is_available() else (*PRELOAD, *PRELOAD_ON_CPU))
    torch.set_num_threads(1)
    _warm_up()
    gc.collect()
    gc.freeze()
    _gather_memory()
    forked_starts.be_a_nursery()
    with contextlib.suppress(KeyboardInterrupt):
        serve_orders(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
