"""Credit in an interaction: the part of the advantage node that knows of episodes, agents and turns.

Rows of an interaction have episode_id, speaker, turn_id and env_reward; columns of other agents' rows in the
same episodes, as many rows as they have, are in ctx.others. All rows of an episode are on one rank.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.advantages import ADVANTAGES, Advantages, compute_advantage
from siirl.algorithms.episode_credit import (
    GROUP_KEYS,
    Scores,
    TurnRows,
    join_scores,
    joint_key,
    rows_of_episode,
    speaker_moments,
    team_score,
    token_units,
    turn_rows,
    whiten_speakers,
)
from siirl.algorithms.groups import is_varied
from siirl.algorithms.rewards import score_to_token_reward
from siirl.algorithms.turns import NO_TURNS, Turns
from siirl.errors import DagError
from siirl.nodes.context import OpContext, sum_over_ranks
from siirl.observe.metrics import MOST_TURNS, Metrics
from siirl.observe.spans import waiting
from siirl.user_code.load_object import load_object


def in_interaction(rows: TensorDict) -> bool:
    """Whether the rows are those of episodes, rather than a response to a prompt each."""
    return "episode_id" in rows.keys()


def outcome(ctx: OpContext, rows: TensorDict) -> Tensor:
    """What each row is rewarded by at its end, fp32 [B]: its own score and its team's, weighted.

    An agent without a score of its own has its team's. Where turns are looked at one by one, the score of an
    episode is the mean over the agent's rows in it, a part of which stands at the end of each.
    """
    if not in_interaction(rows):
        return rows["score"]
    return sum(outcome_shares(ctx, rows).values(), torch.zeros(len(rows), dtype=torch.float64)).float()


def outcome_shares(ctx: OpContext, rows: TensorDict) -> dict[str, Tensor]:
    """What `outcome` adds up in an interaction: "own" and "team", float64 [B] each."""
    credit, episode_B, speaker_B = ctx.cfg.algorithm.credit, rows["episode_id"], rows["speaker"]
    own = [Scores(episode_B, speaker_B, rows["score"])] if "score" in rows.keys() else []
    own_B = credit.own * rows["score"].double() if own else torch.zeros(len(rows), dtype=torch.float64)
    team_B, team = torch.zeros_like(own_B), _team_weight(ctx, rows)
    scores = own + [
        Scores(columns["episode_id"], columns["speaker"], columns["score"])
        for columns in ctx.others.values()
        if "score" in columns.keys() and "value" not in columns.keys()
    ]
    if team and scores:
        team_B = team * team_score(episode_B, speaker_B, join_scores(*scores))
    parts_B = rows_of_episode(episode_B, speaker_B) if _by_turn(ctx) else 1
    return {"own": own_B / parts_B, "team": team_B / parts_B}


def turn_rewards(ctx: OpContext, rows: TensorDict) -> Tensor | float:
    """What the environment gave for each turn, weighted, fp32 [B, T]; 0 without an interaction."""
    return ctx.cfg.algorithm.credit.turn * rows["env_reward"] if in_interaction(rows) else 0.0


def keep_shares(ctx: OpContext, rows: TensorDict, reward_BT: Tensor) -> None:
    """Leave the parts of each token's reward with what is written of this step's tokens, if it is.

    own, team: of the scores; env: of the environment; shaping: what penalties and a KL add.
    """
    if ctx.trained is None:
        return
    length_B, width = rows["response_length"], reward_BT.shape[1]
    shares = {
        name: score_to_token_reward(share_B.float(), length_B, width)
        for name, share_B in outcome_shares(ctx, rows).items()
    }
    scores_BT = score_to_token_reward(outcome(ctx, rows), length_B, width)
    shares["env"] = turn_rewards(ctx, rows) + torch.zeros_like(reward_BT)
    shares["shaping"] = reward_BT - (scores_BT + shares["env"])
    ctx.trained.keep_shares(ctx.agent, rows, shares)


def reward_sums(ctx: OpContext, rows: TensorDict, reward_BT: Tensor) -> dict[str, Tensor]:
    """The parts of each row's reward, float64 [B] each; together they are the sum over its tokens.

    As in keep_shares, those that the row can have: of a row of no interaction own, where nothing but reward
    nodes rewards no env, and shaping with a penalty or a KL.
    """
    algorithm, total_B = ctx.cfg.algorithm, reward_BT.double().sum(-1)
    if in_interaction(rows):
        sums = outcome_shares(ctx, rows)
        sums["env"] = algorithm.credit.turn * rows["env_reward"].double().sum(-1)
        absent = {"own": "score" not in rows.keys(), "team": not _team_weight(ctx, rows)}
        absent["env"] = not (ctx.node.env_rewards and algorithm.credit.turn)
        sums = {name: sum_B for name, sum_B in sums.items() if not absent[name]}
    else:
        sums = {"own": rows["score"].double()}
    if ctx.cfg.reward_model.overlong_buffer.enable or algorithm.use_kl_in_reward:
        sums["shaping"] = total_B - sum(sums.values(), torch.zeros_like(total_B))
    return sums


def other_turns(ctx: OpContext, rows: TensorDict) -> Tensor:
    """(episode, number, value, reward) of the turns of the agents whose values are read, float64 [M, 4].

    Their rewards count by the team's weight, at their turns.
    """
    team, credit, parts = _team_weight(ctx, rows), ctx.cfg.algorithm.credit, [NO_TURNS]
    for columns in ctx.others.values():
        if "value" not in columns.keys():
            continue
        turns, reward_BT = Turns.of(columns["turn_id"]), credit.turn * columns["env_reward"].double()
        if "score" in columns.keys():
            score_B = columns["score"] / rows_of_episode(columns["episode_id"], columns["speaker"])
            length_B, width = columns["response_length"], reward_BT.shape[1]
            reward_BT = reward_BT + score_to_token_reward(score_B, length_B, width)
        episode_U = columns["episode_id"][turns.row_U].double()
        value_U, reward_U = turns.first(columns["value"]), team * turns.sum(reward_BT)
        parts.append(torch.stack([episode_U, turns.number_U.double(), value_U, reward_U], -1))
    return torch.cat(parts)


def _team_weight(ctx: OpContext, rows: TensorDict) -> float:
    """The weight of others' rewards: all there is for an agent that has no score of its own."""
    team = ctx.cfg.algorithm.credit.team
    shares = "score" not in rows.keys() and any("score" in columns.keys() for columns in ctx.others.values())
    return 1.0 if shares and not team else team


