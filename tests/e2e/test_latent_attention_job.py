"""DeepSeek-V3, by the commands that a user types: GRPO, the export in transformers, a run that goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import causal_lms
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import ROOT, Finished, Inputs, overrides
from stored_checkpoints import assert_same_checkpoints

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
KIND = "deepseek_v3"
STEPS, HALF = 4, 2
ON_MEGATRON = (f"{ACTOR}.strategy=megatron", f"{MEGATRON}.param_dtype=float32")
LAYOUTS = {
    "fsdp": (),
    "fsdp, experts dealt": (f"{ACTOR}.fsdp_config.expert_parallel_size=2",),
    "megatron, tp2 ep2": (
        *ON_MEGATRON,
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.sequence_parallel=True",
        f"{MEGATRON}.expert_model_parallel_size=2",
    ),
    "megatron, pp2": (*ON_MEGATRON, f"{MEGATRON}.pipeline_model_parallel_size=2"),
}
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.n_gpus_per_node=2",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=10",
    "trainer.deadline_s=150",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    f"{ACTOR}.optim.lr=1e-3",
    f"+{ACTOR}.optim.override_optimizer_config={{eps:1e-6}}",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 512, "tie_word_embeddings": False}
    causal_lms.write_model(
        make_tiny_model_dir(made.model, weights=False), causal_lms.tiny_config(KIND, **sizes)
    )
    return made


def siirl(*words: str) -> str:
    """What a command prints; it must succeed."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "siirl.cli", *words],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request, inputs, tmp_path_factory) -> tuple[Finished, tuple[str, ...]]:
    """A whole run, and the keys of its layout."""
    folder, layout = tmp_path_factory.mktemp("run"), LAYOUTS[request.param]
    siirl("run", *overrides(inputs, folder, *KEYS, *layout))
    return Finished.read(folder), layout


def sampled_by(model: Path, inputs: Inputs, folder: Path) -> list[dict]:
    """What a run from a model samples in its first step: tokens and log-probs of each response."""
    few = ("trainer.total_training_steps=1", "trainer.n_gpus_per_node=1", "trainer.export_hf=False")
    all_rows = f"trainer.rollout_data_dir={folder}/rows"
    siirl("run", *overrides(inputs, folder, *few, all_rows, f"actor_rollout_ref.model.path={model}"))
    file = folder / "rollouts" / "tokens" / "step_1.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def log_probs(model, before: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *response]])).logits[0, len(before) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainer_and_rollout_agree_and_the_export_says_in_transformers_what_it_was_sampled_with(
    run, inputs, tmp_path
):
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    finished, _ = run
    assert finished.values("step") == list(range(1, STEPS + 1))
    assert max(finished.values("actor/rollout_log_prob_diff_max")) < 1e-5
    assert min(finished.values("actor/grad_norm")) > 1e-3
    last = finished.output / "checkpoints" / f"global_step_{STEPS}"
    siirl("export", str(last), str(tmp_path / "exported"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert model.config.model_type == KIND
    begun = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32)
    named = dict(begun.named_parameters())
    still = [name for name, x in model.named_parameters() if torch.equal(x, named[name])]
    assert still == [], "every tensor has learnt"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    chats = pandas.read_parquet(inputs.train)["prompt"]
    lines = sampled_by(tmp_path / "exported", inputs, tmp_path / "next")
    assert len(lines) == 32
    changed = 0.0
    for line in lines:
        text = tokenizer.apply_chat_template(
            list(chats[line["sample_index"]]), tokenize=False, add_generation_prompt=True
        )
        before, response = tokenizer.encode(text, add_special_tokens=False), line["tokens"]["id"]
        ours = torch.tensor(line["tokens"]["rollout_log_prob"])
        assert float((ours - log_probs(model, before, response)).abs().max()) < 1e-5
        changed = max(changed, float((ours - log_probs(begun, before, response)).abs().max()))
    assert changed > 1e-3, "the weights that it began with say the same"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_goes_on_from_the_middle_ends_as_the_whole(run, inputs, tmp_path):
    finished, layout = run
    half = finished.output / "checkpoints" / f"global_step_{HALF}"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={half}")
    siirl("run", *overrides(inputs, tmp_path, *KEYS, *layout, *resume))
    again = Finished.read(tmp_path)
    assert again.values("step") == list(range(HALF + 1, STEPS + 1))
    for name in ("actor/loss", "actor/grad_norm", "reward/score"):
        assert again.values(name) == finished.values(name)[HALF:], name
    one, other = (folder / "checkpoints" / f"global_step_{STEPS}" for folder in (finished.output, tmp_path))
    assert_same_checkpoints(one, other, "agent_0.actor")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_of_one_strategy_goes_on_under_the_other(run, inputs, tmp_path):
    """Up to the order in which numbers are added."""
    finished, layout = run
    half = finished.output / "checkpoints" / f"global_step_{HALF}"
    other = LAYOUTS["fsdp"] if layout[:1] == ON_MEGATRON[:1] else LAYOUTS["megatron, tp2 ep2"]
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={half}")
    changed = ("trainer.resume_changed=true",)
    siirl("run", *overrides(inputs, tmp_path, *KEYS, *other, *resume, *changed))
    again = Finished.read(tmp_path)
    assert again.values("step") == list(range(HALF + 1, STEPS + 1))
    for name in ("actor/loss", "actor/grad_norm"):
        assert again.values(name) == pytest.approx(finished.values(name)[HALF:], rel=1e-3, abs=2e-5), name
    whole = finished.weights()
    assert max(float((tensor - whole[name]).abs().max()) for name, tensor in again.weights().items()) < 1e-4
