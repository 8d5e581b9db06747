"""Traces of ranks whose clocks differ lie on one time axis."""

from dist_harness import run_workers

AHEAD_S = 1000.0


def zero_under_a_shifted_clock(rank: int, world_size: int) -> float:
    """This rank's idea of the common zero, its clock being AHEAD_S a rank ahead."""
    import time
    from unittest.mock import patch

    import torch.distributed as dist

    from siirl.dag_worker.observing import common_zero_s

    real = time.perf_counter
    with patch("siirl.dag_worker.observing.time.perf_counter", lambda: real() + AHEAD_S * rank):
        return common_zero_s(dist.group.WORLD)


def test_clocks_that_differ_are_aligned():
    zeros = run_workers(zero_under_a_shifted_clock, 3)
    aligned = [zero_s - AHEAD_S * rank for rank, zero_s in enumerate(zeros)]
    assert max(aligned) - min(aligned) < 0.05
