"""Each node's configuration: the run's, with the overrides of the node applied."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from siirl.config import Config, with_overrides
from siirl.config.checks import check_config
from siirl.config.resolve import get
from siirl.config.root import TOP_GROUPS, all_keys
from siirl.config.values import SECRET_KEYS
from siirl.dag.ops import OpSpec, op_under
from siirl.dag.spec import DagSpec, NodeSpec
from siirl.errors import DagError, NotSupportedError, UserError
from siirl.types import FieldKey

_GROUP_OF_ROLE = {
    "ROLLOUT": "actor_rollout_ref",
    "ACTOR": "actor_rollout_ref",
    "REFERENCE": "actor_rollout_ref",
    "ADVANTAGE": "algorithm",
    "POSTPROCESS_SAMPLING": "algorithm",
    "REWARD": "reward_model",
    "CRITIC": "critic",
}
_WHOLE_RUN = ("trainer", "dag", "profiler")
AGENT_WIDE = ("data.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout.")
"""What the rollout node overrides here holds for every node of its agent that does not itself override it."""


@dataclass(frozen=True)
class ResolvedNode:
    """A node with its op and its configuration.

    reads, writes: the fields that its op declares under that configuration. overrides: absolute dotted keys
    that make cfg from the run's configuration. options: the node's other config keys, for the function of a
    custom node, or an environment.
    """

    spec: NodeSpec
    op: OpSpec
    cfg: Config
    reads: tuple[FieldKey, ...]
    writes: tuple[FieldKey, ...]
    overrides: dict[str, Any]
    options: dict[str, Any]

    @property
    def id(self) -> str:
        return self.spec.node_id

    @property
    def agent(self) -> int:
        return self.spec.agent_group

    @property
    def model_agent(self) -> int:
        """The agent whose model its op runs on: its own, unless its critic is another agent's."""
        shared = self.cfg.critic.share_instance if self.op.model == "critic" else None
        return self.agent if shared is None else shared

    @property
    def model(self) -> str | None:
        """Name of the model that its op runs on; each reward of a name of its own has a model of its own."""
        if self.op.model is None:
            return None
        own = (
            f".{self.writes[0].name}"
            if self.op.model in ("reward", "judge") and self.writes[0].name != "score"
            else ""
        )
        return f"agent_{self.model_agent}.{self.op.model}{own}"

    def __str__(self) -> str:
        return str(self.spec)


def resolve_nodes(dag: DagSpec, cfg: Config) -> dict[str, ResolvedNode]:
    """Every node of the DAG with op and configuration, in the order of declaration. Errors name the node."""
    own = {node.node_id: _absolute_keys(node) for node in dag.nodes}
    shared: dict[int, dict[str, Any]] = {}
    for node in dag.nodes:
        if node.node_role == "ROLLOUT":
            wide = {key: value for key, value in own[node.node_id][0].items() if key.startswith(AGENT_WIDE)}
            shared.setdefault(node.agent_group, {}).update(wide)
    return {
        node.node_id: _resolve(node, cfg, shared.get(node.agent_group, {}), *own[node.node_id])
        for node in dag.nodes
    }


def _resolve(
    node: NodeSpec, cfg: Config, shared: dict[str, Any], own: dict[str, Any], options: dict[str, Any]
) -> ResolvedNode:
    _refuse_later(node)
    overrides = {**shared, **own}
    with _naming(node):
        node_cfg = with_overrides(cfg, overrides) if overrides else cfg
    _refuse_secrets(node, cfg, node_cfg)
    op = op_under(node, node_cfg)
    return ResolvedNode(
        spec=node,
        op=op,
        cfg=node_cfg,
        reads=tuple(_key(name, node) for name in op.reads(node_cfg)),
        writes=tuple(_own_key(name, node) for name in op.writes(node_cfg)),
        overrides=overrides,
        options=options,
    )


def _refuse_secrets(node: NodeSpec, cfg: Config, node_cfg: Config) -> None:
    """A plan is printed and stored: what it holds is no secret any more."""
    for name in _secret_keys():
        if get(cfg, name) != get(node_cfg, name):
            raise DagError(f"{node}: {name} must not be in a DAG. Set it on the command line, or HF_TOKEN.")


@functools.cache
def _secret_keys() -> tuple[str, ...]:
    return tuple(name for name in all_keys() if name.endswith(SECRET_KEYS))


def check_node_config(node: ResolvedNode) -> None:
    """ConfigError, with the node's name, if its overrides make a configuration that contradicts itself."""
    if node.overrides:
        with _naming(node.spec):
            check_config(node.cfg)


def _absolute_keys(node: NodeSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """(overrides under absolute keys, options of a custom node's function or an environment)."""
    group = _GROUP_OF_ROLE.get(node.node_role)
    overrides: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in node.config.items():
        first = str(key).partition(".")[0]
        if first in _WHOLE_RUN:
            raise DagError(
                f"{node}: config {key!r} holds for the whole run, not for one node. "
                f"Set {key}={value} on the command line."
            )
        if first in TOP_GROUPS:
            overrides[key] = value
        elif group is not None:
            overrides[f"{group}.{key}"] = value
        else:
            options[key] = value
    if options and node.executable_ref is None and node.node_type != "ENV_INTERACT":
        raise DagError(
            f"{node}: config {next(iter(options))!r} is no key. Start it with {', '.join(TOP_GROUPS)}."
        )
    return overrides, options


def _refuse_later(node: NodeSpec) -> None:
    later = {
        "max_lag": (node.max_lag, "rollouts that run ahead of training"),
    }
    for key, (value, feature) in later.items():
        if value:
            raise NotSupportedError(f"not supported yet: {node}: {key} = {value!r}: {feature}. Remove it.")


@contextmanager
def _naming(node: NodeSpec) -> Iterator[None]:
    """Configuration errors raised inside name the node; "not supported yet: " stays in front."""
    try:
        yield
    except UserError as error:
        prefix, message = "not supported yet: ", str(error)
        named = (
            f"{prefix}{node}: {message[len(prefix) :]}"
            if message.startswith(prefix)
            else f"{node}: {message}"
        )
        raise type(error)(named) from None


def _key(name: str, node: NodeSpec) -> FieldKey:
    """ "score" is the node's own agent's field, "agent_1.score" that of agent 1."""
    prefix, dot, field = name.rpartition(".")
    if not dot:
        return FieldKey(node.agent_group, name)
    if not prefix.startswith("agent_") or not prefix[6:].isdigit() or not field:
        raise DagError(
            f"{node}: {name!r} is no field. Write NAME, or agent_N.NAME for a field of another agent."
        )
    return FieldKey(int(prefix[6:]), field)


def _own_key(name: str, node: NodeSpec) -> FieldKey:
    key = _key(name, node)
    if key.agent != node.agent_group:
        raise DagError(
            f"{node} of agent {node.agent_group} writes {key}: two agents would share a field. "
            f"Write a field of agent {node.agent_group}; nodes of agent {key.agent} can read it as "
            f"agent_{node.agent_group}.{key.name}."
        )
    return key
