"""Released files by what a user types: the text part of Qwen3.5 is trained and put back, FP8 is read."""

import json
from pathlib import Path

import causal_lms
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Finished, Inputs, overrides
from quantised_files import in_fp8, rounded
from safetensors.torch import load_file, save_file

from siirl.cli import main
from siirl.compiler.memory.estimate import read_shape
from siirl.config import load_config

STEPS = 2
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.n_gpus_per_node=2",
    "trainer.deadline_s=150",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_released_form_is_trained_on_texts_and_leaves_what_sees_images_as_it_was(tmp_path, capsys, kind):
    from transformers import AutoModelForImageTextToText

    made, whole = Inputs.make(tmp_path / "inputs"), tmp_path / "whole"
    make_tiny_model_dir(whole, weights=False)
    causal_lms.write_seeing_model(whole, kind, f"{kind}_text", max_position_embeddings=512)
    before = load_file(whole / "model.safetensors")
    inputs = Inputs(tmp_path / "text", made.train, made.val, made.reward)
    refused = overrides(Inputs(whole, made.train, made.val, made.reward), tmp_path / "no", *KEYS)
    assert main(["check", *refused]) == 2
    assert "siirl convert --text MODEL FOLDER" in capsys.readouterr().err
    assert main(["convert", "--text", str(whole), str(inputs.model)]) == 0
    assert main(["run", *overrides(inputs, tmp_path / "run", *KEYS)]) == 0
    finished = Finished.read(tmp_path / "run")
    assert finished.values("step") == list(range(1, STEPS + 1))
    assert max(finished.values("actor/rollout_log_prob_diff_max")) < 1e-5
    assert min(finished.values("actor/grad_norm")) > 1e-3
    trained = finished.output / "hf_model"
    assert main(["convert", str(trained), str(tmp_path / "out"), "--into", str(whole)]) == 0
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    learnt = {name for name in before if not torch.equal(before[name], after[name])}
    assert learnt == {name for name in before if "language_model" in name or name == "lm_head.weight"}
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert Path(tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_folder_in_fp8_is_a_run_of_its_plain_numbers(tmp_path):
    made, learnt, shapes = Inputs.make(tmp_path / "inputs"), {}, []
    for name in ("fp8", "plain"):
        inputs = Inputs(tmp_path / name, made.train, made.val, made.reward)
        make_tiny_model_dir(inputs.model, weights=False)
        causal_lms.write_model(
            inputs.model, causal_lms.tiny_config("qwen3", max_position_embeddings=512, num_hidden_layers=1)
        )
        numbers = rounded(in_fp8(inputs.model, (12, 20)))
        if name == "plain":
            save_file(numbers, inputs.model / "model.safetensors", {"format": "pt"})
            said = json.loads((inputs.model / "config.json").read_text())
            del said["quantization_config"]
            (inputs.model / "config.json").write_text(json.dumps(said))
        keys = overrides(inputs, tmp_path / f"run_{name}", *KEYS, "actor_rollout_ref.rollout.dtype=float32")
        shapes.append(read_shape(load_config(keys), "actor"))
        assert main(["run", *keys]) == 0
        finished = Finished.read(tmp_path / f"run_{name}")
        assert max(finished.values("actor/rollout_log_prob_diff_max")) < 1e-5
        assert min(finished.values("actor/grad_norm")) > 1e-3
        assert "quantization_config" not in (finished.output / "hf_model" / "config.json").read_text()
        learnt[name] = load_file(finished.output / "hf_model" / "model.safetensors")
    assert shapes[0] == shapes[1] and shapes[0].params > 0
    assert learnt["fp8"].keys() == learnt["plain"].keys()
    assert [name for name, x in learnt["plain"].items() if not torch.equal(x, learnt["fp8"][name])] == []