def _group_keys(ctx: OpContext) -> tuple[str, ...]:
    """algorithm.credit.group_by, which means nothing to an estimator that compares no groups."""
    compares = "group_id" in ADVANTAGES.get(_estimator(ctx)).needs
    return ctx.cfg.algorithm.credit.group_by if compares else ("task",)


def _by_turn(ctx: OpContext) -> bool:
    """Whether rewards are looked at turn by turn."""
    return "turn" in _group_keys(ctx) or ctx.cfg.algorithm.estimator.by_turn


def _estimator(ctx: OpContext) -> str:
    who = "algorithm.adv_estimator"
    return ADVANTAGES.resolve(ctx.cfg.algorithm.adv_estimator, partial(load_object, who=who))


class Estimated(NamedTuple):
    """Advantages of rows, and what was compared: U units (rows or turns)."""

    advantages: Advantages
    outcome_U: Tensor
    """What each unit earned."""
    group_U: Tensor
    """The group that it was compared in."""


def estimate(ctx: OpContext, rows: TensorDict, fields: Mapping[str, Tensor], options: dict) -> Estimated:
    """Run the estimator on rows of an interaction, then normalise by agent and weigh, as configured.

    Where turns are compared, the built-in estimators get one number for each; those of users get its tokens.
    Communicates over ctx.group where sums over the batch are needed.
    """
    all_sum, name = partial(sum_over_ranks, ctx), _estimator(ctx)
    fields, cut = dict(fields), None
    if "turn" in _group_keys(ctx):
        where = (rows["turn_id"], rows["episode_id"], rows["speaker"])
        gamma, by_token = ctx.cfg.algorithm.credit.turn_gamma, not ctx.cfg.algorithm.estimator.compares_groups
        cut = turn_rows(fields["reward"], *where, gamma, by_token, rows.get("branch_id", None))
        made = {"reward": cut.reward_UL, "response_mask": cut.mask_UL, "score": cut.reward_UL.sum(-1)}
        needed = fields.keys() & set(ADVANTAGES.get(name).needs) - made.keys()
        fields = {key: fields[key][cut.turns.row_U] for key in needed} | made
    fields |= {"group_id": group_ids(ctx, rows, cut), "other_turns": other_turns(ctx, rows)}
    result = compute_advantage(name, fields, options, all_sum)
    outcome_U = fields["reward"].sum(-1)
    if cut is not None:
        result = Advantages(*(None if value is None else cut.whole(value) for value in result))
    row_U = torch.arange(len(rows)) if cut is None else cut.turns.row_U
    report_zero_std_groups(ctx.metrics, "speaker", rows["speaker"][row_U], outcome_U, fields["group_id"])
    if cut is not None:
        number_U = cut.turns.number_U.clamp(max=MOST_TURNS)
        report_zero_std_groups(ctx.metrics, "turn", number_U, outcome_U, fields["group_id"])
    advantage_BT = _weighed(ctx, rows, _normalized(ctx, rows, result.advantage_BT))
    return Estimated(Advantages(advantage_BT, result.return_BT), outcome_U, fields["group_id"])


