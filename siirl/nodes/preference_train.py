"""Updates on pairs of a better and a worse response of a prompt, given or sampled: DPO, and reward models."""

from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.preference_losses import PairLoss, bradley_terry, dpo
from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.config.batch import batch_of
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs, TrainEngine
from siirl.errors import DataError
from siirl.nodes.actor_train import trains_now
from siirl.nodes.context import OpContext, sum_over_ranks
from siirl.nodes.mini_batches import mini_batches, policy_mini_batches
from siirl.rewards.conversations import ConversationEncoder

PAIR_COLUMNS = ("pair_id", "is_better", "pair_share")


def preference_train(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """ppo_epochs passes over the pairs; no fields are written. Collective over the model's ranks.

    The better response of a prompt is that of the higher score; prompts whose two responses score alike are
    left out.
    """
    actor, rollout = ctx.cfg.actor_rollout_ref.actor, ctx.cfg.actor_rollout_ref.rollout
    if trains_now(ctx):
        beta = actor.policy_loss.dpo_beta
        loss_fn = pair_loss_fn(lambda outputs, rows, *pair: _dpo(outputs, rows, *pair, beta), "dpo_loss")
        for mini_batch in pair_mini_batches(ctx, rows, policy_mini_batches(ctx, rows)):
            metrics = engine.train_mini_batch(mini_batch, loss_fn, ("log_prob",), rollout.trained_temperature)
            ctx.metrics.merge(metrics, "actor/")
        ctx.metrics.sum("flops/train", engine.flops(rows, backward=True) * actor.ppo_epochs)
    return TensorDict({}, batch_size=rows.batch_size)


def reward_train(
    ctx: OpContext, rows: TensorDict, engine: TrainEngine, encoder: ConversationEncoder
) -> TensorDict:
    """ppo_epochs passes over the pairs, as the reward model reads them; no fields are written.

    Collective over the model's ranks. Which response is better, and what is left out: as preference_train.
    """
    loss_fn = pair_loss_fn(_bradley_terry, "loss")
    steps = mini_batches(ctx, rows, batch_of(ctx.cfg, "reward"), None)
    flops = num_cut = num_rows = 0.0
    for mini_batch in pair_mini_batches(ctx, rows, steps):
        conversations, cut = encoder.encode(mini_batch)
        conversations.update(mini_batch.select(*PAIR_COLUMNS))
        ctx.metrics.merge(engine.train_mini_batch(conversations, loss_fn, ("score",), 1.0), "reward_model/")
        flops += engine.flops(conversations, backward=True)
        num_cut, num_rows = num_cut + cut, num_rows + len(mini_batch)
    ctx.metrics.mean("reward_model/cut", num_cut, num_rows)
    ctx.metrics.sum("flops/train", flops)
    return TensorDict({}, batch_size=rows.batch_size)


def _bradley_terry(outputs: TokenOutputs, rows: TensorDict, better_P: Tensor, worse_P: Tensor) -> PairLoss:
    return bradley_terry(outputs.score_BT[:, 0], better_P, worse_P)


def _dpo(outputs: TokenOutputs, rows: TensorDict, better_P: Tensor, worse_P: Tensor, beta: float) -> PairLoss:
    columns = outputs.log_prob_BT, rows["ref_log_prob"], rows["response_mask"]
    return dpo(*columns, better_P, worse_P, dpo_beta=beta)


def pair_mini_batches(ctx: OpContext, rows: TensorDict, steps: Iterator[Tensor]) -> Iterator[TensorDict]:
    """The rows of each optimizer step, with columns that say which of them are pairs.

    pair_id, the same for both rows of a pair, which an engine computes together; is_better; pair_share: what
    a pair counts, 0 where both rows score alike. A step without a pair is left out on all ranks. Collective
    over ctx.group. DataError for a prompt with another number of rows than two.
    """
    for mine_B in steps:
        mini_batch = rows[mine_B]
        prompt, pair_B, count = mini_batch["group_id"].unique(return_inverse=True, return_counts=True)
        if bool((count != 2).any()):
            wrong = int((count != 2).nonzero()[0])
            raise DataError(
                f"node {ctx.node_id!r}: prompt {int(prompt[wrong])} of the batch has {int(count[wrong])} "
                "responses, and a pair has two. Remove the filter that drops or draws single responses."
            )
        score_B = mini_batch["score"].double()
        score_P2 = score_B[torch.argsort(pair_B, stable=True)].view(-1, 2)
        worse_B, better_B = score_P2.amin(1)[pair_B], score_P2.amax(1)[pair_B]
        differs_B = worse_B < better_B
        (num_pairs,) = sum_over_ranks(ctx, differs_B.double().sum()[None] / 2).tolist()
        ctx.metrics.mean("pairs/alike", float((~differs_B).sum()), len(mini_batch))
        if num_pairs:
            mini_batch["pair_id"], mini_batch["is_better"] = pair_B, score_B > worse_B
            mini_batch["pair_share"] = differs_B.double() / num_pairs
            yield mini_batch


def pair_loss_fn(loss: Callable[[TokenOutputs, TensorDict, Tensor, Tensor], PairLoss], name: str) -> LossFn:
    """The mean of a loss over the pairs of a mini-batch, under a name among the metrics."""

    def loss_fn(outputs: TokenOutputs, rows: TensorDict, counts: BatchCounts) -> tuple[Tensor, TensorMetrics]:
        order_B = torch.argsort(2 * rows["pair_id"] + rows["is_better"].long(), stable=True)
        worse_P, better_P = order_B.view(-1, 2).unbind(1)
        share_P = rows["pair_share"][better_P]
        pairs = loss(outputs, rows, better_P, worse_P)
        total = (pairs.loss_P * share_P.to(pairs.loss_P.dtype)).sum()
        metrics, weight = TensorMetrics(), share_P.sum()
        for stat, value_P in pairs.stats.items():
            metrics.mean(stat, (value_P.double() * share_P).sum(), weight)
        metrics.mean(name, total.detach(), weight)
        return total, metrics

    return loss_fn
