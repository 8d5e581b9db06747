"""Ranks that share each row's tokens need less memory for them, as estimated; runs go on with and without."""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from tensordict import TensorDict
from train_engine_cases import Scenario

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.phases import memory_lines
from siirl.config import load_config
from siirl.data.rows import make_rows
from siirl.engines.engine_registry import make_train_engine
from siirl.engines.train.base import TrainEngine
from siirl.parallel.process_groups import ProcessGroupManager

ALONE, SHARED = Scenario("", 2), Scenario("", 2, sizes=(("cp", 2),))


def trained(rank: int, world: int, path: str, folder: str, first: Scenario, then: Scenario) -> float:
    """How far the weights lie apart after a step that follows a checkpoint, by both scenarios."""
    engine, _ = cases.build_engine(first, path)
    cases.train_steps(engine, first, range(2))
    dcp.save(engine.state_dict(), checkpoint_id=folder)
    cases.train_steps(engine, first, range(2, 3))
    other, _ = cases.build_engine(then, path)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    cases.train_steps(other, then, range(2, 3))
    pairs = zip(engine.export_weights(torch.float32), other.export_weights(torch.float32), strict=True)
    return max(float((ours - theirs).abs().max()) for (_, ours), (_, theirs) in pairs)


@pytest.mark.parametrize(("first", "then"), [(SHARED, ALONE), (ALONE, SHARED)], ids=["ends", "begins"])
def test_a_checkpoint_goes_on_with_and_without_shared_rows(tmp_path, first, then):
    path = str(make_tiny_model_dir(Path(tempfile.mkdtemp()), hidden=64, init_std=0.15))
    gaps = run_workers(trained, 2, path, str(tmp_path), first, then)
    assert max(gaps) < 0.01 * cases.LR


PROMPT, RESPONSE = 2048, 6145
"""Tokens of a long row; all but its last one are computed, and four ranks have equal parts of them."""
SIZES = (1, 2, 4)
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"


def long_row() -> TensorDict:
    draw = torch.Generator().manual_seed(0)
    prompt_BP, response_BT = (torch.randint(0, 64, (1, num), generator=draw) for num in (PROMPT, RESPONSE))
    return make_rows(
        {
            "row_id": torch.arange(1),
            "prompt_ids": prompt_BP,
            "prompt_length": torch.tensor([PROMPT]),
            "response_ids": response_BT,
            "response_length": torch.tensor([RESPONSE]),
            "response_mask": torch.ones(1, RESPONSE, dtype=torch.bool),
            "advantage": torch.randn(1, RESPONSE, generator=draw),
        }
    )


def peaks(rank: int, world: int, path: str, recomputed: bool) -> dict[int, tuple[float, float]]:
    """Ranks of a row -> MiB that a step of this rank allocates at its fullest, and as the plan estimates."""
    found = {}
    for size in SIZES:
        cfg = load_config(
            [
                *cases.overrides_for(path),
                "algorithm.adv_estimator=grpo",
                *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=4"),
                *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
                *(f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"),
                *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", f"{CHECKPOINTING}={recomputed}"),
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}",
            ]
        )
        plan, configs = compile_plan(load_dag(cfg), cfg, world)
        lines = memory_lines(plan, configs)["agent_0.actor"]
        names = ("activations", "log-prob head")
        estimated = sum(
            line.num_bytes for line in lines if line.what in names and "update" in (line.during or ())
        )
        groups = ProcessGroupManager(plan.groups, "gloo", 60)
        engine = make_train_engine(plan.models["agent_0.actor"], cfg, groups, torch.device("cpu"))
        found[size] = allocated(lambda engine=engine: train_once(engine)) / 2**20, estimated / 2**20
    return found


def train_once(engine: TrainEngine) -> None:
    engine.train_mini_batch(long_row(), cases.policy_loss, ("log_prob", "entropy"), cases.TEMPERATURE)


def allocated(work: Callable[[], None]) -> int:
    """Most bytes of tensors that are held at once and were not there before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
def test_the_activations_of_a_long_row_shrink_with_the_ranks_that_share_it(tmp_path, recomputed):
    sizes = {"hidden": 64, "kv_heads": 4, "init_std": 0.1, "max_positions": PROMPT + RESPONSE}
    path = str(make_tiny_model_dir(tmp_path / "model", **sizes))
    for found in run_workers(peaks, 4, path, recomputed, deadline_s=400):
        alone, _ = found[1]
        assert alone > 10
        for size in SIZES:
            measured, estimated = found[size]
            assert measured < 1.3 * alone / size, found
            assert estimated == pytest.approx(measured, rel=0.25), found
