"""Memory peaks of spans on a GPU: each span has its own, other processes' share is seen."""

import time

import pytest
import torch

from siirl.observe.memory_probe import DeviceMemory
from siirl.observe.spans import Observer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GIB = 2**30


def test_each_span_has_its_own_peak():
    device = torch.device("cuda", 0)
    observer = Observer(memory=DeviceMemory(device))
    observer.begin_step()
    base_gib = torch.cuda.memory_allocated(device) / GIB
    for name, gib in (("large", 2), ("small", 1)):
        with observer.span(name, 1):
            block = torch.empty(gib * GIB, dtype=torch.uint8, device=device)
            observer.sample_memory()
            del block
            torch.cuda.empty_cache()
    values = observer.metrics().values()
    for name, gib in (("large_", 2), ("small_", 1), ("", 2)):
        assert values[f"memory/{name}peak_gib"] == pytest.approx(base_gib + gib, abs=0.05)
        assert values[f"memory/{name}reserved_gib"] >= values[f"memory/{name}peak_gib"]
        assert values[f"memory/{name}device_gib"] >= values[f"memory/{name}peak_gib"]
    observer.begin_step()
    assert "memory/large_peak_gib" not in observer.metrics().values()


def test_measuring_a_span_is_cheap():
    observer = Observer(memory=DeviceMemory(torch.device("cuda", 0)))
    start_s = time.perf_counter()
    for _ in range(200):
        with observer.span("node", 1):
            pass
    assert (time.perf_counter() - start_s) / 200 < 2e-3
    print(f"{(time.perf_counter() - start_s) / 200 * 1e6:.0f} microseconds a span")
