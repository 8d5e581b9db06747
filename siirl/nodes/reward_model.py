"""The reward op of a frozen model with a score head: conversations in, one number for each out."""

from tensordict import TensorDict

from siirl.data.rows import make_rows, objects
from siirl.errors import RewardError
from siirl.nodes.context import NodeContext
from siirl.nodes.reward import check_scores, report_rewards


def model_reward(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """score [B] and reward_info [B], by any training engine with a score head. Collective over its ranks.

    RewardError, with the sample's index, for a score that is not finite.
    """
    if ctx.train is None or ctx.encoder is None:
        raise RewardError(f"node {ctx.node_id!r} has no reward model on this rank: the plan gave it none")
    conversations, num_cut = ctx.encoder.encode(rows)
    score_B = ctx.train.compute(conversations, ("score",), 1.0)["score"][:, 0]
    check_scores(ctx, rows, score_B)
    ctx.metrics.sum("flops/forward", ctx.train.flops(conversations, backward=False))
    ctx.metrics.mean("reward/model_cut", num_cut, len(rows))
    if not ctx.validate:
        for source, score in zip(objects(rows, "data_source"), score_B.tolist(), strict=True):
            ctx.metrics.mean(f"reward/{source}/mean", score)
    scored = make_rows({"score": score_B, "reward_info": [{} for _ in range(len(rows))]})
    report_rewards(ctx, rows, scored)
    return scored
