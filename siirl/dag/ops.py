"""The op table: what each kind of node reads and writes, and what it needs. Pure; the code is in siirl/nodes.

A node's op follows from (node_type, node_role, only_forward_compute), or is "custom" where `executable_ref`
names the code. Reads and writes depend on the node's resolved configuration.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from siirl.config import Config
from siirl.config.algorithm_choice import estimator_of, policy_loss_of
from siirl.config.algorithm_table import ESTIMATORS
from siirl.config.batch import batch_of
from siirl.dag.names import suggest
from siirl.dag.spec import NodeSpec
from siirl.dag.user_code import declared_needs
from siirl.errors import DagError, NotSupportedError
from siirl.types import FIELDS, INTERACTION_FIELDS, PROMPT_FIELDS, ROLLOUT_FIELDS

Names = tuple[str, ...]
ModelRole = Literal["actor", "ref", "rollout", "critic", "reward", "judge"]


@dataclass(frozen=True)
class OpSpec:
    """Signature of an op.

    model: the role of the model worker that it runs on. split: how its rows must lie: whole groups on one
    shard, or balanced by cost, or anyhow. changes_rows: it starts a new row set. repeats: it collects rows of
    several rounds of the nodes above it, until it has enough. side_effect: never pruned; wanted: neither
    where the configuration asks for it.
    trains: it steps the optimizer. reads and writes: names of fields of the node's own agent, or
    "agent_N.name".
    """

    name: str
    reads: Callable[[Config], Names]
    writes: Callable[[Config], Names]
    model: ModelRole | None = None
    split: Literal["group", "cost", "any"] = "any"
    changes_rows: bool = False
    repeats: bool = False
    side_effect: bool = False
    wanted: Callable[[Config], bool] = lambda cfg: False
    trains: bool = False

    @property
    def is_rollout(self) -> bool:
        """Whether it makes the samples of its agent, or brings them."""
        return self.name in ("rollout", "replay", "interaction", "turns")


def _fixed(*names: str) -> Callable[[Config], Names]:
    return lambda cfg: names


_TOKENS = ("prompt_ids", "prompt_length", "response_ids", "response_length", "response_mask")


def old_log_prob_source(cfg: Config) -> Literal["field", "rollout", "current"]:
    """Where the policy loss takes the log-probs of the policy before the step from.

    "field": old_log_prob, a forward pass. "rollout": rollout_log_prob, because actor.recompute_old_log_prob
    is off. "current": the loss's own log-probs, detached, which are equal because the batch gets one
    optimizer step.
    """
    if not cfg.actor_rollout_ref.actor.recompute_old_log_prob:
        return "rollout"
    picks = policy_loss_of(cfg).picks_tokens
    return "field" if picks or batch_of(cfg).optimizer_steps > 1 else "current"


def uses_full_kl(cfg: Config) -> bool:
    """Whether the loss has the KL over the whole vocabulary, which needs the reference's hidden states."""
    actor = cfg.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type.startswith("full")


def _reference_writes(cfg: Config) -> Names:
    return ("ref_log_prob", "ref_hidden") if uses_full_kl(cfg) else ("ref_log_prob",)


def uses_critic(cfg: Config) -> bool:
    """Whether the advantages are computed from the values of a critic, which then learns their returns."""
    return "value" in _estimator_needs(cfg)


def _estimator_needs(cfg: Config) -> Names:
    """Fields that the advantage estimator reads besides those that the op has anyway."""
    name, had = cfg.algorithm.adv_estimator, ("reward", "response_mask", "group_id", "score")
    if ":" in name:
        needs = declared_needs(name, "register_advantage", "algorithm.adv_estimator")
    else:
        needs, had = estimator_of(cfg).reads, (*had, "other_turns")
    return tuple(field for field in needs if field not in had)


def _advantage_reads(cfg: Config) -> Names:
    needs = _estimator_needs(cfg)
    if not cfg.algorithm.use_kl_in_reward:
        return ("group_id", "response_length", "response_mask", "score", *needs)
    old = "rollout_log_prob" if old_log_prob_source(cfg) == "rollout" else "old_log_prob"
    return ("group_id", "response_length", "response_mask", "score", *needs, old, "ref_log_prob")


