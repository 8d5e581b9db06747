"""Tensors of FP8 and MXFP4 files are read as the numbers that the formats say they stand for."""

import json

import causal_lms
import pytest
import torch
from quantised_files import eight_bits, in_fp8, in_mxfp4, rounded
from safetensors.torch import load_file, save_file

from siirl.errors import DataError
from siirl.model_files.weight_slices import SafetensorsFolder

FORMS = {
    "blocks": ("qwen3", lambda folder: in_fp8(folder, (12, 20))),
    "whole blocks": ("qwen3", lambda folder: in_fp8(folder, (8, 16), torch.bfloat16)),
    "one factor": ("ministral3", lambda folder: in_fp8(folder, None)),
    "experts": ("deepseek_v3", lambda folder: in_fp8(folder, (12, 20))),
    "mxfp4": ("gpt_oss", in_mxfp4),
}


@pytest.mark.parametrize("form", FORMS)
def test_quantised_tensors_are_the_numbers_that_they_stand_for_in_every_slice(tmp_path, form):
    kind, quantise = FORMS[form]
    small = causal_lms.tiny_config(kind, **({"hidden_size": 64} if kind == "gpt_oss" else {}))
    exact = quantise(causal_lms.write_model(tmp_path, small))
    wanted = rounded(exact)
    with SafetensorsFolder(tmp_path) as files:
        assert sorted(files.names()) == sorted(wanted)
        for name, whole in wanted.items():
            like, length = files.like(name), len(whole)
            assert (like.dtype, like.shape) == (whole.dtype, whole.shape)
            assert torch.equal(files.part(name, 0, length), whole), name
            gap = (files.part(name, 0, length).double() - exact[name]).abs()
            assert (gap <= exact[name].abs() * 2**-8).all(), name  # half of bfloat16's last place
            for first in range(0, length, 3):
                last = min(length, first + 5)
                assert torch.equal(files.part(name, first, last), whole[first:last])
                if whole.ndim == 2:
                    part = files.read(name, tuple(whole.shape), (first, last), (3, 7))
                    assert torch.equal(part, whole[first:last, 3:7])
            assert len(files.part(name, 2, 2)) == 0 and files.has(name)
        assert not files.has("model.layers.0.mlp.experts.gate_up_proj_blocks.x")


def test_each_byte_of_e4m3_is_read_as_it_is_defined(tmp_path):
    codes = torch.arange(256).view(16, 16).byte()
    stored = {"x": codes.view(torch.float8_e4m3fn), "x_scale_inv": torch.tensor([[1.0]])}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    with SafetensorsFolder(tmp_path) as files:
        read = files.part("x", 0, 16).double().flatten()
    torch.testing.assert_close(read, eight_bits(), rtol=0, atol=0, equal_nan=True)


def test_numbers_that_nothing_says_the_meaning_of_are_refused(tmp_path):
    in_fp8(causal_lms.write_model(tmp_path, causal_lms.tiny_config("qwen3")), (12, 20))
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    config = json.loads((tmp_path / "config.json").read_text())
    said = config["quantization_config"]
    for block in (None, [12, 8], [0, 20]):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"quantization_config": said | {"weight_block_size": block}})
        )
        with SafetensorsFolder(tmp_path) as files, pytest.raises(DataError, match="they do not fit"):
            files.part(name, 0, 1)
    del stored[f"{name}_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as files, pytest.raises(DataError, match=r"as F8_E4M3 without a tensor"):
        files.like(name)
