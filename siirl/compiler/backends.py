"""The table of backends: what is known of one besides its code, which its row names. Pure.

A new backend is its engine and its row, and a choice of the key that picks it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from siirl.compiler.checks.fsdp_checks import check_attention_kernels, check_fsdp
from siirl.compiler.checks.megatron_checks import MegatronModel, advice, check_megatron
from siirl.compiler.checks.megatron_options import recomputation
from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.checks.packages import check_megatron_packages, sglang_version, vllm_version
from siirl.compiler.checks.sglang_checks import check_sglang
from siirl.compiler.checks.vllm_checks import check_openai, check_vllm
from siirl.compiler.memory.engine_memory import hf_rollout_lines, scored_lines, vllm_lines, writing_lines
from siirl.compiler.memory.estimate import (
    BYTES,
    MemoryLine,
    ModelShape,
    adapter_params,
    expert_adapter_params,
    expert_lines,
    fsdp_lines,
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
from siirl.config.roles import ROLE_GROUPS, ROLES, role_group, role_model, sequence_ranks
from siirl.config.teacher import FrozenConfig
from siirl.errors import ConfigError, NotSupportedError
from siirl.parallel.dims import ParallelDims
from siirl.parallel.megatron_groups import megatron_groups
from siirl.parallel.placement import Ranks
from siirl.spelling import suggest


@dataclass(frozen=True)
class Backend:
    """All that is known of a backend besides its code."""

    engine: str
    """ "module:Class", imported where an engine is built; empty for one that cannot be used yet."""

    dims: Callable[[Config, str, int], ParallelDims]
    """The parallel sizes that a model gets on so many ranks."""

    memory: Callable[[ModelPlan, Config, ModelShape, int], list[MemoryLine]]
    """What a rank holds; the last argument is the rows of a shard."""

    gathers_weights: bool = False
    """Each layer's weights are gathered where it is computed, from dims.weight_shards ranks."""

    layers_by_keys: bool = False
    """Its layers are fused or compiled where keys of the model ask for that."""

    shares_prompts: bool = False
    """Whether rows of one prompt that lie together cost that prompt once."""

    groups: Callable[[ParallelDims, Ranks], Iterable[Ranks]] = lambda dims, ranks: ()
    """The rank tuples that a model of these sizes, on these ranks, communicates over."""

    check: Callable[[Config, str, ParallelDims, ResolvedNode], None] = lambda *model: None
    """What must hold beyond the product of the sizes; raises UserError."""

    packages: Callable[[Config, str], object] = lambda *model: None
    """ConfigError where what it needs is not installed; asked on the machine where it would run."""

    advice: Callable[[ModelPlan, Config], list[str]] = lambda model, cfg: []
    """What works, but badly, and what could not be checked: a line each."""

    recomputes: Callable[[Config, str], bool] = lambda cfg, role: (
        role_model(cfg, role).enable_gradient_checkpointing
    )
    """Whether whole layers are computed again in the backward pass."""

    own_recomputation: Callable[[Config, str], bool] = lambda cfg, role: False
    """Whether options of its own say what is computed again, in the place of the model's key."""

    kernels_of_parts: bool = False
    """FlashAttention 4 is for it also where several ranks have parts of a row."""

    no_replay: Callable[[ActorConfig], str] = lambda actor: ""
    """Why the actor's options do not go with experts that were chosen before (router_replay), and the fix."""

    environment: Callable[[ParallelDims], dict[str, str]] = lambda dims: {}
    """Variables that the processes of a model of these sizes need before CUDA starts."""

    five_sizes: bool = False
    """Its models are cut by tp, pp, cp and ep, which are always named."""

    weights: bool = True
    """It needs weights."""

    works_alone: bool = False
    """It goes on with what a stream has asked while its worker does something else."""

    keeps_kv: bool = False
    """It can go on with the keys and values of a paused response (rollout.keep_kv)."""

    sends_rows: bool = False
    """Ranks of a trainer can send the rows that they have of its weights (rollout.weight_link=spread)."""
    writes_in_place: bool = False
    """It can have weights written where its first sync put them (rollout.replace_weights)."""

    device_share: bool = False
    """On a GPU it takes a share of the device (rollout.gpu_memory_utilization) while it is awake."""

    no_experts: str = "it does not say which experts computed a token"
    """Of a rollout: why experts cannot be replayed from it; empty: they can."""

    no_experts_here: Callable[[Config], str] = lambda cfg: ""
    """The same of one that says them in some places only."""

    takes_images: bool = False
    """Of a rollout: prompts may have images."""

    timed: bool = False
    """Of a rollout: the cost model has constants for what it samples, and for its weight syncs."""

    base_keys: tuple[str, ...] = ()
    """Keys of its group that models of agents on one frozen base agree on; none: they cannot share a base."""

    offloads: tuple[str, ...] = ()
    """Keys in a model's group that move it to host memory while it is idle."""

    offloads_trained: tuple[str, ...] = ()
    """Further ones of a model that trains."""

    later: str = ""
    """The feature that does not exist yet."""


