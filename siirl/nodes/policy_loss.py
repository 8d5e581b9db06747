"""The actor's loss, as the configuration composes it of the functions in siirl/algorithms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.aggregate import TokenLoss, aggregate_loss, trained_only
from siirl.algorithms.distillation import divergence, sampled_reverse_kl, span_divergence, span_sums
from siirl.algorithms.kl import kl_estimate, policy_ratio, straight_through
from siirl.algorithms.policy_losses import POLICY_LOSSES, compute_policy_loss
from siirl.algorithms.rollout_correction import (
    Correction,
    correction_stats,
    correction_weights,
    off_policy_negatives,
)
from siirl.algorithms.tensor_metrics import TensorMetrics, masked_sums
from siirl.config import Config
from siirl.config.actor import ActorConfig
from siirl.config.algorithm_table import LOSSES
from siirl.config.batch import batch_of
from siirl.config.teacher import WHOLE, DistillConfig
from siirl.dag.fields_read import old_log_prob_source
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs
from siirl.observe.metrics import MOST_TURNS, Metrics
from siirl.user_code.load_object import load_object

BY_TURN = ("ref_kl", "approx_kl", "entropy", "clip_fraction")
"""What is also reported by speaker and by turn, in an interaction."""

LOG_PROB_FIELDS = ("old_log_prob", "rollout_log_prob", "ref_log_prob", "teacher_log_prob")
OLD_LOG_PROB_FIELDS = {"field": "old_log_prob", "rollout": "rollout_log_prob", "current": "old_log_prob"}
"""Rows without the field are trained by the policy that their old log-probs would be of."""


TokenReader = Callable[[Tensor, Mapping[str, Tensor]], None]
"""Takes the places of a micro-batch's rows, and of each of their tokens what the loss says, [b, T] each."""
CLIPS = ("clip_fraction", "clip_fraction_lower")
"""What the stats of policy losses call tokens whose gradient a bound cuts off."""


def make_loss_fn(cfg: Config, readers: Sequence[TokenReader] = (), begins: bool = False) -> LossFn:
    """policy loss - entropy_coeff * entropy + kl_loss_coef * KL + distill.coef * divergence from teachers,
    aggregated by loss_agg_mode.

    readers: get what becomes of each token of the rows, which then have a column "place". begins: it is for
    the first optimizer step on the rows, whose own log-probs are those of the policy before it.
    """
    actor = cfg.actor_rollout_ref.actor
    who = "actor_rollout_ref.actor.policy_loss.loss_mode"
    alone = actor.loss.distills
    name = "" if alone else POLICY_LOSSES.resolve(actor.loss_name, partial(load_object, who=who))
    options = policy_loss_options(cfg)
    correction = rollout_correction(actor)
    source = old_log_prob_source(cfg)
    main = "distill_loss" if alone else "sft_loss" if actor.loss.imitates else "pg_loss"
    one_step = batch_of(cfg).optimizer_steps == 1
    as_before = one_step or (begins and source == "rollout")
    old_field = None if one_step and source == "current" else OLD_LOG_PROB_FIELDS[source]

    def loss_fn(outputs: TokenOutputs, rows: TensorDict, counts: BatchCounts) -> tuple[Tensor, TensorMetrics]:
        mask_BT = rows["response_mask"]
        outputs = _of_trained(outputs, mask_BT)
        column = {name: trained_only(rows[name], mask_BT) for name in LOG_PROB_FIELDS if name in rows.keys()}
        log_prob_BT = outputs.log_prob_BT
        old_BT = column.get(old_field, log_prob_BT.detach())
        picked = {"picked_BT": rows["picked"]} if "picked" in rows.keys() else {}
        taught_BT = None
        if actor.distills:
            taught_BT = _from_teachers(actor.distill, outputs, rows, old_BT, column)
        if alone:
            policy = TokenLoss(actor.distill.coef * taught_BT, {})
        else:
            advantage_BT = rows["advantage"] if actor.reads_advantage else torch.zeros_like(old_BT)
            policy = compute_policy_loss(name, log_prob_BT, old_BT, advantage_BT, mask_BT, options | picked)
        metrics = TensorMetrics()
        terms = {main: policy.loss_BT}
        stats = policy.stats | {"entropy": outputs.entropy_BT.detach()}
        weight_BT = None
        if correction.is_used:
            log_ratio_BT = old_BT - column["rollout_log_prob"]
            weight_BT = correction_weights(log_ratio_BT, mask_BT, correction)
            terms[main] = policy.loss_BT * weight_BT
            metrics.merge(correction_stats(log_ratio_BT, weight_BT, mask_BT), "rollout_correction/")
        if actor.opsm_delta is not None:
            columns = (log_prob_BT, column["rollout_log_prob"], rows["advantage"], mask_BT)
            skipped_BT = off_policy_negatives(*columns, actor.opsm_delta)
            terms[main] = torch.where(skipped_BT, 0, terms[main])
            stats["opsm_masked"] = skipped_BT.to(log_prob_BT.dtype)
        if actor.picks_by_entropy:
            terms[main] = torch.where(rows["high_entropy"], terms[main], 0)
            stats["high_entropy"] = rows["high_entropy"].to(log_prob_BT.dtype)
        told = _token_columns(log_prob_BT, old_BT, stats, weight_BT) if readers else {}
        for reader in readers:
            metrics.later(partial(reader, rows["place"], told))
        if actor.entropy_coeff:
            terms["entropy_loss"] = -actor.entropy_coeff * outputs.entropy_BT
        if actor.use_kl_loss:
            kl_BT = _kl(actor.kl_loss_type, outputs, column["ref_log_prob"])
            if actor.kl_loss_weighted:
                kl_BT = kl_BT * policy_ratio(log_prob_BT, old_BT)
            terms["kl_loss"] = actor.kl_loss_coef * kl_BT
            stats["ref_kl"] = kl_BT.detach()
        if taught_BT is not None:
            stats["teacher_divergence"] = taught_BT.detach()
            if not alone:
                terms["distill_loss"] = actor.distill.coef * taught_BT
        share_B = rows["prompt_share"] if "prompt_share" in rows.keys() else None
        shares = _shares(terms, mask_BT, actor.loss_agg_mode, counts, share_B)
        loss = sum(shares.values())
        _report(metrics, stats, {**shares, "loss": loss}, mask_BT, counts)
        if "turn_id" in rows.keys():
            by_turn = {name: stats[name] for name in BY_TURN if name in stats}
            metrics.later(partial(_turn_means, by_turn, rows))
        if "rollout_log_prob" in column and (as_before or source != "rollout"):
            ours_BT = log_prob_BT.detach() if as_before else old_BT
            _report_rollout_difference(metrics, ours_BT - column["rollout_log_prob"], mask_BT)
        return loss, metrics

    return loss_fn


