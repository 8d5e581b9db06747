"""Nodes that move rows or wait, and compute nothing: the plan does that by itself, so they are left out."""

from siirl.dag.spec import DagSpec, NodeSpec
from siirl.errors import DagError

ROWS_MOVE = "rows move by themselves to the ranks of the nodes that read them"
IDLE_TYPES = {
    "DATA_LOAD": "prompts are loaded for whichever node reads them",
    "PUT_TO_BUFFER": ROWS_MOVE,
    "GET_FROM_BUFFER": ROWS_MOVE,
    "BARRIER_SYNC": "a node already waits for all its dependencies",
}
IDLE_ROLES = {
    "DATA_REBALANCE": "rows are dealt out evenly before each node that computes on them; "
    "trainer.balance_batch=true weighs them by their cost"
}
SIIRLS_SAMPLING = (
    "siirl.algorithm.dapo:dynamic_sampling",
    "siirl.user_interface.filter_interface.dapo:dynamic_sampling",
)
"""Code of siiRL that marks the groups which its POSTPROCESS_SAMPLING node then drops."""


def idle_nodes(dag: DagSpec) -> dict[str, str]:
    """Id of each node that computes nothing -> why it is not needed. DagError for one that brings code."""
    samples = any(node.node_role == "POSTPROCESS_SAMPLING" for node in dag.nodes)
    return {node.node_id: why for node in dag.nodes if (why := _why_idle(node, samples))}


def _why_idle(node: NodeSpec, samples: bool) -> str:
    if samples and node.executable_ref in SIIRLS_SAMPLING:
        return "a node of role POSTPROCESS_SAMPLING drops the groups, and samples until the batch is full"
    why = IDLE_TYPES.get(node.node_type) or IDLE_ROLES.get(node.node_role, "")
    if why and node.executable_ref:
        kind = node.node_type if node.node_type in IDLE_TYPES else node.node_role
        raise DagError(
            f"{node}: {kind} with executable_ref {node.executable_ref!r}: such a node is left out ({why}), "
            "and its code would never run. Set node_type: CUSTOM, or remove executable_ref."
        )
    return why
