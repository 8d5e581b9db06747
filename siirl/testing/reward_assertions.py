"""Of rewards, and of the tools and environments that are asked before them."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.plan import InteractionPlan
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
    passed,
    scores,
)

Talk = list[dict[str, Any]]
BROKEN_TOOLS = ("raised", "hung")
"""Errors of calls that are the tool's fault, not the call's."""
SAY_MORE = "Or is its right answer another than the row's ground_truth? Say by --answers what it is."
"""Where answers are not the user's own."""


def rewards_are_numbers_that_differ(trial: Trial) -> Verdict:
    """Rewards are finite, the same when asked twice, and differ among the answers to a prompt."""
    told = []
    for name in dict.fromkeys(node.name for node in nodes_of(trial, scores)):
        varied = groups = 0
        zeros = True
        for record in calls(trial, lambda one, name=name: one.name == name):
            score_B = _score(record)
            if not bool(torch.isfinite(score_B).all()):
                return failing(
                    f"node {name!r} gives {score_B.tolist()}", "Return a finite number for each response."
                )
            if record.again is not None and not torch.equal(score_B, record.again):
                row = int((score_B != record.again).nonzero()[0, 0])
                return failing(
                    f"node {name!r} gave {float(score_B[row]):g}, and asked again "
                    f"{float(record.again[row]):g}, for the same response",
                    "Let the reward depend on response and row alone: no random numbers, no counters.",
                )
            changed, found = _varied(score_B, record.column("sample_index"))
            varied, groups, zeros = varied + changed, groups + found, zeros and not score_B.any()
        if not groups:
            continue
        if zeros and _others_give(trial, name):
            told.append(f"{name}: 0 throughout, beside what others give")
            continue
        if not varied:
            return failing(
                f"node {name!r} gives all that it compares the same reward, in all of {groups} groups "
                f"({_whose(trial)})",
                "Look at what the reward is given and how it compares; say by --answers what good and bad "
                "answers look like.",
            )
        told.append(f"{name}: finite, the same twice, differ in {varied} of {groups} groups")
    if found := _earnings(trial, told):
        return found
    return passed("; ".join(told)) if told else not_here("nothing gives rewards")


def _others_give(trial: Trial, name: str) -> bool:
    """Whether the agent of a node that scores earns rewards that differ, as from an environment."""
    agents = {node.agent for node in nodes_of(trial, scores) if node.name == name}
    for record in calls(trial, lambda one: credits(one) and one.agent in agents):
        if record.expected is not None and len(record.expected.unique()) > 1:
            return True
    return False


def _earnings(trial: Trial, told: list[str]) -> Verdict | None:
    """That what rows earn in all differs, also where an environment gives it; adds to `told`."""
    for name in dict.fromkeys(node.name for node in nodes_of(trial, credits) if compares(trial, node.name)):
        varied = groups = 0
        for record in calls(trial, lambda one, name=name: one.name == name):
            if record.expected is not None and record.has("group_id"):
                changed, found = _varied(record.expected, record.column("group_id"))
                varied, groups = varied + changed, groups + found
        if groups and not varied:
            return failing(
                f"all that the rows of a prompt earn at {name!r} is the same, in all of {groups} groups "
                f"({_whose(trial)})",
                "Look at what the environment gives for good and bad turns, and say these by --answers; "
                "rewards_with_env must be true for its rewards to count.",
            )
        if groups:
            told.append(f"{name}: earned in all, differ in {varied} of {groups} groups")
    return None


def _score(record: NodeRecord) -> Tensor:
    return next(
        column for key, column in record.wrote.items() if not key.endswith("_info") and _is_score(column)
    )


def _is_score(column: Any) -> bool:
    return isinstance(column, Tensor) and column.dim() == 1 and column.is_floating_point()


def _varied(value_B: Tensor, group_B: Tensor) -> tuple[int, int]:
    """(groups whose values differ, groups); of groups of one, which nothing compares, all rows together."""
    groups = group_B.unique()
    if len(groups) == len(group_B):
        return int(len(value_B.unique()) > 1), min(1, len(value_B))
    return sum(int(len(value_B[group_B == one].unique()) > 1) for one in groups), len(groups)


def _whose(trial: Trial) -> str:
    return f"those of {trial.answers.source}" if trial.answers.source else "the row's own among them"


def reward_errors_are_no_zeros(trial: Trial) -> Verdict:
    """No response got 0 because its reward failed."""
    told = []
    for record in calls(trial, scores):
        infos = next((x for key, x in record.wrote.items() if key.endswith("_info")), [])
        errors = [info["error"] for info in infos if isinstance(info, dict) and info.get("error")]
        if errors:
            return failing(
                f"node {record.node!r} did not score {len(errors)} of {len(record)} responses, which count "
                f"as 0: {errors[0]}",
                "Correct the function; with on_error=raise a failure ends the run and is no zero.",
            )
        if record.swallowed:
            return failing(
                f"the reward of node {record.node!r} fails on {record.swallowed}",
                "Do not catch errors of the code or of a service and return a number: let them be raised.",
            )
        told.append(f"{record.node}: {len(record)} scored")
    return passed("; ".join(dict.fromkeys(told)) + ", no failure") if told else not_here("no node scores")


def credit_adds_up(trial: Trial) -> Verdict:
    """What a row's tokens are rewarded with is the sum of what scores and environment gave."""
    told = []
    for record in calls(trial, credits):
        if record.expected is None or "reward" not in record.wrote:
            continue
        off = float((record.column("reward").double().sum(-1) - record.expected).abs().max())
        if off > SAME * max(1.0, float(record.expected.abs().max())):
            return failing(
                f"node {record.node!r}: the tokens of a row get {off:.3g} more or less than its parts",
                "Look at algorithm.credit and at the node that writes the reward.",
            )
        told.append(f"{record.node}: {len(record)} rows, off by {off:.0e}")
    return passed("; ".join(dict.fromkeys(told))) if told else not_here("no sum of scores alone is made")