def _advantage_writes(cfg: Config) -> Names:
    reward = ("reward",) if cfg.algorithm.use_kl_in_reward else ()
    return (*reward, "advantage", *(("return_",) if uses_critic(cfg) else ()))


def _actor_train_reads(cfg: Config) -> Names:
    old = ("old_log_prob",) if old_log_prob_source(cfg) == "field" else ()
    ref = _reference_writes(cfg) if cfg.actor_rollout_ref.actor.use_kl_loss else ()
    return ("row_id", *_TOKENS, "rollout_log_prob", *old, *ref, "advantage")


ROLLOUT = OpSpec(
    "rollout",
    _fixed("row_id", "group_id", "prompt_ids", "prompt_length"),
    _fixed(*ROLLOUT_FIELDS),
    model="rollout",
    split="group",
    changes_rows=True,
)
REPLAY = replace(ROLLOUT, name="replay", model=None)
"""Recorded rows in place of a rollout: no engine, so no model and no weights to take."""
INTERACTION = OpSpec(
    "interaction",
    _fixed(*PROMPT_FIELDS),
    _fixed(*PROMPT_FIELDS, *ROLLOUT_FIELDS, *INTERACTION_FIELDS),
    model="rollout",
    split="group",
    changes_rows=True,
)
"""The rollout that an interaction begins with: it plays the episodes, and gives the rows of its own agent."""
TURNS = replace(INTERACTION, name="turns", reads=_fixed())
"""Another rollout of an interaction: it gives the rows of its agent, prompts included."""
FROZEN_TURNS = replace(TURNS, writes=_fixed())
"""A rollout of an interaction whose agent is not trained."""
SHARED_TURNS = replace(FROZEN_TURNS, model=None)
"""A rollout of an interaction that speaks with another agent's policy, and whose rows are among its rows."""
ENVIRONMENT = OpSpec("environment", _fixed(), _fixed())
FUNCTION_REWARD = OpSpec(
    "function_reward",
    _fixed(
        "row_id",
        "sample_index",
        "raw_prompt",
        "data_source",
        "ground_truth",
        "extra_info",
        "response_ids",
        "response_length",
    ),
    _fixed("score", "reward_info"),
)
MODEL_REWARD = OpSpec(
    "model_reward",
    _fixed(
        "row_id",
        "sample_index",
        "prompt_ids",
        "prompt_length",
        "raw_prompt",
        "data_source",
        "ground_truth",
        "response_ids",
        "response_length",
    ),
    _fixed("score", "reward_info"),
    model="reward",
    split="cost",
)
SCORED_READS = (
    "row_id",
    "sample_index",
    "raw_prompt",
    "data_source",
    "ground_truth",
    "response_ids",
    "response_length",
)
"""What a reward of responses as texts reads; a combination of rewards reads those besides."""
JUDGE_REWARD = replace(
    MODEL_REWARD, name="judge_reward", reads=_fixed(*SCORED_READS), model="judge", split="cost"
)
JUDGE_SERVICE = replace(JUDGE_REWARD, name="judge_service", model=None, split="any")
MODEL_REWARDS = ("model_reward", "judge_reward", "judge_service")
"""Ops that score by a model."""
COMBINE_REWARDS = OpSpec("combine_rewards", _fixed(*SCORED_READS), _fixed("score", "reward_info"))
SCORING = (FUNCTION_REWARD.name, *MODEL_REWARDS, COMBINE_REWARDS.name)
"""Ops that score responses."""
INFO = "_info"
"""The further values of reward NAME are the field NAME_info."""
ADVANTAGE = OpSpec("advantage", _advantage_reads, _advantage_writes, split="group")
REFERENCE = OpSpec("reference_log_prob", _fixed(*_TOKENS), _reference_writes, model="ref", split="cost")
OLD_LOG_PROB = OpSpec("old_log_prob", _fixed(*_TOKENS), _fixed("old_log_prob"), model="actor", split="cost")
ACTOR_TRAIN = OpSpec(
    "actor_train", _actor_train_reads, _fixed(), model="actor", split="cost", side_effect=True, trains=True
)
VALUES = OpSpec("values", _fixed(*_TOKENS), _fixed("value"), model="critic", split="cost")
CRITIC_TRAIN = OpSpec(
    "critic_train",
    _fixed("row_id", *_TOKENS, "value", "return_"),
    _fixed(),
    model="critic",
    split="cost",
    side_effect=True,
    trains=True,
)


