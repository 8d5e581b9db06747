"""Where rollouts may be asynchronous (rollout.max_lag), and where not. Pure."""

from collections.abc import Iterator

from siirl.compiler.plan import InteractionPlan, Plan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.errors import DagError, NotSupportedError, UserError


def check_staleness(kept: Workflow) -> Iterator[UserError]:
    """What refuses asynchronous rollouts: nothing trains, or all rows of a step's prompts are needed."""
    for plan in kept.interactions.values():
        yield from _of_an_interaction(plan, kept)
    for node in kept.nodes.values():
        rollout = node.cfg.actor_rollout_ref.rollout
        if not node.op.is_rollout or not rollout.max_lag:
            continue
        asked = f"{node}: actor_rollout_ref.rollout.max_lag={rollout.max_lag}"
        if kept.run.trainer.rollout_only:
            yield DagError(f"{asked} with trainer.rollout_only=true: no weights change. Remove it.")
        elif not node.op.may_be_stale and node.id not in kept.stages:
            yield DagError(
                f"{asked} with rollout.name={rollout.name}: it samples nothing that could go on. Remove it."
            )
        else:
            yield from _of_its_rows(node, asked, kept)


def _of_an_interaction(plan: InteractionPlan, kept: Workflow) -> Iterator[UserError]:
    """Its episodes go on as a whole: what refuses agents that differ, or that cannot be interrupted."""
    speakers = [kept.nodes[stage.node] for stage in plan.speaking]
    rollouts = [node.cfg.actor_rollout_ref.rollout for node in speakers]
    if not any(rollout.max_lag for rollout in rollouts):
        return
    for key in ("max_lag", "surplus", "stale"):
        values = [getattr(rollout, key) for rollout in rollouts]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            yield DagError(
                f"{speakers[0]} has rollout.{key}={values[0]} and {speakers[other]}, in the same "
                f"interaction, {values[other]}: its episodes go on as a whole. Set the same for all its "
                "agents."
            )
            return
    for node, rollout in zip(speakers, rollouts, strict=True):
        if rollout.name == "openai":
            yield NotSupportedError(
                f"not supported yet: rollout.max_lag={rollout.max_lag} in an interaction with {node}, for "
                "which a service speaks (rollout.name=openai): its turns cannot be interrupted. Set max_lag "
                "to 0."
            )


def _played_with(node: ResolvedNode, kept: Workflow) -> set[int]:
    """The agents whose rows are of the same episodes as those of a rollout, itself too."""
    for plan in kept.interactions.values():
        if node.id in {stage.node for stage in plan.stages}:
            return {*plan.homes}
    return {node.agent}


def _of_its_rows(node: ResolvedNode, asked: str, kept: Workflow) -> Iterator[UserError]:
    for other in kept.nodes.values():
        if node.id in kept.graph.above[other.id] and other.op.repeats and node.id in kept.stages:
            yield NotSupportedError(
                f"not supported yet: {asked} in an interaction above {other}: a round is of as many prompts "
                "as the batch lacks then, maybe one, and if all its episodes fail the run ends. Set "
                "algorithm.filter_groups.enable=false, or max_lag to 0."
            )
        elif node.id in kept.graph.above[other.id] and other.op.draws:
            yield NotSupportedError(
                f"not supported yet: {asked} above {other}, which draws among the responses of a step's "
                "prompts: here they are of several. Set algorithm.use_pf_ppo=false, or max_lag to 0."
            )
        mixed = {key.agent for key in other.reads} | {other.agent}
        apart = sorted(mixed - _played_with(node, kept))
        if node.agent in mixed and apart:
            others = " and ".join(map(str, apart))
            yield NotSupportedError(
                f"not supported yet: {asked}, and {other} reads rows of agent {others} beside those of agent "
                f"{node.agent}: with staleness they are of different prompts. Set max_lag to 0."
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
