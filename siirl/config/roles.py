"""What each role of a model is: its row says which keys describe it. The one place that knows."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from siirl.config.actor import RefConfig
from siirl.config.common import ModelConfig, TrainedConfig
from siirl.config.resolve import get
from siirl.config.root import Config
from siirl.config.teacher import FrozenConfig

Head = Literal["lm", "value", "score", "trained_score"]
"""What a model on a training engine computes: log-probs of tokens, their values, or a score of each row.

trained_score: a score of a model in training, without the constant that pairs cannot teach."""

TEMPLATE_TOKENS = 1024
"""Tokens of a judge's question beyond those of prompt and response, if reward_model.max_length is not set."""

SAMPLED_BESIDE = 1
"""Tokens that a rollout engine samples after a row that it is asked to score; nobody reads them."""


def judge_config(cfg: Config) -> Config:
    """The configuration that a judge's rollout engine is built from.

    Its model is that of the judge; its other settings are those of the policy's rollout, unless the judge's
    node overrides them. Its weights are not rounded.
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
        quantization=None,
        replace_weights="by_loaders",
    )
    policy = dataclasses.replace(cfg.actor_rollout_ref, model=reward_model.model, rollout=engine)
    return dataclasses.replace(cfg, actor_rollout_ref=policy)


def scoring_config(cfg: Config) -> Config:
    """The configuration that the rollout engine of a teacher is built from.

    Its model is that of the teacher; its other settings are those of the policy's rollout, unless the
    teacher's node overrides them. It has room for the longest row, and for the one token that it samples. Its
    weights are not rounded.
    """
    rollout = cfg.actor_rollout_ref.rollout
    room = rollout.prompt_length + rollout.response_length + SAMPLED_BESIDE
    of_policy = {"max_lag": 0, "quantization": None, "replace_weights": "by_loaders"}
    engine = dataclasses.replace(rollout, name=cfg.teacher.strategy, max_model_len=room, **of_policy)
    policy = dataclasses.replace(cfg.actor_rollout_ref, model=cfg.teacher.model, rollout=engine)
    return dataclasses.replace(cfg, actor_rollout_ref=policy)


@dataclass(frozen=True)
class BatchKeys:
    """Full names of the keys that say how much is computed at once."""

    dynamic: str
    """Whether by tokens, or by rows."""

    max_tokens: str
    max_rows: str


@dataclass(frozen=True)
class Role:
    """What a model is for. Names of groups and keys are full ones."""

    group: str
    """The group of its settings."""

    model: str = "actor_rollout_ref.model"
    """The group that says which model it loads."""

    trainer: str = "actor_rollout_ref.actor"
    """The group with its optimizer, if it is trained."""

    head: Head = "lm"
    """On a training engine."""

    trained_head: Head | None = None
    """On a training engine that trains it, if that is another one."""

    forward: BatchKeys | None = None
    """Of a pass without gradient on a training engine."""

    train: BatchKeys | None = None
    """Of an optimizer step."""

    generates: bool = False
    """It runs in a rollout engine; all others in a training engine."""

    backend: str = ""
    """The key that picks its backend, if that is not `name` (it generates) or `strategy` of its group."""

    positions_beside: int = 0
    """That its model must have besides those of a row."""

    gives_weights: bool = False
    """Its agent's rollout samples from it."""

    takes_weights: bool = False
    """It has no weights of its own: its agent's trainer sends them."""

    is_reference: bool = False
    """The policy is kept close to it."""

    export: str = ""
    """The folder of a run into which it is exported, if it was trained."""

    of_node: bool = False
    """Each node has one of its own, for itself; all others are their agent's."""

    is_teacher: bool = False
    """The policy learns from it."""

    shared_by: str = ""
    """The key that says whose model of this role an agent has instead of one of its own."""

    any_length: bool = False
    """It takes rows that are longer than the model can read: they are cut, or not asked about."""

    own_length: str = ""
    """The key with the tokens of its longest row, if its rows are in tokens of its own; not set, or none:
    those of prompt and response."""

    engine_cfg: Callable[[Config], Config] = lambda cfg: cfg
    """The configuration that its engine is built from."""

    @property
    def backend_key(self) -> str:
        """Full name of the key that picks its backend."""
        return self.backend or f"{self.group}.{'name' if self.generates else 'strategy'}"

    @property
    def own_model(self) -> bool:
        """Whether it loads a model of its own, not the policy's."""
        return self.model != Role.model


