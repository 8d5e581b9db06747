"""What nobody needs is left out: nodes whose fields are not read, and old log-probs of rows that need none.

Old log-probs are computed of the rows that the policy trains on after it has moved. The first mini-batch of a
step is trained by the weights that its old log-probs would be of: where nothing else reads the field, the
loss takes the log-probs of that pass.
"""

from dataclasses import replace

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config import Config
from siirl.config.batch import BatchArithmetic, batch_of
from siirl.dag.fields_read import why_unread
from siirl.dag.ops import ACTOR_TRAIN, LATER_OLD_LOG_PROB, OLD_LOG_PROB
from siirl.types import FieldKey


def prune(workflow: Workflow) -> dict[str, str]:
    """Node id -> why nothing needs it: it has no side effect, and no kept node reads what it writes.

    Of an interaction all nodes are needed if one is. With trainer.rollout_only, rollouts and rewards are
    wanted for themselves, and nothing is trained.
    """
    needed: set[FieldKey] = set()
    pruned: dict[str, str] = {}
    rollout_only = workflow.run.trainer.rollout_only
    distilling = _distilling(workflow)
    for node in (workflow.nodes[node_id] for node_id in reversed(workflow.graph.order)):
        shows = node.op.scores and node.agent in distilling
        if shows or _is_wanted(node, rollout_only) or needed.intersection(node.writes):
            needed.update(node.reads)
        else:
            pruned[node.id] = _why_pruned(node, rollout_only)
    for plan in workflow.interactions.values():
        members = {stage.node for stage in plan.stages}
        if members - pruned.keys():
            pruned = {node_id: why for node_id, why in pruned.items() if node_id not in members}
    return {node_id: pruned[node_id] for node_id in workflow.graph.order if node_id in pruned}


def _distilling(workflow: Workflow) -> set[int]:
    """Agents that learn from teachers alone: what scores them says how they are doing."""
    nodes = workflow.nodes.values()
    return {
        node.agent
        for node in nodes
        if node.op.trains_policy and node.cfg.actor_rollout_ref.actor.loss.distills
    }


def _is_wanted(node: ResolvedNode, rollout_only: bool) -> bool:
    if rollout_only:
        effect = node.op.side_effect and not node.op.trains
        tells = node.op.credits and not node.writes
        return effect or node.op.is_rollout or node.op.scores or tells
    return node.op.side_effect or node.op.wanted(node.cfg)


def _why_pruned(node: ResolvedNode, rollout_only: bool) -> str:
    if rollout_only and node.op.trains:
        return "trainer.rollout_only is set: nothing is trained"
    if node.op.is_rollout:
        return "no node that is needed reads its responses"
    if node.op.changes_rows:
        return "nothing asks for it (algorithm.filter_groups.enable and algorithm.use_pf_ppo are off)"
    names = ", ".join(key.name for key in node.writes)
    reason = next((why for key in node.writes if (why := why_unread(key.name, node.cfg))), None)
    return f"nothing reads {names}" + (f": {reason}" if reason else "")


def with_moved_rows(kept: Workflow) -> Workflow:
    """The workflow, whose nodes of old log-probs leave out the first mini-batch where they can."""
    nodes = kept.nodes.values()
    return replace(
        kept, nodes={node.id: _later(node, kept) if _can_leave(node, kept) else node for node in nodes}
    )


def _can_leave(node: ResolvedNode, kept: Workflow) -> bool:
    """Whether the field is read by the agent's training alone, which trains the very rows that it is of.

    Not where a KL in the reward or a node of the user's reads it, where rows are filtered or drawn in
    between, where a loss picks tokens or the pass chooses experts before the update, or where the two nodes
    cut mini-batches differently.
    """
    if node.op is not OLD_LOG_PROB:
        return False
    readers = [other for other in kept.nodes.values() if set(node.writes) & set(other.reads)]
    if [(other.op is ACTOR_TRAIN, other.agent) for other in readers] != [(True, node.agent)]:
        return False
    (trainer,) = readers
    between = kept.graph.above[trainer.id] - kept.graph.above[node.id]
    if any(kept.nodes[other].op.changes_rows and kept.nodes[other].agent == node.agent for other in between):
        return False
    actor = trainer.cfg.actor_rollout_ref.actor
    whole = actor.picks_tokens or actor.router_replay.mode == "R2"
    return not whole and _cut(node.cfg) == _cut(trainer.cfg)


def _cut(cfg: Config) -> tuple[BatchArithmetic, bool, int]:
    """What decides which rows are in which mini-batch of the actor."""
    actor = cfg.actor_rollout_ref.actor
    return batch_of(cfg), actor.shuffle, actor.data_loader_seed


def _later(node: ResolvedNode, kept: Workflow) -> ResolvedNode:
    names = LATER_OLD_LOG_PROB.reads(node.cfg)
    if node.agent in kept.talking:
        names += LATER_OLD_LOG_PROB.in_episodes
    reads = [*node.reads, *(FieldKey(node.agent, name) for name in names)]
    return replace(node, op=LATER_OLD_LOG_PROB, reads=tuple(dict.fromkeys(reads)))
