"""What nodes read besides in an interaction: which episode a row belongs to, who spoke, what others got.

The rows of an agent are those of an interaction where its rollout writes episode_id. What advantages are
computed from is a sum (siirl/nodes/interaction_credit.py): own score, the team's, the environment's,
penalties. Only the advantage node has all of it, so where an agent's reward is more than its score, that node
tells it, also in a validation. Where the sum is the score, the reward node tells it, and no row moves.
"""

from collections.abc import Mapping
from dataclasses import replace

from siirl.compiler.interactions.stages import is_member
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config import Config
from siirl.config.algorithm_table import GROUPED
from siirl.config.resolve import is_changed
from siirl.dag.fields_read import reads_prob_square
from siirl.dag.ops import EPISODE, SCORED_READS, SHOWN_REWARD
from siirl.errors import DagError
from siirl.spelling import suggest
from siirl.types import BRANCH_FIELDS, FieldKey, Layout

GROUP_KEYS = ("task", "agent", "turn", "branch")
JOINED = {"score": (), "value": ("turn_id", "response_length", "env_reward")}
"""What an advantage node may read of another agent, and what it then reads, too."""
SHOWN = (*SCORED_READS, "group_id", "reward_info")
"""What rows are shown by, and counted by prompt and data source."""
OF_TOTAL = (*SHOWN, *SHOWN_REWARD, *EPISODE, "response_mask", "score", "env_reward")
"""What the sum is made of without a model: neither a KL nor values."""


def with_credit(workflow: Workflow) -> Workflow:
    """The workflow, where nodes of agents in an interaction read what their ops need of it.

    DagError for reads that an advantage node cannot use, and for groups that it cannot form.
    """
    return replace(workflow, nodes={node.id: _with_reads(node, workflow) for node in workflow.nodes.values()})


def _with_reads(node: ResolvedNode, workflow: Workflow) -> ResolvedNode:
    if node.op.credits:
        _check_advantage(node, workflow)
    if node.agent not in workflow.talking:
        return node
    reads = _advantage_reads(node, workflow) if node.op.credits else node.reads
    own = [FieldKey(node.agent, name) for name in node.op.in_episodes]
    if node.op.credits and workflow.branching(node.agent):
        own += [FieldKey(node.agent, name) for name in BRANCH_FIELDS]
    return replace(node, reads=tuple(dict.fromkeys([*reads, *own])))


def _advantage_reads(node: ResolvedNode, workflow: Workflow) -> tuple[FieldKey, ...]:
    """What it reads without the interaction; of others their scores, where it has none of its own."""
    nodes, agents, above = workflow.nodes, workflow.talking, workflow.graph.above[node.id]
    scored = {key.agent for other in nodes.values() for key in other.writes if key.name == "score"}
    of_others = [key for key in node.reads if key.agent != node.agent]
    reads = list(node.reads)
    if node.agent not in scored:
        offered = [
            key
            for other_id in sorted(above)
            for key in nodes[other_id].writes
            if key.name == "score" and key.agent in agents
        ]
        if offered and not node.cfg.algorithm.share_reward_in_agent:
            raise DagError(
                f"{node}: agent {node.agent} has no reward node, and algorithm.share_reward_in_agent is "
                "False, so it would get no reward. Add a node with node_type COMPUTE, node_role REWARD, "
                f"agent_group {node.agent}, or set algorithm.share_reward_in_agent=True to give it the "
                "scores of the others."
            )
        of_others = of_others or offered
        rewarded = any(key.name == "score" for key in of_others) or has_environment(nodes)
        reads = [key for key in reads if key != FieldKey(node.agent, "score") or not rewarded]
    elif any(key.name == "score" for key in of_others) and not node.cfg.algorithm.credit.team:
        raise DagError(
            f"{node} reads scores of other agents, but algorithm.credit.team, their weight, is 0. Set it, or "
            "remove the reads."
        )
    elif node.cfg.algorithm.credit.team and not of_others:
        _check_team(node, workflow, scored & agents)
    for key in of_others:
        more = [*EPISODE[:2], *JOINED[key.name]]
        reads += [key, *(FieldKey(key.agent, name) for name in more)]
    return tuple(reads)


def has_environment(nodes: Nodes) -> bool:
    """Whether something gives rewards for turns: an environment, or the program that plays the episodes."""
    return any(
        node.op.is_environment
        or (node.op.is_rollout and node.cfg.actor_rollout_ref.rollout.agent.env_path)
        or (node.op.is_rollout and node.cfg.actor_rollout_ref.serve.is_played)
        for node in nodes.values()
    )


