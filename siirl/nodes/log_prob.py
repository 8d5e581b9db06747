"""Forward-only ops: log-probs of the responses by the policy before the step, or by the reference."""

from tensordict import TensorDict

from siirl.dag.ops import uses_full_kl
from siirl.nodes.context import NodeContext


def old_log_prob(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """old_log_prob [B, T] by the policy's current weights. Collective over the model's ranks."""
    return _forward(ctx, rows, {"log_prob": "old_log_prob"})


def reference_log_prob(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """ref_log_prob [B, T] by the frozen reference; ref_hidden [B, T, D] if the loss has the full KL.

    Collective over the model's ranks.
    """
    hidden = {"hidden": "ref_hidden"} if uses_full_kl(ctx.cfg) else {}
    return _forward(ctx, rows, {"log_prob": "ref_log_prob", **hidden})


def _forward(ctx: NodeContext, rows: TensorDict, fields: dict[str, str]) -> TensorDict:
    """Outputs of the model under the names of fields."""
    out = ctx.train.compute(rows, tuple(fields), ctx.cfg.actor_rollout_ref.rollout.temperature)
    ctx.metrics.sum("flops/forward", ctx.train.flops(rows, backward=False))
    return TensorDict({field: out[name] for name, field in fields.items()}, batch_size=rows.batch_size)
