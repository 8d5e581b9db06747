"""A student learns from a teacher with another tokenizer and chat template, by the command."""

import random
from pathlib import Path

import pytest
import torch
from bpe_tokenizers import byte_level, characters
from fixtures_tiny import make_tiny_model_dir, write_parquet
from http_harness import serving
from job_harness import REWARD, run_job
from served_teacher import ServedTeacher
from transformers import AutoModelForCausalLM, AutoTokenizer

WORDS, LENGTH = ("abcde", "fed", "gabha"), 10
QUESTION = [{"role": "user", "content": "abc"}]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=8)) for _ in range(count)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A student that writes letters at random, and a teacher of bytes and words that knows the words."""
    folder = tmp_path_factory.mktemp("made")
    return models(folder, characters(folder / "letters", "abcdefgh userit:n", ("(", ")")))


@pytest.fixture(scope="module")
def akin(tmp_path_factory) -> Path:
    """As made; the student has 265 of the teacher's 270 tokens, and "fed" is none of them."""
    folder = tmp_path_factory.mktemp("akin")
    other_words = [text.replace("fed", "fgd") for text in texts(30)]
    return models(folder, byte_level(folder / "words like these", 268, other_words, ("(", ")")))


def models(folder: Path, of_student: Path) -> Path:
    """Both, with a reward and data; the folder."""
    words = byte_level(folder / "words", 280, texts(50))
    sizes = {
        name: len(AutoTokenizer.from_pretrained(x))
        for name, x in (("student", of_student), ("teacher", words))
    }
    student, teacher = (
        make_tiny_model_dir(folder / name, vocab=size, seed=size, layers=1, tokenizer=False, max_positions=96)
        for name, size in sizes.items()
    )
    for model, tokens in ((student, of_student), (teacher, words)):
        AutoTokenizer.from_pretrained(tokens).save_pretrained(model)
    teach(teacher)
    (folder / "reward.py").write_text(REWARD)
    write_parquet(
        folder / "data.parquet",
        [{"data_source": "words", "prompt": QUESTION, "reward_model": {"ground_truth": ""}}] * 64,
    )
    return folder


def teach(folder: Path) -> None:
    """Plain steps on texts of words."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    rows = torch.tensor([tokenizer(asked + text)["input_ids"][:40] for text in texts(200)])
    begin = len(tokenizer(asked)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(30):
        batch = rows[step * 5 % 160 :][:32]
        logits = model(batch[:, :-1]).logits[:, begin - 1 :]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, begin:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@torch.no_grad()
def distance(student: Path, teacher: Path) -> float:
    """Nats between both of texts that the student writes: log-probs of texts, each by its model's tokens."""
    (model, its), (other, others) = (
        (AutoModelForCausalLM.from_pretrained(x), AutoTokenizer.from_pretrained(x))
        for x in (student, teacher)
    )
    asked, by_other = (
        x.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"] for x in (its, others)
    )
    torch.manual_seed(0)
    drawn = model.generate(
        torch.tensor([asked] * 64), do_sample=True, max_new_tokens=LENGTH, min_new_tokens=LENGTH, top_k=0
    )[:, len(asked) :]
    found = []
    for row in drawn.tolist():
        text = its.decode(row)
        log_probs = [
            float(x(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1].log_softmax(-1)[
                torch.arange(len(ids)), ids
            ].sum())
            for x, before, ids in ((model, asked, row), (other, by_other, others(text)["input_ids"]))
        ]  # fmt: skip
        found.append(log_probs[0] - log_probs[1])
    return sum(found) / len(found)


def keys(made: Path, output: Path, *more: str) -> list[str]:
    base = {
        f"{ACTOR}.policy_loss.loss_mode": "distill",
        f"{ACTOR}.optim.lr": 1e-2,
        f"{ACTOR}.ppo_mini_batch_size": 8,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "float32",
        "actor_rollout_ref.model.path": made / "student",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{ROLLOUT}.name": "hf",
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.ignore_eos": True,
        "teacher.model.path": made / "teacher",
        "teacher.tokenizer": "own",
        "teacher.log_prob_use_dynamic_bsz": True,
        "teacher.fsdp_config.mixed_precision.param_dtype": "float32",
        "custom_reward_function.path": made / "reward.py",
        "data.train_files": made / "data.parquet",
        "data.val_files": made / "data.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 40,
        "data.max_response_length": LENGTH,
        "trainer.device": "cpu",
        "trainer.logger": "[]",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.output_dir": output,
        "trainer.deadline_s": 240,
    }
    return [*(f"{key}={value}" for key, value in base.items()), *more]


