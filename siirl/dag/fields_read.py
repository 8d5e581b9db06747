"""Which fields built-in ops read and write under a node's configuration, and why nobody reads one. Pure."""

from collections.abc import Callable
from typing import Literal

from siirl.config import Config
from siirl.config.algorithm_table import ESTIMATORS
from siirl.config.batch import batch_of
from siirl.config.teacher import SAMPLED, WHOLE, TeacherConfig
from siirl.types import EXPERT_FIELDS, IMAGE_FIELDS
from siirl.user_code.source import declared_needs

Names = tuple[str, ...]
TOKENS = ("prompt_ids", "prompt_length", "response_ids", "response_length", "response_mask")
"""What a model computes on."""
OF_TEACHER = "_teacher_"
"""Between the id of a teacher's node and what the field is of."""


def with_images(*names: str) -> Callable[[Config], Names]:
    """These, and the images of the row if it may have some: what a model reads."""
    return lambda cfg: (*names, *IMAGE_FIELDS) if cfg.data.has_images else names


def experts_by(cfg: Config, *modes: str) -> Names:
    """The fields of chosen experts, if router replay has one of these modes."""
    return EXPERT_FIELDS if cfg.actor_rollout_ref.actor.router_replay.mode in modes else ()


def old_log_prob_source(cfg: Config) -> Literal["field", "rollout", "current"]:
    """Where the policy loss takes the log-probs of the policy before the step from.

    "field": old_log_prob, a forward pass. "rollout": rollout_log_prob, because actor.recompute_old_log_prob
    is off. "current": the loss's own log-probs, detached, because the batch is one mini-batch: they are equal
    in the first epoch, and kept for the others.
    """
    actor = cfg.actor_rollout_ref.actor
    if actor.imitates:
        return "current"
    if not actor.recompute_old_log_prob:
        return "rollout"
    whole = actor.picks_tokens or actor.router_replay.mode == "R2"
    return "field" if whole or batch_of(cfg).mini_batches > 1 else "current"


def uses_full_kl(cfg: Config) -> bool:
    """Whether the loss has the KL over the whole vocabulary, which needs the reference's hidden states."""
    actor = cfg.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type.startswith("full")


def reference_writes(cfg: Config) -> Names:
    return ("ref_log_prob", "ref_hidden") if uses_full_kl(cfg) else ("ref_log_prob",)


def uses_critic(cfg: Config) -> bool:
    """Whether the advantages are computed from the values of a critic, which then learns their returns."""
    return "value" in _estimator_needs(cfg)


def reads_prob_square(cfg: Config) -> bool:
    """Whether advantages are computed from the sums of squared probabilities."""
    return "old_prob_square" in _estimator_needs(cfg)


def _estimator_needs(cfg: Config) -> Names:
    """Fields that the advantage estimator reads besides those that the op has anyway."""
    name, had = cfg.algorithm.adv_estimator, ("reward", "response_mask", "group_id", "score")
    if ":" in name:
        needs = declared_needs(name, "register_advantage", "algorithm.adv_estimator")
    else:
        needs, had = cfg.algorithm.estimator.reads, (*had, "other_turns")
        needs = tuple("reward_info" if field == "reward_part" else field for field in needs)
    return tuple(field for field in needs if field not in had)


def advantage_reads(cfg: Config) -> Names:
    """What advantages are computed from, without an interaction."""
    needs = _estimator_needs(cfg)
    if not cfg.algorithm.use_kl_in_reward:
        return ("group_id", "response_length", "response_mask", "score", *needs)
    old = "rollout_log_prob" if old_log_prob_source(cfg) == "rollout" else "old_log_prob"
    return ("group_id", "response_length", "response_mask", "score", *needs, old, "ref_log_prob")


def advantage_writes(cfg: Config) -> Names:
    reward = ("reward",) if cfg.algorithm.use_kl_in_reward else ()
    return (*reward, "advantage", *(("return_",) if uses_critic(cfg) else ()))


