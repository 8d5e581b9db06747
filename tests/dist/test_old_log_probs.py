"""Old log-probs of the first mini-batch need no pass: the weights are those of training with the pass.

For random algorithms, mini-batches, epochs and orders of rows: two steps of actor_train under FSDP and
Megatron-Core, with rows dealt out at random.
"""

import copy
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as engines
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from train_engine_cases import NUM_ROWS, TEMPERATURE, WIDTH, Scenario

from siirl.algorithms.policy_losses import POLICY_LOSSES
from siirl.config import load_config, with_overrides
from siirl.config.algorithm_table import LOSSES
from siirl.config.batch import batch_of
from siirl.data.rows import take_rows
from siirl.engines.train.base import TrainEngine
from siirl.nodes.actor_train import actor_train
from siirl.nodes.log_prob import later_old_log_prob, old_log_prob
from siirl.observe.metrics import Metrics

ACTOR = "actor_rollout_ref.actor"
PROMPTS, SAMPLES = 10, 1
FAST_LEARNING = (f"{ACTOR}.optim.lr=0.01",)  # so that a ratio that is wrongly 1 shows
SCENARIOS = [
    Scenario("fsdp on 2", 2, overrides=FAST_LEARNING),
    Scenario("pp2", 2, overrides=FAST_LEARNING, strategy="megatron", sizes=(("pp", 2),)),
    Scenario("tp2", 2, overrides=FAST_LEARNING, strategy="megatron", sizes=(("tp", 2),)),
    Scenario("cp2", 2, overrides=FAST_LEARNING, strategy="megatron", sizes=(("cp", 2),)),
]
ROWS = {name: LOSSES[name] for name in POLICY_LOSSES.names() if name in LOSSES}
NAMES = [name for name, row in ROWS.items() if not (row.picks_tokens or row.imitates)]


def drawn(number: int, seed: int) -> list[dict[str, Any]]:
    """Configurations, those of which one or two epochs go with one or several mini-batches first."""
    rng = random.Random(seed)
    shapes = [(10, 2, False), (5, 1, True), (5, 2, True), (5, 1, False)]
    shapes += [(rng.choice([5, 10]), rng.choice([1, 2]), rng.random() < 0.5) for _ in range(number)]
    return [
        {
            f"{ACTOR}.ppo_mini_batch_size": mini,
            f"{ACTOR}.ppo_epochs": epochs,
            f"{ACTOR}.shuffle": shuffle,
            f"{ACTOR}.policy_loss.loss_mode": "vanilla" if at < 2 else rng.choice(NAMES),
            f"{ACTOR}.rollout_correction.weight": rng.choice(["none", "truncate"]),
            "data.train_batch_size": PROMPTS,
            "actor_rollout_ref.rollout.n": SAMPLES,
            "actor_rollout_ref.rollout.temperature": TEMPERATURE,
        }
        for at, (mini, epochs, shuffle) in enumerate(shapes[:number])
    ]


def batch(step: int) -> TensorDict:
    rows = engines.sample_rows(step).exclude("raw_prompt")
    rows["rollout_log_prob"] = -4 + 0.3 * torch.randn(NUM_ROWS, WIDTH, generator=torch.manual_seed(step))
    return rows


def two_steps(engine: TrainEngine, keys: dict[str, Any], is_leader: bool, how: str) -> SimpleNamespace:
    """Weights, metrics and passed rows of two training steps from the engine's weights.

    how: "whole" (all old log-probs are computed), "pruned" (as the plan has it), "none" (the ratio is 1).
    """
    cfg = with_overrides(load_config([]), keys)
    passed = []
    compute, metrics = engine.compute, Metrics()
    engine.compute = lambda rows, *more: passed.append(len(rows)) or compute(rows, *more)
    for step in (1, 2):
        owner = torch.randint(engine.dp_size, (NUM_ROWS,), generator=torch.Generator().manual_seed(step))
        rows = take_rows(batch(step), (owner == engine.dp_rank).nonzero().squeeze(1))
        ctx = SimpleNamespace(
            cfg=cfg, step=step, group=dist.group.WORLD, options={}, trained=None, taken=None
        )
        ctx.metrics, ctx.is_shard_leader = metrics, is_leader
        later = later_old_log_prob if batch_of(cfg).mini_batches > 1 else None
        node = {"whole": old_log_prob, "pruned": later, "none": None}[how]
        if node is not None:
            rows["old_log_prob"] = node(ctx, rows, engine)["old_log_prob"]
        actor_train(ctx, rows, engine)
    del engine.compute
    weights = {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (metrics.entries, sum(passed)) if is_leader else ({}, 0))
    joined = Metrics()
    for entries, _ in parts:
        joined.merge(Metrics(entries))
    return SimpleNamespace(
        weights=weights, metrics=joined.values(), passed=sum(number for _, number in parts)
    )


def outcomes(rank: int, world: int, scenarios: list[Scenario], cases: list[dict], path: str) -> Any:
    """For each scenario and case: how -> what came of it. From rank 0."""
    found = []
    for one in scenarios:
        engine, _ = engines.build_engine(one, path)
        start = copy.deepcopy(engine.state_dict())
        shards = engines.dims_of(one, tuple(range(world)))[0].data_shards()
        for keys in cases:
            of_case = {}
            for how in ("whole", "pruned", *(("none",) if keys[f"{ACTOR}.ppo_epochs"] == 1 else ())):
                engine.load_state_dict(copy.deepcopy(start))
                of_case[how] = two_steps(engine, keys, shards.index(shards[rank]) == rank, how)
            found.append((one.name, keys, of_case))
    return found if rank == 0 else None


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of all weights together: Adam moves a single one by as much however small its gradient is."""
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


def check(scenarios: list[Scenario], cases: list[dict]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="siirl-old-"))
    path = make_tiny_model_dir(folder / "model", tie=False, hidden=64, init_std=0.15)
    found = run_workers(outcomes, 2, scenarios, cases, str(path), deadline_s=400)[0]
    assert len(found) == len(scenarios) * len(cases)
    start = load_file(path / "model.safetensors")
    for name, keys, of_case in found:
        whole, pruned = of_case["whole"], of_case["pruned"]
        mini, epochs = keys[f"{ACTOR}.ppo_mini_batch_size"], keys[f"{ACTOR}.ppo_epochs"]
        moved = distance(whole.weights, start)
        assert distance(whole.weights, pruned.weights) < 1e-4 * moved, (name, keys)
        assert pruned.passed == (2 * (NUM_ROWS - mini * SAMPLES) if mini < PROMPTS else 0), (name, keys)
        assert whole.passed == 2 * NUM_ROWS
        for metric, value in whole.metrics.items():
            if metric.startswith("actor/"):
                assert pruned.metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), (
                    name,
                    keys,
                    metric,
                )
        if mini < PROMPTS and epochs == 1:
            assert distance(whole.weights, of_case["none"].weights) > 0.05 * moved, (name, keys)


def test_training_without_the_old_log_probs_of_the_first_mini_batch_gives_the_same_weights():
    check(SCENARIOS[:1], drawn(3, 0)[1:])
    check(SCENARIOS[1:2], drawn(2, 0)[1:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_algorithms_need_no_old_log_probs_of_the_first_mini_batch():
    check(SCENARIOS, drawn(12, 1))
