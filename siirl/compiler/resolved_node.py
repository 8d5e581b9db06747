"""Each node's configuration: the run's, with the overrides of the node applied."""

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from siirl.config import Config
from siirl.config.aliases import ALIASES, POLICY
from siirl.config.checks import contradictions
from siirl.config.resolve import FOLLOWS, REFERENCE, get
from siirl.config.root import TOP_GROUPS, all_groups, all_keys
from siirl.config.tree import is_known, overridden, split_name
from siirl.config.values import SECRET_KEYS
from siirl.dag.op_choice import op_under
from siirl.dag.ops import OpSpec
from siirl.dag.spec import DagSpec, NodeSpec
from siirl.errors import DagError, Place, UserError, reworded
from siirl.findings import Findings
from siirl.types import FieldKey

_WHOLE_RUN = ("trainer", "dag", "profiler")
AGENT_WIDE = ("data.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout.")
"""What the rollout node overrides here holds for every node of its agent that does not itself override it."""


@dataclass(frozen=True)
class ResolvedNode:
    """A node with its op and its configuration."""

    spec: NodeSpec
    op: OpSpec
    cfg: Config
    """The run's configuration with what the node, and its agent, override."""
    reads: tuple[FieldKey, ...]
    """Fields that its op declares under that configuration."""
    writes: tuple[FieldKey, ...]
    """The same of what it writes."""
    overrides: dict[str, Any]
    """Absolute dotted keys that make cfg from the run's configuration."""
    options: dict[str, Any]
    """Its other config keys, for the function of a custom node, or an environment."""

    @property
    def id(self) -> str:
        return self.spec.node_id

    @property
    def agent(self) -> int:
        return self.spec.agent_group

    def value(self, key: str) -> Any:
        """The value of a key, a group of keys, or something in a map, in its configuration."""
        name, path = (key, "") if key in all_groups() else split_name(key)
        value = get(self.cfg, name)
        for part in path.split(".") if path else ():
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def shares(self) -> int | None:
        """The agent whose policy, or whose frozen base, a rollout uses instead of its own."""
        target = self.cfg.actor_rollout_ref.rollout.agent.share_instance
        return None if target is None else int(target)

    @property
    def shared_scorer(self) -> int | None:
        """The agent whose reward model it scores by instead of one of its own."""
        return self.cfg.reward_model.share_instance if self.op.on_scorer else None

    @property
    def lora_rank(self) -> int:
        """Of the adapter that its agent's policy has; 0: none."""
        return self.cfg.actor_rollout_ref.model.lora_rank

    @property
    def model_agent(self) -> int:
        """The agent whose model its op runs on: its own, unless another agent's has its place, as the policy
        may have that it trains on responses of the dataset."""
        role, shared = self.op.role, None
        if role is not None and role.shared_by:
            shared = self.value(role.shared_by)
        elif role is not None and role.gives_weights and self.cfg.actor_rollout_ref.rollout.gives_data:
            shared = self.shares
        return self.agent if shared is None else shared

    @property
    def model(self) -> str | None:
        """Name of the model that its op runs on; each reward of a name of its own has a model of its own, if
        it does not share one, and each node where models of the role are nodes' own."""
        if self.op.model is None:
            return None
        named = self.op.by_model and self.writes[0].name != "score" and self.shared_scorer is None
        own = f".{self.writes[0].name}" if named else ""
        if self.op.role is not None and self.op.role.of_node:
            own = f".{self.id}"
        return f"agent_{self.model_agent}.{self.op.model}{own}"

    def __str__(self) -> str:
        return str(self.spec)


def resolve_nodes(
    dag: DagSpec, cfg: Config, found: Findings, known: Mapping[str, ResolvedNode] | None = None
) -> dict[str, ResolvedNode]:
    """The nodes of the DAG with op and configuration, in the order of declaration.

    known: nodes that are resolved already, and differ at most in what they depend on. What is wrong goes to
    `found`, with the name of its node. A node without an op or fields is left out; in the configuration of
    the others, keys with a wrong value are broken.
    """
    known = known or {}
    new = [node for node in dag.nodes if node.node_id not in known]
    own = {
        node.node_id: _absolute_keys(node, Findings() if node.node_id in known else found)
        for node in dag.nodes
    }
    nodes = {
        node.node_id: replace(known[node.node_id], spec=node) for node in dag.nodes if node.node_id in known
    }
    said: set[str] = set()
    for node in sorted(new, key=lambda node: not node.role.makes_samples):
        with found.at():
            wide = _agent_wide(node, dag, own)
            nodes[node.node_id] = _resolve(node, cfg, wide, *own[node.node_id], found, said)
    return {node.node_id: nodes[node.node_id] for node in dag.nodes if node.node_id in nodes}


