"""A standardised reward has mean 0 and deviation 1 over all ranks and steps, by data source."""

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers
from op_contexts import op_context

from siirl.config import load_config
from siirl.data.rows import make_rows
from siirl.nodes.context import StepInfo
from siirl.nodes.reward_combine import combine_rewards

SCORES = {"a": [1.0, 3.0, 5.0, 7.0], "b": [100.0, 300.0]}
KEYS = ("actor_rollout_ref.rollout.name=hf", "+reward_model.weights={*:{model:{weight:2,standardize:true}}}")


def standardize(rank: int, world: int) -> tuple[list[float], list[float], list[float], dict[str, float]]:
    """The scores of this rank in two training steps and a validation, and the state that is left."""
    cfg, state = load_config(list(KEYS)), {}
    pairs = [(source, score) for source, scores in SCORES.items() for score in scores][rank::world]
    if world == 3:  # a rank without rows, and one that holds the rows of another
        pairs = [(source, score) for source, scores in SCORES.items() for score in scores][min(rank, 1) :: 2]
    results = []
    for step, shift in ((1, 0.0), (2, 10.0), (0, 0.0)):
        rows = make_rows(
            {
                "row_id": torch.arange(len(pairs)),
                "sample_index": torch.arange(len(pairs)),
                "data_source": [source for source, _ in pairs],
                "raw_prompt": [""] * len(pairs),
                "model": torch.tensor([score + shift for _, score in pairs]),
            }
        )
        now = StepInfo(step, step == 0)
        ctx = op_context("total", cfg, group=dist.group.WORLD, now=now, is_shard_leader=rank < 2, state=state)
        results.append(combine_rewards(ctx, rows)["score"].tolist())
    return (*results, state)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_rewards_are_standardised_by_source_over_ranks_and_steps(world):
    parts = run_workers(standardize, world)
    assert all(part[3] == parts[0][3] for part in parts)
    scores = torch.tensor(SCORES["a"])
    first = 2 * (scores - scores.mean()) / scores.std(correction=0)
    both = torch.cat([scores, scores + 10])
    second = 2 * (scores + 10 - both.mean()) / both.std(correction=0)
    validated = 2 * (scores - both.mean()) / both.std(correction=0)
    for position, expected in enumerate((first, second, validated)):
        found = sorted([*parts[0][position][:2], *parts[1][position][:2]])
        assert found == pytest.approx(sorted(expected.tolist()), abs=1e-4)
