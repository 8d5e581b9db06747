"""What a run writes of the tokens of its samples is what one process computes of them, in plain float64."""

import functools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from job_harness import Finished, Inputs, overrides, run_job

CAP, CLIP, DUAL_CLIP = 0.9, 0.02, 3.0
ACTOR = "actor_rollout_ref.actor"
TWO_EPOCHS = (
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.tis_imp_ratio_cap={CAP}",
    f"{ACTOR}.clip_ratio={CLIP}",
    "trainer.total_training_steps=1",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def after_one(inputs, tmp_path_factory) -> Path:
    """The model after the first of the two optimizer steps."""
    output = tmp_path_factory.mktemp("one_epoch")
    run_job(1, overrides(inputs, output, *TWO_EPOCHS, f"{ACTOR}.ppo_epochs=1"))
    return output / "hf_model"


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(inputs: Inputs) -> list[str]:
    """The prompt of each row of the training data, as the model reads it."""
    import pandas
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    return [
        tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True)
        for chat in pandas.read_parquet(inputs.train)["prompt"]
    ]


@functools.cache
def plain(model_dir: Path) -> tuple[Any, Any]:
    """The tokenizer and the model, in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    return AutoTokenizer.from_pretrained(model_dir), model


def log_probs(model_dir: Path, prompt: str, response: list[int]) -> torch.Tensor:
    """Of each token of a response."""
    tokenizer, model = plain(model_dir)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *response]])).logits[0, len(before) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def advantages(samples: list[dict]) -> list[float]:
    """GRPO's, from the scores of all rows of a step."""
    scores = defaultdict(list)
    for sample in samples:
        scores[sample["sample_index"]].append(sample["score"])
    found = []
    for sample in samples:
        group = scores[sample["sample_index"]]
        mean = math.fsum(group) / len(group)
        deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in group) / (len(group) - 1))
        found.append((sample["score"] - mean) / (deviation + 1e-6) if deviation else 0.0)
    return found


def is_clipped(ratio: float, advantage: float) -> bool:
    """Whether a bound of PPO's objective, or of its dual clip, cuts off the gradient."""
    if advantage >= 0:
        return ratio > 1 + CLIP and advantage > 0
    return ratio < 1 - CLIP or ratio > DUAL_CLIP


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_tokens_of_samples_have_the_numbers_of_their_update(inputs, after_one, tmp_path, world_size):
    rows, balance = f"trainer.rollout_data_dir={tmp_path / 'rows'}", "trainer.balance_batch=True"
    finished = run_job(world_size, overrides(inputs, tmp_path / "out", *TWO_EPOCHS, rows, balance))
    samples = lines_of(tmp_path / "rows" / "step_1.jsonl")
    written = lines_of(finished.output / "rollouts" / "tokens" / "step_1.jsonl")
    assert [line["row_id"] for line in written] == [sample["row_id"] for sample in samples]
    assert len(samples) == 32 and len({sample["row_id"] for sample in samples}) == 32
    texts, clips = prompts(inputs), []
    for sample, line, advantage in zip(samples, written, advantages(samples), strict=True):
        tokens, (turn,) = line["tokens"], line["turns"]
        assert (line["sample_index"], line["agent"]) == (sample["sample_index"], 0)
        assert "".join(tokens["text"]) == sample["response"]
        before, after = (
            log_probs(path, texts[line["sample_index"]], tokens["id"]) for path in (inputs.model, after_one)
        )
        ratio = (after - before).exp()
        for name, expected in (("rollout_log_prob", before), ("old_log_prob", before), ("ratio", ratio)):
            found = torch.tensor(tokens[name], dtype=torch.float64)
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3, msg=name)
        assert tokens["weight"] == pytest.approx([CAP] * len(ratio))
        assert tokens["advantage"] == pytest.approx([advantage] * len(ratio), abs=1e-5)
        assert turn["advantage"] == pytest.approx(advantage, abs=1e-5) and turn["tokens"] == len(ratio)
        clip = [is_clipped(r, advantage) for r in ratio.tolist()]
        near = [
            min(abs(r - bound) for bound in (1 - CLIP, 1 + CLIP, DUAL_CLIP)) < 2e-3 for r in ratio.tolist()
        ]
        assert all(
            bool(ours) == theirs or close
            for ours, theirs, close in zip(tokens["clip"], clip, near, strict=True)
        )
        clips += clip
    assert 0.05 < sum(clips) / len(clips) < 0.95


def test_rows_of_dynamic_sampling_are_found_although_they_are_numbered_anew(inputs, tmp_path):
    more = (
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        "data.gen_batch_size=5",
        f"trainer.rollout_data_dir={tmp_path / 'rows'}",
        "trainer.total_training_steps=1",
    )
    finished = run_job(2, overrides(inputs, tmp_path / "out", *more))
    samples = lines_of(tmp_path / "rows" / "step_1.jsonl")
    written = lines_of(finished.output / "rollouts" / "tokens" / "step_1.jsonl")
    expected = dict(
        zip(((s["sample_index"], s["response"]) for s in samples), advantages(samples), strict=False)
    )
    assert len(samples) > 32 == len(written), "the batch was filled in rounds"
    ids = {(sample["sample_index"], sample["row_id"]) for sample in samples}
    assert all((line["sample_index"], line["row_id"]) in ids for line in written)
    for line in written:
        said = "".join(line["tokens"]["text"])
        assert line["turns"][0]["advantage"] == pytest.approx(
            expected[line["sample_index"], said], abs=1e-5
        ), said


def test_steps_without_samples_write_no_tokens(inputs, tmp_path):
    finished: Finished = run_job(1, overrides(inputs, tmp_path, "trainer.total_training_steps=3"))
    written = sorted(path.name for path in (finished.output / "rollouts" / "tokens").iterdir())
    assert written == ["step_1.jsonl"]
    lines = lines_of(finished.output / "rollouts" / "tokens" / "step_1.jsonl")
    samples = lines_of(finished.output / "rollouts" / "train" / "step_1.jsonl")
    assert [line["row_id"] for line in lines] == [sample["row_id"] for sample in samples] and len(lines) == 32
