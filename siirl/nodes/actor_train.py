"""The actor update: one optimizer step per mini-batch, with the loss that the configuration composes."""

from functools import partial

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.token_picks import pick_tokens, token_noise
from siirl.compiler.interactions.credit_reads import trains_in
from siirl.config.batch import batch_of
from siirl.dag.ops import old_log_prob_source, uses_full_kl
from siirl.engines.train.base import TrainEngine
from siirl.nodes.context import OpContext, sum_over_ranks
from siirl.nodes.mini_batches import mini_batches
from siirl.nodes.policy_loss import OLD_LOG_PROB_FIELDS, make_loss_fn, policy_loss_options


def actor_train(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """ppo_epochs passes over the batch; no fields are written. Collective over the model's ranks.

    Does nothing in the first trainer.critic_warmup steps, in which only the critic learns, and while other
    agents have their turn (rollout.agent.train_cycle): the weights then stay, and none are pushed.
    """
    cycle, warmup = ctx.cfg.actor_rollout_ref.rollout.agent.train_cycle, ctx.cfg.trainer.critic_warmup
    trains = trains_in(ctx.step, warmup, cycle, ctx.options if cycle else {})
    if cycle:
        ctx.metrics.mean("actor/waits", not trains)
    if not trains:
        return TensorDict({}, batch_size=rows.batch_size)
    actor, rollout = ctx.cfg.actor_rollout_ref.actor, ctx.cfg.actor_rollout_ref.rollout
    loss_fn = make_loss_fn(ctx.cfg)
    seed = actor.data_loader_seed if actor.shuffle else None
    outputs = ("log_prob", "entropy", *(("full_kl",) if uses_full_kl(ctx.cfg) else ()))
    for mine_B in mini_batches(ctx, rows, batch_of(ctx.cfg), seed):
        mini_batch = rows[mine_B]
        if actor.loss.picks_tokens:
            mini_batch["picked"] = _picked(ctx, mini_batch)
        metrics = engine.train_mini_batch(mini_batch, loss_fn, outputs, rollout.temperature)
        ctx.metrics.merge(metrics, "actor/")
    ctx.metrics.sum("flops/train", engine.flops(rows, backward=True) * actor.ppo_epochs)
    return TensorDict({}, batch_size=rows.batch_size)


def _picked(ctx: OpContext, rows: TensorDict) -> Tensor:
    """The tokens of a mini-batch that its loss picks, bool [B, T]. Collective over ctx.group."""

    def all_gather(values: Tensor) -> Tensor:
        values = values if ctx.is_shard_leader else torch.full_like(values, -torch.inf)
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, values, group=ctx.group)
        return torch.cat(parts)

    name, mask_BT = ctx.cfg.actor_rollout_ref.actor.loss_name, rows["response_mask"]
    old_BT = rows[OLD_LOG_PROB_FIELDS[old_log_prob_source(ctx.cfg)]]
    noise_BT = token_noise(rows["row_id"], mask_BT.shape[1], ctx.cfg.trainer.seed * 1_000_003 + ctx.step)
    options = policy_loss_options(ctx.cfg)
    add_up = partial(sum_over_ranks, ctx)
    return pick_tokens(name, old_BT, rows["advantage"], mask_BT, noise_BT, options, add_up, all_gather)
