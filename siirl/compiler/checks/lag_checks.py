"""Where responses may go on from step to step (rollout.max_lag), and where not. Pure."""

from collections.abc import Iterator

from siirl.compiler.plan import Plan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.errors import DagError, NotSupportedError, UserError


def check_lag(kept: Workflow) -> Iterator[UserError]:
    """What refuses rollouts with a lag: nothing that trains, and what needs all rows of a step's prompts."""
    for node in kept.nodes.values():
        rollout = node.cfg.actor_rollout_ref.rollout
        if not node.op.is_rollout or not rollout.max_lag:
            continue
        lag = f"{node}: actor_rollout_ref.rollout.max_lag={rollout.max_lag}"
        if kept.run.trainer.rollout_only:
            yield DagError(f"{lag} with trainer.rollout_only=true: no weights change. Remove it.")
        elif node.id in kept.stages:
            yield NotSupportedError(
                f"not supported yet: {lag} in an interaction: its episodes end in the step in which they "
                "begin. Remove it."
            )
        elif not node.op.runs_ahead:
            yield DagError(
                f"{lag} with rollout.name={rollout.name}: it samples nothing that could go on. Remove it."
            )
        else:
            yield from _of_its_rows(node, lag, kept)


def _of_its_rows(node: ResolvedNode, lag: str, kept: Workflow) -> Iterator[UserError]:
    for other in kept.nodes.values():
        if node.id in kept.graph.above[other.id] and other.op.repeats:
            yield NotSupportedError(
                f"not supported yet: {lag} above {other}, which keeps groups for later steps: they would "
                "be older than the bound. Set algorithm.filter_groups.enable=false, or max_lag to 0."
            )
        elif node.id in kept.graph.above[other.id] and other.op.draws:
            yield NotSupportedError(
                f"not supported yet: {lag} above {other}, which draws among the responses of a step's "
                "prompts: here they are of several. Set algorithm.use_pf_ppo=false, or max_lag to 0."
            )
        mixed = sorted({key.agent for key in other.reads} | {other.agent})
        if node.agent in mixed and len(mixed) > 1:
            others = " and ".join(str(agent) for agent in mixed if agent != node.agent)
            yield NotSupportedError(
                f"not supported yet: {lag}, and {other} reads rows of agent {others} beside those of agent "
                f"{node.agent}: with a lag they are of different prompts. Set max_lag to 0."
            )


def check_loaders(plan: Plan) -> Iterator[UserError]:
    """Prompts that are loaded ahead arrive where the rollout is."""
    for loader in plan.loaders.values():
        if loader.ahead and plan.run_of(loader.node).source != loader.layout:
            yield NotSupportedError(
                f"not supported yet: node {loader.node!r}: actor_rollout_ref.rollout.max_lag where another "
                "node, on other ranks, reads the prompts first. Set max_lag to 0, or place both on the same "
                "ranks."
            )