_BALANCES = (
    "with {}: the loss balances what the router would choose now, and it does not choose. Leave out one of "
    "them."
)


def _along(*axes: str) -> Callable[[ParallelDims, Ranks], Iterable[Ranks]]:
    """The groups of some mesh axes, in the order of the axes."""

    def groups(dims: ParallelDims, ranks: Ranks) -> Iterable[Ranks]:
        lines = dims.mesh_groups(ranks)
        return [group for axis in axes for group in lines.get(axis, ())]

    return groups


def _fsdp_dims(cfg: Config, role: str, world: int) -> ParallelDims:
    """The ranks of a sequence share its model's weights, with as many others as fsdp_size says."""
    size, sequence = role_group(cfg, role).fsdp_config.fsdp_size, sequence_ranks(cfg, role)
    shard = world if size < 1 or size > world else size
    copies, experts = -(-world // shard), role_group(cfg, role).fsdp_config.expert_parallel_size
    return ParallelDims(
        world, cp=sequence, ep=experts, dp_shard=max(1, shard // sequence), dp_replicate=copies
    )


def _fsdp_groups(dims: ParallelDims, ranks: Ranks) -> Iterable[Ranks]:
    return [group for groups in dims.fsdp_groups(ranks).values() for group in groups]


def _megatron_dims(cfg: Config, role: str, world: int) -> ParallelDims:
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


def _megatron_environment(dims: ParallelDims) -> dict[str, str]:
    """Megatron-Core issues messages of tensor and context parallel groups ahead of the matrix products that
    hide them, and counts on one hardware queue to keep the order (megatron-core 0.16.1,
    tensor_parallel/layers.py). FSDP2 wants several queues, so that its prefetches overlap."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if max(dims.tp, dims.cp) > 1 else {}


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
        shape=read_shape(cfg, role),
        lora_rank=role_model(cfg, role).lora_rank,
        longest_row=cfg.actor_rollout_ref.rollout.prompt_length
        + cfg.actor_rollout_ref.rollout.response_length,
        budgets=_token_budgets(cfg, role),
    )


def _token_budgets(cfg: Config, role: str) -> dict[str, int]:
    """Key -> tokens of a micro-batch, of the budgets that a role's model has."""
    batches = [keys for keys in (ROLES[role].train, ROLES[role].forward) if keys is not None]
    return {keys.max_tokens: get(cfg, keys.max_tokens) for keys in batches if get(cfg, keys.dynamic)}


def _check_megatron(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> None:
    cut = f"ranks that cut the stream of tokens (cp {dims.cp}) have attention of their own."
    check_attention_kernels(cfg, role, node, cut if dims.cp > 1 else "")
    check_trained_model(cfg, role, str(node))
    model = _megatron_model(cfg, role, dims, str(node), node.op.trains)
    dims.check(model.who, range(dims.world), model.section.sequence_parallel)
    check_megatron(model)


def _fsdp_no_replay(actor: ActorConfig) -> str:
    weight = actor.fsdp_config.moe_aux_loss_coeff
    return _BALANCES.format(f"fsdp_config.moe_aux_loss_coeff={weight}") if weight else ""


def _megatron_no_replay(actor: ActorConfig) -> str:
    options = actor.megatron.override_transformer_config
    if weight := options.get("moe_aux_loss_coeff"):
        return _BALANCES.format(f"moe_aux_loss_coeff={weight}")
    if {"moe", "mlp"} & {*(recomputation(options, False).get("recompute_modules") or ())}:
        return (
            "with experts that are computed again by themselves (moe_layer_recompute, recompute_modules), "
            "which do not know of which micro-batch they are. Remove the option: whole layers are computed "
            "again."
        )
    return ""


def _megatron_recomputes(cfg: Config, role: str) -> bool:
    whole = role_model(cfg, role).enable_gradient_checkpointing
    options = recomputation(role_group(cfg, role).megatron.override_transformer_config, whole)
    return options.get("recompute_granularity") == "full"


def _megatron_own_recomputation(cfg: Config, role: str) -> bool:
    options = role_group(cfg, role).megatron.override_transformer_config
    return any(name.startswith("recompute") for name in options)


def _megatron_advice(model: ModelPlan, cfg: Config) -> list[str]:
    described = _megatron_model(cfg, model.role, model.dims, f"node {model.node!r}", model.trains)
    num_micro_batches = micro_batches(model, cfg) if model.trains else 0
    return advice(described, model.ranks, cfg.trainer.n_gpus_per_node, num_micro_batches)


def _megatron_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
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
    return megatron_lines(model, shape, settings) + full_kl + teacher_lines(model, cfg, shape, rows) + experts


def _optimizer_options(group: TrainedConfig | RefConfig | FrozenConfig) -> dict[str, Any]:
    return group.optim.override_optimizer_config or {} if isinstance(group, TrainedConfig) else {}


def _replicas(cfg: Config, role: str, world: int) -> ParallelDims:
    return ParallelDims(world, dp_replicate=world)


def _tensor_parallel_replicas(cfg: Config, role: str, world: int) -> ParallelDims:
    tp = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    return ParallelDims(world, tp=tp, dp_replicate=max(1, world // tp))


def _vllm_no_experts(cfg: Config) -> str:
    if cfg.trainer.device == "cpu":
        return "vLLM says which experts computed a token on GPUs only"
    if (ranks := cfg.actor_rollout_ref.rollout.tensor_model_parallel_size) > 1:
        return f"engines of several ranks (tensor_model_parallel_size={ranks}) were not seen to say experts"
    return ""


TRAIN_BACKENDS = {
    "fsdp": Backend(
        "siirl.engines.train.fsdp.fsdp_engine:FSDPEngine",
        _fsdp_dims,
        fsdp_lines,
        gathers_weights=True,
        layers_by_keys=True,
        kernels_of_parts=True,
        sends_rows=True,
        shares_prompts=True,
        groups=_fsdp_groups,
        check=check_fsdp,
        no_replay=_fsdp_no_replay,
        base_keys=("fsdp_config.model_dtype", "fsdp_config.expert_parallel_size"),
        offloads=("fsdp_config.param_offload",),
        offloads_trained=("fsdp_config.optimizer_offload",),
    ),
    "megatron": Backend(
        "siirl.engines.train.megatron.engine:MegatronEngine",
        _megatron_dims,
        _megatron_lines,
        shares_prompts=True,
        groups=megatron_groups,
        check=_check_megatron,
        packages=check_megatron_packages,
        advice=_megatron_advice,
        recomputes=_megatron_recomputes,
        own_recomputation=_megatron_own_recomputation,
        no_replay=_megatron_no_replay,
        environment=_megatron_environment,
        five_sizes=True,
        offloads=("megatron.param_offload",),
        offloads_trained=("megatron.grad_offload", "megatron.optimizer_offload"),
    ),
}
"""Strategy -> backend."""

ROLLOUT_BACKENDS = {
    "hf": Backend(
        "siirl.engines.rollout.hf.hf_rollout:HFRollout",
        _replicas,
        hf_rollout_lines,
        no_experts="",
        takes_images=True,
        base_keys=("name", "dtype"),
    ),
    "vllm": Backend(
        "siirl.engines.rollout.vllm.vllm_rollout:VLLMRollout",
        _tensor_parallel_replicas,
        lambda *model: vllm_lines(*model) + writing_lines(*model) + scored_lines(*model),
        groups=_along("tp"),
        check=check_vllm,
        packages=lambda *model: vllm_version(),
        works_alone=True,
        keeps_kv=True,
        writes_in_place=True,
        device_share=True,
        no_experts="",
        no_experts_here=_vllm_no_experts,
        takes_images=True,
        timed=True,
        base_keys=(
            *("name", "dtype", "prompt_length", "response_length", "max_model_len", "max_num_seqs"),
            *("max_num_batched_tokens", "enable_chunked_prefill", "enforce_eager", "disable_log_stats"),
            *("gpu_memory_utilization", "free_cache_engine", "tensor_model_parallel_size"),
            *("keep_kv", "engine_kwargs.vllm"),
        ),
    ),
    "openai": Backend(
        "siirl.engines.rollout.openai_endpoint:OpenAIRollout",
        _replicas,
        lambda *model: [],
        check=check_openai,
        weights=False,
    ),
    "sglang": Backend(
        "siirl.engines.rollout.sglang.sglang_rollout:SGLangRollout",
        _tensor_parallel_replicas,
        vllm_lines,
        check=lambda cfg, role, dims, node: check_sglang(cfg, dims.tp, node),
        packages=lambda *model: sglang_version(),
        works_alone=True,
        device_share=True,
    ),
}
"""rollout.name -> backend. A replay has none."""


def backend_of(model: ModelPlan) -> Backend:
    """The backend that a model runs on."""
    return (ROLLOUT_BACKENDS if model.generates else TRAIN_BACKENDS)[model.backend]


def choose_backend(role: str, node: ResolvedNode) -> tuple[str, Backend]:
    """Name and row of the backend that a node's configuration gives a role; ConfigError for one unknown."""
    key = ROLES[role].backend_key
    name, known = get(node.cfg, key) or "", ROLLOUT_BACKENDS if ROLES[role].generates else TRAIN_BACKENDS
    if name not in known:
        raise ConfigError(f"{node}: unknown {key}={name}. {suggest(name, known)} Known: {', '.join(known)}.")
    if known[name].later:
        available = ", ".join(other for other, backend in known.items() if not backend.later)
        raise NotSupportedError(
            f"not supported yet: {node}: {key}={name}: {known[name].later}. Available: {available}."
        )
    return name, known[name]
