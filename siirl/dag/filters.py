"""What nodes of the file become: with filter_plugin two, the filter and the node below it; some none.

Nodes that move rows or wait compute nothing: the plan does that by itself, so they are left out.
"""

from dataclasses import replace
from typing import Any

from siirl.dag.spec import DagSpec, NodeSpec, dag_spec, node_spec
from siirl.errors import DagError, Place
from siirl.findings import Findings
from siirl.spelling import suggest

_KEYS = ("fn", "reads")
SIIRLS_SAMPLING = (
    "siirl.algorithm.dapo:dynamic_sampling",
    "siirl.user_interface.filter_interface.dapo:dynamic_sampling",
)
"""Code of siiRL that marks the groups which its POSTPROCESS_SAMPLING node then drops."""


def with_filters(dag: DagSpec) -> DagSpec:
    """The DAG with a node "<id>_filter" above every node that has a filter_plugin.

    filter_plugin is "pkg.mod:fn", or {fn: "pkg.mod:fn", reads: [fields]}.
    """
    nodes: list[NodeSpec] = []
    found = Findings(Place.WORKFLOW)
    plugins: dict[str, dict[str, Any]] = {}
    for node in dag.nodes:
        if node.filter_plugin is not None:
            with found.at():
                plugins[node.node_id] = _plugin(node)
    found.close()
    for node in dag.nodes:
        if node.node_id not in plugins:
            nodes.append(node)
            continue
        plugin = plugins[node.node_id]
        entry: dict[str, Any] = {
            "node_id": f"{node.node_id}_filter",
            "node_type": "COMPUTE",
            "node_role": "POSTPROCESS_SAMPLING",
            "dependencies": list(node.dependencies),
            "agent_group": node.agent_group,
            "executable_ref": plugin["fn"],
            "reads": _and_source(plugin.get("reads")),
        }
        nodes.append(node_spec(entry))
        nodes.append(replace(node, filter_plugin=None, dependencies=(entry["node_id"],)))
    return dag_spec(dag.dag_id, nodes, dag.description)


def _plugin(node: NodeSpec) -> dict[str, Any]:
    plugin = {"fn": node.filter_plugin} if isinstance(node.filter_plugin, str) else node.filter_plugin
    if not isinstance(plugin, dict) or not isinstance(plugin.get("fn"), str):
        raise DagError(
            f"{node}: filter_plugin = {node.filter_plugin!r} names no function. Write filter_plugin: "
            "pkg.mod:fn, or {fn: pkg.mod:fn, reads: [score]}."
        )
    for key in plugin:
        if key not in _KEYS:
            raise DagError(f"{node}: filter_plugin has the unknown key {key!r}. {suggest(key, _KEYS)}")
    return plugin


def _and_source(reads: Any) -> Any:
    """With the column by which dropped rows are counted; None, and what is no list, as it is."""
    if not isinstance(reads, list | tuple) or "data_source" in reads:
        return reads
    return [*reads, "data_source"]


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
            f"{node}: {kind} with executable_ref {node.executable_ref!r}: such a node is skipped ({why}), "
            "and its code would never run. Set node_type: CUSTOM, or remove executable_ref."
        )
    return why
