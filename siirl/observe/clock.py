"""One clock for the traces of all ranks, whose own clocks start anywhere."""

import time

import torch
import torch.distributed as dist

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
