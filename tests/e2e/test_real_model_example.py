"""examples/real_model: its three runs, with a tiny model of the same type that has a character a token."""

import importlib
import json
import string
from pathlib import Path

import pytest
import torch
from job_harness import ROOT, run_example, run_job
from some_cases import some
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

prepare = importlib.import_module("examples.real_model.prepare")
reward = importlib.import_module("examples.real_model.reward")
LINE_END = 107
"""As in Gemma's tokenizer, which run.sh relies on."""
KEYS = [
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
    "trainer.device=cpu",
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "data.max_prompt_length=320",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "trainer.logger=[]",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    others = [f"<{number}>" for number in range(3, LINE_END)]
    words = ["<pad>", "<eos>", "<bos>", *others, "\n", *sorted(set(string.printable) - {"\n"})]
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.chat_template = importlib.import_module("examples.real_model.get_model").CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = Gemma3TextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=64,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", some(["sums", "team", "products"], "team"))
def test_a_run_of_the_example_trains(name, model, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", str(model))
    words = run_example(tmp_path, name, *KEYS, example="real_model", python="echo").splitlines()[-1].split()
    for task in ("sums", "products"):
        for split, found in zip(("train", "val"), prepare.rows(getattr(prepare, task), 16, 4), strict=True):
            (tmp_path / f"{task}_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    monkeypatch.chdir(ROOT)
    finished = run_job(1, words[2:], deadline_s=120)
    trained = [key for key in finished.lines[-1] if key.endswith("actor/lr")]
    assert len(trained) == (2 if name == "team" else 1)


def test_tasks_to_validate_with_are_none_of_those_trained_on():
    for make in (prepare.sums, prepare.products):
        train, val = prepare.rows(make, 10_000, 400)
        asked = {row["prompt"][0]["content"] for row in val}
        assert len(train) == 10_000 and len(asked) == 400
        assert asked.isdisjoint(row["prompt"][0]["content"] for row in train)


@pytest.mark.parametrize(
    ("said", "score"), [(" 68\n", 1), ("68", 1), (" 68\n41", 0), (" 6 8", 0), ("168", 0), ("", 0)]
)
def test_the_number_and_nothing_else_counts(said, score):
    assert reward.compute_score("arithmetic", said, "68", None) == score


def test_of_two_agents_the_last_one_counts():
    turns = [
        {"agent": 0, "content": " 68\n"},
        {"agent": None, "content": "1"},
        {"agent": 1, "content": " 67\n"},
    ]
    assert reward.compute_score("arithmetic", " 68\n", "68", {"conversation": turns}) == 0
