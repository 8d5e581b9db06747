"""The value head of a training engine equals plain Hugging Face, however the rows are cut, and its export loads."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir

from siirl.checkpoint.hf import save_hf
from siirl.config import load_config
from siirl.dag.plan import ModelPlan
from siirl.data.rows import take_rows
from siirl.engines.registry import make_train_engine
from siirl.engines.train.hf_model import load_hf_config, load_source
from siirl.nodes.critic import make_value_loss_fn
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroups

STEPS, LR, CLIP_RANGE = 2, 1e-3, 0.2
LORA = ("critic.model.lora_rank=4", "critic.model.lora_alpha=8")


@pytest.fixture(scope="module")
def model_dir() -> str:
    root = Path(tempfile.mkdtemp(prefix="siirl-value-head-"))
    return str(make_tiny_model_dir(root, hidden=64, init_std=0.15))


def config(path: str, *more: str):
    return load_config(
        [
            f"critic.model.path={path}",
            "critic.fsdp_config.mixed_precision.param_dtype=float32",
            f"critic.optim.lr={LR}",
            "critic.optim.weight_decay=0.1",
            "critic.ppo_micro_batch_size_per_gpu=3",
            f"critic.cliprange_value={CLIP_RANGE}",
            *more,
        ]
    )


def critic_rows(step: int):
    """sample_rows with returns, and old values from which some values are clipped."""
    rows = cases.sample_rows(step)
    draw = torch.Generator().manual_seed(step)
    rows["return_"] = torch.randn(rows["advantage"].shape, generator=draw)
    rows["value"] = torch.randn(rows["advantage"].shape, generator=draw) * 0.3
    return rows


def build_critic(world: int, path: str, *more: str):
    ranks = tuple(range(world))
    dims = ParallelDims(world=world, dp_shard=world)
    wanted = dict.fromkeys([ranks, *(line for lines in dims.mesh_groups(ranks).values() for line in lines)])
    plan = ModelPlan("agent_0.critic", 0, "critic", "fsdp", "value", True, ranks, dims, "c", ("c",))
    cfg = config(path, *more)
    return make_train_engine(plan, cfg, ProcessGroups(list(wanted), "gloo", 60), torch.device("cpu")), cfg


def train_critic(rank: int, world: int, path: str, out: str, more: tuple[str, ...]):
    """(values before, exported weights after STEPS steps), the export written to `out`."""
    engine, cfg = build_critic(world, path, *more)
    mine = cases.rows_of_rank(rank, world, "uneven" if world > 1 else "even")
    values = torch.zeros(cases.NUM_ROWS, cases.WIDTH)
    values[mine] = engine.compute(take_rows(critic_rows(0), mine), ("value",), 1.0)["value"]
    dist.all_reduce(values)
    loss_fn = make_value_loss_fn(cfg.critic)
    for step in range(STEPS):
        engine.train_mini_batch(take_rows(critic_rows(step), mine), loss_fn, ("value",), 1.0)
    after = torch.zeros_like(values)
    after[mine] = engine.compute(take_rows(critic_rows(0), mine), ("value",), 1.0)["value"]
    dist.all_reduce(after)
    if out:
        save_hf(engine.export_weights(), path, Path(out), rank, engine.hf_config_changes())
    return values, after, {name: weight.clone() for name, weight in engine.export_weights()}


def plain_values(model, rows) -> torch.Tensor:
    """The value of each response token by plain Hugging Face, from the state before it, a row at a time."""
    value_BT = torch.zeros(len(rows), cases.WIDTH)
    for row in range(len(rows)):
        num_prompt, num = int(rows["prompt_length"][row]), int(rows["response_length"][row])
        if num:
            prompt = rows["prompt_ids"][row][rows["prompt_ids"].shape[1] - num_prompt :]
            ids = torch.cat([prompt, rows["response_ids"][row][:num]])[None]
            value_BT[row, :num] = model(input_ids=ids).logits[0, num_prompt - 1 : -1, 0]
    return value_BT


def plain_training(path: str):
    """The same training in plain PyTorch, loss written out."""
    cfg = config(path)
    hf_config = load_hf_config(cfg.critic.model)
    hf_config.num_labels = 1
    model = load_source(hf_config, cfg.critic.model, "value", cfg.trainer.seed)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    with torch.no_grad():
        before = plain_values(model, critic_rows(0))
    for step in range(STEPS):
        rows = critic_rows(step)
        value, old, target = plain_values(model, rows), rows["value"], rows["return_"]
        near = torch.maximum(torch.minimum(value, old + CLIP_RANGE), old - CLIP_RANGE)
        loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
        mask = rows["response_mask"]
        ((loss * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
    with torch.no_grad():
        return before, plain_values(model, critic_rows(0)), dict(model.named_parameters())


@pytest.fixture(scope="module")
def reference(model_dir):
    return plain_training(model_dir)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_values_and_their_training_equal_plain_hf(model_dir, reference, tmp_path, world):
    before, after, weights = run_workers(train_critic, world, model_dir, str(tmp_path / "hf"), ())[0]
    assert reference[0].abs().max() > 0.1
    torch.testing.assert_close(before, reference[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(after, reference[1], atol=2e-5, rtol=0)
    assert weights.keys() == reference[2].keys()
    for name, weight in reference[2].items():
        torch.testing.assert_close(weights[name], weight.detach(), atol=0.02 * LR, rtol=0, msg=name)

    from transformers import AutoModelForTokenClassification

    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(plain_values(loaded, critic_rows(0)), after, atol=1e-5, rtol=0)
    again = run_workers(train_critic, 1, str(tmp_path / "hf"), "", ())[0]
    torch.testing.assert_close(again[0], after, atol=1e-5, rtol=0)  # a critic that starts from a critic


@pytest.mark.slow
def test_adapters_of_a_critic_train_with_its_head(model_dir):
    before, after, weights = run_workers(train_critic, 2, model_dir, "", LORA)[0]
    assert (after - before).abs().max() > 1e-4
    assert "score.weight" in weights and not any("lora" in name for name in weights)


def test_a_reward_model_lends_its_head_and_seeds_decide_a_new_one(model_dir, tmp_path):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1).save_pretrained(tmp_path)
    cfg = config(str(tmp_path))
    hf_config = load_hf_config(cfg.critic.model)
    model = load_source(hf_config, cfg.critic.model, "value", 0)
    reward_model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(model.score.weight, reward_model.score.weight) and not model.score.bias.any()

    plain = config(model_dir).critic.model
    heads = []
    for seed in (1, 1, 2):
        hf_config = load_hf_config(plain)
        hf_config.num_labels = 1
        heads.append(load_source(hf_config, plain, "value", seed).score.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
