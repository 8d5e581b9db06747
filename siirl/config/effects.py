"""Keys that change nothing in a run, and why; defaults that do not go with what was set: they work, but are
hardly what is meant.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from siirl.config.aliases import ALIASES, POLICY
from siirl.config.keys import Key
from siirl.config.resolve import COMPUTE_DTYPE, compute_dtype, get, is_changed
from siirl.config.root import TOP_GROUPS, Config, all_keys
from siirl.config.values import show


def default_warnings(cfg: Config) -> Iterator[str]:
    """One line for each such default."""
    yield from _unlike_its_paper(cfg)
    yield from _averaged_advantages(cfg)
    yield from _reference_of_another_type(cfg)
    yield from _uncorrected_staleness(cfg)
    yield from _uncorrected_fp8(cfg)


def _unlike_its_paper(cfg: Config) -> Iterator[str]:
    actor, mode = cfg.actor_rollout_ref.actor, "actor_rollout_ref.actor.loss_agg_mode"
    default, of_paper = actor.loss_agg_mode, actor.loss.paper_mode
    if of_paper == "seq-mean-token-mean" and mode not in cfg.explicit:
        yield (
            f"{mode}={default} is the default, but the paper of policy_loss.loss_mode={actor.loss_name} "
            f"averages over each response first. Set {mode}={of_paper} (or {default})."
        )


def _averaged_advantages(cfg: Config) -> Iterator[str]:
    """Advantages that differ within a row, under a loss that takes their mean."""
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    if not actor.loss.row_advantage:
        return
    credit, estimator = algorithm.credit, algorithm.estimator
    causes = [f"adv_estimator={algorithm.adv_estimator}"] if estimator.form == "token" else []
    if estimator.form == "reward to go":
        causes += ["use_kl_in_reward=true"] if algorithm.use_kl_in_reward else []
        if "gamma" in estimator.keys and algorithm.gamma != 1:
            causes.append(f"gamma={algorithm.gamma:g}")
    causes += [f"credit.group_by=[{','.join(credit.group_by)}]"] if "turn" in credit.group_by else []
    causes += ["credit.equal_weight=turn"] if credit.equal_weight == "turn" else []
    if causes:
        yield (
            f"policy_loss.loss_mode={actor.loss_name} takes the mean of a row's advantages, as its "
            f"paper has one for a row, but algorithm.{causes[0]} gives the tokens of a row different ones: "
            "the differences are lost. Set policy_loss.loss_mode=gspo, whose ratio is that of the row as "
            "well and keeps them."
        )


def _reference_of_another_type(cfg: Config) -> Iterator[str]:
    """A reference that rounds otherwise than the actor: the KL of identical weights is not 0."""
    ref, actor = compute_dtype(cfg, "ref"), compute_dtype(cfg, "actor")
    if ref != actor and (cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward):
        name = f"{POLICY}.ref.{COMPUTE_DTYPE[cfg.actor_rollout_ref.ref.strategy]}"
        yield (
            f"{name}={ref}, but the actor computes in {actor}: the KL from the reference has the difference "
            f"of their rounding in it. Leave {name} out, and it is the actor's."
        )


def _uncorrected_staleness(cfg: Config) -> Iterator[str]:
    """Tokens of older weights that count like those of the newest."""
    actor, max_lag = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.max_lag
    if max_lag and actor.recompute_old_log_prob and not actor.corrects_rollout:
        yield (
            "actor_rollout_ref.actor.rollout_correction.weight=none with actor_rollout_ref.rollout."
            f"max_lag={max_lag}: tokens of older weights count as if the newest had sampled them. Leave it "
            "unset (truncate)."
        )


def _uncorrected_fp8(cfg: Config) -> Iterator[str]:
    """Tokens that an engine in FP8 has sampled, which count as if the policy itself had."""
    actor, in_fp8 = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.in_fp8
    if in_fp8 and actor.recompute_old_log_prob and not (actor.corrects_rollout or actor.imitates):
        yield (
            "actor_rollout_ref.actor.rollout_correction.weight=none with actor_rollout_ref.rollout."
            f"{in_fp8}: tokens that the engine finds likelier than the policy does count as if they were "
            "not. Leave it unset (truncate)."
        )


LOSS_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "policy_drift_coeff")
"""Keys of the actor that only some policy losses take."""

OF_REWARD_TRAINING = tuple(
    f"reward_model.{name}"
    for name in ("ppo_", "grad_clip", "optim.", "checkpoint.", "model.enable_grad", "model.gradient_")
)
"""How keys begin that a reward model has in training only."""

OF_CHECKPOINTS = tuple(
    f"trainer.{name}" for name in ("save_freq", "memory_checkpoint_freq", "export_hf", "resume_mode")
)
"""Keys of the trainer about what a run without training does not have."""

OF_STEPS = (
    *(f"trainer.{name}" for name in ("save_freq", "memory_checkpoint_freq", "export_hf", "test_freq")),
    "profiler.enable",
)
"""Keys about steps, and what is made of them, of which a run that validates once has none."""

OF_VALIDATION = (
    *("actor_rollout_ref.rollout.val_kwargs.", "data.val_batch_size"),
    *("trainer.log_val_generations", "trainer.validation_data_dir"),
)
"""How keys begin that are about validation."""


def effect_warnings(cfg: Config, node_cfgs: Iterable[Config] = ()) -> list[str]:
    """One line for each key that was set to more than its default and changes nothing in this run, and for
    defaults that do not go with what was set.

    node_cfgs: the configurations of the nodes. A key that acts in one of them is not named: another node may
    have another strategy.
    """
    others = list(node_cfgs)
    warnings = []
    for name in cfg.explicit:
        if name in ALIASES or not is_changed(cfg, name):
            continue
        reason = why_no_effect(cfg, name, others)
        if reason:
            warnings.append(f"{name}={show(all_keys()[name], get(cfg, name))} has no effect: {reason}.")
    return [*warnings, *default_warnings(cfg)]


def why_no_effect(cfg: Config, name: str, others: Iterable[Config] = ()) -> str:
    """Why a key changes nothing under a configuration, or an empty string.

    others: configurations of nodes; if the key's condition holds in one of them, the key may act there.
    """
    key = all_keys()[name]
    idle = unmet(key, lambda needed: get(cfg, needed))
    if not all(unmet(key, lambda needed, other=other: get(other, needed)) for other in others):
        idle = ""
    return key.rule.ignored or idle or next(filter(None, (why(cfg, name) for why in ABSENT)), "")


def unmet(key: Key, value_of: Callable[[str], Any]) -> str:
    """Why the condition under which a key acts does not hold, as in "lora_rank is 0", or an empty string.

    value_of: what a key of that name is.
    """
    for conditions in filter(None, (key.rule.within, key.rule.when)):
        found = [_unmet_one(key, condition, value_of) for condition in conditions.split(" or ")]
        if all(found):
            return " and ".join(found)
    return ""


def _unmet_one(key: Key, condition: str, value_of: Callable[[str], Any]) -> str:
    """The same of one condition."""
    needed, _, values = condition.partition("=")
    if needed.split(".")[0] not in TOP_GROUPS:
        needed = f"{key.name.rsplit('.', 1)[0]}.{needed}"
    value = value_of(needed)
    actual = show(all_keys()[needed], value)
    if all_keys()[needed].rule.user_code and ":" in actual:
        return ""  # code of the user's own may read any key
    is_zero = value == 0 and value is not False and all_keys()[needed].default is None  # agent 0, say
    met = actual in values.split("|") if values else bool(value) or is_zero
    return "" if met else f"{needed} is {actual}"


def _no_reference(cfg: Config, name: str) -> str:
    """Why a key of the reference model has no effect in a built-in workflow, or an empty string."""
    if not name.startswith("actor_rollout_ref.ref.") or cfg.dag.workflow_path or cfg.dag.custom_pipeline_fn:
        return ""
    actor = cfg.actor_rollout_ref.actor
    if actor.use_kl_loss or actor.loss.pairs or cfg.algorithm.use_kl_in_reward:
        return ""
    return "there is no reference model without actor.use_kl_loss or algorithm.use_kl_in_reward"


def _no_teacher(cfg: Config, name: str) -> str:
    """Why a key of teachers has no effect in a built-in workflow, or an empty string."""
    distill = "actor_rollout_ref.actor.distill."
    if not name.startswith(("teacher.", distill)) or cfg.dag.workflow_path or cfg.dag.custom_pipeline_fn:
        return ""  # a node may say that it learns from teachers
    if not cfg.actor_rollout_ref.actor.distills:
        return f"{distill}enable is False, and policy_loss.loss_mode is not distill"
    here = tuple(f"teacher.{key}" for key in ("strategy", "fsdp_config", "megatron", "log_prob", "ulysses"))
    if cfg.teacher.is_remote and name.startswith(here):
        return "teacher.endpoint.url is set, so nothing of the teacher runs here"
    if cfg.teacher.is_scored and name.startswith("teacher.log_prob_"):
        return "teacher.strategy is vllm, which fills its batches itself"
    older = name in ("teacher.sync_steps", "teacher.update_rate")
    frozen = cfg.teacher.policy is None and not cfg.dag.node_config
    return "teacher.policy is null, so teachers are frozen" if frozen and older else ""


def _no_frozen(cfg: Config, name: str) -> str:
    """Why a key of frozen models of nodes has no effect in a built-in workflow, or an empty string."""
    if not name.startswith("frozen.") or cfg.dag.workflow_path or cfg.dag.custom_pipeline_fn:
        return ""
    return "no node of the built-in workflow has a frozen model of its own"


def _no_critic(cfg: Config, name: str) -> str:
    """Why a key of the critic has no effect, or an empty string."""
    if not name.startswith("critic.") or cfg.algorithm.may_use_critic:
        return ""
    return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} uses no critic"


def _no_reward_training(cfg: Config, name: str) -> str:
    """Why a key of a reward model in training has no effect in a built-in workflow, or an empty string."""
    if not name.startswith(OF_REWARD_TRAINING) or cfg.dag.workflow_path or cfg.dag.custom_pipeline_fn:
        return ""
    return "" if cfg.actor_rollout_ref.rollout.gives_data else "no node trains the reward model"


def _without(cfg: Config, name: str) -> str:
    """Why a key has no effect in a run that lacks what it is about, or an empty string."""
    if cfg.trainer.rollout_only and name in OF_CHECKPOINTS:
        return "trainer.rollout_only is true, so there is nothing to save or to resume"
    if cfg.trainer.val_only and name in OF_STEPS:
        return "trainer.val_only is true, so there are no steps"
    if name.startswith(OF_VALIDATION) and not cfg.trainer.validates:
        return "the run does not validate (trainer.test_freq, val_before_train and val_only)"
    if cfg.actor_rollout_ref.rollout.replays and name == "trainer.dump_rollouts_dir":
        return "actor_rollout_ref.rollout.name is replay, so the rows are recorded already"
    logger = "prometheus" if name.startswith("trainer.prometheus_") else ""
    logger = "console" if name == "trainer.progress" else logger
    if logger and logger not in cfg.trainer.logger:
        return f"trainer.logger does not name {logger}"
    return ""


def _other_loss(cfg: Config, name: str) -> str:
    """Why a key of the actor has no effect on the policy loss, or an empty string."""
    group, _, key = name.rpartition(".")
    if group != "actor_rollout_ref.actor" or key not in LOSS_KEYS:
        return ""
    actor = cfg.actor_rollout_ref.actor
    if ":" in actor.loss_name or actor.loss.takes(key):
        return ""
    return f"policy_loss.loss_mode is {actor.loss_name}"


def _spans_ranks(cfg: Config, name: str) -> str:
    """Why an engine is not started again, or an empty string."""
    rollout = cfg.actor_rollout_ref.rollout
    if name != "actor_rollout_ref.rollout.max_engine_restarts" or rollout.tensor_model_parallel_size == 1:
        return ""
    return (
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}, and an "
        "engine of several ranks is not started again"
    )


ABSENT = (
    *(_no_reference, _no_teacher, _no_frozen, _no_critic, _no_reward_training, _other_loss, _without),
    _spans_ranks,
)
"""Why a key has no effect, beyond what the schema says of it."""
