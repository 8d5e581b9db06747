"""Keys that stand for others, and keys whose value follows others: the one place where both are decided.

An older or duplicate name (`ALIASES`) sets the keys that it stands for; setting both to different values is
an error. A key in `FOLLOWS` that nobody set takes its value from the keys that its template names; an entry
may use an earlier one.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from siirl.config.aliases import ALIASES, FORWARD_MEGATRON, MEGATRON_SIZES, POLICY
from siirl.config.root import Config, all_keys
from siirl.config.unused_keys import unused_keys
from siirl.errors import ConfigError

FOLLOWS: dict[str, str] = {
    "data.seed": "${trainer.seed}",
    f"{POLICY}.actor.data_loader_seed": "${trainer.seed}",
    f"{POLICY}.actor.clip_ratio_low": f"${{{POLICY}.actor.clip_ratio}}",
    f"{POLICY}.actor.clip_ratio_high": f"${{{POLICY}.actor.clip_ratio}}",
    f"{POLICY}.actor.policy_loss.clip_divergence_low": f"${{{POLICY}.actor.policy_loss.clip_divergence}}",
    f"{POLICY}.actor.policy_loss.clip_divergence_high": f"${{{POLICY}.actor.policy_loss.clip_divergence}}",
    f"{POLICY}.ref.strategy": f"${{{POLICY}.actor.strategy}}",
    f"{POLICY}.ref.ulysses_sequence_parallel_size": f"${{{POLICY}.actor.ulysses_sequence_parallel_size}}",
    "teacher.top_k": f"${{{POLICY}.actor.distill.top_k}}",
    f"{POLICY}.ref.log_prob_use_dynamic_bsz": f"${{{POLICY}.actor.use_dynamic_bsz}}",
    f"{POLICY}.ref.log_prob_max_token_len_per_gpu": f"${{{POLICY}.actor.ppo_max_token_len_per_gpu}}",
    f"{POLICY}.rollout.log_prob_use_dynamic_bsz": f"${{{POLICY}.actor.use_dynamic_bsz}}",
    f"{POLICY}.rollout.log_prob_max_token_len_per_gpu": f"${{{POLICY}.actor.ppo_max_token_len_per_gpu}}",
    f"{POLICY}.actor.ppo_mini_batch_size": "${data.train_batch_size}",
    "critic.model.path": f"${{{POLICY}.model.path}}",
    "critic.use_dynamic_bsz": f"${{{POLICY}.actor.use_dynamic_bsz}}",
    "critic.ppo_mini_batch_size": f"${{{POLICY}.actor.ppo_mini_batch_size}}",
    "critic.ppo_micro_batch_size_per_gpu": f"${{{POLICY}.actor.ppo_micro_batch_size_per_gpu}}",
    "critic.data_loader_seed": "${trainer.seed}",
    "reward_model.ppo_mini_batch_size": f"${{{POLICY}.actor.ppo_mini_batch_size}}",
    "reward_model.ppo_micro_batch_size_per_gpu": f"${{{POLICY}.actor.ppo_micro_batch_size_per_gpu}}",
    "reward_model.micro_batch_size_per_gpu": f"${{{POLICY}.ref.log_prob_micro_batch_size_per_gpu}}",
    f"{POLICY}.rollout.prompt_length": "${data.max_prompt_length}",
    f"{POLICY}.rollout.response_length": "${data.max_response_length}",
    f"{POLICY}.rollout.surplus": f"${{{POLICY}.rollout.max_lag}}",
    "trainer.output_dir": "outputs/${trainer.project_name}/${trainer.experiment_name}",
    "trainer.default_local_dir": "${trainer.output_dir}/checkpoints",
}
FOLLOWS |= {
    f"{POLICY}.ref.megatron.{name}": f"${{{POLICY}.actor.megatron.{name}}}"
    for name in FORWARD_MEGATRON
    if name not in ("seed", "param_offload")
}
FOLLOWS |= {
    f"{POLICY}.ref.fsdp_config.{name}": f"${{{POLICY}.actor.fsdp_config.{name}}}"
    for name in ("model_dtype", "mixed_precision.param_dtype", "expert_parallel_size", "float8")
}
CORRECTION, MAX_LAG = f"{POLICY}.actor.rollout_correction.weight", f"{POLICY}.rollout.max_lag"
QUANTIZATION = f"{POLICY}.rollout.quantization"
FOLLOWS[CORRECTION] = f"truncate if ${{{MAX_LAG}}} or ${{{QUANTIZATION}}} (or a KV cache in fp8), else none"
"""Tokens of older weights, and of an engine in FP8, are weighted, unless the loss compares with the rollout's
log-probs anyway."""
SOURCE, OWN_REWARD = "data.data_source", "custom_reward_function.path"
FOLLOWS[SOURCE] = f"own if ${{{OWN_REWARD}}}, else null"
SAMPLES, VALIDATES_FIRST = f"{POLICY}.rollout.n", "trainer.val_before_train"
GROUP_SAMPLES = 8
FOLLOWS[SAMPLES] = f"{GROUP_SAMPLES} if ${{algorithm.adv_estimator}} compares responses of a prompt, else 1"
FOLLOWS[VALIDATES_FIRST] = "true if ${data.val_files} names any"
COMPUTE_DTYPE = {"fsdp": "fsdp_config.mixed_precision.param_dtype", "megatron": "megatron.param_dtype"}
"""Strategy -> the key of a model that says in which type it computes."""
REF_DTYPES = tuple(f"{POLICY}.ref.{name}" for name in COMPUTE_DTYPE.values())
"""The reference computes in the actor's type, also where the two have different strategies."""
REF_SIZES = tuple(f"{POLICY}.ref.megatron.{name}" for name in MEGATRON_SIZES)
"""The reference takes the actor's sizes as a whole: setting one of them ends that."""
REF_LAYOUT = (*REF_SIZES, f"{POLICY}.ref.megatron.override_transformer_config")
REFERENCE = re.compile(r"\$\{([^}]+)\}")