def _log_prob(group: str) -> BatchKeys:
    keys = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")
    return BatchKeys(*(f"{group}.log_prob_{key}" for key in keys))


def _ppo(group: str, tokens: str = "ppo_max_token_len_per_gpu") -> BatchKeys:
    return BatchKeys(f"{group}.use_dynamic_bsz", f"{group}.{tokens}", f"{group}.ppo_micro_batch_size_per_gpu")


def of_a_node(head: Head) -> Role:
    """A frozen model of a node's own on a training engine, by what it computes."""
    return Role("frozen", "frozen.model", head=head, forward=_log_prob("frozen"), of_node=True)


ROLES: dict[str, Role] = {
    "actor": Role(
        "actor_rollout_ref.actor",
        forward=_log_prob("actor_rollout_ref.rollout"),
        train=_ppo("actor_rollout_ref.actor"),
        gives_weights=True,
        export="hf_model",
    ),
    "ref": Role("actor_rollout_ref.ref", forward=_log_prob("actor_rollout_ref.ref"), is_reference=True),
    "teacher": Role("teacher", "teacher.model", forward=_log_prob("teacher"), of_node=True, is_teacher=True),
    "frozen": of_a_node("lm"),
    "frozen_score": of_a_node("score"),
    "scoring_teacher": Role(
        "teacher",
        "teacher.model",
        generates=True,
        backend="teacher.strategy",
        positions_beside=SAMPLED_BESIDE,
        of_node=True,
        is_teacher=True,
        engine_cfg=scoring_config,
    ),
    "critic": Role(
        "critic",
        "critic.model",
        trainer="critic",
        head="value",
        forward=_ppo("critic", "forward_max_token_len_per_gpu"),
        train=_ppo("critic"),
        shared_by="critic.share_instance",
        export="hf_critic",
    ),
    "reward": Role(
        "reward_model",
        "reward_model.model",
        trainer="reward_model",
        head="score",
        trained_head="trained_score",
        train=_ppo("reward_model"),
        export="hf_reward",
        shared_by="reward_model.share_instance",
        own_length="reward_model.max_length",
        forward=BatchKeys(
            "reward_model.use_dynamic_bsz",
            "reward_model.forward_max_token_len_per_gpu",
            "reward_model.micro_batch_size_per_gpu",
        ),
        any_length=True,
    ),
    "judge": Role(
        "reward_model.judge",
        "reward_model.model",
        generates=True,
        any_length=True,
        engine_cfg=judge_config,
    ),
    "rollout": Role("actor_rollout_ref.rollout", generates=True, takes_weights=True),
}

EXPORTS = {name: role.export for name, role in ROLES.items() if role.export}
"""Role -> folder of a run into which models of it are exported."""

ROLE_GROUPS = {name: role.group for name, role in ROLES.items()}
"""Role -> full name of the group that holds its settings, for messages."""


def role_group(cfg: Config, role: str) -> TrainedConfig | RefConfig | FrozenConfig:
    """The settings of a model on a training engine: its batches, sharding and checkpoints."""
    return get(cfg, ROLES[role].group)


def sequence_ranks(cfg: Config, role: str) -> int:
    """Ranks that share each sequence of a model under fsdp; of other strategies 1."""
    if role_group(cfg, role).strategy != "fsdp":
        return 1
    return role_group(cfg, role).ulysses_sequence_parallel_size


def token_budget(cfg: Config, role: str, keys: BatchKeys) -> int:
    """Most tokens of a micro-batch, with keys.dynamic: so many for each rank that shares its sequences."""
    return get(cfg, keys.max_tokens) * sequence_ranks(cfg, role)


def least_budget(cfg: Config, role: str, tokens: int) -> int:
    """The least keys.max_tokens that holds so many, padded where they are cut into pieces of equal length."""
    share, group = -(-tokens // sequence_ranks(cfg, role)), role_group(cfg, role)
    return share + -share % group.megatron.row_multiple if group.strategy == "megatron" else share


def role_model(cfg: Config, role: str) -> ModelConfig:
    """Which model a role loads: that of the policy, or one of its own."""
    return get(cfg, ROLES[role].model)


def trained_group(cfg: Config, role: str) -> TrainedConfig:
    """The settings of a model that is trained."""
    return get(cfg, ROLES[role].trainer)


def normalizes_weights(cfg: Config) -> bool:
    """Whether the weights of several rewards are divided by their sum."""
    return bool(cfg.reward_model.reward_kwargs.get("normalize_weights", False))
