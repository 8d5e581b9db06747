"""What comes of an assertion, and what assertions look at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from siirl.algorithms.advantages import ADVANTAGES
from siirl.compiler.plan import NodePlan
from siirl.testing.evidence import NodeRecord
from siirl.testing.trial import Outcome, Trial
from siirl.user_code.load_object import load_object

Status = Literal["pass", "FAIL", "n/a", "not done"]
SAME = 1e-4
"""Relative distance up to which float32 sums in another order are equal."""


@dataclass(frozen=True)
class Verdict:
    """What came of an assertion."""

    status: Status
    evidence: str
    fix: str = ""
    """What to change, of one that failed."""
    shown: str = ""
    """What is to be looked at, several lines."""

    @property
    def is_open(self) -> bool:
        """It failed, or the machine was too busy for it: the workflow is not known to be sound."""
        return self.status in ("FAIL", "not done")


Assertion = Callable[[Trial], Verdict]


def passed(evidence: str, shown: str = "") -> Verdict:
    """It holds."""
    return Verdict("pass", evidence, shown=shown)


def failing(evidence: str, fix: str) -> Verdict:
    """It does not hold."""
    return Verdict("FAIL", evidence, fix)


def of_failed(run: Outcome, what: str, fix: str = "Correct what it names.") -> Verdict:
    """Of a run that has an error: it failed, or was not done in time, which says nothing of the workflow."""
    if run.is_late:
        return Verdict("not done", run.error, "Run the test again when the machine has time.")
    return failing(f"{what}{run.error}", fix)


def not_here(why: str) -> Verdict:
    """It does not apply to the workflow."""
    return Verdict("n/a", why)


def nodes_of(trial: Trial, wanted: Callable[[NodePlan], bool]) -> list[NodePlan]:
    """The nodes of a kind."""
    return [node for node in trial.plan.nodes.values() if wanted(node)]


def calls(trial: Trial, wanted: Callable[[NodePlan], bool], run: str = "alone") -> Iterator[NodeRecord]:
    """The calls of nodes of a kind that had rows."""
    names = {node.name for node in nodes_of(trial, wanted)}
    yield from (record for record in trial.runs[run].records() if record.node in names and len(record))


def trains_policy(node: NodePlan) -> bool:
    """Whether a node updates a policy."""
    return node.spec.trains_policy


def scores(node: NodePlan) -> bool:
    """Whether a node gives rewards."""
    return node.spec.scores


def credits(node: NodePlan) -> bool:
    """Whether a node makes advantages."""
    return node.spec.credits


def staleness_bound(trial: Trial, rollout: NodePlan) -> int:
    """The staleness of what a rollout gives: in a conversation that of the episode, which goes on as one."""
    speaks = any(rollout.name in plan.homes.values() for plan in trial.plan.interactions.values())
    return trial.cfg(rollout.name).actor_rollout_ref.rollout.max_lag if speaks else rollout.max_lag


def compares(trial: Trial, node: str) -> bool:
    """Whether an advantage node compares the responses of a prompt; also by an estimator of the user's."""
    who = "algorithm.adv_estimator"
    estimator = trial.cfg(node).algorithm.adv_estimator
    name = ADVANTAGES.resolve(estimator, partial(load_object, who=who))
    return "group_id" in ADVANTAGES.get(name).needs
