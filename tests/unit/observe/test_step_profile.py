"""Profiles of steps: which operators and ranges of what is run get into which file."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from siirl.observe.profile import TRACE_END, Details, MemorySnapshot, StepProfile
from siirl.observe.spans import Observer, observing, phase


def run_steps(profile, steps=2) -> Observer:
    """Steps with a node that multiplies, one that sorts, and a multiplication outside of both."""
    observer = Observer(profile=profile)
    rows = torch.rand(8, 8, requires_grad=True)
    with observing(observer):
        for step in range(1, steps + 1):
            observer.begin_step(step)
            with observer.span("load", step, (0,)):
                rows.detach().cumsum(0)
            for _ in range(2):
                with observer.span("multiply", step, (1,)), phase("forward"):
                    (rows @ rows).sum().backward()
            with observer.span("serve", step, (2,), node="order"):
                rows.detach().sort()
            observer.end_step()
            torch.linalg.inv(torch.eye(4))
    return observer


def events_of(path: Path) -> dict[str, list[dict]]:
    """Name -> the intervals of a trace."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    return {event["name"]: [other for other in events if other["name"] == event["name"]] for event in events}


def inside(inner: dict, outer: dict) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01


def test_a_step_is_one_trace_with_spans_and_phases_as_ranges_of_its_operators(tmp_path):
    run_steps(StepProfile(tmp_path, 3, [2], torch.device("cpu")))
    assert [path.name for path in tmp_path.iterdir()] == [f"step_2_rank_3{TRACE_END}"]
    events = events_of(tmp_path / f"step_2_rank_3{TRACE_END}")
    assert {"load", "serve", "aten::cumsum", "aten::mm", "aten::sort", "MmBackward0"} <= events.keys()
    assert "aten::linalg_inv_ex" not in events, "it ran between the steps"
    assert len(events["multiply"]) == len(events["forward"]) == 2, "of this step alone"
    for node, part in zip(events["multiply"], events["forward"], strict=True):
        assert inside(part, node)
        assert sum(inside(op, part) for op in events["aten::mm"]) == 3, "forward, and two of backward"


def test_each_named_node_has_a_trace_of_its_own_without_what_else_ran(tmp_path):
    run_steps(StepProfile(tmp_path, 0, [1], torch.device("cpu"), nodes=["multiply", "order"]))
    names = ["multiply", "multiply_2", "order_serve"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_1_rank_0_{name}{TRACE_END}" for name in names
    ]
    first, second, served = (events_of(tmp_path / f"step_1_rank_0_{name}{TRACE_END}") for name in names)
    for events in (first, second):
        assert len(events["multiply"]) == 1 and len(events["aten::mm"]) == 3
        assert all(inside(op, events["multiply"][0]) for op in events["aten::mm"])
        assert not {"aten::sort", "aten::cumsum", "serve", "load"} & events.keys()
    assert "aten::sort" in served and not {"aten::mm", "multiply", "forward"} & served.keys()


def test_details_are_in_the_trace_where_they_are_asked_for(tmp_path):
    details = Details(shapes=True, memory=True, stack=True)
    run_steps(StepProfile(tmp_path, 0, [1], torch.device("cpu"), ["multiply"], details), steps=1)
    path = tmp_path / f"step_1_rank_0_multiply{TRACE_END}"
    assert events_of(path)["aten::mm"][0]["args"]["Input Dims"] == [[8, 8], [8, 8]]
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event["name"] == "[memory]" for event in events)
    assert any("test_step_profile.py" in event["name"] for event in events)


def test_nothing_runs_where_no_step_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler.profile, "start", lambda self: pytest.fail("a profile was started"))
    observer = run_steps(StepProfile(tmp_path / "profile", 0, [7], torch.device("cpu")))
    assert not (tmp_path / "profile").exists() and observer.spans


def test_a_profile_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    run_steps(StepProfile(tmp_path / "file" / "profile", 0, [1, 2], torch.device("cpu")))
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and all("is not written, and the run goes on" in line for line in said)


def test_a_snapshot_of_memory_is_of_the_asked_steps(tmp_path, monkeypatch):
    """By torch's own functions, here without a GPU: tests/gpu has the true ones."""
    calls = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **more: calls.append(enabled)
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **more: {"calls": list(calls)})
    run_steps(MemorySnapshot(tmp_path / "new", 1, [2]), steps=3)
    assert calls == ["all", None]
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "step_2_rank_1.pickle" and pickle.loads(path.read_bytes()) == {"calls": ["all"]}
