"""Where the episodes of an interaction branch (rollout.agent.branch), and what refuses it. Pure."""

from collections.abc import Iterator

from siirl.compiler.plan import ALL, BEST, Branches, EnvStage, InteractionPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config.algorithm_table import GROUPED
from siirl.errors import DagError, NotSupportedError, UserError
from siirl.user_code.source import may_be_replayable


def branches_of(node: ResolvedNode) -> Branches | None:
    """What the configuration of a rollout says; None: it has one candidate of each turn."""
    branch = node.cfg.actor_rollout_ref.rollout.agent.branch
    return Branches(branch.candidates, branch.visits, branch.go_on) if branch.candidates > 1 else None


def check_branches(kept: Workflow) -> Iterator[UserError]:
    """What refuses branches: nothing brings an episode back, or its rows would not be comparable."""
    for plan in kept.interactions.values():
        nodes = [kept.nodes[stage.node] for stage in plan.speaking if stage.branches]
        if nodes:
            yield from _of_plan(plan, nodes)
            yield from _of_readers(plan, nodes[0], kept)
    for node in kept.nodes.values():
        if node.op.is_rollout and branches_of(node) and node.id not in kept.stages:
            yield DagError(
                f"{_asked(node)}, but it is in no interaction: candidates of a single turn are its "
                "responses. Set rollout.n."
            )
        if node.op.credits and "branch" in (by := node.cfg.algorithm.credit.group_by):
            own = [plan for plan in kept.interactions.values() if node.agent in plan.homes]
            if not any(plan.branching for plan in own):
                why, fix = "no episode of it branches", "Set rollout.agent.branch.candidates at a rollout"
            elif "turn" not in by:
                why, fix = "turns branch, not rows", "Add turn"
            else:
                continue
            yield DagError(
                f"{node}: algorithm.credit.group_by has branch, but {why}. {fix}, or remove branch."
            )


def _asked(node: ResolvedNode) -> str:
    candidates = node.cfg.actor_rollout_ref.rollout.agent.branch.candidates
    return f"{node}: rollout.agent.branch.candidates={candidates}"


def _of_plan(plan: InteractionPlan, nodes: list[ResolvedNode]) -> Iterator[UserError]:
    node, first, rollout = nodes[0], plan.branching[0], nodes[0].cfg.actor_rollout_ref.rollout
    asked = _asked(node)
    for other, one in zip(nodes, plan.branching, strict=True):
        if (one.candidates, one.go_on) != (first.candidates, first.go_on):
            yield DagError(
                f"{asked} with go_on={first.go_on}, and {other} has {one.candidates} with "
                f"go_on={one.go_on}: the "
                "turns of an episode have the same number. Set the same for all agents of the interaction."
            )
        if one.go_on == ALL and not one.visits:
            yield DagError(
                f"{_asked(other)} with go_on=all at every visit: each way branches again, so an episode of "
                "T turns "
                "becomes candidates^T. Set rollout.agent.branch.visits, e.g. [0], or go_on=best."
            )
    if plan.program is not None:
        yield DagError(f"{asked}, but a program plays the episodes, which nobody can play again. Remove it.")
    if rollout.max_lag:
        yield NotSupportedError(
            f"not supported yet: {asked} with rollout.max_lag={rollout.max_lag}: a checkpoint holds no "
            "branches of unfinished episodes. Set max_lag to 0."
        )
    for stage in plan.speaking:
        if stage.branches and stage.beside:
            yield NotSupportedError(
                f"not supported yet: node {stage.node!r} branches and speaks at once with "
                f"{' and '.join(stage.beside)}. Let one depend on the other, or remove branch.candidates."
            )
    env = plan.environment
    if env is not None and not may_be_replayable(env.path):
        yield DagError(
            f"{asked}: a branch acts again in an environment of its own until it is where the episode was, "
            "and "
            f"{env.path} does not say that the same seed and actions lead to the same state. If they do, "
            "write replayable = True into the class."
        )
    if first.go_on == BEST and len(nodes) > 1:
        yield NotSupportedError(
            f"not supported yet: {asked} with go_on=best, and {nodes[1]} branches, too: the best is told by "
            "what the environment gives, which has not acted yet when the next agent speaks. Leave one."
        )
    if first.go_on == BEST and not any(
        isinstance(stage, EnvStage) and stage.rewards_with_env for stage in plan.stages
    ):
        yield DagError(
            f"{asked} with go_on=best: the best is told by the rewards of an environment, and there is "
            "none. Add an ENV_INTERACT node, or set go_on=all."
        )


def _of_readers(plan: InteractionPlan, node: ResolvedNode, kept: Workflow) -> Iterator[UserError]:
    """Nodes that compare episodes: they would take branches for samples of their own."""
    asked, best = _asked(node), plan.branching[0].go_on == BEST
    for other in kept.nodes.values():
        algorithm = other.cfg.algorithm
        if other.agent not in plan.homes:
            continue
        if other.op.repeats or other.op.draws:
            key = "filter_groups.enable" if other.op.repeats else "use_pf_ppo"
            yield NotSupportedError(
                f"not supported yet: {asked} above {other}, which keeps some episodes of a prompt: branches "
                f"would be torn apart. Set algorithm.{key}=false."
            )
        if not other.op.credits:
            continue
        if algorithm.estimator.by_turn:
            yield DagError(
                f"{other}: algorithm.adv_estimator={algorithm.adv_estimator} takes the value after a turn "
                "from the "
                f"turn that follows it, and {node} has several. Set algorithm.adv_estimator=grpo."
            )
        elif best and not (
            algorithm.adv_estimator in GROUPED
            and "turn" in algorithm.credit.group_by
            and not algorithm.credit.turn_gamma
        ):
            yield DagError(
                f"{asked} with go_on=best: only one candidate has a later reward, so {other} must compare "
                "each turn by its own. Set algorithm.credit.group_by=[task,agent,turn,branch], "
                f"algorithm.credit.turn_gamma=0, and an adv_estimator of {', '.join(GROUPED)}."
            )
