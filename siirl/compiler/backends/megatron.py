"""Megatron-Core: what a model under strategy=megatron gets, and what it needs. Pure."""

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

from siirl.compiler.backends.base import ASKED, Backend, balances
from siirl.compiler.checks.megatron_checks import MegatronModel, advice, check_megatron
from siirl.compiler.checks.megatron_options import recomputation
from siirl.compiler.checks.megatron_vision import layers_beside_tower
from siirl.compiler.checks.model_checks import check_attention_kernels, check_model_of_node
from siirl.compiler.memory.estimate import (
    BYTES,
    MemoryLine,
    ModelShape,
    adapter_params,
    expert_adapter_params,
    expert_lines,
    full_kl_lines,
    head_lines,
    micro_batch_tokens,
    micro_batches,
    read_shape,
    teacher_lines,
)
from siirl.compiler.memory.megatron_memory import MegatronMemory, megatron_lines
from siirl.compiler.plan import ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.config.actor import ActorConfig, RefConfig
from siirl.config.common import TrainedConfig
from siirl.config.resolve import get, sizes_group
from siirl.config.roles import ROLE_GROUPS, ROLES, role_group, role_model
from siirl.config.teacher import FrozenConfig
from siirl.errors import ConfigError, UserError
from siirl.findings import Check
from siirl.models.config_json import config_json
from siirl.models.overridden import overridden
from siirl.models.sizes import deepstack_layers
from siirl.parallel.dims import ParallelDims, megatron_groups
from siirl.parallel.placement import Ranks


def _megatron_model(cfg: Config, role: str, dims: ParallelDims, who: str, trains: bool) -> MegatronModel:
    group = role_group(cfg, role)
    return MegatronModel(
        who=who,
        group=ROLE_GROUPS[role],
        sizes=f"{sizes_group(cfg, ROLE_GROUPS[role])}.megatron",
        section=group.megatron,
        optimizer_options=_optimizer_options(group),
        trains=trains,
        dims=dims,
        shape=read_shape(cfg, role, decoder=True),
        recomputes=trains and role_model(cfg, role).enable_gradient_checkpointing,
        lora_rank=role_model(cfg, role).lora_rank,
        longest_row=cfg.actor_rollout_ref.rollout.prompt_length
        + cfg.actor_rollout_ref.rollout.response_length,
        budgets=_token_budgets(cfg, role),
    )


def _token_budgets(cfg: Config, role: str) -> dict[str, int]:
    """Key -> tokens of a micro-batch, of the budgets that a role's model has."""
    batches = [keys for keys in (ROLES[role].train, ROLES[role].forward) if keys is not None]
    return {keys.max_tokens: get(cfg, keys.max_tokens) for keys in batches if get(cfg, keys.dynamic)}


def _optimizer_options(group: TrainedConfig | RefConfig | FrozenConfig) -> dict[str, Any]:
    return group.optim.override_optimizer_config or {} if isinstance(group, TrainedConfig) else {}


