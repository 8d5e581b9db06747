"""The rule-based reward op: responses in, scores out, computed beside whatever the DAG lets run meanwhile."""

from concurrent.futures import Future

from tensordict import TensorDict

from siirl.errors import RewardError
from siirl.nodes.context import NodeContext


def function_reward(ctx: NodeContext, rows: TensorDict) -> Future[TensorDict]:
    """score [B] and reward_info [B] as a Future: the scorer's processes work while the next nodes run."""
    if ctx.scorer is None:
        raise RewardError(f"node {ctx.node_id!r} has no reward scorer on this rank")
    return ctx.scorer.submit(rows)