def _dynamic_sampling_reads(cfg: Config) -> Names:
    info = () if cfg.algorithm.filter_groups.metric == "score" else ("reward_info",)
    return ("row_id", "group_id", "score", *info)


DYNAMIC_SAMPLING = OpSpec(
    "dynamic_sampling",
    _dynamic_sampling_reads,
    _fixed(),
    split="group",
    changes_rows=True,
    repeats=True,
    wanted=lambda cfg: cfg.algorithm.filter_groups.enable,
)

GREEDY_ROLLOUT = OpSpec(
    "greedy_rollout",
    _fixed("row_id", "group_id", "prompt_ids", "prompt_length"),
    _fixed("baseline_response_ids", "baseline_response_length"),
    model="rollout",
    split="group",
)
BASELINE_REWARD = OpSpec(
    "baseline_reward",
    _fixed(
        "row_id",
        "sample_index",
        "raw_prompt",
        "data_source",
        "ground_truth",
        "extra_info",
        "baseline_response_ids",
        "baseline_response_length",
    ),
    _fixed("baseline_score"),
)
RESAMPLE = OpSpec(
    "pf_ppo",
    _fixed("row_id", "score"),
    _fixed(),
    split="group",
    changes_rows=True,
    wanted=lambda cfg: cfg.algorithm.use_pf_ppo,
)
FILTER = OpSpec(
    "filter",
    _fixed("row_id", "group_id", "score", "response_length"),
    _fixed(),
    split="group",
    changes_rows=True,
    wanted=lambda cfg: True,
)

_MODEL = ("MODEL_INFERENCE", "MODEL_TRAIN")
_TABLE: dict[str, tuple[tuple[str, ...], Callable[[NodeSpec], OpSpec]]] = {
    "ROLLOUT": (
        ("MODEL_INFERENCE",),
        lambda node: GREEDY_ROLLOUT if node.only_forward_compute else ROLLOUT,
    ),
    "REWARD": (("COMPUTE", *_MODEL), lambda node: _reward(node)),
    "ADVANTAGE": (("COMPUTE",), lambda node: ADVANTAGE),
    "REFERENCE": (_MODEL, lambda node: REFERENCE),
    "ACTOR": (("MODEL_TRAIN",), lambda node: OLD_LOG_PROB if node.only_forward_compute else ACTOR_TRAIN),
    "POSTPROCESS_SAMPLING": (("COMPUTE",), lambda node: DYNAMIC_SAMPLING),
    "CRITIC": (("MODEL_TRAIN",), lambda node: VALUES if node.only_forward_compute else CRITIC_TRAIN),
}


def op_under(node: NodeSpec, cfg: Config) -> OpSpec:
    """The op that a node runs under its resolved configuration; the errors of op_of."""
    op = op_of(node)
    if op is DYNAMIC_SAMPLING and cfg.algorithm.use_pf_ppo and not cfg.algorithm.filter_groups.enable:
        return RESAMPLE
    if op.name == "model_reward":
        kind = reward_kind(cfg)
        return replace(kind, writes=op.writes)
    return REPLAY if op is ROLLOUT and cfg.actor_rollout_ref.rollout.name == "replay" else op


def reward_kind(cfg: Config) -> OpSpec:
    """How a node that scores by a model does so: by a score head, or a judge, here or behind a service."""
    judge = cfg.reward_model.judge
    if judge.url is not None:
        return JUDGE_SERVICE
    return MODEL_REWARD if judge.name is None else JUDGE_REWARD


