"""Opponent pools (rollout.agent.pool): agents that play as kept versions of a policy in training. Pure."""

from collections.abc import Iterator

from siirl.compiler.backends import ROLLOUT_BACKENDS
from siirl.compiler.plan import Plan, PoolPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config.resolve import first_difference
from siirl.errors import DagError, NotSupportedError, PlacementError, UserError


def pool_of(node: ResolvedNode) -> PoolPlan | None:
    """The pool that a rollout's configuration describes; None: it has weights of its own."""
    pool = node.cfg.actor_rollout_ref.rollout.agent.pool
    if pool.policy is None or not node.op.is_rollout:
        return None
    return PoolPlan(
        node.agent,
        pool.policy,
        pool.size,
        pool.every_steps,
        pool.win_rate,
        pool.sampling,
        pool.power,
        pool.current,
    )


def check_pools(kept: Workflow) -> Iterator[UserError]:
    """What refuses a pool: there are no versions for it, nobody plays it, or nobody knows who wins."""
    for node in kept.nodes.values():
        pool = pool_of(node)
        if pool is not None:
            yield from _of_policy(node, pool, kept)
            yield from _of_games(node, pool, kept)


def _of_policy(node: ResolvedNode, pool: PoolPlan, kept: Workflow) -> Iterator[UserError]:
    """Whose versions they are, and who plays as them."""
    key, rollout = f"{node}: rollout.agent.pool.policy={pool.policy}", node.cfg.actor_rollout_ref.rollout
    trainers = {other.agent: other for other in kept.nodes.values() if other.op.trains_policy}
    if node.agent in trainers:
        yield DagError(
            f"{key}, and {trainers[node.agent]} trains this agent: who plays as a version of another is not "
            "trained. Remove the agent's reward, advantage and ACTOR nodes, or the pool."
        )
    elif pool.policy not in trainers:
        trained = ", ".join(map(str, trainers)) or "none"
        yield DagError(
            f"{key}: no node trains the policy of agent {pool.policy}, so it has no versions. Agents in "
            f"training: {trained}."
        )
    elif found := first_difference(node.cfg, trainers[pool.policy].cfg, "actor_rollout_ref.model"):
        name, own, other = found
        yield DagError(
            f"{key}, with {name}={own}, which is {other} at {trainers[pool.policy]}: they are versions of "
            "one model. Set it alike at both rollouts, or on the command line for all."
        )
    elif trainers[pool.policy].cfg.actor_rollout_ref.actor.strategy != "fsdp":
        yield NotSupportedError(
            f"not supported yet: {key} with actor.strategy=megatron at {trainers[pool.policy]}: only fsdp "
            "keeps versions. Set actor_rollout_ref.actor.strategy=fsdp."
        )
    if node.shares is not None:
        yield DagError(
            f"{key} and rollout.agent.share_instance={node.shares}: one speaks with a version of a policy, "
            "the other with the policy as it is. Remove one; pool.current=P mixes both."
        )
    engine = ROLLOUT_BACKENDS.get(rollout.name)
    if engine is None or not engine.weights:
        yield DagError(f"{key} with rollout.name={rollout.name}, which takes no weights. Set hf or vllm.")
    if rollout.weight_link == "checkpoint":
        yield NotSupportedError(
            f"not supported yet: {key} with rollout.weight_link=checkpoint, whose folder holds what has "
            "changed since the last sync. Set rollout.weight_link=auto."
        )


def _of_games(node: ResolvedNode, pool: PoolPlan, kept: Workflow) -> Iterator[UserError]:
    """The episodes in which it plays."""
    key = f"{node}: rollout.agent.pool.policy={pool.policy}"
    talk = next((plan for plan in kept.interactions.values() if node.agent in plan.homes), None)
    if talk is None or pool.policy not in talk.homes:
        yield DagError(
            f"{key}, but agent {pool.policy} is not in the same interaction: nobody plays against its "
            "versions. Let one of both rollouts depend on the other, or on the same environment."
        )
        return
    if talk.program is not None:
        yield NotSupportedError(
            f"not supported yet: {key} where a program plays the episodes (rollout.serve). Remove the pool."
        )
    if node.cfg.actor_rollout_ref.rollout.max_lag:
        yield NotSupportedError(
            f"not supported yet: {key} with rollout.max_lag above 0: an episode that goes on in the next "
            "step would change its opponent. Set max_lag to 0."
        )
    for other in kept.nodes.values():
        if other.agent in talk.homes and other.op.repeats:
            yield NotSupportedError(
                f"not supported yet: {key} above {other}: only some of the games of a step count then. Set "
                "algorithm.filter_groups.enable=false."
            )
    if pool.needs_results and not talk.gives_rewards:
        asked = (
            f"pool.sampling={pool.sampling}" if pool.win_rate is None else f"pool.win_rate={pool.win_rate}"
        )
        yield DagError(
            f"{key} with {asked}: who wins is told by the rewards of an environment, and none of the "
            "interaction gives any. Add an ENV_INTERACT node, or set pool.sampling=uniform and "
            "pool.win_rate=null."
        )


def check_places(plan: Plan) -> Iterator[UserError]:
    """Trainer, opponent and whoever plays are on the same ranks: each draws, counts and keeps the same."""
    for link in plan.links.values():
        if link.pool is None:
            continue
        source, target = plan.models[link.source], plan.models[link.target]
        entry = next(talk.entry for talk in plan.interactions.values() if link.target in talk.policies)
        players = plan.layouts[plan.run_of(entry).source].ranks
        if not source.ranks == target.ranks == players:
            yield PlacementError(
                f"not supported yet: node {target.node!r}: rollout.agent.pool.policy={link.pool.policy} "
                f"where {source.name} is on ranks {source.ranks}, {target.name} on {target.ranks}, and "
                f"episodes are played on {players}. Give the nodes of both agents the same placement, and "
                "their rollouts tensor_model_parallel_size=1."
            )
