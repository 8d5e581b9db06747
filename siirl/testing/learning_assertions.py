"""Of what is learnt: groups, equal rewards, and which answers become likelier."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.plan import NodePlan
from siirl.testing.evidence import NodeRecord
from siirl.testing.trial import Trial
from siirl.testing.verdicts import (
    SAME,
    Verdict,
    calls,
    compares,
    credits,
    failing,
    nodes_of,
    not_here,
    of_failed,
    passed,
    trains_policy,
)


def groups_are_as_declared(trial: Trial) -> Verdict:
    """What is compared are groups of n rows or episodes of a prompt each."""
    told = []
    for node in nodes_of(trial, credits):
        cfg = trial.cfg(node.name)
        n, keys = cfg.actor_rollout_ref.rollout.n, cfg.algorithm.credit.group_by
        if not compares(trial, node.name):
            continue
        if n < 2:
            return failing(
                f"node {node.name!r} compares the responses of a prompt, and there is {n}: nothing is learnt",
                "Set actor_rollout_ref.rollout.n to 4 or more.",
            )
        for record in calls(trial, lambda one, name=node.name: one.name == name):
            samples: dict[int, set[Any]] = defaultdict(set)
            own = "episode_id" if record.has("episode_id") else None
            groups = record.column("group_id").tolist()
            ids = _samples(trial, record) if own else range(len(groups))
            for group, sample in zip(groups, ids, strict=True):
                samples[group].add(sample)
            silent = _groups_in_which_it_is_silent(trial, record, n) if own else {}
            odd = {
                group: len(found)
                for group, found in samples.items()
                if len(found) != n and found != silent.get(group)
            }
            if odd:
                group, size = next(iter(odd.items()))
                return failing(
                    f"{len(odd)} of {len(samples)} groups of {node.name!r} in step {record.step} have not "
                    f"rollout.n={n} {'episodes' if own else 'rows'}: prompt {group} has {size}",
                    "Let nodes between the rollout and the advantages keep or drop whole groups.",
                )
            if own and "episode" in keys:
                return failing(
                    f"algorithm.credit.group_by={list(keys)} of {node.name!r} makes each episode a group: "
                    "nothing is compared",
                    "Group by task, or task and agent.",
                )
            told.append(f"{node.name}: {len(samples)} groups of {n}")
    if not told:
        return not_here("no advantage node compares the responses of a prompt")
    return passed("; ".join(dict.fromkeys(told)))


def _samples(trial: Trial, record: NodeRecord) -> list[int]:
    """Which sample each row's episode is, or is a branch of."""
    talks = [talk for talk in trial.plan.interactions.values() if record.agent in talk.homes]
    most = max((talk.most_branches for talk in talks), default=1)
    return [episode // most for episode in record.column("episode_id").tolist()]


def _groups_in_which_it_is_silent(trial: Trial, record: NodeRecord, n: int) -> dict[int, set[Any]]:
    """Groups of n episodes, of which an agent speaks in some -> those in which it does."""
    played: dict[int, set[Any]] = defaultdict(set)
    own: dict[int, set[Any]] = defaultdict(set)
    for one in calls(trial, lambda node: node.spec.is_rollout):
        if one.step == record.step and one.has("group_id", "episode_id"):
            ids = one.column("group_id").tolist(), _samples(trial, one)
            for group, episode in zip(*ids, strict=True):
                played[group].add(episode)
                if one.agent == record.agent:
                    own[group].add(episode)
    return {group: found for group, found in own.items() if len(played[group]) == n}


def equal_rewards_teach_nothing(trial: Trial) -> Verdict:
    """Where all responses are worth the same, no policy has a gradient."""
    outcome, told = trial.runs["equal"], []
    if not any(compares(trial, node.name) for node in nodes_of(trial, credits)):
        return not_here("no estimator compares the responses of a prompt: equal rewards may teach")
    if outcome.error:
        return of_failed(outcome, "the run with equal rewards failed: ")
    for record in calls(trial, credits, "equal"):
        if not compares(trial, record.node):
            continue
        largest = float((record.column("advantage") * record.column("response_mask")).abs().max())
        if largest > SAME:
            return failing(
                f"with equal rewards node {record.node!r} gives advantages up to {largest:.3g}",
                "Compare each reward with those of its group: subtract the mean of the group.",
            )
        told.append(f"{record.node}: advantages 0")
    for record in calls(trial, trains_policy, "equal"):
        norm, actor = record.metrics.get("actor/grad_norm"), trial.cfg(record.node).actor_rollout_ref.actor
        if actor.distills or not actor.reads_advantage:
            continue  # what it learns is not from rewards
        if norm is not None and norm > SAME:
            return failing(
                f"with equal rewards the gradient of {record.node!r} has norm {norm:.3g}",
                "Find the term of the loss that does not come from rewards.",
            )
        told.append(f"{record.node}: gradient {norm or 0.0:.0e}")
    return passed("; ".join(told))


def better_answers_become_likelier(trial: Trial) -> Verdict:
    """An update moves probability from answers worth less to those of the same prompt that are worth more."""
    told, told_why = [], []
    for node in nodes_of(trial, trains_policy):
        found = _moved(trial, node)
        if isinstance(found, Verdict):
            return found
        (told if found[0] else told_why).append(found[1])
    if not told:
        return not_here("; ".join(told_why) or "no policy is trained")
    return passed("; ".join(told + told_why))


def _moved(trial: Trial, node: NodePlan) -> Verdict | tuple[bool, str]:
    """(whether it could be seen, what was), of one node that trains."""
    actor = trial.cfg(node.name).actor_rollout_ref.actor
    record = next(calls(trial, lambda one: one.name == node.name), None)
    if record is None or record.before is None or record.after is None:
        return False, f"{node.name}: trained nothing"
    if actor.loss.distills or not actor.reads_advantage:
        return False, f"{node.name}: its loss reads no rewards (SFT, preferences or distillation)"
    mask_BT = record.column("response_mask").float()
    change_B = ((record.after - record.before) * mask_BT).sum(-1).double()
    worth = _worth(trial, record)
    if worth is None:
        return False, f"{node.name}: what its rows are worth is not known from its nodes"
    better_B, worse_B = worth > SAME, worth < -SAME
    if not (bool(better_B.any()) and bool(worse_B.any())):
        return False, f"{node.name}: no two answers of a prompt are worth more and less"
    if not float(change_B.abs().max()):
        return failing(
            f"the update of {node.name!r} changed no log-prob: nothing is learnt",
            "Look at the learning rate, and whether its advantages are all 0.",
        )
    if record.has("advantage") and not bool((record.column("advantage") * mask_BT).any()):
        return failing(
            f"all advantages of {node.name!r} are 0, and its rows are worth more and less",
            "Look at the estimator, and at what writes the advantages.",
        )
    up, down = float(change_B[better_B].mean()), float(change_B[worse_B].mean())
    text = f"{node.name}: better answers {up:+.3g} nats, worse ones {down:+.3g}"
    if float((worth * change_B).sum()) <= 0:
        return failing(
            text, "Look at the sign of the advantages and of the loss, and whose rewards they are."
        )
    return True, text


def _worth(trial: Trial, record: NodeRecord) -> Tensor | None:
    """By how much each trained row earned more than its group, float64 [B]; None: not known."""
    for credit in calls(trial, credits):
        if (credit.agent, credit.step) != (record.agent, record.step) or not credit.has("group_id"):
            continue
        known = _total(credit)
        rewarded = _row_numbers(trial, credit)
        if known is None or rewarded is None or not record.has("row_id"):
            return None
        groups = credit.column("group_id")
        centered = known - torch.stack([known[groups == group].mean() for group in groups])
        by_row = dict(zip(rewarded, centered.tolist(), strict=True))
        rows = record.column("row_id").tolist()
        return torch.tensor([by_row.get(row, 0.0) for row in rows], dtype=torch.float64)
    return None


def _total(credit: NodeRecord) -> Tensor | None:
    """What each row of an advantage node earned, [B], before anything is made of it."""
    if credit.expected is not None:
        return credit.expected
    return credit.column("score").double() if credit.has("score") else None


def _row_numbers(trial: Trial, credit: NodeRecord) -> list[int] | None:
    """The row_id of each row that an advantage node saw: its own, or that of the nodes on the same rows."""
    if credit.has("row_id"):
        return credit.column("row_id").tolist()
    for other in trial.alone.records(credit.step):
        same = other.agent == credit.agent and len(other) == len(credit) and other.round == credit.round
        same = same and other.has("row_id", "response_length") and credit.has("response_length")
        if same and torch.equal(other.column("response_length"), credit.column("response_length")):
            return other.column("row_id").tolist()
    return None
