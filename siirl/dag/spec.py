"""The DAG as the user wrote it: NodeSpec and DagSpec, made by Python or read from YAML (yaml_file.py)."""

import json
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from siirl.dag.node_kinds import NODE_ROLES, NODE_TYPES, NodeRole, NodeType
from siirl.errors import DagError, Place
from siirl.findings import Findings
from siirl.spelling import suggest

_NODE_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_REFERENCE = re.compile(r"[^:]+:[A-Za-z_]\w*")


@dataclass(frozen=True)
class NodeSpec:
    """One node of the file, with the defaults of what it leaves out."""

    node_id: str

    node_type: str
    """Of NODE_TYPES."""

    node_role: str = "DEFAULT"
    """Of NODE_ROLES."""

    dependencies: tuple[str, ...] = ()
    """Nodes that it waits for."""

    only_forward_compute: bool = False
    """It trains nothing, though nodes of its type and role do; a rollout or reward: of a greedy baseline."""

    agent_group: int = 0
    """The number of its agent."""

    config: dict[str, Any] = field(default_factory=dict)
    """Dotted overrides, relative to the role's group of the configuration, or absolute."""

    executable_ref: str | None = None
    """ "pkg.mod:fn" or "file.py:fn": code of its own."""

    filter_plugin: Any = None
    """A function that filters its rows first (filters.py)."""

    agent_options: dict[str, Any] | None = None
    """What surrounds the turns of a rollout in an interaction."""

    loop: dict[str, Any] | None = None
    """Where an episode goes back to after this node, and how often."""

    placement: Any = None
    """See parse_placement; None: all ranks, or for a COMPUTE node those of its parent."""

    reads: tuple[str, ...] | None = None
    """Fields that its own code reads; None: those of the role's own op."""

    writes: tuple[str, ...] | None = None
    """The same of what it writes."""

    max_lag: int | None = None
    """Steps by which a rollout may run ahead of training."""

    @property
    def type(self) -> NodeType:
        """The row of its type."""
        return NODE_TYPES[self.node_type]

    @property
    def role(self) -> NodeRole:
        """The row of its role."""
        return NODE_ROLES[self.node_role]

    @property
    def trains_policy(self) -> bool:
        """Whether it trains the model that its agent's rollout samples from."""
        return self.role.on_policy and not self.only_forward_compute

    def __str__(self) -> str:
        return f"node {self.node_id!r}"


@dataclass(frozen=True)
class DagSpec:
    """A workflow: nodes in the order of their declaration."""

    dag_id: str
    nodes: tuple[NodeSpec, ...]
    description: str = ""

    def node(self, node_id: str) -> NodeSpec:
        """The node of that name. KeyError if there is none."""
        return next(node for node in self.nodes if node.node_id == node_id)

    def save(self, path: str | Path) -> None:
        """Write it as a DAG file, which dag.workflow_path names. Read again, it is equal."""
        import yaml

        nodes = [
            {
                item.name: list(value) if isinstance(value, tuple) else value
                for item in fields(NodeSpec)
                if (value := getattr(node, item.name)) != _default(item)
            }
            for node in self.nodes
        ]
        head = {"dag_id": self.dag_id} | ({"description": self.description} if self.description else {})
        text = yaml.safe_dump(head | {"nodes": nodes}, sort_keys=False, allow_unicode=True, width=110)
        Path(path).expanduser().write_text(text, encoding="utf-8")


def _default(item: Field) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


class DagBuilder:
    """Builds a DagSpec in Python; the object is the same as the one read from YAML.

    >>> dag = DagBuilder("grpo")
    >>> rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    >>> reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
    >>> spec = dag.build()
    """

    def __init__(self, dag_id: str, description: str = "") -> None:
        self._dag_id = dag_id
        self._description = description
        self._nodes: list[NodeSpec] = []

    def node(self, node_id: str, node_type: str, node_role: str = "DEFAULT", **options: Any) -> str:
        """Add a node; options are the keys of the DAG file. Returns node_id, for `dependencies`."""
        self._nodes.append(
            node_spec({"node_id": node_id, "node_type": node_type, "node_role": node_role, **options})
        )
        return node_id

    def build(self) -> DagSpec:
        """The finished DagSpec. DagError if it has no nodes or repeats an id."""
        return dag_spec(self._dag_id, self._nodes, self._description)


def dag_spec(dag_id: str, nodes: list[NodeSpec], description: str = "") -> DagSpec:
    """A DagSpec of nodes whose ids differ, else DagError."""
    if not nodes:
        raise DagError(f"DAG {dag_id!r} has no nodes: nothing would run. Add nodes under `nodes`.")
    found = Findings(Place.WORKFLOW)
    seen: set[str] = set()
    for node in nodes:
        if node.node_id in seen:
            found.add(
                DagError(
                    f"node id {node.node_id!r} is used twice in DAG {dag_id!r}: rename one of the two nodes."
                )
            )
        seen.add(node.node_id)
    found.close()
    return DagSpec(dag_id, tuple(nodes), description)


