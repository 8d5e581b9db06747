"""What a training engine reads of the resolved config: the one place that knows the groups of a role."""

from dataclasses import dataclass

from siirl.compiler.plan import Head, ModelPlan
from siirl.config import Config
from siirl.config.common import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig, SeeingConfig
from siirl.config.resolve import get
from siirl.config.roles import ROLES, BatchKeys, role_group, role_model, token_budget, trained_group
from siirl.dag.fields_read import uses_full_kl
from siirl.data.image_reader import ImageReader
from siirl.engines.train.packed.micro_batches import MicroBatchLimit
from siirl.errors import ConfigError, NotSupportedError


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one model of one role."""

    model: ModelConfig
    head: Head
    fsdp: FSDPConfig
    megatron: MegatronConfig
    forward_limit: MicroBatchLimit
    """Of the micro-batches of compute()."""
    train_limit: MicroBatchLimit | None
    """None for a model that is never trained."""
    optim: OptimConfig | None
    """None for a model that is never trained."""
    grad_clip: float
    """Largest norm of a gradient."""
    router_loss: float
    """What the load-balancing loss of experts weighs (fsdp)."""
    replays_routers: bool
    """Its routers are seen, and take experts that are given."""
    grad_offload: bool
    """Gradients stay in host memory (fsdp)."""
    seed: int
    response_width: int
    """The configured response length."""
    full_kl: bool
    """The output head is kept as it is read, for the KL over the whole vocabulary."""
    top_k: int
    """Of how many words a distribution is told; -1: of all."""
    image_reader: ImageReader | None = None
    """Of a vision model."""
    freeze_vision_tower: bool = False
    """Its tower is not trained."""


def engine_settings(plan: ModelPlan, cfg: Config) -> EngineSettings:
    """Settings of the plan's role; ConfigError without a micro-batch size, NotSupportedError otherwise."""
    role = ROLES[plan.role]
    if role.generates or role.forward is None:
        raise NotSupportedError(
            f"not supported yet: {plan.name} is a {plan.role} with a {plan.head} head: training engines hold "
            "actors, critics, references and reward models. Remove the node, or use an algorithm without it."
        )
    trainer = trained_group(cfg, plan.role)
    return EngineSettings(
        model=role_model(cfg, plan.role),
        head=plan.head,
        fsdp=role_group(cfg, plan.role).fsdp_config,
        megatron=role_group(cfg, plan.role).megatron,
        forward_limit=_limit(cfg, plan.role, role.forward),
        train_limit=_limit(cfg, plan.role, role.train) if plan.trains and role.train else None,
        optim=trainer.optim if plan.trains else None,
        grad_clip=trainer.grad_clip,
        router_loss=trainer.fsdp_config.moe_aux_loss_coeff if plan.trains else 0.0,
        replays_routers=plan.is_policy and cfg.actor_rollout_ref.actor.router_replay.mode != "disabled",
        grad_offload=plan.is_policy and cfg.actor_rollout_ref.actor.grad_offload,
        seed=cfg.trainer.seed,
        response_width=cfg.data.max_response_length,
        full_kl=plan.is_policy and plan.trains and uses_full_kl(cfg),
        top_k=cfg.teacher.top_k if role.is_teacher else cfg.actor_rollout_ref.actor.distill.top_k,
        image_reader=ImageReader.from_config(cfg, role_model(cfg, plan.role)),
        freeze_vision_tower=plan.trains and isinstance(trainer, SeeingConfig) and trainer.freeze_vision_tower,
    )


def trained_limit(cfg: Config) -> MicroBatchLimit:
    """Of a policy in training."""
    keys = ROLES["actor"].train
    assert keys is not None
    return _limit(cfg, "actor", keys)


def _limit(cfg: Config, role: str, keys: BatchKeys) -> MicroBatchLimit:
    if get(cfg, keys.dynamic):
        return MicroBatchLimit(max_tokens=token_budget(cfg, role, keys))
    max_rows = get(cfg, keys.max_rows)
    if max_rows is None:
        raise ConfigError(
            f"{keys.max_rows} is not set: it says how many rows are computed at once. Set it, or use a token "
            f"budget: {keys.max_tokens} with {keys.dynamic}=true."
        )
    return MicroBatchLimit(max_rows=max_rows)
