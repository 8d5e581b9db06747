"""The critic's ops: values of the responses, and the update that moves them towards the returns."""

from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.aggregate import aggregate_loss, trained_only
from siirl.algorithms.preference_losses import clipped_value_loss
from siirl.algorithms.stats import explained_variance, explained_variance_sums
from siirl.algorithms.tensor_metrics import TensorMetrics, masked_sums
from siirl.config.actor import CriticConfig
from siirl.config.batch import batch_of
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs, TrainEngine
from siirl.nodes.context import OpContext, sum_over_ranks
from siirl.nodes.mini_batches import mini_batches


def values(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """value [B, T] by the critic's current weights. Collective over the model's ranks."""
    out = engine.compute(rows, ("value",), 1.0)
    ctx.metrics.sum("flops/forward", engine.flops(rows, backward=False))
    return TensorDict({"value": out["value"]}, batch_size=rows.batch_size)


def critic_train(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """ppo_epochs passes over the batch; no fields are written. Collective over the model's ranks."""
    critic = ctx.cfg.critic
    sums = explained_variance_sums(rows["value"], rows["return_"], rows["response_mask"])
    ctx.metrics.mean("critic/explained_variance", explained_variance(sum_over_ranks(ctx, sums)))
    loss_fn = make_value_loss_fn(critic)
    seed = critic.data_loader_seed if critic.shuffle else None
    for mine_B in mini_batches(ctx, rows, batch_of(ctx.cfg, "critic"), seed):
        ctx.metrics.merge(engine.train_mini_batch(rows[mine_B], loss_fn, ("value",), 1.0), "critic/")
    ctx.metrics.sum("flops/train", engine.flops(rows, backward=True) * critic.ppo_epochs)
    return TensorDict({}, batch_size=rows.batch_size)


def make_value_loss_fn(critic: CriticConfig) -> LossFn:
    """The clipped value loss, aggregated by critic.loss_agg_mode."""

    def loss_fn(outputs: TokenOutputs, rows: TensorDict, counts: BatchCounts) -> tuple[Tensor, TensorMetrics]:
        mask_BT = rows["response_mask"]
        columns = (trained_only(x, mask_BT) for x in (outputs.value_BT, rows["value"], rows["return_"]))
        token = clipped_value_loss(*columns, cliprange_value=critic.cliprange_value)
        share = aggregate_loss(
            token.loss_BT,
            mask_BT,
            critic.loss_agg_mode,
            counts.num_tokens,
            counts.num_rows,
            counts.response_width,
        )
        metrics, num_tokens = TensorMetrics(), mask_BT.sum()
        stats = token.stats | {"return": rows["return_"]}
        for name, total in zip(stats, masked_sums(list(stats.values()), mask_BT), strict=True):
            metrics.mean(name, total, num_tokens)
        weight = mask_BT.any(-1).sum().double() / max(counts.num_rows, 1.0)
        metrics.mean("value_loss", share.detach(), weight)
        return share, metrics

    return loss_fn
