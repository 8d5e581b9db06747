"""siirl convert: weights from a Hugging Face directory to a distributed checkpoint and back, in pieces."""

import json
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from safetensors.torch import load_file, save_file

from siirl.checkpoint.convert import convert, to_distributed
from siirl.checkpoint.export import save_hf
from siirl.cli import main
from siirl.model_files.stored_tensors import save_tensors, stored_tensors
from siirl.model_files.weight_slices import SafetensorsFolder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model of mixed experts in bf16, its weights in several files, one of them without dimensions."""
    folder = tmp_path_factory.mktemp("source")
    made = make_tiny_model_dir(folder / "made", "mixtral", tie=False, dtype="bfloat16")
    weights = weights_of(made) | {"model.scale": torch.tensor(2.5)}
    save_hf(iter(weights.items()), str(made), folder / "model", 0, shard_bytes=60_000)
    assert len(list((folder / "model").glob("*.safetensors"))) > 2
    return folder / "model"


def test_weights_come_back_bit_for_bit_with_config_and_tokenizer(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "stored")]) == 0
    assert "dist_checkpointing_path" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "stored"), str(tmp_path / "back")]) == 0
    expected, found = weights_of(source), weights_of(tmp_path / "back")
    assert expected.keys() == found.keys() and len(expected) > 30
    for name, tensor in expected.items():
        wanted = tensor.to(torch.bfloat16)  # what config.json declares; the scalar is fp32 in the source
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], wanted), name
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert configs[0] == configs[1]


def test_no_more_than_a_piece_is_read_at_a_time(source, tmp_path, monkeypatch):
    pieces = []
    part = SafetensorsFolder.part

    def watched(*arguments):
        found = part(*arguments)
        pieces.append(found.nbytes)
        return found

    monkeypatch.setattr(SafetensorsFolder, "part", watched)
    to_distributed(source, tmp_path / "stored", chunk_bytes=512)
    weights = weights_of(source)
    row = max(tensor[0].nbytes for tensor in weights.values() if tensor.ndim)
    assert max(pieces) <= max(row, 512) < max(tensor.nbytes for tensor in weights.values())
    assert sum(pieces) == sum(tensor.nbytes for tensor in weights.values()), "each byte once"
    entry = stored_tensors(tmp_path / "stored")["model/model.embed_tokens.weight"]
    assert len(entry.chunks) == weights["model.embed_tokens.weight"].nbytes // 512


def foreign(folder: Path) -> Path:
    """A distributed checkpoint with other names, as Megatron's own converters write."""
    save_tensors({"decoder.layers.mlp.linear_fc1.weight": torch.ones(2, 4, 3)}, folder, None)
    return folder


def cut_short(folder: Path) -> Path:
    made = make_tiny_model_dir(folder)
    whole = (made / "model.safetensors").read_bytes()
    (made / "model.safetensors").write_bytes(whole[:-7])
    return made


def without_config(folder: Path) -> Path:
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign, "has no config.json"),
        (cut_short, "it is damaged"),
        (without_config, "is neither a Hugging Face model"),
        (lambda folder: folder, "is neither a Hugging Face model"),
    ],
    ids=["a checkpoint of another program", "a file cut short", "no config.json", "nothing"],
)
def test_what_cannot_be_converted_leaves_nothing_and_one_message(make, message, tmp_path, capsys):
    source = make(tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_not_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        convert(source, tmp_path / "out")
