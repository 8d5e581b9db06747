"""filter_plugin: a node whose rows are filtered first becomes two nodes, the filter and the node below it."""

from dataclasses import replace
from typing import Any

from siirl.dag.spec import DagSpec, NodeSpec, dag_spec, node_spec
from siirl.errors import DagError, Place
from siirl.findings import Findings
from siirl.spelling import suggest

_KEYS = ("fn", "reads")


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
