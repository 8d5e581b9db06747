"""ReMax's baseline: the greedy response of each prompt, and its score."""

from concurrent.futures import Future

import torch
from tensordict import TensorDict

from siirl.data.completions import SamplingParams
from siirl.data.rows import pad_stack, seen_of
from siirl.engines.rollout.base import RolloutEngine
from siirl.nodes.context import OpContext
from siirl.nodes.generate import prompt_seed, prompt_tokens
from siirl.rewards.scorer import RewardScorer
from siirl.types import FIELDS


def greedy_rollout(ctx: OpContext, rows: TensorDict, engine: RolloutEngine) -> TensorDict:
    """baseline_response_ids [B, T] and baseline_response_length [B] of each prompt. No communication."""
    rollout_cfg = ctx.cfg.actor_rollout_ref.rollout
    params = SamplingParams(
        max_tokens=rollout_cfg.response_length,
        n=1,
        temperature=0.0,
        stop_token_ids=ctx.dialect.stop_ids,
        ignore_eos=rollout_cfg.ignore_eos,
    )
    seeds = [prompt_seed(ctx, group_id) for group_id in rows["group_id"].tolist()]
    found = [one.token_ids for (one,) in engine.generate(prompt_tokens(rows), params, seeds, seen_of(rows))]
    lengths = torch.tensor([len(ids) for ids in found], dtype=torch.int64)
    ids = pad_stack(found, FIELDS["baseline_response_ids"])
    return TensorDict(
        {"baseline_response_ids": ids, "baseline_response_length": lengths}, batch_size=[len(found)]
    )


def baseline_reward(ctx: OpContext, rows: TensorDict, scorer: RewardScorer) -> Future[TensorDict]:
    """baseline_score [B], pending while the responses are sampled. No communication."""
    for name in ("response_ids", "response_length"):
        rows = rows.rename_key_(f"baseline_{name}", name)
    return scorer.submit(rows, names={"score": "baseline_score"})