def group_ids(ctx: OpContext, rows: TensorDict, cut: TurnRows | None) -> Tensor:
    """The group of each unit by _group_keys, int64 [U]; units: rows, or turns where it cuts.

    A function of the user's gets {"task", "agent", "episode", with turns "turn" and, where episodes branch,
    "branch"}: int64 [U], and returns int64 [U]. DagError if it returns anything else.
    """
    names = _group_keys(ctx)
    keys = {"task": rows["group_id"], "agent": rows["speaker"], "episode": rows["episode_id"]}
    if cut is not None:
        keys = {name: value[cut.turns.row_U] for name, value in keys.items()} | {"turn": cut.turns.number_U}
        if "branch_id" in rows.keys():
            keys["branch"] = cut.turns.last(rows["branch_id"])
    num_units = len(keys["task"])
    columns = [keys[name] for name in names if name in GROUP_KEYS]
    for name in (name for name in names if name not in GROUP_KEYS):
        found: Any = load_object(name, "algorithm.credit.group_by")(keys)
        if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.shape != (num_units,):
            shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
            raise DagError(
                f"node {ctx.node_id!r}: {name} of algorithm.credit.group_by returned "
                f"{getattr(found, 'dtype', repr(found))}{shape} for {num_units} units. Return an int64 "
                "tensor with the group of each."
            )
        columns.append(found)
    return joint_key(*columns) if columns else torch.zeros(num_units, dtype=torch.int64)


def _normalized(ctx: OpContext, rows: TensorDict, advantage_BT: Tensor) -> Tensor:
    if ctx.cfg.algorithm.credit.normalize != "agent":
        return advantage_BT
    mask_BT, speaker_B = rows["response_mask"], rows["speaker"]
    highest = torch.tensor([int(speaker_B.max()) if len(speaker_B) else 0])
    with waiting():
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=ctx.group)
    moments = sum_over_ranks(ctx, speaker_moments(advantage_BT, mask_BT, speaker_B, int(highest) + 1))
    return whiten_speakers(advantage_BT, mask_BT, speaker_B, moments)


def _weighed(ctx: OpContext, rows: TensorDict, advantage_BT: Tensor) -> Tensor:
    by = ctx.cfg.algorithm.credit.equal_weight
    if by == "none":
        return advantage_BT
    where = (rows["turn_id"], rows["episode_id"], rows["speaker"])
    mode = ctx.cfg.actor_rollout_ref.actor.loss_agg_mode
    units = token_units(by, rows["response_mask"], *where, mode)
    weight_BT = units.weights(sum_over_ranks(ctx, units.totals()))
    return (advantage_BT * weight_BT).to(advantage_BT.dtype)


def report_zero_std_groups(
    metrics: Metrics, kind: str, key_U: Tensor, outcome_U: Tensor, group_U: Tensor
) -> None:
    """speaker_N/... and turn_K/zero_std_groups: share of the groups that its units are in."""
    varied_U = is_varied(outcome_U, group_U)
    for key in key_U.unique().tolist():
        mine_U = key_U == key
        taught, groups = group_U[mine_U & varied_U].unique(), group_U[mine_U].unique()
        metrics.mean(f"{kind}_{key}/zero_std_groups", len(groups) - len(taught), len(groups))


def report_turns(metrics: Metrics, rows: TensorDict, reward_BT: Tensor, advantage_BT: Tensor) -> None:
    """speaker_N/... and turn_K/...: reward (mean sum), advantage (mean over tokens), length of turns."""
    turns = Turns.of(rows["turn_id"])
    speaker_U, number_U = rows["speaker"][turns.row_U], turns.number_U.clamp(max=MOST_TURNS)
    ones_BT = (turns.token_BT >= 0).double()
    length_U, reward_U, advantage_U = (turns.sum(x) for x in (ones_BT, reward_BT, advantage_BT * ones_BT))
    for kind, key_U in (("speaker", speaker_U), ("turn", number_U)):
        for key in key_U.unique().tolist():
            mine_U = key_U == key
            tokens, count = float(length_U[mine_U].sum()), float(mine_U.sum())
            metrics.mean(f"{kind}_{key}/reward", float(reward_U[mine_U].sum()), count)
            metrics.mean(f"{kind}_{key}/length", tokens, count)
            metrics.mean(f"{kind}_{key}/advantage", float(advantage_U[mine_U].sum()), tokens)