def op_of(node: NodeSpec) -> OpSpec:
    """The op that a node stands for; DagError or NotSupportedError if it means nothing or is not built."""
    if node.node_type == "ENV_INTERACT" and node.node_role == "DEFAULT":
        return ENVIRONMENT
    types, choose = _TABLE.get(node.node_role, (("COMPUTE", "CUSTOM"), None))
    if node.node_type not in types and not (node.executable_ref and node.node_type == "CUSTOM"):
        raise DagError(
            f"{node}: node_role {node.node_role} does not go with node_type {node.node_type}. "
            f"Set node_type: {' or '.join(types)}."
        )
    if node.executable_ref and node.node_role == "POSTPROCESS_SAMPLING":
        return FILTER if node.reads is None else replace(FILTER, reads=_fixed(*node.reads))
    if node.executable_ref:
        return _custom(node, choose(node) if choose else None)
    if choose is None:
        raise DagError(
            f"{node}: a node of role {node.node_role} has no code of its own. Set executable_ref: "
            "pkg.mod:fn, "
            f"or a node_role. {suggest(node.node_role, _TABLE)}"
        )
    if node.node_role == "REWARD":
        return choose(node)
    if node.node_role == "ADVANTAGE" and node.reads is not None and node.writes is None:
        more = node.reads
        return replace(ADVANTAGE, reads=lambda cfg: (*_advantage_reads(cfg), *more))
    if node.reads is not None or node.writes is not None:
        raise DagError(f"{node}: reads and writes of op {choose(node).name!r} are fixed. Remove them.")
    return choose(node)


def _reward(node: NodeSpec) -> OpSpec:
    """What scores the responses: a frozen model, functions, or a weighted sum of the rewards that it reads.

    With `writes: [NAME]` the score is the field NAME, for a node that adds up several.
    """
    op = FUNCTION_REWARD
    if node.node_type in _MODEL:
        op = MODEL_REWARD
    elif node.only_forward_compute:
        op = BASELINE_REWARD
    elif node.reads is not None:
        op = replace(COMBINE_REWARDS, reads=_fixed(*SCORED_READS, *node.reads))
    if node.reads is not None and op.name != "combine_rewards":
        raise DagError(f"{node}: reads of op {op.name!r} are fixed. Remove them.")
    if node.writes is None:
        return op
    if op is BASELINE_REWARD or len(node.writes) != 1 or node.writes[0] in FIELDS.keys() - {"score"}:
        raise DagError(
            f"{node}: writes = [{', '.join(node.writes)}]: a reward node writes one score under a name of "
            "its own. Write writes: [NAME], e.g. [helpful]."
        )
    name = node.writes[0]
    return op if name == "score" else replace(op, writes=_fixed(name, f"{name}{INFO}"))


def score_names(reads: Iterable[str]) -> Names:
    """The rewards among the fields that a combination reads: names of nodes' own, and no further values."""
    return tuple(name for name in reads if name not in FIELDS and not name.endswith(INFO))


def _custom(node: NodeSpec, replaced: OpSpec | None) -> OpSpec:
    """User code: on its declared fields, or on those of the op that it replaces."""
    if replaced is not None and replaced.model is not None:
        raise NotSupportedError(
            f"not supported yet: {node}: executable_ref in place of op {replaced.name!r}."
        )
    if replaced is None and (node.reads is None or node.writes is None):
        raise DagError(
            f"{node}: a custom node declares the fields that it reads and writes: without them nobody knows "
            "which rows to bring. Add reads: [...] and writes: [...]."
        )
    base = replaced or OpSpec("custom", _fixed(), _fixed())
    reads = base.reads if node.reads is None else _fixed(*node.reads)
    writes = base.writes if node.writes is None else _fixed(*node.writes)
    return replace(base, name="custom", reads=reads, writes=writes, side_effect=node.writes == ())


def why_unread(name: str, cfg: Config) -> str | None:
    """Why no op reads a field in this run, for the built-in fields that are needed only sometimes."""
    if name == "value" and not uses_critic(cfg):
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} uses no critic"
    if name.startswith("baseline_"):
        those = ", ".join(known for known, row in ESTIMATORS.items() if row.uses_greedy)
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} uses no greedy baseline ({those} does)"
    if name in ("ref_log_prob", "ref_hidden"):
        return "no KL is used (actor.use_kl_loss and algorithm.use_kl_in_reward are off)"
    if name == "old_log_prob" and old_log_prob_source(cfg) == "rollout":
        return "actor.recompute_old_log_prob is off: the rollout's log-probs are used"
    if name == "old_log_prob":
        return "each rollout batch gets exactly one optimizer step"
    return None
