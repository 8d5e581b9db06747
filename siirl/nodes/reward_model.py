"""The reward op of a frozen model with a score head: conversations in, one number for each out."""

from tensordict import TensorDict

from siirl.data.rows import make_rows
from siirl.errors import RewardError
from siirl.nodes.context import NodeContext
from siirl.nodes.reward import finished


def model_reward(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """score [B] and reward_info [B], or under the node's own name, by a training engine with a score head.

    Collective over the model's ranks. RewardError, with the sample's index, for a score that is not finite.
    """
    if ctx.train is None or ctx.encoder is None:
        raise RewardError(f"node {ctx.node_id!r} has no reward model on this rank: the plan gave it none")
    conversations, num_cut = ctx.encoder.encode(rows)
    score_B = ctx.train.compute(conversations, ("score",), 1.0)["score"][:, 0]
    ctx.metrics.sum("flops/forward", ctx.train.flops(conversations, backward=False))
    ctx.metrics.mean("reward/model_cut", num_cut, len(rows))
    return finished(ctx, rows, make_rows({"score": score_B, "reward_info": [{} for _ in range(len(rows))]}))
