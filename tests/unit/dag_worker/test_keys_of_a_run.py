"""Keys that say what a run writes, and how: each reaches what does it."""

from types import SimpleNamespace

import pytest
import torch
from plan_cases import config

from siirl.compiler.compile import compile_plan, load_dag
from siirl.dag_worker import observing, training
from siirl.dag_worker.row_ledger import RowLedger
from siirl.data.ledger_events import FOLDER
from siirl.observe.profile import Details
from siirl.observe.spans import observing as observed_by
from siirl.observe.spans import phase


@pytest.mark.parametrize(("gib", "most"), [("0.5", 2**29), ("null", None)])
def test_event_files_of_tensorboard_are_bounded_by_their_key(tmp_path, monkeypatch, gib, most):
    """That the bound holds: tests/unit/observe/test_step_files.py."""
    told = []
    monkeypatch.setattr(training, "make_sinks", lambda names, info: told.append((names, info)))
    cfg = config("trainer.logger=[tensorboard]", f"trainer.tensorboard_gib={gib}", "trainer.samples_gib=9")
    training.Training._make_sinks(SimpleNamespace(cfg=cfg, output_dir=tmp_path, total_steps=3, step=0))
    ((names, info),) = told
    assert "tensorboard" in names and (info.tensorboard_bytes, info.samples_bytes) == (most, 9 * 2**30)


def ledger_bytes(folder, level: str, gib: float | None, ranks: int) -> int:
    """What the ledger of one of these ranks takes after a hundred steps of 50 kB."""
    asked = "null" if gib is None else f"{gib:.12f}"
    cfg = config(f"trainer.ledger={level}", f"trainer.ledger_gib={asked}")
    plan, _ = compile_plan(load_dag(cfg), cfg, ranks)
    ledger = RowLedger(cfg, plan, 0, {"attempt": 1, "first_step": 1}, {}, folder)
    for step in range(1, 101):
        ledger._add("waiting", step, 0, 6400, {"id": torch.randint(1 << 60, (6400,))})
        ledger.end_step(step, {})
    ledger.close()
    return sum(path.stat().st_size for path in (folder / FOLDER).iterdir())


@pytest.mark.parametrize(("level", "ranks", "parts"), [("rows", 1, 1), ("rows", 2, 2), ("tokens", 2, 4)])
def test_the_ledger_of_all_ranks_takes_what_its_key_says(tmp_path, level, ranks, parts):
    """A rank's share of it, of which its tokens have the half that these steps leave."""
    whole = ledger_bytes(tmp_path / "whole", level, None, ranks)
    bounded = ledger_bytes(tmp_path / "bounded", level, whole / 2 / 2**30, ranks)
    most = whole / 2 / parts
    assert 0.5 * most < bounded < 1.2 * most


@pytest.mark.parametrize(
    ("keys", "waits"),
    [
        (["trainer.trace=true", "trainer.trace_sync=true"], 4),
        (["trainer.trace=true"], 2),
        (["trainer.trace_sync=true"], 2),
    ],
)
def test_phases_wait_for_the_gpu_where_they_are_told_to(tmp_path, monkeypatch, keys, waits):
    """A node does at its beginning and at its end."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(observing, "common_zero_s", lambda group: 0.0)
    monkeypatch.setattr(observing, "DeviceMemory", lambda device: None)
    cfg = config(*keys)
    plan, _ = compile_plan(load_dag(cfg), cfg, 1)
    observer = observing.make_observer(cfg, plan, 0, torch.device("cuda"), tmp_path, tmp_path / "position")
    with observed_by(observer), observer.span("actor_train", 1), phase("micro_batch"):
        pass
    observer.close()
    assert len(waited) == waits


@pytest.mark.parametrize("asked", [True, False])
def test_a_profile_has_the_lines_of_python_where_it_is_asked_for(tmp_path, asked):
    """What a trace then holds: tests/unit/observe/test_step_profile.py."""
    cfg = config("profiler.enable=true", "profiler.profile_steps=[1]", f"profiler.with_stack={asked}")
    plan, _ = compile_plan(load_dag(cfg), cfg, 1)
    profile = observing._make_profile(cfg, plan, 0, torch.device("cpu"), tmp_path)
    assert profile._details == Details(stack=asked)
