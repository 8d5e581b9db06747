"""Exports in the FP8 of a released model: each number is the nearest one, and loaders take the files."""

import json
import shutil

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from quantised_files import eight_bits, in_fp8, in_mxfp4
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from siirl import cli
from siirl.checkpoint.manager import CheckpointManager, SavedModel
from siirl.model_files.weight_slices import SafetensorsFolder
from siirl.models.trained import why_not

pytestmark = pytest.mark.heavy
BLOCK = (12, 20)


class Weights:
    """A model as a checkpoint sees its engine: no optimizer."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"model": weights, "optimizer": {}, "scheduler": {}, "version": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's folder with a checkpoint of plain weights, the model, and a release of the same type in FP8."""
    folder = tmp_path_factory.mktemp("made")
    base = make_tiny_model_dir(folder / "base", hidden=40, heads=5, kv_heads=1, init_std=0.2)
    shutil.copytree(base, folder / "released")
    in_fp8(folder / "released", BLOCK)
    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_model_dir(folder / "new", hidden=40, heads=5, kv_heads=1, seed=3)
    )
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:12, :20] = 0  # a block of zeros
    saved = {"agent_0.actor": SavedModel(Weights(model), None, str(folder / "released"))}
    CheckpointManager(folder / "run" / "checkpoints", 1, None).save(1, saved, {}, {})
    return folder, model


def export(folder, out, *more):
    return cli.main(["export", str(folder / "run"), str(out), *map(str, more)])


@pytest.mark.parametrize("form", [None, "ue8m0"])
def test_an_export_is_quantised_again_in_the_blocks_of_the_release(made, tmp_path, form):
    folder, model = made
    released = tmp_path / "released"
    shutil.copytree(folder / "released", released)
    config = json.loads((released / "config.json").read_text())
    if form:
        config["quantization_config"]["scale_fmt"] = form
        (released / "config.json").write_text(json.dumps(config))
    assert export(folder, tmp_path / "out", "--quantised-as", released) == 0
    there, want = load_file(tmp_path / "out" / "model.safetensors"), load_file(released / "model.safetensors")
    assert {name: (x.dtype, x.shape) for name, x in there.items()} == {
        name: (x.dtype, x.shape) for name, x in want.items()
    }
    out_config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        out_config["quantization_config"] == config["quantization_config"]
        and out_config["dtype"] == "bfloat16"
    )
    assert why_not(out_config, "fsdp") == why_not(config, "fsdp"), "it is trained as the release is"
    table = eight_bits()
    values = table[~table.isnan()].sort().values
    with SafetensorsFolder(tmp_path / "out") as read:
        for name, weight in model.named_parameters():
            rounded = weight.detach().bfloat16().double()  # the type that config.json declares
            if f"{name}_scale_inv" not in there:
                assert torch.equal(there[name].double(), rounded), name
                continue
            factors = there[f"{name}_scale_inv"].double()
            factor = factors.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            factor = factor[: rounded.shape[0], : rounded.shape[1]]
            found = table[there[name].view(torch.uint8).long()]
            nearest = (rounded / factor).unsqueeze(-1).sub(values).abs().amin(-1)
            error = (found - rounded / factor).abs()
            torch.testing.assert_close(error, nearest, atol=1e-4, rtol=1e-4)
            largest = torch.stack([
                rounded[i : i + BLOCK[0], j : j + BLOCK[1]].abs().max()
                for i in range(0, rounded.shape[0], BLOCK[0])
                for j in range(0, rounded.shape[1], BLOCK[1])
            ]).view_as(factors)  # fmt: skip
            used = (largest / factors / 448)[largest > 0]
            assert bool((used <= 1 + 1e-6).all()) and bool((used > (0.5 if form else 1 - 1e-6)).all()), name
            assert form is None or torch.equal(factors.log2(), factors.log2().round()), "powers of two"
            ours = read.part(name, 0, rounded.shape[0])
            torch.testing.assert_close(
                ours.double(), (found * factor).bfloat16().double(), atol=0, rtol=2**-8
            )


def test_transformers_loads_the_export_as_the_same_numbers(made, tmp_path):
    """In blocks that cut no matrix short, which is all that it takes."""
    folder, model = made
    released = folder / "whole"
    if not released.exists():
        shutil.copytree(folder / "base", released)
        in_fp8(released, (8, 8))
    assert export(folder, tmp_path / "out", "--quantised-as", released) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with SafetensorsFolder(tmp_path / "out") as read:
        for name, weight in loaded.named_parameters():
            assert torch.equal(weight, read.part(name, 0, weight.shape[0])), name
    ids = torch.tensor([[6, 7, 8, 9, 10]])
    with torch.no_grad():
        near, plain = (x(ids).logits.float().log_softmax(-1) for x in (loaded, model))
    assert 0 < float((near - plain).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (lambda folder: in_fp8(folder, None), "With a factor for a whole matrix"),
        (lambda folder: None, "of plain numbers"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_what_cannot_be_quantised_again_is_refused_with_the_reason(made, tmp_path, capsys, form, why):
    folder, _ = made
    shutil.copytree(folder / "base", tmp_path / "released")
    form(tmp_path / "released")
    assert export(folder, tmp_path / "out", "--quantised-as", tmp_path / "released") == 2
    assert why in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_release_of_another_model_is_refused(made, tmp_path, capsys):
    folder, _ = made
    other = make_tiny_model_dir(tmp_path / "other", hidden=40, heads=5, kv_heads=1, layers=1)
    in_fp8(other, BLOCK)
    assert export(folder, tmp_path / "out", "--quantised-as", other) == 2
    assert "has no tensor model.layers.1." in capsys.readouterr().err and not (tmp_path / "out").exists()
    gpt = make_tiny_model_dir(tmp_path / "gpt", "gpt_oss", hidden=64)
    in_mxfp4(gpt)
    assert export(folder, tmp_path / "out", "--quantised-as", gpt) == 2
    assert "MXFP4 was trained with its rounding" in " ".join(capsys.readouterr().err.split())
