"""Jobs that train on responses of the dataset do what TRL's trainers do on the same files: every number."""

from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl_trainers
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from job_harness import ROOT, Finished, audited, run_example, run_job

from examples.given_responses import prepare

LR, BATCH, MINI = 1e-3, 8, 4
ACTOR = "actor_rollout_ref.actor"
TP2 = (
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.megatron.tensor_model_parallel_size=2",
    f"{ACTOR}.megatron.param_dtype=float32",
)
BY_TOKENS = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=64")
ONE_ROW = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)
PP2 = (*TP2[::2], f"{ACTOR}.megatron.pipeline_model_parallel_size=2")
ANSWERS = ("{0}", "it is {0}", "{0} or {1}", "the sum of both is {0}")


def rows(number: int) -> list[dict]:
    """Questions with answers of different lengths, and worse ones."""
    made = []
    for index in range(number):
        a, b = index % 7, index % 10
        prompt = [{"role": "user", "content": f"{a}+{b}=" * (1 + index % 3)}]
        right, wrong = ANSWERS[index % 4].format(a + b, b), ANSWERS[(index + 1) % 4].format(a * b + 1, a)
        made.append({"prompt": prompt, "response": right, "chosen": right, "rejected": wrong})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and a file of 16 rows: two steps of two mini-batches each."""
    out = tmp_path_factory.mktemp("given")
    make_tiny_model_dir(out / "model", init_std=0.2)
    pq.write_table(pa.Table.from_pylist(rows(16)), out / "given.parquet")
    return out


def chats(*names: str) -> list[dict]:
    """The rows as TRL reads them; names: the columns, as it calls them, and as we do."""
    pairs = [name.split("=") for name in names]
    said = [{"role": "assistant", "content": ""}]
    return [
        {"prompt": row["prompt"]} | {trl: [said[0] | {"content": row[own]}] for trl, own in pairs}
        for row in rows(16)
    ]


def by_trl(kind: str, model: Path, names: tuple[str, ...], batch: int = MINI, **more) -> trl_trainers.Trained:
    pytest.importorskip("trl")
    settings = (kind, str(model), chats(*names), batch, LR)
    (found,) = run_workers(_train, 1, settings, tuple(more.items()), backend=None, deadline_s=200)
    return found


def _train(rank: int, world: int, settings: tuple, more: tuple) -> trl_trainers.Trained:
    return trl_trainers.train(*settings, **dict(more))


def train(folder: Path, output: Path, world: int, *more: str) -> Finished:
    """A run of two steps, in fp32, in the order of the file."""
    keys = {
        "data.train_files": folder / "given.parquet",
        "data.train_batch_size": BATCH,
        "data.shuffle": False,
        "data.max_prompt_length": 32,
        "data.max_response_length": 32,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.rollout.name": "dataset",
        f"{ACTOR}.optim.lr": LR,
        f"{ACTOR}.optim.weight_decay": 0,
        f"{ACTOR}.ppo_mini_batch_size": MINI,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "float32",
        "trainer.device": "cpu",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.logger": "[]",
        "trainer.total_training_steps": 2,
        "trainer.output_dir": output,
        "trainer.ledger": "rows",
    }
    finished = run_job(world, [*(f"{key}={value}" for key, value in keys.items()), *more])
    audited(finished)
    return finished


def assert_equal(ours: Finished, theirs: trl_trainers.Trained, loss: str) -> None:
    """Loss and gradient of every step, which has two optimizer steps, and all weights after the last."""
    assert_means(ours, {loss: theirs.losses, "actor/grad_norm": theirs.grad_norms})
    weights = ours.weights()
    for name, tensor in weights.items():
        assert float((tensor - theirs.weights[name]).abs().max()) < 2e-5, name
    assert len(weights) > 10


def assert_means(ours: Finished, theirs: dict[str, list[float]]) -> None:
    """Metrics of steps are the means of their two optimizer steps."""
    for name, found in theirs.items():
        means = [(one + other) / 2 for one, other in zip(found[::2], found[1::2], strict=True)]
        assert ours.values(name) == pytest.approx(means, rel=2e-5), name


@cache
def sft(model: Path) -> trl_trainers.Trained:
    return by_trl("SFT", model, ("completion=response",))


@pytest.mark.parametrize(
    ("world", "more"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        (2, BY_TOKENS),
        pytest.param(2, TP2, marks=pytest.mark.slow),
    ],
    ids=["fsdp on 1", "fsdp on 2, by tokens", "tp2"],
)
def test_supervised_fine_tuning_is_trls(folder, tmp_path, world, more):
    ours = train(folder, tmp_path, world, f"{ACTOR}.policy_loss.loss_mode=sft", *more)
    assert_equal(ours, sft(folder / "model"), "actor/sft_loss")


def test_a_warm_up_is_that_training_and_what_follows_samples_from_it(folder, tmp_path):
    """Two steps of SFT, a step in which nobody runs, then GRPO by what was learnt, on two ranks."""
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, **more):\n    return len(solution_str)\n")
    questions = [{"prompt": row["prompt"], "data_source": "sum"} for row in rows(16)]
    pq.write_table(pa.Table.from_pylist(questions), tmp_path / "questions.parquet")
    nodes = "dag.node_config"
    ours = train(
        folder,
        tmp_path / "run",
        2,
        "dag.workflow_path=dag_templates/sft_grpo.yaml",
        f"{nodes}.demonstrations.data.train_files={folder / 'given.parquet'}",
        f"{nodes}.demonstrations.rollout.agent.last_step=2",
        f"{nodes}.rollout.rollout.agent.first_step=4",
        f"data.train_files={tmp_path / 'questions.parquet'}",
        f"custom_reward_function.path={reward}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=5",
    )
    theirs = sft(folder / "model")
    found = [line.get("agent_1/actor/sft_loss") for line in ours.lines]
    means = [(one + other) / 2 for one, other in zip(theirs.losses[::2], theirs.losses[1::2], strict=True)]
    assert found[:2] == pytest.approx(means, rel=2e-5) and found[2:] == [None] * 3
    sampled = [line.get("agent_0/actor/rollout_log_prob_diff") for line in ours.lines]
    assert sampled[:3] == [None] * 3 and max(sampled[3:]) < 1e-5  # by the weights that it had learnt
    versions = ours.values("weight_sync/agent_0.weights_version")
    assert versions and versions[0] == 4  # two steps of two mini-batches


@cache
def dpo(model: Path) -> trl_trainers.Trained:
    return by_trl("DPO", model, ("chosen=chosen", "rejected=rejected"), beta=0.3)


@pytest.mark.parametrize(
    ("world", "more"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, BY_TOKENS, marks=pytest.mark.slow),
        pytest.param(2, ONE_ROW, marks=pytest.mark.slow),
        (2, TP2),
        pytest.param(2, PP2, marks=pytest.mark.slow),
    ],
    ids=["fsdp on 1", "fsdp on 2, by tokens", "fsdp on 2, a row at a time", "tp2", "pp2"],
)
def test_preferences_are_learnt_as_trl_does(folder, tmp_path, world, more):
    keys = ("actor_rollout_ref.rollout.n=2", "data.response_keys=[chosen,rejected]")
    loss = (f"{ACTOR}.policy_loss.loss_mode=dpo", f"{ACTOR}.policy_loss.dpo_beta=0.3")
    ref = "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=float32"
    ours, theirs = train(folder, tmp_path, world, *keys, *loss, ref, *more), dpo(folder / "model")
    assert_equal(ours, theirs, "actor/dpo_loss")
    for own, name in (("margin", "margins"), ("better", "chosen"), ("worse", "rejected")):
        found = [entry[f"rewards/{name}"] for entry in theirs.log]
        means = [(one + other) / 2 for one, other in zip(found[::2], found[1::2], strict=True)]
        assert ours.values(f"actor/reward_{own}") == pytest.approx(means, rel=1e-4, abs=1e-6), own


SHORT = {
    "sft": ("trainer.total_training_steps=1",),
    "dpo": ("trainer.total_training_steps=1",),
    "sft_grpo": (
        "dag.node_config.demonstrations.rollout.agent.last_step=1",
        "dag.node_config.rollout.rollout.agent.first_step=2",
        "trainer.total_training_steps=2",
    ),
}
"""Example -> keys that leave of its training a step of each kind."""


@pytest.mark.parametrize(
    "name", [name if name == "sft_grpo" else pytest.param(name, marks=pytest.mark.slow) for name in SHORT]
)
def test_the_examples_train_by_the_keys_of_their_script(name, tmp_path, monkeypatch):
    prepare.write(tmp_path, 64)
    words = run_example(tmp_path, name, *SHORT[name], example="given_responses", python="echo").split()
    monkeypatch.chdir(ROOT)
    found = run_job(1, words[2:])
    losses = {"sft": "actor/sft_loss", "dpo": "actor/dpo_loss", "sft_grpo": "agent_1/actor/sft_loss"}
    assert [loss > 0.5 for loss in found.values(losses[name])] == [True]
    grads = (
        ("agent_0/actor/grad_norm", "agent_1/actor/grad_norm") if name == "sft_grpo" else ("actor/grad_norm",)
    )
    assert all(max(found.values(grad)) > 0 for grad in grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_the_examples_learn(name, tmp_path):
    run_example(tmp_path, name, example="given_responses")
    found = Finished.read(tmp_path / name)
    if name == "sft":
        losses = found.values("actor/sft_loss")
        assert losses[0] > 2 and losses[-1] < 0.1
        return
    if name == "dpo":
        assert found.values("actor/reward_accuracy")[-1] > 0.95 and found.values("actor/dpo_loss")[-1] < 0.3
        return
    worth = found.values("agent_0/val/reward/mean")
    assert worth[0] < 0.2 and worth[3] > 0.8 and worth[-1] > 0.95, worth  # the fourth: GRPO has not begun
