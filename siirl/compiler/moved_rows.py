"""Old log-probs are computed of the rows that the policy trains on after it has moved.

The first mini-batch of a step is trained by the weights that its old log-probs would be of: where nothing
else reads the field, the loss takes the log-probs of that pass.
"""

from dataclasses import replace

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config import Config
from siirl.config.batch import BatchArithmetic, batch_of
from siirl.dag.ops import ACTOR_TRAIN, LATER_OLD_LOG_PROB, OLD_LOG_PROB
from siirl.types import FieldKey


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
