"""Which op a node runs: by its role and type, by the code that it names, and by its configuration. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from siirl.config import Config
from siirl.dag.fields_read import advantage_reads, teacher_writes
from siirl.dag.node_kinds import NODE_TYPES
from siirl.dag.ops import (
    ACTOR_TRAIN,
    ADVANTAGE,
    BASELINE_REWARD,
    COMBINE_REWARDS,
    CRITIC_TRAIN,
    CUSTOM,
    DYNAMIC_SAMPLING,
    ENVIRONMENT,
    FILTER,
    FUNCTION_REWARD,
    GREEDY_ROLLOUT,
    INFO,
    MODEL_REWARD,
    OLD_LOG_PROB,
    OPS,
    REFERENCE,
    REWARD_TRAIN,
    ROLLOUT,
    SCORED_READS,
    TEACHER,
    VALUES,
    VARIANTS,
    OpSpec,
    fixed,
)
from siirl.dag.spec import NodeSpec
from siirl.dag.user_ops import declared_op
from siirl.errors import DagError, NotSupportedError
from siirl.spelling import suggest
from siirl.types import FIELDS

_MODEL = tuple(name for name, kind in NODE_TYPES.items() if kind.on_model)


@dataclass(frozen=True)
class RoleOps:
    """The ops of nodes of one role."""

    types: tuple[str, ...]
    """The node types that go with it."""

    op: Callable[[NodeSpec], OpSpec] | None = None
    """The op of a node; None: it has code of its own only."""

    plugin: OpSpec | None = None
    """The op of a node that names code which is no op by itself."""

    reads_more: bool = False
    """Whether a node may name fields that its op reads besides."""

    names_fields: bool = False
    """Whether the reads and writes of a node have a meaning of their own, which `op` knows."""


def _either(op: OpSpec, forward: OpSpec | None = None) -> Callable[[NodeSpec], OpSpec]:
    """One op, or with only_forward_compute another one."""
    return lambda node: forward if forward is not None and node.only_forward_compute else op


ROLE_OPS: dict[str, RoleOps] = {
    "ROLLOUT": RoleOps(("MODEL_INFERENCE",), _either(ROLLOUT, GREEDY_ROLLOUT)),
    "REWARD": RoleOps(("COMPUTE", *_MODEL), lambda node: _reward(node), names_fields=True),
    "ADVANTAGE": RoleOps(("COMPUTE",), _either(ADVANTAGE), reads_more=True),
    "REFERENCE": RoleOps(_MODEL, _either(REFERENCE)),
    "TEACHER": RoleOps(
        _MODEL, lambda node: replace(TEACHER, writes=lambda cfg: teacher_writes(node.node_id, cfg))
    ),
    "ACTOR": RoleOps(("MODEL_TRAIN",), _either(ACTOR_TRAIN, OLD_LOG_PROB)),
    "POSTPROCESS_SAMPLING": RoleOps(("COMPUTE",), _either(DYNAMIC_SAMPLING), plugin=FILTER),
    "CRITIC": RoleOps(("MODEL_TRAIN",), _either(CRITIC_TRAIN, VALUES)),
    **{op.node_role: RoleOps(_MODEL, _either(op)) for op in OPS.values() if op.node_role},
}
_OTHER = RoleOps(("COMPUTE", "CUSTOM"))


def op_under(node: NodeSpec, cfg: Config) -> OpSpec:
    """The op that a node runs under its resolved configuration; the errors of op_of."""
    op = op_of(node)
    if op.name not in VARIANTS:
        return op
    variant, common = VARIANTS[op.name](cfg), OPS[op.name]
    of_node = {name: getattr(op, name) for name in ("writes", "in_episodes")}
    own = {name: value for name, value in of_node.items() if value is not getattr(common, name)}
    return replace(variant, **own) if own else variant


def op_of(node: NodeSpec) -> OpSpec:
    """The op that a node stands for; DagError or NotSupportedError if it means nothing or is not built."""
    if node.type.is_environment and node.node_role not in ROLE_OPS:
        return ENVIRONMENT
    role = ROLE_OPS.get(node.node_role, _OTHER)
    declared = None if node.executable_ref is None else declared_op(node.executable_ref, str(node))
    types = role.types if declared is None else (*role.types, *_MODEL[: declared.model is not None])
    if node.node_type not in types and not (node.executable_ref and node.node_type in _OTHER.types):
        raise DagError(
            f"{node}: node_role {node.node_role} does not go with node_type {node.node_type}. "
            f"Set node_type: {' or '.join(types)}."
        )
    if role.plugin is not None and node.executable_ref:
        return role.plugin if node.reads is None else replace(role.plugin, reads=fixed(*node.reads))
    op = role.op(node) if role.op else None
    if node.executable_ref:
        return _custom(node, op, declared)
    if op is None:
        raise DagError(
            f"{node}: a node of role {node.node_role} has no code of its own. Set executable_ref: "
            f"pkg.mod:fn, or a node_role. {suggest(node.node_role, ROLE_OPS)}"
        )
    if role.names_fields or (node.reads is None and node.writes is None):
        return op
    if role.reads_more and node.writes is None:
        more = node.reads or ()
        return replace(op, reads=lambda cfg: (*advantage_reads(cfg), *more))
    raise DagError(f"{node}: reads and writes of op {op.name!r} are fixed. Remove them.")


def _reward(node: NodeSpec) -> OpSpec:
    """What scores the responses: a model, functions, or a weighted sum of the rewards that it reads; or what
    trains the model.

    With `writes: [NAME]` the score is the field NAME, for a node that adds up several.
    """
    op = FUNCTION_REWARD
    if node.type.on_model:
        trains = node.node_type == "MODEL_TRAIN" and not node.only_forward_compute
        op = REWARD_TRAIN if trains else MODEL_REWARD
    elif node.only_forward_compute:
        op = BASELINE_REWARD
    elif node.reads is not None:
        op = replace(COMBINE_REWARDS, reads=fixed(*SCORED_READS, *node.reads))
    if node.executable_ref and op.model is not None:
        return op  # its code declares its fields
    if node.reads is not None and not op.combines:
        raise DagError(f"{node}: reads of op {op.name!r} are fixed. Remove them.")
    if node.writes is not None and op.trains:
        raise DagError(
            f"{node}: node_type MODEL_TRAIN trains the reward model, and writes nothing. Remove writes; or "
            "score by the model: set node_type: MODEL_INFERENCE."
        )
    if node.writes is None:
        return op
    if not op.scores or len(node.writes) != 1 or node.writes[0] in FIELDS.keys() - {"score"}:
        raise DagError(
            f"{node}: writes = [{', '.join(node.writes)}]: a reward node writes one score under a name of "
            "its own. Write writes: [NAME], e.g. [helpful]."
        )
    name = node.writes[0]
    if name == "score":
        return op
    return replace(op, writes=fixed(name, f"{name}{INFO}"), in_episodes=())


def _custom(node: NodeSpec, replaced: OpSpec | None, declared: OpSpec | None) -> OpSpec:
    """User code: on the fields of the node, else those that it declares or those of the op it replaces."""
    if declared is None and replaced is not None and replaced.model is not None:
        raise NotSupportedError(
            f"not supported yet: {node}: executable_ref in place of op {replaced.name!r}: code that runs "
            "on a model declares it by @declare_op (examples/extend/README.md)."
        )
    base = declared or replaced
    if base is None and (node.reads is None or node.writes is None):
        raise DagError(
            f"{node}: a custom node declares the fields that it reads and writes: without them nobody knows "
            "which rows to bring. Add reads: [...] and writes: [...]."
        )
    base = base or CUSTOM
    reads = base.reads if node.reads is None else fixed(*node.reads)
    writes = base.writes if node.writes is None else fixed(*node.writes)
    return replace(
        declared or CUSTOM,
        reads=reads,
        writes=writes,
        split=base.split,
        scores=replaced is not None and replaced.scores,
        side_effect=base.side_effect if node.writes is None else not node.writes,
    )
