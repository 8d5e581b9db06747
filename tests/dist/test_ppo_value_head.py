"""The value head of a training engine equals plain Hugging Face, however rows are cut; its export loads."""

import tempfile
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
import value_head_cases as heads
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario
from value_head_cases import CriticOutcome, CriticRun, critic_config, plain_values

from siirl.checkpoint.export import save_hf
from siirl.engines.train.hf_model import load_source
from siirl.model_files.hf_config import load_hf_config
from siirl.parallel.process_groups import ProcessGroupManager

LORA = ("critic.model.lora_rank=4", "critic.model.lora_alpha=8")


@pytest.fixture(scope="module")
def model_dir() -> str:
    root = Path(tempfile.mkdtemp(prefix="siirl-value-head-"))
    return str(make_tiny_model_dir(root, hidden=64, init_std=0.15))


def train_critic(rank: int, world: int, path: str, out: str, scenario: Scenario) -> CriticOutcome:
    """Train a critic on all ranks; the export is written to `out`."""
    ranks = tuple(range(world))
    groups = ProcessGroupManager(cases.dims_of(scenario, ranks)[1], "gloo", 60)
    run = CriticRun(*heads.make_critic(scenario, path, groups, ranks), scenario.split)
    for step in range(heads.STEPS):
        run.step(step)
    if out:
        save_hf(run.engine.export_weights(), path, Path(out), rank, run.engine.hf_config_changes())
    return run.outcome()


@pytest.fixture(scope="module")
def reference(model_dir):
    return heads.plain_training(model_dir)


def megatron(world: int, *overrides: str, split: str = "even", **sizes: int) -> Scenario:
    return Scenario(
        f"megatron {sizes} {split}",
        world,
        split=split,
        overrides=tuple(f"critic.megatron.{key}" for key in overrides),
        strategy="megatron",
        sizes=tuple(sizes.items()),
    )


SCENARIOS = [
    megatron(4, "sequence_parallel=True", tp=2, pp=2),
    *(
        pytest.param(scenario, marks=pytest.mark.slow)
        for scenario in (
            Scenario("fsdp", 4, split="uneven"),
            Scenario("fsdp, one rank", 1),
            Scenario("fsdp, two pairs share rows", 4, split="uneven", sizes=(("cp", 2),)),
            megatron(1),
            megatron(2, "use_distributed_optimizer=False", tp=2),
            megatron(2, "sequence_parallel=True", tp=2),
            megatron(2, pp=2),
            megatron(2, cp=2),
            megatron(4, split="uneven"),
            megatron(4, "sequence_parallel=True", split="first_rank", tp=2),
            megatron(4, "sequence_parallel=True", tp=2, cp=2),
            megatron(4, cp=2, pp=2),
        )
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_values_and_their_training_equal_plain_hf(model_dir, reference, tmp_path, scenario):
    exported = tmp_path / "hf"
    ours = run_workers(train_critic, scenario.world, model_dir, str(exported), scenario)[0]
    heads.assert_equal(ours, reference)

    from transformers import AutoModelForTokenClassification

    loaded = AutoModelForTokenClassification.from_pretrained(exported)
    with torch.no_grad():
        found = plain_values(loaded, heads.critic_rows(0))
    torch.testing.assert_close(found, ours.after, atol=1e-5, rtol=0)
    other = "megatron" if scenario.strategy == "fsdp" else "fsdp"  # a critic that starts from a critic
    again = run_workers(train_critic, 1, str(exported), "", Scenario("again", 1, strategy=other))[0]
    torch.testing.assert_close(again.before, ours.after, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_adapters_of_a_critic_train_with_its_head(model_dir):
    ours = run_workers(train_critic, 2, model_dir, "", Scenario("lora", 2, overrides=LORA))[0]
    assert (ours.after - ours.before).abs().max() > 1e-4
    assert "score.weight" in ours.weights and not any("lora" in name for name in ours.weights)


def test_a_reward_model_lends_its_head_and_seeds_decide_a_new_one(model_dir, tmp_path):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1).save_pretrained(tmp_path)
    cfg = critic_config(str(tmp_path))
    hf_config = load_hf_config(cfg.critic.model)
    model = load_source(hf_config, cfg.critic.model, "value", 0)
    reward_model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(model.score.weight, reward_model.score.weight) and not model.score.bias.any()

    plain = critic_config(model_dir).critic.model
    fresh = []
    for seed in (1, 1, 2):
        hf_config = load_hf_config(plain)
        hf_config.num_labels = 1
        fresh.append(load_source(hf_config, plain, "value", seed).score.weight)
    assert torch.equal(fresh[0], fresh[1]) and not torch.equal(fresh[0], fresh[2])
