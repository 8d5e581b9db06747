"""The example learns from two teachers what neither knows alone; where teachers are changes nothing."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from job_harness import ROOT, Finished, run_example, run_job
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.distillation.prepare import write

ACTOR = "actor_rollout_ref.actor"
HALVES = ("larger", "smaller")
APART = tuple(
    f"dag.node_config.{node}.placement=0" for node in ("rollout", "reward", "old_log_prob", "train")
)
ON_1 = (*APART, *(f"dag.node_config.{half}.placement=1" for half in HALVES))
SHARED = ("teacher.ulysses_sequence_parallel_size=2",)
MEGATRON = (*ON_1, "teacher.strategy=megatron", "teacher.megatron.param_dtype=float32")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    write(folder)
    return folder


def alone(folder: Path, half: str) -> float:
    """The share of both halves' questions that a teacher answers."""
    model, tokenizer = (x.from_pretrained(folder / half) for x in (AutoModelForCausalLM, AutoTokenizer))
    rows = pq.read_table(folder / "test.parquet").to_pylist()
    ids = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows
    ]
    with torch.no_grad():
        said = tokenizer.convert_ids_to_tokens(model(torch.tensor(ids)).logits[:, -1].argmax(-1).tolist())
    right = [row["reward_model"]["ground_truth"] for row in rows]
    return sum(one == other for one, other in zip(said, right, strict=True)) / len(rows)


def run(folder: Path, *keys: str, **options) -> str:
    """The example's script; what it prints."""
    few = ("trainer.logger=[]", "trainer.deadline_s=300")
    return run_example(folder, *keys, *few, example="distillation", **options)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_student_of_two_teachers_learns_both_halves_of_which_each_knows_one(made):
    run(made)
    found = Finished.read(made / "run")
    assert all(alone(made, half) < 0.6 for half in HALVES)
    last = [line for line in found.lines if f"val/{HALVES[0]}/reward/mean" in line][-1]
    assert all(last[f"val/{half}/reward/mean"] > 0.9 for half in HALVES), last
    divergence = found.values("actor/teacher_divergence")
    assert divergence[-1] < 0.2 * divergence[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("said", ["distill.top_k=-1", "distill.top_k=3", "distill.top_k=0"])
def test_teachers_on_other_ranks_sharing_rows_and_under_megatron_give_the_same_loss(
    made, tmp_path, said, monkeypatch
):
    monkeypatch.chdir(ROOT)
    more = ("trainer.total_training_steps=2", f"{ACTOR}.{said}", "trainer.test_freq=-1")
    more += ("trainer.val_before_train=false",)
    if said.endswith("0"):
        more += (f"{ACTOR}.distill.divergence=reverse_kl", f"{ACTOR}.ppo_mini_batch_size=32")
    losses = []
    for name, keys in (("together", ()), ("apart", ON_1), ("shared", SHARED), ("megatron", MEGATRON)):
        shutil.copytree(made, tmp_path / name, ignore=shutil.ignore_patterns("run"))
        words = run(tmp_path / name, *more, *keys, python="echo").split()
        job = run_job(2 if keys else 1, words[words.index("siirl.main_dag") + 1 :], deadline_s=300)
        losses.append(job.values("actor/distill_loss"))
    assert len(losses[0]) == 2 and min(map(abs, losses[0])) > 1e-2
    assert losses[1] == pytest.approx(losses[0], rel=1e-6, abs=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6, abs=1e-6)
    assert losses[3] == pytest.approx(losses[0], rel=1e-6, abs=1e-6)


def test_a_row_that_no_teacher_takes_is_refused_before_the_run(tmp_path):
    write(tmp_path / "x", num_rows=64, steps=0)
    keys = ("dag.node_config.smaller.takes=[other]",)
    said = run_example(tmp_path / "x", *keys, example="distillation", fails=True)
    assert "no teacher of agent 0 takes it, they take larger, other" in " ".join(said.split()), said
    assert "has no effect" not in said, "its workflow says that it learns from teachers"
    many = [f"{key}={10**9}" for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")]
    said = run_example(tmp_path / "x", *many, example="distillation", fails=True)
    assert "of this machine, which has no GPU" in " ".join(said.split()), said
    assert not (tmp_path / "x" / "run" / "metrics.jsonl").exists()
