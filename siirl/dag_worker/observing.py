"""The observer of a worker: what it measures on this device, and whether it writes a trace or profiles."""

import logging
import socket
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from siirl.compiler.plan import Plan
from siirl.compiler.profiled_nodes import profiled_nodes
from siirl.config import Config
from siirl.observe.heartbeat import current_heartbeat
from siirl.observe.memory_probe import DeviceMemory, HostMemory
from siirl.observe.position import PositionFile
from siirl.observe.profile import PROFILE_DIR, Details, MemorySnapshot, StepProfile
from siirl.observe.spans import Observer, Profile, waiting
from siirl.observe.trace import TRACE_DIR, TraceFile, merge_trace

ROUNDS = 8
"""Round trips to each rank; the quickest counts."""


def common_zero_s(group: dist.ProcessGroup) -> float:
    """The moment of rank 0's call, in seconds of this rank's time.perf_counter.

    Good to half a round trip. All ranks of `group` call it; rank 0 asks one after another what time it is
    there, through host memory. Source: Cristian, "Probabilistic clock synchronization" (1989).
    """
    if dist.get_rank(group) == 0:
        zero_s = time.perf_counter()
        for rank in range(1, dist.get_world_size(group)):
            offset_s = min(_ask(rank, group) for _ in range(ROUNDS))[1]
            dist.send(_number(zero_s + offset_s), group_dst=rank, group=group)
        return zero_s
    received = _number(0.0)
    for _ in range(ROUNDS):
        dist.recv(received, group_src=0, group=group)
        dist.send(_number(time.perf_counter()), group_dst=0, group=group)
    dist.recv(received, group_src=0, group=group)
    return float(received)


def _ask(rank: int, group: dist.ProcessGroup) -> tuple[float, float]:
    """(round trip, how far that rank's clock is ahead of ours), in seconds."""
    answer = _number(0.0)
    sent_s = time.perf_counter()
    dist.send(answer, group_dst=rank, group=group)
    dist.recv(answer, group_src=rank, group=group)
    back_s = time.perf_counter()
    return back_s - sent_s, float(answer) - (sent_s + back_s) / 2


def _number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


log = logging.getLogger(__name__)


def make_observer(
    cfg: Config, plan: Plan, rank: int, device: torch.device, output_dir: Path, position_path: Path
) -> Observer:
    """The observer of this rank. All ranks call it: but for trainer.trace=false they align their clocks."""
    trainer = cfg.trainer
    on_gpu = device.type == "cuda"
    trace = None
    if trainer.trace is not False:
        zero_s = common_zero_s(dist.group.WORLD)
        label = f"rank {rank} ({socket.gethostname()}, {device})"
        steps = trainer.trace_steps if trainer.trace else None
        trace = TraceFile(output_dir / TRACE_DIR, rank, label, zero_s, steps)
    return Observer(
        position=PositionFile(position_path),
        sync=partial(torch.cuda.synchronize, device) if on_gpu else None,
        trace=trace,
        memory=DeviceMemory(device) if on_gpu else HostMemory(),
        sync_phases=bool(trainer.trace and trainer.trace_sync),
        heartbeat=current_heartbeat(),
        profile=_make_profile(cfg, plan, rank, device, output_dir),
    )


def _make_profile(
    cfg: Config, plan: Plan, rank: int, device: torch.device, output_dir: Path
) -> Profile | None:
    """What records steps of this rank, if anything does."""
    profiler = cfg.profiler
    if not profiler.enable or not (profiler.all_ranks or rank in profiler.ranks):
        return None
    folder = profile_folder(cfg, output_dir)
    if profiler.tool == "torch_memory":
        if device.type == "cuda":
            return MemorySnapshot(folder, rank, profiler.profile_steps)
        log.warning("profiler.tool=torch_memory records nothing: rank %d runs on %s, not a GPU", rank, device)
        return None
    details = Details(profiler.record_shapes, profiler.with_memory, profiler.with_stack)
    nodes = profiled_nodes(profiler, plan)
    return StepProfile(folder, rank, profiler.profile_steps, device, nodes, details)


def profile_folder(cfg: Config, output_dir: Path) -> Path:
    """Where profiles go."""
    given = cfg.profiler.save_path
    return Path(given).expanduser() if given else output_dir / PROFILE_DIR


def finish_trace(cfg: Config, rank: int, output_dir: Path) -> Path | None:
    """Merge the traces of all ranks on rank 0, once all have come here; the file, None where none was asked
    for: `siirl trace` makes one of those of a few steps.
    """
    if not cfg.trainer.trace:
        return None
    with waiting():
        dist.barrier()
    return merge_trace(output_dir) if rank == 0 else None