def _check_team(node: ResolvedNode, workflow: Workflow, scored: set[int]) -> None:
    """DagError if credit.team, as set at the node or for the whole run, counts for nobody."""
    advantages = [other for other in workflow.nodes.values() if other.op.credits]
    of_node = "algorithm.credit.team" in node.overrides
    if any(_has_team(other, scored, workflow) for other in ([node] if of_node else advantages)):
        return
    others = [f"agent_{agent}.score" for agent in sorted(scored - {node.agent})]
    fix = f"Add reads: [{others[0]}]" if others else "Give another agent a reward"
    raise DagError(
        f"{node}: algorithm.credit.team = {node.cfg.algorithm.credit.team:g} has nobody to count: the node "
        f"reads no score of another agent, and agent {node.agent} alone speaks with its policy. {fix}, or "
        "remove credit.team."
    )


def _has_team(node: ResolvedNode, scored: set[int], workflow: Workflow) -> bool:
    """Whether an advantage node gets scores of others: it reads them, has none, or its policy is shared."""
    reads = any(key.agent != node.agent for key in node.reads)
    return reads or node.agent not in scored or _speakers(node.agent, workflow) > 1


def _speakers(policy: int, workflow: Workflow) -> int:
    """How many agents speak with the policy of an agent, itself included."""
    return 1 + sum(owner == policy for owner in _borrowed(workflow).values())


def _borrowed(workflow: Workflow) -> dict[int, int]:
    """Agent -> the agent whose whole policy it speaks with."""
    owners = {agent: workflow.shared_policy(node) for agent, node in workflow.rollouts.items()}
    return {agent: owner for agent, owner in owners.items() if owner is not None}


def _why_no_rows(agent: int, reader: int, workflow: Workflow) -> str:
    """Why an agent has no scores that belong to rows of the reader's episodes, and what to do."""
    nodes = workflow.nodes
    known = sorted({node.agent for node in nodes.values()})
    if agent not in known:
        return f"there is no agent {agent}: there are {', '.join(map(str, known))}. Correct the number."
    owner = _borrowed(workflow).get(agent)
    if owner == reader:
        return (
            f"agent {agent} speaks with agent {owner}'s policy: its scores are among agent {owner}'s, and "
            "credit.team counts them. Remove it from reads."
        )
    if owner is not None:
        return (
            f"agent {agent} speaks with agent {owner}'s policy: its scores are among agent {owner}'s. "
            f"Read agent_{owner}.score."
        )
    if not any(node.agent == agent and not is_member(node) for node in nodes.values()):
        return f"agent {agent} is frozen: no rows of it are made, and none are scored. Remove it from reads."
    return (
        f"agents {reader} and {agent} make rows in no interaction: nothing says which rows belong together. "
        "Connect their rollout nodes."
    )


def _check_advantage(node: ResolvedNode, workflow: Workflow) -> None:
    """DagError for reads of other agents that mean nothing, and for group keys that are not known."""
    agents = workflow.talking
    credit, joined = node.cfg.algorithm.credit, [key for key in node.reads if key.agent != node.agent]
    for name in node.spec.reads or ():
        if not any(str(key) == name for key in joined) or name.partition(".")[2] not in JOINED:
            raise DagError(
                f"{node}: reads: [{name}]: besides what its op reads, an advantage node reads scores and "
                "values of other agents. Write agent_N.score or agent_N.value."
            )
    for key in joined:
        if not {key.agent, node.agent} <= agents:
            raise DagError(f"{node} reads {key}, but {_why_no_rows(key.agent, node.agent, workflow)}")
        if key.name == "score" and not node.cfg.algorithm.share_reward_in_agent:
            raise DagError(
                f"{node} reads {key}, but algorithm.share_reward_in_agent is False: agents see no score but "
                "their own. Remove one of the two."
            )
    for name in credit.group_by:
        if ":" not in name and name not in GROUP_KEYS:
            raise DagError(
                f"{node}: algorithm.credit.group_by has {name!r}. {suggest(name, GROUP_KEYS)} Or name a "
                "function: file.py:name."
            )
    if node.agent in agents and node.cfg.algorithm.estimator.compares_parts:
        raise DagError(
            f"{node}: algorithm.adv_estimator={node.cfg.algorithm.adv_estimator} compares the rewards of a "
            "response one by one, and the rows of an interaction have those of other agents and turns, too. "
            "Set algorithm.adv_estimator=grpo, and reward_model.weights to add rewards up."
        )
    own = [plan for plan in workflow.interactions.values() if node.agent in plan.homes]
    at_once = [stage for plan in own for stage in plan.stages if stage.beside]
    if at_once and node.cfg.algorithm.estimator.by_turn:
        first, name = at_once[0], node.cfg.algorithm.adv_estimator
        raise DagError(
            f"{node}: algorithm.adv_estimator={name} takes the value after a turn from the turn that follows "
            f"it, and {first.node!r} speaks at once with {' and '.join(map(repr, first.beside))}: none of "
            "these follows another. Set algorithm.adv_estimator=grpo, or let one depend on the other."
        )
    if node.agent in agents and "turn" in credit.group_by and reads_prob_square(node.cfg):
        raise DagError(
            f"{node}: algorithm.adv_estimator={node.cfg.algorithm.adv_estimator} has a baseline for each "
            "token, and algorithm.credit.group_by has turn, which compares turns as wholes. Remove turn."
        )
    told = [key for key in node.cfg.explicit if key.startswith("algorithm.credit.")]
    changed = [key for key in told if is_changed(node.cfg, key)]
    if changed and not agents:
        raise DagError(
            f"{node}: {changed[0]} is set, but the DAG has no interaction: no "
            "rollout node depends on another, on an environment or on tools. Remove it."
        )