def _talks(trial: Trial) -> dict[tuple[int, int], Talk]:
    """(step, episode) -> what was said."""
    return {
        (record.step, int(episode)): talk
        for record in calls(trial, lambda node: node.spec.is_rollout)
        if "conversation" in record.wrote and record.has("episode_id")
        for episode, talk in zip(
            record.column("episode_id").tolist(), record.column("conversation"), strict=True
        )
    }


def _interactions(trial: Trial) -> Iterator[InteractionPlan]:
    yield from trial.plan.interactions.values()


def tools_and_environments_are_used(trial: Trial) -> Verdict:
    """Each tool was called and answered, and no episode failed in its environment."""
    told: list[str] = []
    for one in trial.alone.evidence:
        for node, names in one.tools.items():
            if found := _tools_used(trial, node, names, told):
                return found
    failed: Counter[str] = Counter()
    for record in trial.alone.records():
        for name, value in record.metrics.items():
            if name.startswith(FAILED):
                failed[name.removeprefix(FAILED)] += int(value)
    if failed:
        kinds = ", ".join(f"{count} by {kind}" for kind, count in failed.items())
        reason = next((x for one in trial.alone.evidence for x in one.failures), "")
        return failing(
            f"episodes failed ({kinds}), and are dropped{': ' + reason if reason else ''}",
            "Correct reset and step of the environment that raised, hung or gave no plain data.",
        )
    talks = _talks(trial)
    for plan in _interactions(trial):
        if not plan.acting:
            continue
        names = {stage.node for stage in plan.acting}
        rewards = [sum(said["reward"] for said in talk) for talk in talks.values()]
        shown = sum(said["node"] in names for talk in talks.values() for said in talk)
        if rewards:
            told.append(
                f"{', '.join(sorted(names))}: {len(rewards)} episodes, {shown} observations, rewards "
                f"{min(rewards):g} to {max(rewards):g}"
            )
    return passed("; ".join(told)) if told else not_here("there are no tools and no environment")


FAILED = "interaction/failed/"


def _tools_used(trial: Trial, node: str, names: tuple[str, ...], told: list[str]) -> Verdict | None:
    """What is wrong with the calls at a node; adds what is right to `told`."""
    answers = [
        said
        for talk in _talks(trial).values()
        for said in talk
        if said["role"] == "tool" and said["node"] == node
    ]
    errors = Counter(said["error"] for said in answers if "error" in said)
    fine = Counter(said["tool"] for said in answers if "error" not in said)
    broken = [said for said in answers if said.get("error") in BROKEN_TOOLS]
    if broken:
        return failing(
            f"tool {broken[0]['tool']!r} of node {node!r} {broken[0]['error']} in {len(broken)} of "
            f"{len(answers)} calls: the model reads {broken[0]['content'][:120]!r}",
            "Correct the tool: it must answer what its tool_schema allows, within multi_turn.tool_timeout_s.",
        )
    if answers and not fine:
        kinds = ", ".join(f"{count} {kind}" for kind, count in errors.items())
        return failing(
            f"no call of node {node!r} is answered ({kinds}), but {answers[0]['content'][:120]!r}",
            "Let names, tool_schema and rollout.multi_turn.format say what the model's calls look like.",
        )
    if missing := [name for name in names if not fine[name]]:
        return failing(
            f"no answer of node {node!r} calls {', '.join(missing)}: that is not tested",
            "Say by --answers a turn that calls it, as rollout.multi_turn.format has it; docs/tools.md.",
        )
    told.append(f"{node}: " + ", ".join(f"{name} answered {fine[name]} calls" for name in names))
    return None


def what_an_agent_says_counts(trial: Trial) -> Verdict:
    """Of several agents: where the others say the same, another answer of an agent's earns something else."""
    talks, told = _talks(trial), []
    speakers = {stage.agent for plan in _interactions(trial) for stage in plan.speaking}
    if len(speakers) < 2:
        return not_here("one agent speaks")
    for record in calls(trial, credits):
        earned = record.expected if record.expected is not None else record.read.get("score")
        if earned is None or not record.has("episode_id", "group_id", "speaker"):
            continue
        alike: dict[Any, dict[str, float]] = defaultdict(dict)
        columns = (record.column(name).tolist() for name in ("episode_id", "group_id", "speaker"))
        for episode, group, speaker, worth in zip(*columns, earned.tolist(), strict=True):
            said = [
                (x["agent"], x["content"])
                for x in talks.get((record.step, episode), ())
                if x["agent"] is not None
            ]
            others = tuple(text for agent, text in said if agent != speaker)
            own = "\n".join(text for agent, text in said if agent == speaker)
            alike[group, speaker, others][own] = worth
        pairs = [worths for worths in alike.values() if len(worths) > 1]
        if not pairs:
            continue
        counts = sum(max(worths.values()) - min(worths.values()) > SAME for worths in pairs)
        if not counts:
            return failing(
                f"what agent {record.agent} says changes nothing at {record.node!r}: in {len(pairs)} prompts "
                "it said several things where the others said the same, and earned the same",
                "Look at whose turn its reward reads: extra_info['agent'] is the row's own agent."
                + ("" if trial.answers.source else " " + SAY_MORE),
            )
        told.append(f"{record.node}: in {counts} of {len(pairs)} sets where the others said the same")
    return passed("; ".join(told)) if told else not_here("no two episodes in which only one agent differs")
