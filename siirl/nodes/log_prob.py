"""Forward-only ops: log-probs of the responses by the policy before the step, or by the reference."""

from tensordict import TensorDict

from siirl.dag.ops import uses_full_kl
from siirl.engines.train.base import TrainEngine
from siirl.nodes.context import OpContext


def old_log_prob(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """old_log_prob [B, T] by the policy's current weights. Collective over the model's ranks."""
    return _forward(ctx, rows, engine, {"log_prob": "old_log_prob"})


def reference_log_prob(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """ref_log_prob [B, T] by the frozen reference; ref_hidden [B, T, D] if the loss has the full KL.

    Collective over the model's ranks.
    """
    hidden = {"hidden": "ref_hidden"} if uses_full_kl(ctx.cfg) else {}
    return _forward(ctx, rows, engine, {"log_prob": "ref_log_prob", **hidden})


def _forward(ctx: OpContext, rows: TensorDict, engine: TrainEngine, fields: dict[str, str]) -> TensorDict:
    """Outputs of the model under the names of fields."""
    out = engine.compute(rows, tuple(fields), ctx.cfg.actor_rollout_ref.rollout.temperature)
    ctx.metrics.sum("flops/forward", engine.flops(rows, backward=False))
    return TensorDict({field: out[name] for name, field in fields.items()}, batch_size=rows.batch_size)
