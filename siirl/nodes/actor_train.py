"""The actor update: one optimizer step per mini-batch, with the loss that the configuration composes."""

from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.aggregate import aggregate_loss
from siirl.algorithms.kl import kl_estimate
from siirl.algorithms.policy_losses import compute_policy_loss
from siirl.config import Config
from siirl.dag.ops import old_log_prob_source
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs
from siirl.nodes.context import NodeContext
from siirl.nodes.mini_batches import mini_batches
from siirl.observe.metrics import Metrics

OLD_LOG_PROB_FIELDS = {"field": "old_log_prob", "rollout": "rollout_log_prob", "current": None}


def actor_train(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """ppo_epochs passes over the batch; no fields are written. Collective over the model's ranks.

    Does nothing in the first trainer.critic_warmup steps, in which only the critic learns.
    """
    if ctx.step <= ctx.cfg.trainer.critic_warmup:
        return TensorDict({}, batch_size=rows.batch_size)
    actor, rollout = ctx.cfg.actor_rollout_ref.actor, ctx.cfg.actor_rollout_ref.rollout
    loss_fn = make_loss_fn(ctx.cfg)
    num_rows = actor.ppo_mini_batch_size * rollout.n
    seed = actor.data_loader_seed if actor.shuffle else None
    for mine_B in mini_batches(ctx, rows["row_id"], num_rows, actor.ppo_epochs, seed):
        outputs = ("log_prob", "entropy")
        metrics = ctx.train.train_mini_batch(rows[mine_B], loss_fn, outputs, rollout.temperature)
        ctx.metrics.merge(metrics, "actor/")
    ctx.metrics.sum("flops/train", ctx.train.flops(rows, backward=True) * actor.ppo_epochs)
    return TensorDict({}, batch_size=rows.batch_size)


def make_loss_fn(cfg: Config) -> LossFn:
    """policy loss - entropy_coeff * entropy + kl_loss_coef * KL, aggregated by loss_agg_mode."""
    actor = cfg.actor_rollout_ref.actor
    options = policy_loss_options(cfg)
    old_field = OLD_LOG_PROB_FIELDS[old_log_prob_source(cfg)]

    def loss_fn(outputs: TokenOutputs, rows: TensorDict, counts: BatchCounts) -> tuple[Tensor, Metrics]:
        mask_BT = rows["response_mask"]
        log_prob_BT = outputs.log_prob_BT
        old_BT = log_prob_BT.detach() if old_field is None else rows[old_field]
        policy = compute_policy_loss(
            actor.policy_loss.loss_mode, log_prob_BT, old_BT, rows["advantage"], mask_BT, options
        )
        terms = {"pg_loss": policy.loss_BT}
        if actor.entropy_coeff:
            terms["entropy_loss"] = -actor.entropy_coeff * outputs.entropy_BT
        stats = policy.stats | {"entropy": outputs.entropy_BT.detach()}
        if actor.use_kl_loss:
            kl_BT = kl_estimate(actor.kl_loss_type, log_prob_BT, rows["ref_log_prob"])
            terms["kl_loss"] = actor.kl_loss_coef * kl_BT
            stats["ref_kl"] = kl_BT.detach()
        shares = {
            name: aggregate_loss(
                term_BT,
                mask_BT,
                actor.loss_agg_mode,
                counts.num_tokens,
                counts.num_rows,
                counts.response_width,
            )
            for name, term_BT in terms.items()
        }
        loss = sum(shares.values())
        metrics = Metrics()
        num_tokens = float(mask_BT.sum())
        for name, value_BT in stats.items():
            metrics.mean(name, float(value_BT[mask_BT].sum()), num_tokens)
        # Shares add up over a mini-batch, whose weights sum to 1, and are averaged over mini-batches.
        weight = float(mask_BT.any(-1).sum()) / max(counts.num_rows, 1.0)
        for name, share in {**shares, "loss": loss}.items():
            metrics.mean(name, float(share.detach()), weight)
        if "rollout_log_prob" in rows.keys():
            _report_rollout_difference(metrics, (old_BT - rows["rollout_log_prob"])[mask_BT])
        return loss, metrics

    return loss_fn


def policy_loss_options(cfg: Config) -> dict[str, float]:
    """All scalars that a policy loss may take from the configuration, by name."""
    actor = cfg.actor_rollout_ref.actor
    return {
        "clip_ratio_low": actor.clip_ratio_low,
        "clip_ratio_high": actor.clip_ratio_high,
        "clip_ratio_c": actor.clip_ratio_c,
        "tau_pos": actor.policy_loss.tau_pos,
        "tau_neg": actor.policy_loss.tau_neg,
        "clip_divergence": actor.policy_loss.clip_divergence,
    }


def _report_rollout_difference(metrics: Metrics, difference_N: Tensor) -> None:
    """Distance of the trainer's log-probs from the rollout engine's under the same weights, in nats."""
    metrics.mean("rollout_log_prob_diff", float(difference_N.abs().sum()), len(difference_N))
    if len(difference_N):
        metrics.max("rollout_log_prob_diff_max", float(difference_N.abs().max()))