def _token_columns(
    log_prob_BT: Tensor, old_BT: Tensor, stats: dict[str, Tensor], weight_BT: Tensor | None
) -> dict[str, Tensor]:
    """What readers see of each token: the log-prob that the ratio is to, the ratio, and where there are such,
    1 where the loss clips, and what its policy loss was multiplied by.
    """
    found = {"old_log_prob": old_BT, "ratio": policy_ratio(log_prob_BT.detach(), old_BT)}
    if clips := [stats[name] for name in CLIPS if name in stats]:
        found["clip"] = torch.stack([clip_BT.float() for clip_BT in clips]).amax(0)
    for name, sign in (("opsm_masked", -1), ("high_entropy", 1)):
        if name in stats:
            counts_BT = stats[name] if sign > 0 else 1 - stats[name]
            weight_BT = counts_BT if weight_BT is None else weight_BT * counts_BT
    return found if weight_BT is None else found | {"weight": weight_BT}


def _of_trained(outputs: TokenOutputs, mask_BT: Tensor) -> TokenOutputs:
    """The outputs at trained tokens, 0 elsewhere."""
    found = {item.name: getattr(outputs, item.name) for item in fields(outputs)}
    kept = {name: _at_trained(value, mask_BT) for name, value in found.items() if value is not None}
    return replace(outputs, **kept)


