"""Which nodes a profile records: what the names of profiler.roles stand for. Pure."""

from collections.abc import Callable, Iterator, Mapping

from siirl.compiler.backends import backend_of
from siirl.compiler.plan import Plan
from siirl.compiler.workflow import Workflow
from siirl.config import Config
from siirl.config.roles import ROLES
from siirl.config.trainer import ProfilerConfig
from siirl.dag.ops import BASELINE_REWARD, OpSpec
from siirl.errors import ConfigError, UserError
from siirl.spelling import suggest

KEY = "profiler.roles"
PHASES: Mapping[str, Callable[[OpSpec], object]] = {
    "generate": lambda op: op.is_rollout or op.asks_policy,
    "compute_reward": lambda op: op.scores or op is BASELINE_REWARD,
    "compute_old_log_prob": lambda op: op.model == "actor" and not op.trains,
    "compute_ref_log_prob": lambda op: op.model == "ref",
    "compute_value": lambda op: op.on_critic and not op.trains,
    "compute_advantage": lambda op: op.credits,
    "train_critic": lambda op: op.on_critic and op.trains,
    "train_actor": lambda op: op.trains_policy,
}
"""siiRL's name of a phase of the step -> whether an op is of it."""


def profiled_nodes(profiler: ProfilerConfig, plan: Plan) -> frozenset[str] | None:
    """The nodes of which each has a trace of its own; None: the step has one."""
    ops = {name: node.spec for name, node in plan.nodes.items()}
    if not profiler.roles:
        return frozenset(ops) if profiler.discrete else None
    return frozenset(node for name in profiler.roles for node in _meant(name, ops))


def check_profiled(kept: Workflow) -> Iterator[UserError]:
    """Names that are neither a node's, nor a role's, nor a phase's."""
    profiler, nodes = kept.run.profiler, kept.nodes
    for name in profiler.roles if profiler.enable else ():
        if name not in nodes and name not in ROLES and name not in PHASES:
            yield ConfigError(
                f"{KEY}=[{','.join(profiler.roles)}]: {name!r} is no node of the plan, no role of a model "
                f"and no phase. {suggest(name, (*nodes, *ROLES, *PHASES))}"
            )


def profile_warnings(cfg: Config, plan: Plan) -> Iterator[str]:
    """Names of which nothing, or only half, is recorded."""
    profiler, ops = cfg.profiler, {name: node.spec for name, node in plan.nodes.items()}
    for name in profiler.roles if profiler.enable and profiler.tool == "torch" else ():
        found = sorted(_meant(name, ops))
        if not found:
            yield f"{KEY}: {name} has no effect: no node of the plan is of it."
        for node in found:
            model = plan.models.get(plan.nodes[node].model or "")
            if model is not None and backend_of(model).works_alone:
                yield (
                    f"{KEY}: {name} records the worker's part of node {node!r} only: its engine "
                    f"({model.backend}) is another process, with a profiler of its own."
                )


def _meant(name: str, ops: Mapping[str, OpSpec]) -> Iterator[str]:
    """The nodes that a name stands for."""
    is_of = PHASES.get(name, lambda op: False)
    for node, op in ops.items():
        if node == name or op.model == name or is_of(op):
            yield node
