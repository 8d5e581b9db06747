"""What a training engine reads of the resolved config: the one place that knows the groups of a role."""

from dataclasses import dataclass

from siirl.config import Config
from siirl.config.common import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig
from siirl.config.roles import role_group, role_model
from siirl.dag.ops import uses_full_kl
from siirl.dag.plan import Head, ModelPlan
from siirl.engines.train.packing import MicroBatchLimit
from siirl.errors import ConfigError, NotSupportedError


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one model of one role.

    grad_offload: keep gradients in host memory (fsdp). forward_limit: micro-batches of compute().
    train_limit, optim: None for a model that is never trained.
    response_width: the configured response length. full_kl: keep the output head as it is read, for the KL
    over the whole vocabulary.
    """

    model: ModelConfig
    head: Head
    fsdp: FSDPConfig
    megatron: MegatronConfig
    forward_limit: MicroBatchLimit
    train_limit: MicroBatchLimit | None
    optim: OptimConfig | None
    grad_clip: float
    grad_offload: bool
    seed: int
    response_width: int
    full_kl: bool


def engine_settings(plan: ModelPlan, cfg: Config) -> EngineSettings:
    """Settings of the plan's role; ConfigError without a micro-batch size, NotSupportedError otherwise."""
    if plan.role not in ("actor", "ref", "critic", "reward"):
        raise NotSupportedError(
            f"not supported yet: {plan.name} is a {plan.role} with a {plan.head} head: training engines hold "
            "actors, critics, references and reward models. Remove the node, or use an algorithm without it."
        )
    trainer = cfg.critic if plan.role == "critic" else cfg.actor_rollout_ref.actor
    train_limit = _limit(
        trainer.use_dynamic_bsz,
        trainer.ppo_max_token_len_per_gpu,
        trainer.ppo_micro_batch_size_per_gpu,
        f"{'critic' if plan.role == 'critic' else 'actor_rollout_ref.actor'}.ppo",
    )
    return EngineSettings(
        model=role_model(cfg, plan.role),
        head=plan.head,
        fsdp=role_group(cfg, plan.role).fsdp_config,
        megatron=role_group(cfg, plan.role).megatron,
        forward_limit=_forward_limit(plan, cfg),
        train_limit=train_limit if plan.trains else None,
        optim=trainer.optim if plan.trains else None,
        grad_clip=trainer.grad_clip,
        grad_offload=plan.role == "actor" and cfg.actor_rollout_ref.actor.grad_offload,
        seed=cfg.trainer.seed,
        response_width=cfg.data.max_response_length,
        full_kl=plan.role == "actor" and plan.trains and uses_full_kl(cfg),
    )


def _forward_limit(plan: ModelPlan, cfg: Config) -> MicroBatchLimit:
    if plan.role == "reward":
        return _limit(
            cfg.reward_model.use_dynamic_bsz,
            cfg.reward_model.forward_max_token_len_per_gpu,
            cfg.reward_model.micro_batch_size_per_gpu,
            "reward_model",
        )
    if plan.role == "critic":
        return _limit(
            cfg.critic.use_dynamic_bsz,
            cfg.critic.forward_max_token_len_per_gpu,
            cfg.critic.ppo_micro_batch_size_per_gpu,
            "critic.ppo",
        )
    name = "rollout" if plan.role == "actor" else "ref"
    forward = cfg.actor_rollout_ref.rollout if plan.role == "actor" else cfg.actor_rollout_ref.ref
    return _limit(
        forward.log_prob_use_dynamic_bsz,
        forward.log_prob_max_token_len_per_gpu,
        forward.log_prob_micro_batch_size_per_gpu,
        f"actor_rollout_ref.{name}.log_prob",
    )


def _limit(dynamic: bool, max_tokens: int, max_rows: int | None, keys: str) -> MicroBatchLimit:
    if dynamic:
        return MicroBatchLimit(max_tokens=max_tokens)
    if max_rows is None:
        raise ConfigError(
            f"{keys}_micro_batch_size_per_gpu is not set: it says how many rows are computed at once. "
            f"Set it, or use a token budget: {keys}_max_token_len_per_gpu with dynamic batch sizes."
        )
    return MicroBatchLimit(max_rows=max_rows)