def get(cfg: Config, name: str) -> Any:
    """The value of a full key name; of an older name, that of the key it stands for."""
    return _getter(name)(cfg)


@functools.cache
def _getter(name: str) -> Callable[[Config], Any]:
    name = ALIASES.get(name, (name,))[0]
    if name in unused_keys():
        return lambda cfg: cfg.unused.get(name, all_keys()[name].default)
    return operator.attrgetter(name)


def first_difference(one: Config, other: Config, name: str) -> tuple[str, Any, Any] | None:
    """(key, value, value) of the first key of a group, or of a key alone, in which two configurations
    differ."""
    values = get(one, name), get(other, name)
    if not dataclasses.is_dataclass(values[0]):
        return None if values[0] == values[1] else (name, *values)
    keys = (f"{name}.{item.name}" for item in dataclasses.fields(values[0]))
    return next(filter(None, (first_difference(one, other, key) for key in keys)), None)


def is_set(cfg: Config, name: str) -> bool:
    """Whether somebody set a key, or the one that it follows."""
    if name in cfg.explicit:
        return True
    followed = REFERENCE.fullmatch(FOLLOWS.get(name, ""))
    return followed is not None and is_set(cfg, followed[1])


def is_changed(cfg: Config, name: str) -> bool:
    """Whether a key was set to something else than it is by itself: the file that a run writes sets all."""
    default = followed_value(cfg, name) if name in FOLLOWS else all_keys()[name].default
    return name in cfg.explicit and get(cfg, name) != default


def compute_dtype(cfg: Config, role: str) -> str:
    """The type in which the actor or the reference computes."""
    strategy = get(cfg, f"{POLICY}.{role}.strategy")
    return get(cfg, f"{POLICY}.{role}.{COMPUTE_DTYPE[strategy]}")


def sizes_group(cfg: Config, group: str) -> str:
    """The group with the keys of a model's Megatron sizes: the actor's for a reference that follows it.

    A single size of its own would put its other ones back to their defaults.
    """
    actor, ref = f"{POLICY}.actor", f"{POLICY}.ref"
    follows = group == ref and set(REF_SIZES).isdisjoint(cfg.explicit)
    return actor if follows and get(cfg, f"{actor}.strategy") == get(cfg, f"{ref}.strategy") else group


def followed_value(cfg: Config, name: str) -> Any:
    """What a key of `FOLLOWS` is while nobody sets it."""
    if name in REF_LAYOUT and not set(REF_SIZES).isdisjoint(cfg.explicit):
        return all_keys()[name].default
    if name in REF_DTYPES:
        dtype = compute_dtype(cfg, "actor")
        return dtype if dtype in all_keys()[name].rule.choices else all_keys()[name].default
    if name == CORRECTION:
        differs = get(cfg, MAX_LAG) > 0 or cfg.actor_rollout_ref.rollout.in_fp8
        return "truncate" if differs and get(cfg, f"{POLICY}.actor.recompute_old_log_prob") else "none"
    if name == SAMPLES:
        compares = cfg.algorithm.estimator.compares_groups or cfg.algorithm.filter_groups.enable
        return GROUP_SAMPLES if compares and not cfg.actor_rollout_ref.rollout.gives_data else 1
    if name == SOURCE:
        return "own" if get(cfg, OWN_REWARD) else None
    if name == VALIDATES_FIRST:
        return bool(cfg.data.val_files)
    template = FOLLOWS[name]
    whole = REFERENCE.fullmatch(template)
    if whole:
        return get(cfg, whole[1])
    return REFERENCE.sub(lambda found: str(get(cfg, found[1])), template)


def expand_aliases(updates: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    """The updates with each older name carried over to what it stands for, and the contradictions found."""
    expanded, problems = dict(updates), []
    for alias, targets in ALIASES.items():
        if alias not in updates:
            continue
        for target in targets:
            if target in updates and updates[target] != updates[alias]:
                problems.append(
                    ConfigError(
                        f"{alias}={updates[alias]} contradicts {target}={updates[target]}: the first is an "
                        f"older name of the second. Set only {target}."
                    )
                )
            expanded[target] = updates.get(target, updates[alias])
    return expanded, problems


def status(name: str) -> str:
    """Status of a key: supported, alias, later, ignored or replaced."""
    return "alias" if name in ALIASES else all_keys()[name].rule.status
