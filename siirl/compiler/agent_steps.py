"""In which steps of a run an agent's nodes run: a warm-up on responses of the data before rollouts, for one.

Outside of them none of its instructions is run, on any rank: an agent with such a window shares no rows with
others, and neither waits for them nor lets them wait.
"""

from collections.abc import Iterator, Mapping

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import (
    Collect,
    Free,
    Instruction,
    Load,
    Repeat,
    Reshard,
    Run,
    Serve,
    SyncWeights,
    Until,
)
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config import Config
from siirl.errors import DagError, NotSupportedError, UserError

Window = tuple[int, int | None]
"""First and last step; None: that of the run."""
WHOLE: Window = (1, None)


def window_of(cfg: Config) -> Window:
    """The steps of the agent of a node with that configuration."""
    agent = cfg.actor_rollout_ref.rollout.agent
    return agent.first_step, agent.last_step


def takes_part(window: Window, step: int) -> bool:
    first, last = window
    return first <= step and (last is None or step <= last)


def in_step(
    instructions: list[Instruction], plan: Plan, windows: Mapping[int, Window], step: int
) -> list[Instruction]:
    """Those of agents that take part in a step: all ranks leave out the same."""
    return [ins for ins in instructions if takes_part(windows[_agent(ins, plan)], step)]


def _agent(ins: Instruction, plan: Plan) -> int:
    match ins:
        case Load(loader=loader):
            return plan.loaders[loader].agent
        case Reshard(keys=keys):
            return keys[0].agent
        case Free(keys=keys):
            return keys[0][0].agent
        case SyncWeights(link=link):
            return plan.models[plan.links[link].target].agent
        case Run(node=node) | Collect(node=node) | Serve(node=node) | Repeat(node=node) | Until(node=node):
            return plan.nodes[node].agent


def check_windows(kept: Workflow) -> Iterator[UserError]:
    """DagError for a window that has no step, or whose agent has something to do with others."""
    for agent, rollout in kept.rollouts.items():
        first, last = window_of(rollout.cfg)
        key = "rollout.agent.first_step" if first > 1 else "rollout.agent.last_step"
        if last is not None and last < first:
            yield DagError(
                f"{rollout}: rollout.agent.first_step={first} is after last_step={last}. Lower it."
            )
        if (first, last) == WHOLE:
            continue
        total = kept.run.trainer.total_training_steps
        if total is not None and first > total:
            yield DagError(
                f"{rollout}: rollout.agent.first_step={first}, and the run ends after "
                f"trainer.total_training_steps={total}: agent {agent} would never run. Lower it."
            )
        if reason := _why_bound(agent, rollout, kept):
            yield NotSupportedError(f"not supported yet: {rollout}: {key} {reason}. Remove {key}.")


def _why_bound(agent: int, rollout: ResolvedNode, kept: Workflow) -> str:
    """Why an agent cannot be left out of a step, or an empty string."""
    options = rollout.cfg.actor_rollout_ref.rollout
    if rollout.id in kept.stages:
        return "of an agent in an interaction, whose others would speak without it"
    if options.max_lag or options.agent.train_cycle is not None:
        return "with rollout.max_lag or agent.train_cycle, which count the steps of the run"
    for node in kept.nodes.values():
        parents = {kept.nodes[name].agent for name in kept.graph.parents[node.id]}
        bound = {node.agent, *parents, *(key.agent for key in node.reads)}
        if (
            agent in bound
            and len({window_of(kept.rollouts[x].cfg) for x in bound & kept.rollouts.keys()}) > 1
        ):
            return f"of an agent whose rows or nodes have to do with those of others ({node})"
    return ""
