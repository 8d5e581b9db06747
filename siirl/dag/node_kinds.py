"""What a node can say that it is: the tables of node types and node roles. op_choice.py has their ops."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from siirl.dag.ops import OPS

ROWS_MOVE = "rows move by themselves to the ranks of the nodes that read them"


@dataclass(frozen=True)
class NodeType:
    """A node_type."""

    on_model: bool = False
    """It computes on a model."""

    is_environment: bool = False
    """It answers the agents of an interaction."""

    idle: str = ""
    """Why its nodes compute nothing in a plan, and are left out."""


NODE_TYPES: dict[str, NodeType] = {
    "COMPUTE": NodeType(),
    "CUSTOM": NodeType(),
    "MODEL_INFERENCE": NodeType(on_model=True),
    "MODEL_TRAIN": NodeType(on_model=True),
    "DATA_LOAD": NodeType(idle="prompts are loaded for whichever node reads them"),
    "ENV_INTERACT": NodeType(is_environment=True),
    "PUT_TO_BUFFER": NodeType(idle=ROWS_MOVE),
    "GET_FROM_BUFFER": NodeType(idle=ROWS_MOVE),
    "BARRIER_SYNC": NodeType(idle="a node already waits for all its dependencies"),
}


@dataclass(frozen=True)
class NodeRole:
    """A node_role."""

    group: str = ""
    """The group of the configuration that short keys of its config are relative to; none: it has only full
    ones, and options of code of its own."""

    agent_options: Mapping[str, str] = field(default_factory=dict)
    """Keys that agent_options may hold, too, as in siiRL -> full names of the keys that they are."""

    follows: str = ""
    """The group of its model, where some keys follow those of the policy in training."""

    makes_samples: bool = False
    """Of its agent, or of a baseline."""

    on_policy: bool = False
    """It computes on the policy in training."""

    picks_rows: bool = False
    """It chooses among rows."""

    idle: str = ""
    """Why its nodes compute nothing in a plan, and are left out."""


_POLICY, _AGENT = "actor_rollout_ref", "actor_rollout_ref.rollout.agent"
_ROLLOUT_OPTIONS = (
    *("env_path", "env_seed", "obs_with_env", "rewards_with_env"),
    *("train_cycle", "share_instance"),
)

NODE_ROLES: dict[str, NodeRole] = {
    "DEFAULT": NodeRole(),
    "ROLLOUT": NodeRole(
        _POLICY, agent_options={key: f"{_AGENT}.{key}" for key in _ROLLOUT_OPTIONS}, makes_samples=True
    ),
    "REWARD": NodeRole("reward_model", follows="reward_model"),
    "REFERENCE": NodeRole(_POLICY, follows=f"{_POLICY}.ref"),
    "TEACHER": NodeRole("teacher", follows="teacher"),
    "ADVANTAGE": NodeRole("algorithm"),
    "ACTOR": NodeRole(_POLICY, agent_options={"train_cycle": f"{_AGENT}.train_cycle"}, on_policy=True),
    "CRITIC": NodeRole("critic", agent_options={"share_instance": "critic.share_instance"}, follows="critic"),
    "POSTPROCESS_SAMPLING": NodeRole("algorithm", picks_rows=True),
    "DATA_REBALANCE": NodeRole(
        idle="rows are sharded evenly before each node that computes on them; trainer.balance_batch=true "
        "weighs them by their cost"
    ),
    **{
        op.node_role: NodeRole(op.role.group, follows=op.role.group)
        for op in OPS.values()
        if op.node_role and op.role is not None
    },
}
