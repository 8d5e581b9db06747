"""The reward op of a frozen model with a score head: conversations in, one number for each out."""

from tensordict import TensorDict

from siirl.data.rows import make_rows
from siirl.engines.train.base import TrainEngine
from siirl.nodes.context import OpContext
from siirl.nodes.function_reward import finished
from siirl.rewards.conversations import ConversationEncoder


def model_reward(
    ctx: OpContext, rows: TensorDict, engine: TrainEngine, encoder: ConversationEncoder
) -> TensorDict:
    """score [B] and reward_info [B], or under the node's own name, by a training engine with a score head.

    Collective over the model's ranks. RewardError, with the sample's index, for a score that is not finite.
    """
    conversations, num_cut = encoder.encode(rows)
    score_B = engine.compute(conversations, ("score",), 1.0)["score"][:, 0]
    ctx.metrics.sum("flops/forward", engine.flops(conversations, backward=False))
    ctx.metrics.mean("reward/model_cut", num_cut, len(rows))
    return finished(ctx, rows, make_rows({"score": score_B, "reward_info": [{} for _ in range(len(rows))]}))
