"""dag.node_config: what the command line adds to the config of nodes, so that a template is used as it is."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from siirl.dag.spec import DagSpec, NodeSpec, dag_spec
from siirl.errors import DagError, Place
from siirl.findings import Findings
from siirl.spelling import suggest


def with_node_config(dag: DagSpec, node_config: Mapping[str, Any]) -> DagSpec:
    """The DAG with keys of nodes set: node id -> config, whose keys win over those of the file.

    {"actor": {"model": {"path": "/m"}}} is {"actor": {"model.path": "/m"}}; an environment's or a custom
    node's own options keep their maps. Of other nodes `placement` sets where they run. DagError for a node
    that the DAG does not have.
    """
    if not node_config:
        return dag
    ids = [node.node_id for node in dag.nodes]
    found = Findings(Place.WORKFLOW)
    for node_id, config in node_config.items():
        if node_id not in ids:
            found.add(
                DagError(
                    f"dag.node_config names the node {node_id!r}, which DAG {dag.dag_id!r} does not have. "
                    f"{suggest(node_id, ids)}"
                )
            )
        elif not isinstance(config, Mapping):
            found.add(
                DagError(
                    f"dag.node_config.{node_id} = {config!r} is no map of keys to values. Write "
                    f"dag.node_config.{node_id}.KEY=VALUE."
                )
            )
    found.close()
    nodes = [_with_keys(node, dict(node_config.get(node.node_id, {}))) for node in dag.nodes]
    return dag_spec(dag.dag_id, nodes, dag.description)


def _with_keys(node: NodeSpec, keys: dict[str, Any]) -> NodeSpec:
    if node.type.is_environment or node.executable_ref is not None:
        return replace(node, config=node.config | keys)
    placement = keys.pop("placement", node.placement)
    return replace(node, config=node.config | flat(keys), placement=placement)


def flat(tree: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested maps as dotted keys; a map within so many that nobody wrote them stays one."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and depth < 20:
            found |= flat(value, f"{prefix}{name}.", depth + 1)
        else:
            found[f"{prefix}{name}"] = value
    return found
