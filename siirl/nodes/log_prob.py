"""Forward-only ops: log-probs of the responses by the policy before the step, or by the reference."""

import torch
from tensordict import TensorDict

from siirl.dag.fields_read import Names, experts_by, reads_prob_square, uses_full_kl
from siirl.data.rows import take_rows
from siirl.engines.train.base import EXPERTS, TrainEngine
from siirl.nodes.context import OpContext
from siirl.nodes.mini_batches import policy_mini_batches


def old_log_prob(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """old_log_prob [B, T] by the policy's current weights; old_entropy if the loss picks tokens by it,
    old_prob_square if advantages are computed from it, EXPERT_FIELDS if the update takes them.

    Collective over the model's ranks.
    """
    picks_by_entropy = ctx.cfg.actor_rollout_ref.actor.picks_by_entropy
    entropy = {"entropy": "old_entropy"} if picks_by_entropy else {}
    square = {"prob_square": "old_prob_square"} if reads_prob_square(ctx.cfg) else {}
    return _forward(
        ctx, rows, engine, {"log_prob": "old_log_prob", **entropy, **square}, experts_by(ctx.cfg, "R2")
    )


def later_old_log_prob(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """old_log_prob [B, T] of the rows of all mini-batches but the first; NaN in those of the first.

    The first mini-batch is trained by the weights that would compute its old log-probs here: actor_train
    takes those of its own forward pass. Collective over the model's ranks.
    """
    first_B = next(policy_mini_batches(ctx, rows), None)
    log_prob_BT = torch.full(rows["response_ids"].shape, torch.nan, device=rows["response_ids"].device)
    if first_B is not None:
        log_prob_BT[~first_B] = old_log_prob(ctx, take_rows(rows, ~first_B), engine)["old_log_prob"]
    return TensorDict({"old_log_prob": log_prob_BT}, batch_size=rows.batch_size)


def reference_log_prob(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """ref_log_prob [B, T] by the frozen reference; ref_hidden [B, T, D] if the loss has the full KL.

    Collective over the model's ranks.
    """
    hidden = {"hidden": "ref_hidden"} if uses_full_kl(ctx.cfg) else {}
    return _forward(ctx, rows, engine, {"log_prob": "ref_log_prob", **hidden})


def _forward(
    ctx: OpContext, rows: TensorDict, engine: TrainEngine, fields: dict[str, str], experts: Names = ()
) -> TensorDict:
    """Outputs of the model under the names of fields, and the experts that computed them."""
    outputs = (*fields, EXPERTS) if experts else tuple(fields)
    out = engine.compute(rows, outputs, ctx.cfg.actor_rollout_ref.rollout.trained_temperature)
    ctx.metrics.sum("flops/forward", engine.flops(rows, backward=False))
    found = {field: out[name] for name, field in fields.items()} | {name: out[name] for name in experts}
    return TensorDict(found, batch_size=rows.batch_size)
