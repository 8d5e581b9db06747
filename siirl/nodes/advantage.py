"""The advantage op: from the score of each row to an advantage for each of its tokens."""

from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.advantages import ADVANTAGES, compute_advantage
from siirl.algorithms.kl import kl_controller, kl_in_reward
from siirl.algorithms.rewards import overlong_penalty, score_to_token_reward
from siirl.algorithms.stats import advantage_stats, group_stats, length_stats, score_stats
from siirl.config.algorithm_table import ESTIMATORS
from siirl.dag.fields_read import old_log_prob_source
from siirl.data.rows import objects
from siirl.errors import RewardError
from siirl.nodes.context import OpContext, sum_over_ranks
from siirl.nodes.function_reward import check_scores, report_validation, show
from siirl.nodes.interaction_credit import (
    Estimated,
    estimate,
    in_interaction,
    keep_shares,
    outcome,
    report_turns,
    reward_sums,
    turn_rewards,
)
from siirl.user_code.load_object import load_object


def credited(ctx: OpContext, rows: TensorDict) -> TensorDict:
    """What `advantage` gives; in a validation and with trainer.rollout_only nothing: rewards are told alone.

    Shows rows to the user where their reward is more than their score. Communicates as `advantage` does.
    """
    if "advantage" in ctx.writes:
        out = advantage(ctx, rows)
        reward_BT = out["reward"]
    else:
        out = TensorDict({}, batch_size=rows.batch_size)
        reward_BT = reward_before_kl(ctx, rows)
        _tell(ctx, rows, reward_BT)
    if "raw_prompt" in rows.keys():
        show(ctx, rows, rows, reward_BT.sum(-1))
    return out


def advantage(ctx: OpContext, rows: TensorDict) -> TensorDict:
    """advantage [B, T] and reward [B, T] (and return_ with a critic). Whole groups on this rank.

    Communicates over the node's ranks only if the estimator, or a KL in the reward, needs batch-wide sums.
    """
    algorithm = ctx.cfg.algorithm
    reward_BT = token_reward(ctx, rows)
    fields = {name: rows[name] for name in rows.keys() if isinstance(rows[name], Tensor)} | {
        "reward": reward_BT
    }
    if algorithm.estimator.compares_parts:
        fields["reward_part"] = reward_parts(ctx, rows)
    options = {name: getattr(algorithm, name) for row in ESTIMATORS.values() for name in row.keys}
    if in_interaction(rows):
        found = estimate(ctx, rows, fields, options)
        report_turns(ctx.metrics, rows, reward_BT, found.advantages.advantage_BT)
        keep_shares(ctx, rows, reward_BT)
    else:
        who = "algorithm.adv_estimator"
        name = ADVANTAGES.resolve(algorithm.adv_estimator, partial(load_object, who=who))
        result = compute_advantage(name, fields, options, partial(sum_over_ranks, ctx))
        found = Estimated(result, rows["score"], rows["group_id"])
    result = found.advantages
    _report(ctx, rows, reward_BT, found)
    out = {"advantage": result.advantage_BT, "reward": reward_BT}
    if result.return_BT is not None:
        out["return_"] = result.return_BT
    return TensorDict(out, batch_size=rows.batch_size)


def token_reward(ctx: OpContext, rows: TensorDict) -> Tensor:
    """The reward of each token, fp32 [B, T]: that before a KL, less, if asked, the KL."""
    reward_BT = reward_before_kl(ctx, rows)
    return _less_kl(ctx, rows, reward_BT) if ctx.cfg.algorithm.use_kl_in_reward else reward_BT


def reward_before_kl(ctx: OpContext, rows: TensorDict) -> Tensor:
    """The score at the last response token, less the over-long penalty, fp32 [B, T].

    In an interaction: the mix of scores there, and the environment's rewards at the ends of turns.
    RewardError, with the sample, where they do not add up to a finite number in float32.
    """
    buffer = ctx.cfg.reward_model.overlong_buffer
    score_B = outcome(ctx, rows)
    if buffer.enable:
        penalty_B = overlong_penalty(
            rows["response_length"],
            ctx.cfg.actor_rollout_ref.rollout.response_length,
            buffer.len,
            buffer.penalty_factor,
        )
        if buffer.log and not ctx.validate:
            ctx.metrics.mean("reward/overlong_penalty", float(penalty_B.sum()), len(penalty_B))
        score_B = score_B + penalty_B
    reward_BT = score_to_token_reward(score_B, rows["response_length"], rows["response_mask"].shape[-1])
    reward_BT = reward_BT + turn_rewards(ctx, rows)
    check_scores(ctx, rows, reward_BT.sum(-1))
    return reward_BT


