"""The actor update: one optimizer step per mini-batch, with the loss that the configuration composes."""

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.aggregate import aggregate_loss
from siirl.algorithms.kl import kl_estimate
from siirl.algorithms.policy_losses import compute_policy_loss
from siirl.config import Config
from siirl.dag.ops import old_log_prob_source
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs
from siirl.nodes.context import NodeContext
from siirl.observe.metrics import Metrics

OLD_LOG_PROB_FIELDS = {"field": "old_log_prob", "rollout": "rollout_log_prob", "current": None}


def actor_train(ctx: NodeContext, rows: TensorDict) -> TensorDict:
    """ppo_epochs passes over the batch; no fields are written. Collective over the model's ranks.

    A mini-batch is a run of rows in the order of row_id: the same rows on any number of ranks.
    """
    actor = ctx.cfg.actor_rollout_ref.actor
    mini_batch_rows = actor.ppo_mini_batch_size * ctx.cfg.actor_rollout_ref.rollout.n
    position_B, total = global_positions(rows["row_id"], ctx.group)
    loss_fn = make_loss_fn(ctx.cfg)
    for epoch in range(actor.ppo_epochs):
        place_B = _shuffled(position_B, total, ctx, epoch) if actor.shuffle else position_B
        for first in range(0, total, mini_batch_rows):
            mine_B = (place_B >= first) & (place_B < first + mini_batch_rows)
            metrics = ctx.train.train_mini_batch(
                rows[mine_B], loss_fn, ("log_prob", "entropy"), ctx.cfg.actor_rollout_ref.rollout.temperature
            )
            ctx.metrics.merge(metrics, "actor/")
    ctx.metrics.sum("flops/train", ctx.train.flops(rows, backward=True) * actor.ppo_epochs)
    return TensorDict({}, batch_size=rows.batch_size)


def global_positions(row_id_B: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Position of each of this rank's rows among all rows of the group, by row_id; and their number.

    Rows that several ranks hold count once. Collective over the group; exchanges 8 bytes a row.
    """
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(row_id_B)], dtype=torch.int64), group=group)
    width = int(max(count.item() for count in counts))
    mine = torch.full((width,), -1, dtype=torch.int64)
    mine[: len(row_id_B)] = row_id_B
    gathered = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(gathered, mine, group=group)
    ids = torch.cat([part[: int(count)] for part, count in zip(gathered, counts, strict=True)]).unique()
    return torch.searchsorted(ids, row_id_B.contiguous()), len(ids)


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


def _shuffled(position_B: Tensor, total: int, ctx: NodeContext, epoch: int) -> Tensor:
    seed = ctx.cfg.actor_rollout_ref.actor.data_loader_seed
    generator = torch.Generator().manual_seed((seed * 1_000_003 + ctx.step) * 1_009 + epoch)
    return torch.randperm(total, generator=generator)[position_B]


def _report_rollout_difference(metrics: Metrics, difference_N: Tensor) -> None:
    """Distance of the trainer's log-probs from the rollout engine's under the same weights, in nats."""
    metrics.mean("rollout_log_prob_diff", float(difference_N.abs().sum()), len(difference_N))
    if len(difference_N):
        metrics.max("rollout_log_prob_diff_max", float(difference_N.abs().max()))