def _at_trained(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Numbers or vectors at trained tokens, 0 elsewhere."""
    return trained_only(value_BT, mask_BT if value_BT.ndim == 2 else mask_BT[..., None])


def _from_teachers(
    distill: DistillConfig,
    outputs: TokenOutputs,
    rows: TensorDict,
    old_BT: Tensor,
    column: dict[str, Tensor],
) -> Tensor:
    """The divergence from the teachers at each token, with gradient."""
    if "teacher_log_prob" in column:
        log_prob_BT = outputs.log_prob_BT
        if "teacher_span" in rows.keys():
            span_BT = trained_only(rows["teacher_span"], rows["response_mask"])
            log_prob_BT, old_BT = span_sums(log_prob_BT, span_BT), span_sums(old_BT, span_BT)
        return sampled_reverse_kl(log_prob_BT, old_BT, column["teacher_log_prob"])
    teacher_BTK = _at_trained(rows["teacher_top_log_prob"], rows["response_mask"])
    whole = distill.top_k == WHOLE
    if "teacher_span" in rows.keys():
        return span_divergence(
            outputs.top_log_prob_BT,
            teacher_BTK,
            outputs.log_prob_BT,
            None if whole else rows["top_ids"],
            rows["response_ids"],
            rows["teacher_span"],
            distill.divergence,
            distill.beta,
            distill.unshared_coef,
        )
    return divergence(outputs.top_log_prob_BT, teacher_BTK, distill.divergence, distill.beta, whole=whole)


def _kl(name: str, outputs: TokenOutputs, ref_log_prob_BT: Tensor) -> Tensor:
    """The KL from the reference at each token, as kl_loss_type says, with gradient."""
    if not name.startswith("full"):
        return kl_estimate(name, outputs.log_prob_BT, ref_log_prob_BT)
    exact_BT = outputs.full_kl_BT
    return straight_through(exact_BT, outputs.log_prob_BT, ref_log_prob_BT) if name == "full+" else exact_BT


def rollout_correction(actor: ActorConfig) -> Correction:
    """What actor.rollout_correction, or its short form tis_imp_ratio_cap, asks for."""
    config = actor.rollout_correction
    if actor.tis_imp_ratio_cap > 0:
        config = replace(config, weight="truncate", level="token", high=actor.tis_imp_ratio_cap)
    return Correction(
        weight=config.weight,
        level=config.level,
        low=config.low,
        high=config.high,
        reject=config.reject,
        reject_low=config.reject_low,
        reject_high=config.reject_high,
        reject_divergence=config.reject_divergence or 0.0,
    )


def policy_loss_options(cfg: Config) -> dict[str, Any]:
    """All scalars that a policy loss may take from the configuration, by name: those of the table."""
    actor = cfg.actor_rollout_ref.actor
    names = (name for row in LOSSES.values() for name in row.keys)
    return {
        name: getattr(actor if hasattr(actor, name) else actor.policy_loss, name)
        for name in dict.fromkeys(names)
    }


def _shares(
    terms: dict[str, Tensor], mask_BT: Tensor, mode: str, counts: BatchCounts, prompt_share_B: Tensor | None
) -> dict[str, Tensor]:
    sizes = (counts.num_tokens, counts.num_rows, counts.response_width, prompt_share_B)
    return {name: aggregate_loss(term_BT, mask_BT, mode, *sizes) for name, term_BT in terms.items()}


def _report(
    metrics: TensorMetrics,
    stats: dict[str, Tensor],
    shares: dict[str, Tensor],
    mask_BT: Tensor,
    counts: BatchCounts,
) -> None:
    num_tokens = mask_BT.sum()
    for name, total in zip(stats, masked_sums(list(stats.values()), mask_BT), strict=True):
        metrics.mean(name, total, num_tokens)
    # Shares add up over a mini-batch, whose weights sum to 1, and are averaged over mini-batches.
    weight = mask_BT.any(-1).sum().double() / max(counts.num_rows, 1.0)
    values = torch.stack([share.detach() for share in shares.values()]).double().unbind()
    for name, share in zip(shares, values, strict=True):
        metrics.mean(name, share, weight)


def _turn_means(stats: dict[str, Tensor], rows: TensorDict) -> Metrics:
    """speaker_N/... and turn_K/...: means over the trained tokens of a speaker, and of the K-th turns."""
    metrics, names = Metrics(), list(stats)
    mask_BT, turn_BT = rows["response_mask"], rows["turn_id"]
    value_NS = torch.stack([stats[name][mask_BT].double() for name in names], -1)
    speaker_BT = rows["speaker"][:, None].expand_as(turn_BT)
    for kind, key_BT in (("speaker", speaker_BT), ("turn", turn_BT.clamp(max=MOST_TURNS))):
        key_K, index_N, count_K = torch.unique(key_BT[mask_BT], return_inverse=True, return_counts=True)
        sum_KS = value_NS.new_zeros(len(key_K), len(names)).index_add_(0, index_N, value_NS)
        for key, count, sums in zip(key_K.tolist(), count_K.tolist(), sum_KS.tolist(), strict=True):
            for name, total in zip(names, sums, strict=True):
                metrics.mean(f"{kind}_{key}/{name}", total, count)
    return metrics


def _report_rollout_difference(metrics: TensorMetrics, difference_BT: Tensor, mask_BT: Tensor) -> None:
    """Distance of the trainer's log-probs from the rollout engine's under the same weights, in nats.

    Where the trainer computes none before the step (recompute_old_log_prob=False) those of the first
    optimizer step are: of the rows of the first mini-batch. Later ones have other weights.
    """
    distance_BT = trained_only(difference_BT.abs(), mask_BT)
    metrics.mean("rollout_log_prob_diff", distance_BT.sum(dtype=torch.float64), mask_BT.sum())
    metrics.max("rollout_log_prob_diff_max", distance_BT.max())