def actor_train_reads(cfg: Config) -> Names:
    old = ("old_log_prob",) if old_log_prob_source(cfg) == "field" else ()
    ref = reference_writes(cfg) if cfg.actor_rollout_ref.actor.use_kl_loss else ()
    actor, tokens = cfg.actor_rollout_ref.actor, with_images(*TOKENS)(cfg)
    if actor.loss.pairs:
        return ("row_id", "group_id", *tokens, "score", "ref_log_prob")
    entropy = ("old_entropy",) if actor.picks_by_entropy else ()
    prompt = ("group_id",) if actor.loss_agg_mode == "prompt-mean" else ()
    sampled = () if actor.imitates else ("rollout_log_prob", *old, *entropy)
    advantage = ("advantage",) if actor.reads_advantage else ()
    experts = experts_by(cfg, "R2", "R3")
    return ("row_id", "sample_index", *tokens, *experts, *sampled, *advantage, *ref, *prompt)


def old_log_prob_reads(cfg: Config) -> Names:
    return (*with_images(*TOKENS)(cfg), *experts_by(cfg, "R3"))


def old_log_prob_writes(cfg: Config) -> Names:
    entropy = ("old_entropy",) if cfg.actor_rollout_ref.actor.picks_by_entropy else ()
    square = ("old_prob_square",) if reads_prob_square(cfg) else ()
    return ("old_log_prob", *entropy, *square, *experts_by(cfg, "R2"))


def dynamic_sampling_reads(cfg: Config) -> Names:
    info = () if cfg.algorithm.filter_groups.metric == "score" else ("reward_info",)
    return ("row_id", "group_id", "score", "data_source", *info)


def why_unread(name: str, cfg: Config) -> str | None:
    """Why no op reads a field in this run, for the built-in fields that are needed only sometimes."""
    if name == "value" and not uses_critic(cfg):
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} uses no critic"
    if name.startswith("baseline_"):
        those = ", ".join(known for known, row in ESTIMATORS.items() if row.uses_greedy)
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} uses no greedy baseline ({those} does)"
    if name in ("ref_log_prob", "ref_hidden"):
        return "no KL is used (actor.use_kl_loss and algorithm.use_kl_in_reward are off)"
    if name == "old_prob_square":
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} does not read it"
    if OF_TEACHER in name:
        return "no loss learns from teachers (actor.distill.enable is off, loss_mode is not distill)"
    if name == "old_entropy":
        return "actor.top_entropy_quantile is 1: the policy loss trains tokens of any entropy"
    if name == "old_log_prob":
        if old_log_prob_source(cfg) == "rollout":
            return "actor.recompute_old_log_prob is off: the rollout's log-probs are used"
        return "each rollout batch is one mini-batch, so they are those of its first optimizer step"
    return None


def teacher_outputs(teacher: TeacherConfig) -> Names:
    """What a teacher computes of each token: outputs of a training engine; with its own tokenizer also
    the span of the token."""
    known: dict[int, Names] = {SAMPLED: ("log_prob",), WHOLE: ("top_log_prob",)}
    outputs = known.get(teacher.top_k, ("top_log_prob", "top_ids"))
    return (*outputs, "span") if teacher.is_aligned else outputs


def teacher_writes(node_id: str, cfg: Config) -> Names:
    """The fields of a teacher: what it counts in each row, and what it says of its tokens."""
    return tuple(f"{node_id}{OF_TEACHER}{name}" for name in ("weight", *teacher_outputs(cfg.teacher)))


def teacher_reads(cfg: Config) -> Names:
    """Tokens and images, the messages that a teacher tokenises itself, and what says which rows it takes."""
    routed = (cfg.teacher.by.partition(".")[0],) if cfg.teacher.takes else ()
    return (*with_images(*TOKENS)(cfg), *(("raw_prompt",) if cfg.teacher.is_aligned else ()), *routed)
