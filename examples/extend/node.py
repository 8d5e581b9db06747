"""A node of your own: a bonus for short responses, as a step of the DAG that changes the score.

The DAG (dag.py) puts it between the reward and the advantages: reads score, writes bonus.
"""

import torch
from tensordict import TensorDict

from siirl.nodes.context import NodeContext, sum_over_ranks


def short_bonus(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """bonus [B]: `weight` (a key of the node's config) for responses of one token and its end."""
    weight = float(ctx.options.get("weight", 0.1))
    bonus_B = weight * (rows["response_length"] <= 2).float()
    ctx.metrics.mean("bonus/mean", float(bonus_B.sum()), len(bonus_B))
    return TensorDict({"bonus": bonus_B}, batch_size=rows.batch_size)


def add_bonus(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """advantage [B, T] of outcome and bonus, less their mean over the rows of all ranks."""
    outcome_B = rows["score"] + rows["bonus"]
    totals = torch.tensor([float(outcome_B.sum()), len(outcome_B)], dtype=torch.float64)
    total, count = sum_over_ranks(ctx, totals).tolist()
    advantage_B = outcome_B - total / max(count, 1)
    return TensorDict({"advantage": advantage_B[:, None] * rows["response_mask"]}, batch_size=rows.batch_size)
