"""Which group of the configuration describes a model, by its role: the one place that knows."""

from siirl.config.actor import ActorConfig, RefConfig
from siirl.config.common import ModelConfig
from siirl.config.critic import CriticConfig
from siirl.config.reward import RewardModelConfig
from siirl.config.root import Config

ROLE_GROUPS = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "reward": "reward_model",
    "rollout": "actor_rollout_ref.rollout",
}
"""Role -> full name of the group that holds its settings, for messages."""


OWN_MODELS = ("critic", "reward")
"""Roles that load a model of their own, not the policy's."""


def role_group(cfg: Config, role: str) -> ActorConfig | RefConfig | CriticConfig | RewardModelConfig:
    """The settings of a model of that role, its batches, sharding and checkpoints; not of a rollout."""
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    return {"actor": actor, "ref": ref, "critic": cfg.critic, "reward": cfg.reward_model}[role]


def role_model(cfg: Config, role: str) -> ModelConfig:
    """Which model a role loads: that of the policy, or one of its own."""
    if role == "reward":
        return cfg.reward_model.model
    return cfg.critic.model if role == "critic" else cfg.actor_rollout_ref.model


def model_key(role: str) -> str:
    """Full name of the group that role_model gives, for messages."""
    return f"{ROLE_GROUPS[role]}.model" if role in OWN_MODELS else "actor_rollout_ref.model"


def normalizes_weights(cfg: Config) -> bool:
    """Whether the weights of several rewards are divided by their sum."""
    return bool(cfg.reward_model.reward_kwargs.get("normalize_weights", False))


def trained_group(cfg: Config, role: str) -> ActorConfig | CriticConfig:
    """The settings of a model that is trained."""
    return cfg.critic if role == "critic" else cfg.actor_rollout_ref.actor


def mini_batch_prompts(cfg: Config, role: str) -> int:
    """Prompts of one optimizer step of an actor or critic."""
    return trained_group(cfg, role).ppo_mini_batch_size


def optimizer_steps(cfg: Config, role: str = "actor") -> int:
    """Optimizer steps that an actor or critic takes on each rollout batch."""
    epochs = cfg.critic.ppo_epochs if role == "critic" else cfg.actor_rollout_ref.actor.ppo_epochs
    return cfg.data.train_batch_size // mini_batch_prompts(cfg, role) * epochs


def generated_prompts(cfg: Config) -> int:
    """Prompts that one rollout samples: those of the step, or with dynamic sampling those of one round."""
    if not cfg.algorithm.filter_groups.enable:
        return cfg.data.train_batch_size
    return cfg.data.gen_batch_size or cfg.data.train_batch_size
