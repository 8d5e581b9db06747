"""Profiles of steps on a GPU: kernels belong to the node that queued them, and allocations have an owner."""

import gzip
import json
import pickle

import pytest
import torch

from siirl.observe.profile import TRACE_END, MemorySnapshot, StepProfile
from siirl.observe.spans import Observer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_steps(profile) -> None:
    device = torch.device("cuda", 0)
    observer = Observer(profile=profile, sync=torch.cuda.synchronize)
    rows = torch.rand(512, 512, device=device)
    for step in (1, 2):
        observer.begin_step(step)
        with observer.span("sort", step, (0,)):
            rows.sort()
        with observer.span("multiply", step, (1,)):
            rows @ rows
        observer.end_step()


def test_a_node_has_its_kernels_and_no_others(tmp_path):
    run_steps(StepProfile(tmp_path, 0, [1, 2], torch.device("cuda", 0), nodes=["multiply"]))
    for step in (1, 2):
        with gzip.open(tmp_path / f"step_{step}_rank_0_multiply{TRACE_END}", "rt") as file:
            events = json.load(file)["traceEvents"]
        kernels = [event["name"].lower() for event in events if event.get("cat") == "kernel"]
        assert kernels and any("gemm" in name or "nvjet" in name for name in kernels)
        assert not any("sort" in name for name in kernels)


def test_a_snapshot_says_who_allocated(tmp_path):
    run_steps(MemorySnapshot(tmp_path, 0, [2]))
    (path,) = tmp_path.iterdir()
    traces = pickle.loads(path.read_bytes())["device_traces"][0]
    assert path.name == "step_2_rank_0.pickle" and traces
    frames = {frame["filename"] for event in traces for frame in event.get("frames", [])}
    assert any(name.endswith("test_step_profile_gpu.py") for name in frames)
