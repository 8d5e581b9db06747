"""Which group of the configuration describes a model, by its role: the one place that knows."""

import dataclasses

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
    "judge": "reward_model.judge",
    "rollout": "actor_rollout_ref.rollout",
}
"""Role -> full name of the group that holds its settings, for messages."""


OWN_MODELS = ("critic", "reward", "judge")
"""Roles that load a model of their own, not the policy's."""

SAMPLERS = ("rollout", "judge")
"""Roles whose model generates in a rollout engine. All others run in a training engine."""


def role_group(cfg: Config, role: str) -> ActorConfig | RefConfig | CriticConfig | RewardModelConfig:
    """The settings of a model of that role, its batches, sharding and checkpoints; not of SAMPLERS."""
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    return {"actor": actor, "ref": ref, "critic": cfg.critic, "reward": cfg.reward_model}[role]


def role_model(cfg: Config, role: str) -> ModelConfig:
    """Which model a role loads: that of the policy, or one of its own."""
    if role in ("reward", "judge"):
        return cfg.reward_model.model
    return cfg.critic.model if role == "critic" else cfg.actor_rollout_ref.model


def model_key(role: str) -> str:
    """Full name of the group that role_model gives, for messages."""
    groups = {"critic": "critic", "reward": "reward_model", "judge": "reward_model"}
    return f"{groups.get(role, 'actor_rollout_ref')}.model"


TEMPLATE_TOKENS = 1024
"""Tokens of a judge's question beyond those of prompt and response, if reward_model.max_length is not set."""


def judge_config(cfg: Config) -> Config:
    """The configuration that a judge's rollout engine is built from.

    Its model is that of the judge; its other settings are those of the policy's rollout, unless the judge's
    node overrides them.
    """
    reward_model, rollout = cfg.reward_model, cfg.actor_rollout_ref.rollout
    room = reward_model.max_length or rollout.prompt_length + rollout.response_length + TEMPLATE_TOKENS
    engine = dataclasses.replace(
        rollout,
        name=reward_model.judge.name or rollout.name,
        n=1,
        prompt_length=room,
        response_length=reward_model.judge.max_tokens,
        max_model_len=None,
    )
    policy = dataclasses.replace(cfg.actor_rollout_ref, model=reward_model.model, rollout=engine)
    return dataclasses.replace(cfg, actor_rollout_ref=policy)


def normalizes_weights(cfg: Config) -> bool:
    """Whether the weights of several rewards are divided by their sum."""
    return bool(cfg.reward_model.reward_kwargs.get("normalize_weights", False))


def trained_group(cfg: Config, role: str) -> ActorConfig | CriticConfig:
    """The settings of a model that is trained."""
    return cfg.critic if role == "critic" else cfg.actor_rollout_ref.actor