def check_kernels(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> Iterator[UserError]:
    """Ranks that cut the stream of tokens have no kernels by keys."""
    cut = f"ranks that cut the stream of tokens (cp {dims.cp}) have attention of their own."
    return check_attention_kernels(cfg, role, node, cut if dims.cp > 1 else "")


def check_built(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> Iterator[UserError]:
    """The sizes divide the ranks and the model, and Megatron-Core takes the options."""
    model = _megatron_model(cfg, role, dims, str(node), node.op.trains)
    dims.check(model.who, range(dims.world), model.section.sequence_parallel)
    return check_megatron(model)


def check_tower(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> Iterator[UserError]:
    """The layers to which a vision tower adds lie beside it."""
    model, described = role_model(cfg, role), _megatron_model(cfg, role, dims, str(node), node.op.trains)
    whole = overridden(config_json(model), model.override_config)
    return layers_beside_tower(described, deepstack_layers(whole))


class Megatron(Backend):
    """Weights are cut by tp, pp, cp and ep."""

    checks = (
        Check("model", ASKED, check_kernels),
        Check("model", ("cfg", "role", "node"), check_model_of_node),
        Check("model", ASKED, check_built),
        Check("model", ASKED, check_tower),
    )
    shares_prompts = five_sizes = True
    offloads = ("megatron.param_offload",)
    offloads_trained = ("megatron.grad_offload", "megatron.optimizer_offload")

    def dims(self, cfg: Config, role: str, world: int) -> ParallelDims:
        section = role_group(cfg, role).megatron
        tp, pp, cp = (
            section.tensor_model_parallel_size,
            section.pipeline_model_parallel_size,
            section.context_parallel_size,
        )
        return ParallelDims(
            world,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=section.expert_model_parallel_size,
            etp=section.expert_tensor_parallel_size,
            vpp=section.virtual_pipeline_model_parallel_size or 1,
            dp_replicate=max(1, world // (tp * pp * cp)),
        )

    def memory(self, model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
        group = role_group(cfg, model.role)
        width, words = BYTES[group.megatron.param_dtype], -(-shape.vocabulary // model.dims.tp)
        settings = MegatronMemory(
            section=group.megatron,
            optimizer_options=_optimizer_options(group),
            recompute=role_model(cfg, model.role).enable_gradient_checkpointing,
            train_tokens=micro_batch_tokens(model, cfg, trains=True) if model.trains else 0,
            forward_tokens=micro_batch_tokens(model, cfg, trains=False),
            head=head_lines(model, cfg, words, shape.hidden, width) if model.head == "lm" else (),
            adapter=adapter_params(role_model(cfg, model.role), shape),
            on_experts=expert_adapter_params(role_model(cfg, model.role), shape),
        )
        full_kl = full_kl_lines(model, cfg, shape, rows, width)
        experts = expert_lines(model, cfg, shape, rows)
        return (
            megatron_lines(model, shape, settings)
            + full_kl
            + teacher_lines(model, cfg, shape, rows)
            + experts
        )

    def groups(self, dims: ParallelDims, ranks: Ranks) -> Iterable[Ranks]:
        return megatron_groups(dims, ranks)

    def packages(self, cfg: Config, role: str) -> None:
        """ConfigError without Megatron-Core, or without mbridge where the model of a role asks for it."""
        key, section = ROLE_GROUPS[role], role_group(cfg, role).megatron
        needs = [("megatron-core", "megatron", f"{key}.strategy=megatron", "strategy=fsdp")]
        if section.use_mbridge:
            needs.append(("mbridge", "mbridge", f"{key}.megatron.use_mbridge=True", "use_mbridge=False"))
        for package, module, setting, instead in needs:
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"{setting}: the package {package} is not installed. Install it "
                    f"(pip install 'siirl[megatron]'), or set {instead}."
                )

    def advice(self, model: ModelPlan, cfg: Config) -> list[str]:
        described = _megatron_model(cfg, model.role, model.dims, f"node {model.node!r}", model.trains)
        num_micro_batches = micro_batches(model, cfg) if model.trains else 0
        return advice(described, model.ranks, cfg.trainer.n_gpus_per_node, num_micro_batches)

    def recomputes(self, cfg: Config, role: str) -> bool:
        whole = role_model(cfg, role).enable_gradient_checkpointing
        options = recomputation(role_group(cfg, role).megatron.override_transformer_config, whole)
        return options.get("recompute_granularity") == "full"

    def own_recomputation(self, cfg: Config, role: str) -> bool:
        options = role_group(cfg, role).megatron.override_transformer_config
        return any(name.startswith("recompute") for name in options)

    def no_replay(self, actor: ActorConfig) -> str:
        options = actor.megatron.override_transformer_config
        if weight := options.get("moe_aux_loss_coeff"):
            return balances(f"moe_aux_loss_coeff={weight}")
        if {"moe", "mlp"} & {*(recomputation(options, False).get("recompute_modules") or ())}:
            return (
                "with experts that are computed again by themselves (moe_layer_recompute, "
                "recompute_modules), which do not know of which micro-batch they are. Remove the option: "
                "whole layers are computed again."
            )
        return ""

    def environment(self, dims: ParallelDims) -> dict[str, str]:
        """Megatron-Core issues messages of tensor and context parallel groups ahead of the matrix products
        that hide them, and counts on one hardware queue to keep the order (megatron-core 0.16.1,
        tensor_parallel/layers.py). FSDP2 wants several queues, so that its prefetches overlap."""
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if max(dims.tp, dims.cp) > 1 else {}
