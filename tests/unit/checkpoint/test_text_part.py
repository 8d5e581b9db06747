"""The language model inside one that sees images computes of texts the same, and goes back into its place."""

import json

import causal_lms
import pytest
import torch
from quantised_files import in_fp8, rounded
from safetensors.torch import load_file, save_file
from some_cases import some

from siirl.cli import main
from siirl.models.families import TEXT_PARTS
from siirl.models.trained import why_not

TEXTS = {
    **dict.fromkeys(("idefics3", "llava", "smolvlm", "vipllava"), ("llama",)),
    **{"internvl": ("qwen2", "qwen3"), "llava_next": ("mistral",), "llava_onevision": ("qwen2",)},
    **{"mistral3": ("mistral", "ministral3"), "gemma3": ("gemma3_text",), "exaone4_5": ("exaone4",)},
    **{kind: (f"{kind}_text",) for kind in ("qwen3_5", "qwen3_5_moe")},
}
CASES = [(kind, text, False) for kind in TEXT_PARTS for text in TEXTS[kind]]
CASES += [("gemma3", "gemma3_text", True), ("qwen3_5", "qwen3_5_text", True)]
OFTEN = (
    *(("llava", "llama", False), ("internvl", "qwen3", False), ("mistral3", "ministral3", False)),
    *(("exaone4_5", "exaone4", False), ("qwen3_5_moe", "qwen3_5_moe_text", False)),
    *(("smolvlm", "llama", False), ("gemma3", "gemma3_text", True)),
)
"""Of each kind of names and of text part one."""


@pytest.mark.parametrize(("kind", "text", "tied"), some(CASES, *OFTEN))
def test_a_text_part_computes_what_the_whole_does_and_goes_back_into_it(tmp_path, capsys, kind, text, tied):
    from transformers import AutoModelForCausalLM

    model = causal_lms.write_seeing_model(tmp_path / "whole", kind, text, tied)
    ids = torch.randint(10, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    assert main(["convert", "--text", str(tmp_path / "whole"), str(tmp_path / "text")]) == 0
    assert f"a {text}: its text part" in capsys.readouterr().out
    raw = json.loads((tmp_path / "text" / "config.json").read_text())
    assert raw["model_type"] == text and raw["eos_token_id"] == [5, 6] and not why_not(raw, "fsdp")
    part = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(part(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    own = load_file(tmp_path / "text" / "model.safetensors")
    assert ("lm_head.weight" in own) == (not tied)
    changed = {name: tensor + 1 for name, tensor in own.items()}
    save_file(changed, tmp_path / "text" / "model.safetensors", {"format": "pt"})
    into = ["convert", str(tmp_path / "text"), str(tmp_path / "out"), "--into", str(tmp_path / "whole")]
    assert main(into) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(moved) == len(own) and all("language" in x or "text" in x or "lm_head" in x for x in moved)
    assert all(torch.equal(after[name], before[name] + 1) for name in moved)
    for folder in ("whole", "out"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["model_type"] == kind
    again = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(trained(ids).logits, again(ids).logits, rtol=0, atol=1e-4)


def test_the_text_part_of_quantised_files_is_one_of_plain_numbers(tmp_path, capsys):
    causal_lms.write_seeing_model(tmp_path / "whole", "mistral3", "ministral3", False)
    whole = rounded(in_fp8(tmp_path / "whole", (12, 20)))
    assert main(["convert", "--text", str(tmp_path / "whole"), str(tmp_path / "text")]) == 0
    own = load_file(tmp_path / "text" / "model.safetensors")
    assert all(
        any(torch.equal(x, y) for y in whole.values() if x.shape == y.shape) for x in own.values()
    ) and any(name.endswith("up_proj.weight") for name in own)
    assert "quantization_config" not in json.loads((tmp_path / "text" / "config.json").read_text())
    into = ["convert", str(tmp_path / "text"), str(tmp_path / "out"), "--into", str(tmp_path / "whole")]
    assert main(into) == 0
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == whole.keys() and all(torch.equal(back[name], x) for name, x in whole.items())
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert main(["convert", "--text", str(tmp_path / "whole"), str(tmp_path / "other")]) == 2
    assert "quant_method=awq is not read: fp8 and mxfp4 are" in capsys.readouterr().err


def test_check_says_how_a_text_part_is_trained_where_it_is():
    for text, strategies in {
        "gemma3_text": ("fsdp", "megatron"),
        "ministral3": ("fsdp",),
        "cohere": (),
    }.items():
        raw = {"model_type": "mistral3", "vision_config": {"depth": 1}, "text_config": {"model_type": text}}
        for strategy in ("fsdp", "megatron"):
            told = why_not(raw, strategy)
            assert ("siirl convert --text MODEL FOLDER" in told) == (strategy in strategies), told
    assert "convert" not in why_not({**raw, "model_type": "paligemma"}, "fsdp")


def test_what_has_no_text_part_or_another_is_refused(tmp_path, capsys):
    causal_lms.write_model(tmp_path / "llama", causal_lms.tiny_config("llama"))
    causal_lms.write_seeing_model(tmp_path / "whole", "llava", "llama", False)
    assert main(["convert", "--text", str(tmp_path / "llama"), str(tmp_path / "out")]) == 2
    assert "is a llama, which has no text part that was compared with the whole" in capsys.readouterr().err
    causal_lms.write_model(tmp_path / "other", causal_lms.tiny_config("llama", intermediate_size=48))
    into = ["--into", str(tmp_path / "whole")]
    assert main(["convert", str(tmp_path / "other"), str(tmp_path / "out"), *into]) == 2
    assert "is no text part of" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "llama"), str(tmp_path / "whole"), *into]) == 2
    assert "exists already" in capsys.readouterr().err