def _agent_wide(
    node: NodeSpec, dag: DagSpec, own: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> dict[str, Any]:
    """Overrides of other nodes of its agent that hold for a node: the rollout's (AGENT_WIDE), and for a
    reference or critic those of the actor's trainer that keys of its own follow."""
    followed = _followed_by(node.role.follows)
    wide: dict[str, Any] = {}
    for other in dag.nodes:
        if other.agent_group != node.agent_group:
            continue
        of_other = own[other.node_id][0].items()
        if other.role.makes_samples:
            wide |= {key: value for key, value in of_other if key.startswith(AGENT_WIDE)}
        elif other.trains_policy:
            wide |= {key: value for key, value in of_other if f"{key}.".startswith(followed)}
    return wide


@functools.cache
def _followed_by(group: str) -> tuple[str, ...]:
    """The actor's keys that keys of a group follow, and their older names, each with a dot at its end."""
    if not group:
        return ()
    sources = {
        source
        for name, template in FOLLOWS.items()
        for source in REFERENCE.findall(template)
        if name.startswith(f"{group}.") and source.startswith(f"{POLICY}.actor.")
    }
    older = {alias for alias, targets in ALIASES.items() if not sources.isdisjoint(targets)}
    return tuple(sorted(f"{name}." for name in sources | older))


def _resolve(
    node: NodeSpec,
    cfg: Config,
    shared: dict[str, Any],
    own: dict[str, Any],
    options: dict[str, Any],
    found: Findings,
    said: set[str],
) -> ResolvedNode:
    """said: what was found in overrides that several nodes share, which is said of the first one."""
    overrides = {**shared, **own}
    wrong = Findings()
    node_cfg = overridden(cfg, overrides, wrong)
    for problem in wrong.problems:
        if str(problem) not in said:
            said.add(str(problem))
            found.add(_named(problem, node))
    overrides = {key: value for key, value in overrides.items() if is_known(key)}
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


def check_node_config(node: ResolvedNode, of_run: Collection[str] = ()) -> Iterator[UserError]:
    """What is wrong, with the node's name, if its overrides make a configuration that contradicts itself.

    of_run: the contradictions of the run's own configuration, which are not repeated.
    """
    if node.overrides:
        problems = contradictions(node.cfg)
        yield from (_named(problem, node.spec) for problem in problems if str(problem) not in of_run)


def _absolute_keys(node: NodeSpec, found: Findings) -> tuple[dict[str, Any], dict[str, Any]]:
    """(overrides under absolute keys, options of a custom node's function or an environment)."""
    group = node.role.group
    overrides: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if node.max_lag is not None:
        if node.role.makes_samples and not node.only_forward_compute:
            overrides[f"{POLICY}.rollout.max_lag"] = node.max_lag
        else:
            found.add(
                DagError(
                    f"{node}: max_lag = {node.max_lag}: it says how old the tokens of a rollout may be, and "
                    f"this node is none ({node.node_type}, {node.node_role}). Set it at the agent's rollout."
                )
            )
    for key, value in node.config.items():
        first = str(key).partition(".")[0]
        if first in _WHOLE_RUN:
            found.add(
                DagError(
                    f"{node}: config {key!r} holds for the whole run, not for one node. "
                    f"Set {key}={value} on the command line."
                )
            )
        elif first in TOP_GROUPS:
            overrides[key] = value
        elif group:
            overrides[f"{group}.{key}"] = value
        else:
            options[key] = value
    if node.executable_ref is None and not node.type.is_environment:
        found.take(
            DagError(f"{node}: config {key!r} is no key. Start it with {', '.join(TOP_GROUPS)}.")
            for key in options
        )
    return overrides, options


def _named(error: UserError, node: NodeSpec) -> UserError:
    """The error with the node's name; "not supported yet: " stays in front."""
    prefix = "not supported yet: "

    def named(message: str) -> str:
        if message.startswith(prefix):
            return f"{prefix}{node}: {message[len(prefix) :]}"
        return f"{node}: {message}"

    error = reworded(error, named)
    error.place = Place.WORKFLOW
    return error


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