def reward_parts(ctx: OpContext, rows: TensorDict) -> Tensor:
    """The rewards that algorithm.gdpo_rewards names, in its order, fp32 [B, K].

    RewardError, with the names that there are, for a row without a finite number of that name.
    """
    names, infos = ctx.cfg.algorithm.gdpo_rewards, [info or {} for info in objects(rows, "reward_info")]
    parts = []
    for name in names:
        given = rows["score"].tolist() if name == "score" else [info.get(name) for info in infos]
        for value, info in zip(given, infos, strict=True):
            if not isinstance(value, int | float):
                raise RewardError(
                    f"algorithm.gdpo_rewards names {name!r}, of which a row has {value!r}; it has score, "
                    f"{', '.join(info)}. Return a number of this name for every response, or remove it."
                )
        parts.append(torch.tensor(given, dtype=torch.float64))
        check_scores(ctx, rows, parts[-1], name)
    return torch.stack(parts, -1).float()


def _less_kl(ctx: OpContext, rows: TensorDict, reward_BT: Tensor) -> Tensor:
    algorithm, control = ctx.cfg.algorithm, ctx.cfg.algorithm.kl_ctrl
    controller = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
    if ctx.state:
        controller.load_state_dict(ctx.state)
    from_rollout = old_log_prob_source(ctx.cfg) == "rollout"
    log_prob_BT = rows["rollout_log_prob" if from_rollout else "old_log_prob"]
    reward_BT, kl_BT = kl_in_reward(
        reward_BT,
        log_prob_BT,
        rows["ref_log_prob"],
        rows["response_mask"],
        kl_penalty=algorithm.kl_penalty,
        kl_coef=controller.coef,
    )
    kl_B = kl_BT.sum(-1) / rows["response_mask"].sum(-1).clamp(min=1)
    totals = torch.tensor([float(kl_B.sum()), float(len(kl_B))], dtype=torch.float64)
    kl_sum, num_rows = sum_over_ranks(ctx, totals).tolist()
    ctx.metrics.mean("reward/kl", kl_sum, num_rows)
    if in_interaction(rows):
        for speaker in rows["speaker"].unique().tolist():
            mine_B = rows["speaker"] == speaker
            ctx.metrics.mean(f"speaker_{speaker}/kl", float(kl_B[mine_B].sum()), float(mine_B.sum()))
    ctx.metrics.mean("reward/kl_coef", controller.coef)
    controller.update(kl_sum / max(num_rows, 1.0), int(num_rows))
    ctx.state.update(controller.state_dict())
    return reward_BT


def _tell(ctx: OpContext, rows: TensorDict, reward_BT: Tensor) -> None:
    """What rows are rewarded with, where nothing is made of it."""
    reward_B, kind = reward_BT.sum(-1), ""
    if ctx.validate:
        report_validation(ctx, rows, TensorDict({"score": reward_B}, batch_size=rows.batch_size))
        kind = "val/"
    elif "score" not in rows.keys():
        ctx.metrics.merge(group_stats(reward_B, rows["group_id"]), "reward/")
    _report_sums(ctx, rows, reward_BT, kind)


def _report_sums(ctx: OpContext, rows: TensorDict, reward_BT: Tensor, kind: str = "") -> None:
    """The reward that advantages are made of, mean over rows, and its parts where there are several."""
    if not kind:
        ctx.metrics.mean("reward/total", float(reward_BT.double().sum()), len(rows))
    sums = reward_sums(ctx, rows, reward_BT)
    for name, sum_B in sums.items() if len(sums) > 1 else ():
        ctx.metrics.mean(f"{kind}reward/{name}", float(sum_B.sum()), len(rows))


def _report(ctx: OpContext, rows: TensorDict, reward_BT: Tensor, found: Estimated) -> None:
    ctx.metrics.merge(group_stats(found.outcome_U, found.group_U), "reward/")
    ctx.metrics.merge(advantage_stats(found.advantages.advantage_BT, rows["response_mask"]), "advantage/")
    has_score = "score" in rows.keys()
    told_B = rows["score"] if has_score else reward_BT.sum(-1)
    ctx.metrics.merge(length_stats(rows["response_length"], told_B), "reward/")
    if has_score:
        ctx.metrics.merge(score_stats(told_B), "reward/")
    _report_sums(ctx, rows, reward_BT)
