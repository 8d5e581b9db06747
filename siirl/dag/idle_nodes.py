"""Nodes that move rows or wait, and compute nothing: the plan does that by itself, so they are left out."""

from siirl.dag.spec import DagSpec, NodeSpec
from siirl.errors import DagError

SIIRLS_SAMPLING = (
    "siirl.algorithm.dapo:dynamic_sampling",
    "siirl.user_interface.filter_interface.dapo:dynamic_sampling",
)
"""Code of siiRL that marks the groups which its POSTPROCESS_SAMPLING node then drops."""


def idle_nodes(dag: DagSpec) -> dict[str, str]:
    """Id of each node that computes nothing -> why it is not needed. DagError for one that brings code."""
    picks = any(node.role.picks_rows for node in dag.nodes)
    return {node.node_id: why for node in dag.nodes if (why := _why_idle(node, picks))}


def _why_idle(node: NodeSpec, picks: bool) -> str:
    if picks and node.executable_ref in SIIRLS_SAMPLING:
        return "a node of role POSTPROCESS_SAMPLING drops the groups, and samples until the batch is full"
    why = node.type.idle or node.role.idle
    if why and node.executable_ref:
        kind = node.node_type if node.type.idle else node.node_role
        raise DagError(
            f"{node}: {kind} with executable_ref {node.executable_ref!r}: such a node is left out ({why}), "
            "and its code would never run. Set node_type: CUSTOM, or remove executable_ref."
        )
    return why
