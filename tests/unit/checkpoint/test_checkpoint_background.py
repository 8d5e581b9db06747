"""Saves in the background of one process: what is saved, when it becomes current, where errors come out."""

import threading
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from safetensors.torch import load_file
from torch import nn

from siirl.checkpoint import files
from siirl.checkpoint import manager as writer
from siirl.checkpoint.manager import CheckpointManager
from siirl.checkpoint.staging import SavedModel
from siirl.errors import CheckpointError


class Engine:
    """A module as the checkpoint sees an engine; `change` is an optimizer step."""

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.moment = torch.zeros(2, 3)
        self.version = 0

    def change(self) -> None:
        with torch.no_grad():
            self.module.weight.add_(1.0)
        self.moment.mul_(0.5).add_(self.version)
        self.version += 1

    def state_dict(self):
        moments = {"exp_avg.weight": self.moment, "step": torch.tensor(float(self.version))}
        model = {name: p.detach() for name, p in self.module.named_parameters()}
        return {"model": model, "optimizer": moments, "version": self.version}

    def load_state_dict(self, state):
        self.version = state["version"]

    def export_weights(self, dtype=None):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()  # the live weight, as an engine on one rank yields it


@pytest.fixture
def gate(monkeypatch):
    """Holds writes back until it is set; they start after the state is staged."""
    opened = threading.Event()
    original = writer.save_tensors

    def wait_first(*arguments):
        assert opened.wait(20)
        original(*arguments)

    monkeypatch.setattr(writer, "save_tensors", wait_first)
    yield opened
    opened.set()


def saved_values(path: Path) -> tuple[list, list, int]:
    engine = Engine()
    CheckpointManager(path.parent, 2, None).load(path, {"actor": SavedModel(engine, None)})
    return engine.module.weight.tolist(), engine.moment.tolist(), engine.version


def test_a_save_in_the_background_holds_the_state_of_the_call_and_becomes_current_when_complete(
    tmp_path, gate
):
    engine, manager = Engine(), CheckpointManager(tmp_path, 2, None)
    engine.change()
    models = {"actor": SavedModel(engine, None)}
    expected = (engine.module.weight.tolist(), engine.moment.tolist(), engine.version)
    generator = {"rng": torch.arange(3)}
    path = manager.save(1, models, {"position": 7}, generator, background=True)
    engine.change()
    generator["rng"].zero_()
    assert files.current_step(tmp_path) is None and manager.take_finished() is None
    gate.set()
    saved = manager.wait()
    assert saved.path == path and saved.total_s > 0 and manager.wait() is None
    assert files.current_step(tmp_path) == 1 and saved_values(path) == expected
    restored = manager.load(path, models)
    assert restored.extra == {"position": 7} and restored.rank_state["rng"].tolist() == [0, 1, 2]


def test_the_next_save_waits_for_the_one_before_and_old_ones_are_deleted(tmp_path, gate):
    engine, manager = Engine(), CheckpointManager(tmp_path, 2, None)
    models = {"actor": SavedModel(engine, None)}
    manager.save(1, models, {}, {}, background=True)
    threading.Timer(0.2, gate.set).start()
    for step in (2, 3, 4):
        engine.change()
        manager.save(step, models, {}, {}, background=step != 3)
        assert step - 1 in files.saved_steps(tmp_path)
    manager.wait()
    assert files.saved_steps(tmp_path) == [4, 3] and files.current_step(tmp_path) == 4
    assert [saved_values(files.step_folder(tmp_path, step))[2] for step in (3, 4)] == [2, 3]


@pytest.mark.parametrize("asked_by", ["take_finished", "wait", "save"])
def test_an_error_in_the_background_comes_out_once_and_the_previous_checkpoint_stays(
    tmp_path, monkeypatch, asked_by
):
    manager = CheckpointManager(tmp_path, 2, None)
    models = {"actor": SavedModel(Engine(), None)}
    manager.save(1, models, {}, {})

    def no_space(*_arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "save_tensors", no_space)
        manager.save(2, models, {}, {}, background=True)
        manager._running.exception(20)
    with pytest.raises(CheckpointError, match=r"of step 2 under .* while writing the models.*No space left"):
        manager.save(3, models, {}, {}) if asked_by == "save" else getattr(manager, asked_by)()
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_1"
    assert not files.aside_folder(tmp_path, 2).exists()
    manager.save(3, models, {}, {}, background=True)
    assert manager.wait().path == tmp_path / "global_step_3"


def test_hf_weights_are_those_of_the_call_too(tmp_path, gate):
    engine, manager = Engine(), CheckpointManager(tmp_path, 2, None)
    source = str(make_tiny_model_dir(tmp_path / "model", weights=False))
    expected = engine.module.weight.detach().clone()
    contents = ("model", "optimizer", "hf_model")
    path = manager.save(1, {"actor": SavedModel(engine, None, source, contents)}, {}, {}, background=True)
    engine.change()
    gate.set()
    manager.wait()
    assert torch.equal(load_file(path / "actor" / "hf" / "model.safetensors")["weight"], expected)
