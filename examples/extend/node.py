"""A node of your own: a bonus for short responses, as a step of the DAG that changes the score.

The DAG (dag.py) puts it between the reward and the advantages: reads score, writes bonus.
"""

from tensordict import TensorDict

from siirl.nodes.context import NodeContext


def short_bonus(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """bonus [B]: `weight` (a key of the node's config) for responses of one token and its end."""
    weight = float(ctx.options.get("weight", 0.1))
    bonus_B = weight * (rows["response_length"] <= 2).float()
    ctx.metrics.mean("bonus/mean", float(bonus_B.sum()), len(bonus_B))
    return TensorDict({"bonus": bonus_B}, batch_size=rows.batch_size)


def add_bonus(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """advantage [B, T] of outcome and bonus, less their mean over this rank's rows."""
    outcome_B = rows["score"] + rows["bonus"]
    advantage_B = outcome_B - outcome_B.mean() if len(outcome_B) else outcome_B
    return TensorDict({"advantage": advantage_B[:, None] * rows["response_mask"]}, batch_size=rows.batch_size)
