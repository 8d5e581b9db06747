"""Whatever has become of a checkpoint's files: it is used as it was, or refused in words that name it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from fuzzing import PLAIN, cases, command, explore, mangled, replaced_somewhere
from hypothesis import strategies as st

from siirl.checkpoint import files
from siirl.checkpoint.manager import CheckpointManager, SavedModel
from siirl.errors import SiirlError

pytestmark = pytest.mark.heavy
MODEL = "agent_0.actor"


class Weights:
    """An engine of two tensors."""

    def __init__(self) -> None:
        self.state = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(3)}

    def state_dict(self):
        moments = {f"exp_avg.{name}": tensor * 2 for name, tensor in self.state.items()}
        return {"model": self.state, "optimizer": moments, "scheduler": {"steps": 3}, "version": 2}

    def load_state_dict(self, state):
        self.loaded = state

    def export_weights(self, dtype=None):
        yield from self.state.items()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint that is whole."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = make_tiny_model_dir(folder / "model", weights=False, tokenizer=False)
    saved = {MODEL: SavedModel(Weights(), None, str(model))}
    state = {"torch": torch.arange(4), "python": [1, (2, 3)]}
    return CheckpointManager(folder / "c", 1, None).save(1, saved, {"settings": {}, "step": 1}, state)


@st.composite
def damages(draw, whole: Path) -> tuple[str, bytes | None]:
    """A file of the checkpoint, and what is in it now; None: it has gone."""
    names = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    name = draw(st.sampled_from([*names, files.MANIFEST, files.MANIFEST]))
    content = (whole / name).read_bytes()
    ways = [mangled(content), mangled(content), st.none(), st.just(b""), st.binary(max_size=16)]
    if name.endswith(".json"):
        tree = json.loads(content)
        written = st.one_of(replaced_somewhere(tree), replaced_somewhere(tree), PLAIN)
        ways += [written.map(lambda value: json.dumps(value).encode())] * 4
    return name, draw(st.one_of(ways))


def damaged(whole: Path, folder: Path, name: str, content: bytes | None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole.parent, folder)
    path = folder / whole.name / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return folder / whole.name


def signed_again(checkpoint: Path) -> None:
    """The manifest as it would be if the files had been written so."""
    path = checkpoint / files.MANIFEST
    manifest = json.loads(path.read_text())
    there = [one for one in checkpoint.rglob("*") if one.is_file() and one != path]
    about = {key: value for key, value in manifest.items() if key not in ("format", "step", "files")}
    files.write_manifest(checkpoint, manifest["step"], files.records_of(checkpoint, there), about)


@cases(30)
def test_a_damaged_checkpoint_is_refused_by_export_check_and_resume(num_cases, whole, good, deep):
    root, out = Path(deep) / "c", Path(deep) / "exported"

    def export(checkpoint: Path) -> bool:
        shutil.rmtree(out, ignore_errors=True)
        exported = command(["export", str(checkpoint), str(out)], deep) == 0
        assert exported == out.exists()
        return exported

    def check_settings(checkpoint: Path) -> bool:
        keys = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
        command(["check", f"--config-name={good}", *keys], deep)
        return False  # it does not read the contents

    def resume(checkpoint: Path) -> bool:
        manager, weights = CheckpointManager(root, 1, None), Weights()
        try:
            found = manager.find_resume("auto", None)
            assert found == checkpoint
            manager.load(found, {MODEL: SavedModel(weights, None)})
        except SiirlError as error:
            assert str(root) in str(error)
            return False
        assert torch.equal(weights.loaded["model"]["a.weight"], weights.state["a.weight"])
        return True

    def check(damage: tuple[str, bytes | None], use: Callable[[Path], bool]) -> None:
        name, content = damage
        used = use(damaged(whole, root, name, content))
        same = content == (whole / name).read_bytes()
        assert not used or same or name == files.MANIFEST or not name.startswith(MODEL), name

    uses = st.sampled_from([export, export, export, resume, resume, check_settings])
    explore(num_cases, check, damages(whole), uses)


@cases(30)
def test_a_checkpoint_of_somebody_else_is_refused_in_words(num_cases, whole, deep):
    """Its manifest is right, so all of it is read."""
    root, out = Path(deep) / "c", Path(deep) / "exported"

    def check(damage: tuple[str, bytes | None], adapter: list[str]) -> None:
        if damage[0] == files.MANIFEST:
            return
        checkpoint = damaged(whole, root, *damage)
        signed_again(checkpoint)
        shutil.rmtree(out, ignore_errors=True)
        command(["export", *adapter, str(checkpoint), str(out)], deep)
        shutil.rmtree(out, ignore_errors=True)
        command(["convert", str(checkpoint / MODEL), str(out)], deep)
        manager = CheckpointManager(root, 1, None)
        try:
            found = manager.find_resume("auto", None)
            manager.load(found, {MODEL: SavedModel(Weights(), None)})
        except SiirlError as error:
            assert str(root) in str(error)

    explore(num_cases, check, damages(whole), st.sampled_from([[], [], [], ["--adapter"]]))
