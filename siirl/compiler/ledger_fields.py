"""The ledger's field: a row has the same number in every node that says something of it (trainer.ledger)."""

from dataclasses import replace

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.types import FieldKey

LEDGER_ID = "ledger_id"


def with_ledger(workflow: Workflow) -> Workflow:
    """The workflow, where rollouts number their rows, and what scores, credits, drops or trains rows reads
    the number. Nothing changes with trainer.ledger=disable."""
    if workflow.run.trainer.ledger == "disable":
        return workflow
    numbered = {node.agent for node in workflow.nodes.values() if node.op.is_rollout and node.writes}
    nodes = {name: _with_number(node, numbered) for name, node in workflow.nodes.items()}
    return replace(workflow, nodes=nodes)


def _with_number(node: ResolvedNode, numbered: set[int]) -> ResolvedNode:
    op, number = node.op, FieldKey(node.agent, LEDGER_ID)
    if node.agent not in numbered:
        return node
    if op.is_rollout:
        return replace(node, writes=(*node.writes, number)) if node.writes else node
    scores = op.scores or FieldKey(node.agent, "score") in node.writes
    trains = op.trains and not op.on_critic
    if not (scores or trains or op.credits or op.changes_rows):
        return node
    prompt = [FieldKey(node.agent, "sample_index")] if trains else []
    return replace(node, reads=tuple(dict.fromkeys([*node.reads, number, *prompt])))
