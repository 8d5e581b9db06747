"""Megatron models of both heads, and one under FSDP, in one world: each trains as if it were alone."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
import value_head_cases as heads
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.data.rows import take_rows
from siirl.nodes.value_model import make_value_loss_fn
from siirl.parallel.process_groups import ProcessGroupManager

PLAIN_OPTIMIZER = ("actor_rollout_ref.actor.megatron.use_distributed_optimizer=False",)


def model(name: str, ranks: tuple[int, ...], tie: bool = False, overrides=(), strategy="megatron", **sizes):
    kind = "qwen3_tied" if tie else "qwen3_untied"
    scenario = Scenario(
        name, len(ranks), kind, overrides=overrides, strategy=strategy, sizes=tuple(sizes.items())
    )
    return scenario, ranks


MODELS = [
    model("tp2 on 0, 1", (0, 1), overrides=PLAIN_OPTIMIZER, tp=2),
    model("pp2, tied, on 2, 3", (2, 3), tie=True, overrides=PLAIN_OPTIMIZER, pp=2),
    model("tp2, pp2 on all", (0, 1, 2, 3), overrides=PLAIN_OPTIMIZER, tp=2, pp=2),
    model("dp4 on all", (0, 1, 2, 3), tie=True, overrides=PLAIN_OPTIMIZER),
    model("dp2, distributed optimizer, on 1, 3", (1, 3)),
    model("fsdp on all", (0, 1, 2, 3), strategy="fsdp"),
]
CRITIC, CRITIC_RANKS = model("critic, pp2, tied, on 0, 1", (0, 1), tie=True, pp=2)
REFERENCES = {"qwen3_tied": True, "qwen3_untied": False}


def train_interleaved(rank: int, world: int, paths: dict[str, str]) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of this rank's models after some steps, which they take in turn."""
    from megatron.core import parallel_state

    models = [*MODELS, (CRITIC, CRITIC_RANKS)]
    wanted = dict.fromkeys(line for scenario, ranks in models for line in cases.dims_of(scenario, ranks)[1])
    groups = ProcessGroupManager(list(wanted), "gloo", 60)
    engines = {
        scenario.name: (scenario, cases.make_engine(scenario, paths[scenario.model], groups, ranks))
        for scenario, ranks in MODELS
        if rank in ranks
    }
    critic = None
    if rank in CRITIC_RANKS:
        critic, cfg = heads.make_critic(CRITIC, paths[CRITIC.model], groups, CRITIC_RANKS)
    for step in range(cases.NUM_STEPS):
        if critic is not None and step < heads.STEPS:
            rows = heads.critic_rows(step)
            critic.train_mini_batch(rows, make_value_loss_fn(cfg.critic), ("value",), 1.0)
        for scenario, engine in engines.values():
            cases.train_steps(engine, scenario, range(step, step + 1))
            assert parallel_state.is_unitialized()
            assert dist.get_world_size() == world and dist.get_rank() == rank
            rows = take_rows(cases.sample_rows(0), cases.rows_of_rank(engine.dp_rank, engine.dp_size, "even"))
            engine.compute(rows, ("log_prob",), cases.TEMPERATURE)
    streams = {name: engine.export_weights() for name, (_, engine) in engines.items()}
    if critic is not None:
        streams[CRITIC.name] = critic.export_weights()
    weights: dict[str, dict[str, torch.Tensor]] = {name: {} for name in streams}
    while streams:  # the exports too are interleaved, a tensor of each in turn
        for name in list(streams):
            found = next(streams[name], None)
            if found is None:
                del streams[name]
            else:
                weights[name][found[0]] = found[1].clone()
    return weights


@pytest.fixture(scope="module")
def paths() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-models-"))
    return {
        name: str(make_tiny_model_dir(root / name, tie=tie, hidden=64, init_std=0.15))
        for name, tie in REFERENCES.items()
    }


@pytest.mark.slow
def test_seven_models_of_different_layouts_on_four_ranks_train_as_if_alone(paths):
    references = {name: cases.run_reference(Path(path)).weights for name, path in paths.items()}
    critic = heads.plain_training(paths[CRITIC.model]).weights
    for rank, found in enumerate(run_workers(train_interleaved, 4, paths)):
        trained = found.pop(CRITIC.name, {})
        assert trained.keys() == (critic.keys() if rank in CRITIC_RANKS else set())
        for name, weight in trained.items():
            torch.testing.assert_close(weight, critic[name], atol=0.02 * heads.LR, rtol=0, msg=name)
        assert found.keys() == {scenario.name for scenario, ranks in MODELS if rank in ranks}
        for scenario, _ in MODELS:
            for name, weight in found.get(scenario.name, {}).items():
                gap = float((weight - references[scenario.model][name]).abs().max())
                assert gap < 0.01 * cases.LR, (rank, scenario.name, name)
            expected = references[scenario.model].keys()
            assert scenario.name not in found or found[scenario.name].keys() == expected
