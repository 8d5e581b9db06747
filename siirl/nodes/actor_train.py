"""The actor update: one optimizer step per mini-batch, with the loss that the configuration composes."""

from functools import partial

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.aggregate import prompt_shares
from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.algorithms.token_picks import TIE, high_entropy, pick_tokens, token_noise
from siirl.compiler.interactions.credit_reads import policy_trains
from siirl.dag.fields_read import old_log_prob_source, uses_full_kl
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs, TrainEngine
from siirl.nodes.context import OpContext, sum_over_ranks
from siirl.nodes.mini_batches import global_positions, policy_mini_batches
from siirl.nodes.policy_loss import OLD_LOG_PROB_FIELDS, make_loss_fn, policy_loss_options
from siirl.nodes.teacher_rows import taught
from siirl.observe.spans import waiting


def actor_train(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """ppo_epochs passes over the batch; no fields are written. Collective over the model's ranks.

    Does nothing in the first trainer.critic_warmup steps, in which only the critic learns, while other agents
    have their turn (rollout.agent.train_cycle), and with actor.freeze: the weights stay, and none are pushed.
    """
    if not trains_now(ctx):
        return TensorDict({}, batch_size=rows.batch_size)
    actor, rollout = ctx.cfg.actor_rollout_ref.actor, ctx.cfg.actor_rollout_ref.rollout
    outputs = ("log_prob", "entropy", *(("full_kl",) if uses_full_kl(ctx.cfg) else ()))
    outputs += ("top_log_prob",) if actor.distribution else ()
    rows = taught(ctx, rows) if actor.distills else rows
    shown = ctx.trained is not None and actor.reads_advantage  # nobody scores, so nobody shows the others
    kept = None if not shown else ctx.trained.keep(ctx.agent, rows, ctx.tokenizer)
    recomputes = actor.recompute_old_log_prob and not actor.imitates
    readers = [one for one in (kept, ctx.taken) if one is not None]
    loss_fn, first_loss_fn = make_loss_fn(ctx.cfg, readers), make_loss_fn(ctx.cfg, readers, begins=True)
    for number, mine_B in enumerate(policy_mini_batches(ctx, rows)):
        mini_batch, loss = rows[mine_B], loss_fn if number else first_loss_fn
        mini_batch["place"] = mine_B.nonzero().squeeze(1)
        if actor.loss.picks_tokens:
            mini_batch["picked"] = _picked(ctx, mini_batch)
        if actor.picks_by_entropy:
            found = (mini_batch["old_entropy"], mini_batch["response_mask"], actor.top_entropy_quantile)
            mini_batch["high_entropy"] = high_entropy(*found, partial(sum_over_ranks, ctx), TIE)
        if actor.loss_agg_mode == "prompt-mean":
            mini_batch["prompt_share"] = _prompt_share(ctx, mini_batch)
        if number == 0 and recomputes and (actor.loss.kinked or not _has_old(mini_batch)):
            mini_batch = mini_batch.exclude("old_log_prob")
            if actor.ppo_epochs > 1:
                old_BT, loss = _kept(rows, first_loss_fn)
                rows = rows.copy().set("old_log_prob", old_BT)
        metrics = engine.train_mini_batch(mini_batch, loss, outputs, rollout.trained_temperature)
        ctx.metrics.merge(metrics, "actor/")
    ctx.metrics.sum("flops/train", engine.flops(rows, backward=True) * actor.ppo_epochs)
    return TensorDict({}, batch_size=rows.batch_size)


def trains_now(ctx: OpContext) -> bool:
    """Whether the policy is trained in this step, see policy_trains."""
    trains = policy_trains(ctx.cfg, ctx.step, ctx.options)
    if ctx.cfg.actor_rollout_ref.rollout.agent.train_cycle or ctx.cfg.actor_rollout_ref.actor.freeze:
        ctx.metrics.mean("actor/waits", not trains)
    return trains


def _has_old(rows: TensorDict) -> bool:
    """Whether old log-probs of a mini-batch were computed: of the first one only where others read them."""
    return "old_log_prob" in rows.keys() and not bool(rows["old_log_prob"].isnan().any())


def _kept(rows: TensorDict, loss_fn: LossFn) -> tuple[Tensor, LossFn]:
    """Old log-probs [B, T] of all `rows`, and a loss that fills in those of the first mini-batch.

    They are the log-probs that its optimizer step computes, before it: later epochs need them.
    """
    old_BT = torch.full(rows["response_ids"].shape, torch.nan)
    if "old_log_prob" in rows.keys():
        old_BT = rows["old_log_prob"].clone()

    def keeping(
        outputs: TokenOutputs, micro_batch: TensorDict, counts: BatchCounts
    ) -> tuple[Tensor, TensorMetrics]:
        log_prob_BT = outputs.log_prob_BT.detach()

        def keep() -> None:
            old_BT[micro_batch["place"].to(old_BT.device)] = log_prob_BT.to(old_BT.device)

        loss, metrics = loss_fn(outputs, micro_batch, counts)
        metrics.later(keep)
        return loss, metrics

    return old_BT, keeping


def _prompt_share(ctx: OpContext, rows: TensorDict) -> Tensor:
    """What a trained token of each row of a mini-batch counts, float64 [B]. Collective over ctx.group."""
    prompt_B, num_prompts = global_positions(rows["group_id"], ctx.group)
    mine_P = torch.zeros(num_prompts, dtype=torch.float64)
    mine_P.index_add_(0, prompt_B, rows["response_mask"].sum(-1).double())
    return prompt_shares(sum_over_ranks(ctx, mine_P), prompt_B)


def _picked(ctx: OpContext, rows: TensorDict) -> Tensor:
    """The tokens of a mini-batch that its loss picks, bool [B, T]. Collective over ctx.group."""

    def all_gather(values: Tensor) -> Tensor:
        values = values if ctx.is_shard_leader else torch.full_like(values, -torch.inf)
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(ctx.group))]
        with waiting():
            dist.all_gather(parts, values, group=ctx.group)
        return torch.cat(parts)

    name, mask_BT = ctx.cfg.actor_rollout_ref.actor.loss_name, rows["response_mask"]
    old_BT = rows[OLD_LOG_PROB_FIELDS[old_log_prob_source(ctx.cfg)]]
    noise_BT = token_noise(rows["row_id"], mask_BT.shape[1], ctx.cfg.trainer.seed * 1_000_003 + ctx.step)
    options = policy_loss_options(ctx.cfg)
    add_up = partial(sum_over_ranks, ctx)
    return pick_tokens(name, old_BT, rows["advantage"], mask_BT, noise_BT, options, add_up, all_gather, TIE)