@pytest.mark.timeout(500)
def test_a_student_comes_nearer_to_a_teacher_that_has_other_tokens(made, tmp_path):
    steps = 12
    found = run_job(1, keys(made, tmp_path / "run", f"trainer.total_training_steps={steps}"), 400)
    aligned, divergence = found.values("teacher/aligned"), found.values("actor/teacher_divergence")
    assert len(divergence) == steps and min(aligned) > 0.9
    before, after = (distance(x, made / "teacher") for x in (made / "student", tmp_path / "run" / "hf_model"))
    print(before, after, divergence[0] * LENGTH, divergence[-1] * LENGTH)
    assert after < 0.85 * before and divergence[-1] < 0.85 * divergence[0]
    assert divergence[0] * LENGTH == pytest.approx(before, rel=0.1), "of texts, in nats"


@pytest.mark.timeout(500)
def test_distributions_over_shared_words_teach_faster_than_sampled_text(akin, tmp_path):
    """In nats between texts of both, whatever the loss says. A third of the teacher's words is not shared."""
    steps, after = 20, {}
    for top_k in (0, -1):
        few = (f"trainer.total_training_steps={steps}", f"{ACTOR}.distill.top_k={top_k}")
        found = run_job(1, keys(akin, tmp_path / str(top_k), *few), 400)
        divergence = found.values("actor/teacher_divergence")
        assert len(divergence) == steps and divergence[-1] < 0.5 * divergence[0]
        after[top_k] = distance(tmp_path / str(top_k) / "hf_model", akin / "teacher")
    print(distance(akin / "student", akin / "teacher"), after)
    assert after[-1] < 0.5 * after[0]
    assert divergence[-1] < 0.15 * divergence[0], "189 to 18 nats"
    assert found.values("teacher/shared")[-1] == pytest.approx(2 / 3, abs=0.1)
    assert min(found.values("teacher/aligned")) > 0.9


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("top_k", [0, 6])
def test_a_teacher_behind_a_service_says_the_same_in_its_own_tokens(akin, tmp_path, top_k):
    few, losses = ("trainer.total_training_steps=2", f"{ACTOR}.distill.top_k={top_k}"), []
    with serving(ServedTeacher(akin / "teacher")) as server:
        url = f"teacher.endpoint.url={server.url.replace('/score', '/v1/completions')}"
        for name, more in (("here", ()), ("there", (url,))):
            found = run_job(1, keys(akin, tmp_path / name, *few, *more), 400)
            losses.append(found.values("actor/distill_loss"))
        assert any("prompt_logprobs" in message for message in server.messages)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("top_k", [-1, 8])
def test_distributions_over_two_vocabularies_are_the_same_on_two_ranks_and_by_megatron(akin, tmp_path, top_k):
    few = ("trainer.total_training_steps=2", f"{ACTOR}.distill.top_k={top_k}", f"{ROLLOUT}.temperature=1")
    megatron = ("teacher.strategy=megatron", "teacher.megatron.param_dtype=float32")
    losses = [
        run_job(ranks, keys(akin, tmp_path / str(ranks), *few, *more), 400).values("actor/distill_loss")
        for ranks, more in ((1, ()), (2, megatron))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.timeout(500)
def test_given_responses_are_learned_from_a_teacher_with_other_tokens(akin, tmp_path):
    """Off-policy: the data has the texts, and the teacher's distributions say what else there was to say."""
    rows = [
        {"data_source": "words", "prompt": QUESTION, "response": text, "reward_model": {"ground_truth": ""}}
        for text in texts(64)
    ]
    write_parquet(tmp_path / "given.parquet", rows)
    given = (
        *(f"{ROLLOUT}.name=dataset", f"{ROLLOUT}.n=1", f"{ROLLOUT}.ignore_eos=false"),
        *(f"data.train_files={tmp_path / 'given.parquet'}", "data.max_response_length=40"),
        *(f"{ACTOR}.distill.top_k=16", "trainer.total_training_steps=16"),
    )
    found = run_job(1, keys(akin, tmp_path / "run", *given), 400)
    divergence = found.values("actor/teacher_divergence")
    assert divergence[-1] < 0.3 * divergence[0] and min(found.values("teacher/aligned")) == 1