def node_spec(entry: dict[str, Any]) -> NodeSpec:
    """A NodeSpec of one entry of `nodes`. DagError for unknown or missing keys and wrong types."""
    node_id = entry.get("node_id")
    if not isinstance(node_id, str) or not _NODE_ID.fullmatch(node_id):
        raise DagError(
            f"node_id {node_id!r} of node {entry!r}: a node needs an id of letters, digits, '_', '-' and "
            "'.', "
            "that starts with a letter. Set node_id."
        )
    who = f"node {node_id!r}"
    known = [f.name for f in fields(NodeSpec)]
    found = Findings(Place.WORKFLOW)
    found.take(
        DagError(f"{who} has the unknown key {key!r}. {suggest(key, known)}")
        for key in entry
        if key not in known
    )
    values = {key: value for key, value in entry.items() if value is not None and key in known}
    if "node_type" not in values:
        found.add(DagError(f"{who} has no node_type. Set one of {', '.join(NODE_TYPES)}."))
    for key in values:
        with found.at():
            values[key] = _checked(values[key], key, who)
    found.close()
    return NodeSpec(**_options_in_config(values, who))


def _options_in_config(values: dict[str, Any], who: str) -> dict[str, Any]:
    """The entry of a node with what its agent_options hold of its config there. DagError if both differ."""
    role, options = NODE_ROLES[values.get("node_role", "DEFAULT")], values.get("agent_options", {})
    moved = {key: value for key, value in options.items() if key in role.agent_options}
    if not moved:
        return values
    config = dict(values.get("config", {}))
    for key, value in moved.items():
        absolute = role.agent_options[key]
        relative = absolute.partition(".")[2]
        for name in (absolute, relative):
            if config.get(name, value) != value:
                raise DagError(
                    f"{who}: agent_options.{key} = {value!r} contradicts config {name!r} = {config[name]!r}. "
                    "Set one of them."
                )
        config = {name: item for name, item in config.items() if name != relative} | {absolute: value}
    left = {key: value for key, value in options.items() if key not in moved}
    return {**values, "config": config, "agent_options": left or None}


def _checked(value: Any, key: str, who: str) -> Any:
    """The value of a key of a node as a NodeSpec has it. DagError if it is none."""
    if key in _CHOICES:
        return _choice(value, _CHOICES[key], key, who)
    if key in ("dependencies", "reads", "writes"):
        return _names(value, key, who)
    if key in _KINDS:
        kind, meaning = _KINDS[key]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise DagError(f"{who}: {key} = {value!r} is not {meaning}. Write {key} as {meaning}.")
    if key == "agent_group" and value < 0:
        raise DagError(f"{who}: agent_group = {value}: agents are numbered from 0.")
    if key in ("config", "agent_options", "loop", "placement", "filter_plugin"):
        return _plain(value, key, who)
    return _reference(value, who) if key == "executable_ref" else value


_CHOICES = {"node_type": NODE_TYPES, "node_role": NODE_ROLES}
_KINDS = {
    "only_forward_compute": (bool, "true or false"),
    "agent_group": (int, "a whole number"),
    "config": (dict, "a mapping of dotted keys to values"),
    "executable_ref": (str, 'text like "pkg.mod:fn"'),
    "agent_options": (dict, "a mapping"),
    "loop": (dict, "a mapping like {to: NODE, max_turns: 4}"),
    "max_lag": (int, "a whole number"),
}


def _choice(value: Any, choices: Iterable[str], key: str, who: str) -> str:
    upper = value.upper() if isinstance(value, str) else value
    if upper not in tuple(choices):
        raise DagError(f"{who}: unknown {key} {value!r}. {suggest(upper, choices)}")
    return upper


def _names(value: Any, key: str, who: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise DagError(f"{who}: {key} = {value!r} is not a list of names. Write {key}: [a, b].")
    return tuple(dict.fromkeys(value))


def _plain(value: Any, key: str, who: str) -> Any:
    """The value as JSON gives it back, since plans travel as JSON."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise DagError(
            f"{who}: {key} = {value!r} is not plain data: {error}. Use numbers, text, lists, mappings."
        ) from None


def _reference(value: str, who: str) -> str:
    """Dotted references (pkg.mod.fn), as siiRL writes them, become pkg.mod:fn."""
    if ":" not in value and "." in value:
        value = ":".join(value.rsplit(".", 1))
    if not _REFERENCE.fullmatch(value):
        raise DagError(
            f"{who}: executable_ref {value!r} does not name a function. Write pkg.mod:fn or file.py:fn."
        )
    return value
