"""Where an agent's reward is more than its score: its advantage node then tells it, also in a validation.

What advantages are computed from is a sum (siirl/nodes/interaction_credit.py): own score, the team's, the
environment's, penalties. Only the advantage node has all of it. Where the sum is the score, the reward node
tells it, and no row moves for that.
"""

from dataclasses import replace

from siirl.compiler.interactions.credit_reads import has_environment
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.dag.ops import EPISODE, SCORED_READS, SHOWN_REWARD
from siirl.types import FieldKey

SHOWN = (*SCORED_READS, "group_id", "reward_info")
"""What rows are shown by, and counted by prompt and data source."""
OF_TOTAL = (*SHOWN, *SHOWN_REWARD, *EPISODE, "response_mask", "score", "env_reward")
"""What the sum is made of without a model: neither a KL nor values."""


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
