"""Compares checkpoints on disk."""

import json
from pathlib import Path

import torch

from siirl.checkpoint import files
from siirl.model_files.stored_tensors import load_tensors, stored_tensors


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's folder, whole."""
    stored = stored_tensors(model)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    load_tensors(tensors, model, None)
    return tensors


def assert_same_checkpoints(first: Path, second: Path, model: str) -> None:
    """Both are whole, have the same files, and agree in every tensor of a model and in the run's state."""
    names = [[entry["path"] for entry in files.verify(path)["files"]] for path in (first, second)]
    assert names[0] == names[1]
    expected, found = tensors_of(first / model), tensors_of(second / model)
    assert expected.keys() == found.keys() and any(name.startswith("optimizer/") for name in expected)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for name in ("extra.json", f"{model}/state.json"):
        states = [json.loads((path / name).read_text()) for path in (first, second)]
        for state in states:
            state.pop("reported", None)  # metrics of the step, with its seconds
        assert states[0] == states[1], name