def turns_of_training(kept: Nodes) -> dict[str, dict[str, int]]:
    """Actor training node -> its place among those that take turns, and their number; {} if none do.

    DagError unless all agents name the same rollout.agent.train_cycle.
    """
    trainers = sorted((n for n in kept.values() if n.op.trains_policy), key=lambda node: node.agent)
    cycles = {node.id: node.cfg.actor_rollout_ref.rollout.agent.train_cycle for node in trainers}
    if len(set(cycles.values())) > 1:
        named = ", ".join(f"{node_id!r}: {cycle}" for node_id, cycle in cycles.items())
        raise DagError(
            f"rollout.agent.train_cycle differs between agents ({named}): they take turns only together. Set "
            "it for the whole run."
        )
    if not trainers or cycles[trainers[0].id] is None:
        return {}
    return {node.id: {"place": place, "agents": len(trainers)} for place, node in enumerate(trainers)}


def warmup_of(cfg: Config) -> int:
    """The first steps of a run in which only critics are trained: what reads no advantage needs none."""
    return cfg.trainer.critic_warmup if cfg.actor_rollout_ref.actor.reads_advantage else 0


def policy_trains(cfg: Config, step: int, turn: Mapping[str, int]) -> bool:
    """Whether a policy is trained in a step: it is not frozen, after the critics' warm-up, in its turn.

    cfg, turn: configuration and options of the node that trains it.
    """
    cycle, warmup = cfg.actor_rollout_ref.rollout.agent.train_cycle, warmup_of(cfg)
    if cfg.actor_rollout_ref.actor.freeze or step <= warmup:
        return False
    return cycle is None or (step - warmup - 1) // cycle % turn["agents"] == turn["place"]


def check_groups(node: ResolvedNode, layout: Layout) -> None:
    """DagError if groups span several shards: only those of one task lie on one."""
    algorithm = node.cfg.algorithm
    grouped = node.op.credits and algorithm.adv_estimator in GROUPED
    if grouped and "task" not in algorithm.credit.group_by and layout.num_shards > 1:
        raise DagError(
            f"{node}: algorithm.credit.group_by = [{', '.join(algorithm.credit.group_by)}] has no task: its "
            f"groups span {layout.num_shards} shards of rows. Add task, or place the node on one rank: "
            'placement: "0".'
        )


def with_totals(workflow: Workflow) -> Workflow:
    """The workflow whose advantage nodes show what they add up; with trainer.rollout_only, no more."""
    rollout_only = workflow.run.trainer.rollout_only
    found = {}
    for node in workflow.nodes.values():
        if adds_up(node, workflow) and (rollout_only or node.agent in workflow.talking):
            shown = _showing(node, workflow)
            found[node.id] = _telling(shown) if rollout_only else shown
    return replace(workflow, nodes={**workflow.nodes, **found})


def validating(workflow: Workflow) -> Workflow:
    """The workflow as a validation sees it: advantage nodes that add up tell the sum, and give nothing."""
    nodes = workflow.nodes.values()
    told = {node.id: _telling(_showing(node, workflow)) for node in nodes if adds_up(node, workflow)}
    return replace(workflow, nodes={**workflow.nodes, **told})


def adds_up(node: ResolvedNode, workflow: Workflow) -> bool:
    """Whether advantages are computed from anything but the agent's own score as it is."""
    if not node.op.credits:
        return False
    credit, buffer = node.cfg.algorithm.credit, node.cfg.reward_model.overlong_buffer
    if node.agent not in workflow.talking:
        return buffer.enable
    owns = FieldKey(node.agent, "score") in node.reads
    of_env = credit.turn and has_environment(workflow.nodes)
    return bool(not owns or buffer.enable or of_env or credit.team or credit.own != 1)


def _showing(node: ResolvedNode, workflow: Workflow) -> ResolvedNode:
    made = {key for other in workflow.nodes.values() for key in other.writes}
    names = SHOWN if node.agent not in workflow.talking else (*SHOWN, *SHOWN_REWARD)
    owns = FieldKey(node.agent, "score") in node.reads
    keys = [FieldKey(node.agent, name) for name in names]
    more = [key for key in keys if key.name != "reward_info" or (owns and key in made)]
    return replace(node, reads=tuple(dict.fromkeys([*node.reads, *more])))


def _telling(node: ResolvedNode) -> ResolvedNode:
    """The node without what only advantages are made of: values, log-probs, scores that count by turns."""
    valued = {key.agent for key in node.reads if key.name == "value" and key.agent != node.agent}
    reads = [key for key in node.reads if key.name in OF_TOTAL and key.agent not in valued]
    return replace(node, reads=tuple(reads), writes=())
