"""Forward-only ops: log-probs of the responses by the policy before the step, or by the reference."""

from tensordict import TensorDict

from siirl.nodes.context import NodeContext


def old_log_prob(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """old_log_prob [B, T] by the policy's current weights. Collective over the model's ranks."""
    return _log_prob(ctx, rows, "old_log_prob")


def reference_log_prob(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """ref_log_prob [B, T] by the frozen reference. Collective over the model's ranks."""
    return _log_prob(ctx, rows, "ref_log_prob")


def _log_prob(ctx: NodeContext, rows: TensorDict, field: str) -> TensorDict:
    out = ctx.train.compute(rows, ("log_prob",), ctx.cfg.actor_rollout_ref.rollout.temperature)
    ctx.metrics.sum("flops/forward", ctx.train.flops(rows, backward=False))
    return TensorDict({field: out["log_prob"]}, batch_size=rows.batch_size)
