"""What must hold for a Megatron model before anything starts, beyond what ParallelDims.check finds.

Pure: sizes come from the configuration and the model's config.json; megatron.core need not be installed.
Rules are those of megatron-core 0.16 unless they name another reason.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from siirl.compiler.checks.megatron_options import MODULES, Kind, recomputation, refusal
from siirl.compiler.memory.estimate import ModelShape
from siirl.config.common import MegatronConfig
from siirl.errors import ConfigError, UserError
from siirl.models.families import family_of
from siirl.parallel.dims import ParallelDims
from siirl.parallel.pipeline_layers import SPLIT_OPTIONS, split_layers, suggest_split
from siirl.parallel.placement import Ranks, format_ranks

ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type")
"""Options that add a loss of the router."""


@dataclass(frozen=True)
class MegatronModel:
    """A Megatron model as the checks see it."""

    who: str
    """What messages call it."""
    group: str
    """Full name of its role's group: actor_rollout_ref.actor, for one."""
    sizes: str
    """Where its parallel sizes are set: a reference follows those of the actor."""
    section: MegatronConfig
    optimizer_options: Mapping[str, Any]
    """override_optimizer_config, of a model that can train."""
    trains: bool
    dims: ParallelDims
    shape: ModelShape | str
    """Its sizes, or why they are not known: checks that need them are then left to the engine."""
    recomputes: bool
    """Whole layers are computed again, unless options say otherwise."""
    lora_rank: int
    longest_row: int
    """Most tokens of prompt and response."""
    budgets: Mapping[str, int]
    """Key -> tokens of a micro-batch, of keys that act."""

    def wrong(self, problem: str) -> ConfigError:
        """The error of what is wrong with it."""
        return ConfigError(f"{self.who}: {problem}")

    @property
    def options(self) -> dict[str, Any]:
        return self.section.override_transformer_config

    @property
    def keys(self) -> str:
        return f"{self.group}.megatron"

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of so many tokens."""
        return self.section.row_multiple


def _options(model: MegatronModel) -> Iterator[UserError]:
    """What siirl does not pass on, and values that an option cannot have."""
    maps: list[tuple[Kind, str, Mapping[str, Any]]] = [
        ("transformer", f"{model.keys}.override_transformer_config", model.options)
    ]
    if model.trains:
        maps += [
            ("ddp", f"{model.keys}.override_ddp_config", model.section.override_ddp_config),
            ("optimizer", f"{model.group}.optim.override_optimizer_config", model.optimizer_options),
        ]
    for kind, where, options in maps:
        for name, value in options.items():
            problem = refusal(kind, name, value, model.group)
            if problem:
                yield model.wrong(f"{where}.{name}{problem if problem.startswith('=') else ' ' + problem}")


def _weights(model: MegatronModel) -> Iterator[UserError]:
    """Weights are read from one place."""
    section = model.section
    if section.use_dist_checkpointing and not section.dist_checkpointing_path:
        yield model.wrong(
            f"{model.keys}.use_dist_checkpointing=true without a checkpoint. Set "
            f"{model.keys}.dist_checkpointing_path to the directory that `siirl convert` wrote."
        )
    if section.use_dist_checkpointing and section.use_mbridge:
        yield model.wrong(
            f"{model.keys}.use_mbridge and use_dist_checkpointing are both true: weights are read from "
            "Hugging Face files by mbridge, or from a converted checkpoint. Set one of them to false."
        )
    shape = model.shape
    if section.use_mbridge and isinstance(shape, ModelShape):
        is_mixed = 0 < shape.moe_layers < shape.layers
        what = f"a {shape.family}" + " with dense layers among those of experts" * is_mixed
        if is_mixed or not family_of(shape.family).mbridge:
            yield model.wrong(
                f"{model.keys}.use_mbridge=true for {what}: that mbridge reads it as siirl does has not been "
                "seen. Set it to false: siirl reads the weights itself."
            )


def _adapters(model: MegatronModel) -> Iterator[UserError]:
    """Adapters are trained on every pipeline rank, and leave on the weights of model.path."""
    if not (model.trains and model.lora_rank):
        return
    if model.section.use_dist_checkpointing:
        yield model.wrong(
            f"{model.keys}.use_dist_checkpointing=true with LoRA adapters: they are saved and exported on "
            "the weights of model.path. Set it to false; use_mbridge=true reads those, too."
        )
    if isinstance(model.shape, ModelShape):
        with contextlib.suppress(ValueError):
            chunks = split_layers(model.shape.layers, model.dims.pp, model.dims.vpp, model.options)
            for stage in (stage for stage, counts in enumerate(chunks) if not sum(counts)):
                yield model.wrong(
                    f"pipeline rank {stage} of pp({model.dims.pp}) has no layers, so nothing of it trains "
                    "with LoRA adapters. Give it a layer, or set model.lora_rank=0."
                )


def _layers(model: MegatronModel) -> Iterator[UserError]:
    dims, shape = model.dims, model.shape
    assert isinstance(shape, ModelShape)
    try:
        chunks = split_layers(shape.layers, dims.pp, dims.vpp, model.options)
    except ValueError as error:
        options = suggest_split(shape.layers, dims.pp, dims.vpp)
        settings = " ".join(f"+{model.keys}.override_transformer_config.{k}={v}" for k, v in options.items())
        fits = [str(pp) for pp in range(1, shape.layers + 1) if shape.layers % (pp * dims.vpp) == 0]
        given = ", ".join(name for name in SPLIT_OPTIONS if name in model.options)
        remedy = f"Set {settings}" if settings else f"Remove {given}"
        yield model.wrong(
            f"{error}. {remedy}, or a pipeline_model_parallel_size that divides them "
            f"({', '.join(fits)} with vpp({dims.vpp}))."
        )
        return
    empty = [stage for stage, counts in enumerate(chunks) if sum(counts) == 0]
    if len(empty) > 0 and "pipeline_model_parallel_layout" not in model.options:
        yield model.wrong(
            f"pipeline rank {empty[0]} of pp({dims.pp}) would hold none of the {shape.layers} layers. Lower "
            f"{model.sizes}.pipeline_model_parallel_size."
        )


def _attention(model: MegatronModel) -> Iterator[UserError]:
    tp, shape = model.dims.tp, model.shape
    assert isinstance(shape, ModelShape)
    key, fits = f"{model.sizes}.tensor_model_parallel_size", _fitting(model, "tp")
    if model.dims.cp > 1 and family_of(shape.family).sinks:
        yield model.wrong(
            f"cp({model.dims.cp}) with attention sinks ({shape.family}), which ranks that share rows do not "
            f"compute. Set {model.sizes}.context_parallel_size=1, or strategy=fsdp."
        )
    if shape.heads % tp:
        yield model.wrong(
            f"{shape.heads} attention heads do not divide over tp({tp}) ranks. Set {key}={fits}."
        )
    elif tp > shape.kv_heads and family_of(shape.family).qk_norm == "whole":
        yield model.wrong(
            f"tp({tp}) is more than the {shape.kv_heads} KV heads of a {shape.family}, whose norm spans all "
            f"of them: it is not split within a head. Set {key}={fits}."
        )
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        yield model.wrong(
            f"tp({tp}) is neither a divisor nor a multiple of the {shape.kv_heads} KV heads: they can be "
            f"split over ranks or repeated, not both. Set {key}={fits}."
        )


def _mlp(model: MegatronModel) -> Iterator[UserError]:
    dims, shape = model.dims, model.shape
    assert isinstance(shape, ModelShape)
    widths = [("tensor_model_parallel_size", "tp", dims.tp, "shared expert width", shape.shared_width)]
    if shape.moe_layers < shape.layers:
        widths.append(("tensor_model_parallel_size", "tp", dims.tp, "intermediate_size", shape.intermediate))
    if shape.experts:
        widths.append(("expert_tensor_parallel_size", "etp", dims.etp, "expert width", shape.expert_width))
    for key, axis, size, what, width in widths:
        if width % size:
            yield model.wrong(
                f"{what} {width} does not divide over {axis}({size}) ranks. "
                f"Set {model.sizes}.{key}={_fitting(model, axis)}."
            )


def _vocabulary(model: MegatronModel) -> Iterator[UserError]:
    """Ranks hold equal shares of the words, rounded up; the last one must still have some."""
    tp, shape = model.dims.tp, model.shape
    assert isinstance(shape, ModelShape)
    if (tp - 1) * -(-shape.vocabulary // tp) >= shape.vocabulary:
        yield model.wrong(
            f"a vocabulary of {shape.vocabulary} words leaves some of tp({tp}) ranks without any. Lower "
            f"{model.sizes}.tensor_model_parallel_size."
        )


def _rows(model: MegatronModel) -> Iterator[UserError]:
    """Context parallelism cuts each row into 2 cp equal pieces, so a row is padded first."""
    multiple = model.row_multiple
    padded = -(-model.longest_row // multiple) * multiple
    for key, budget in model.budgets.items():
        if budget < padded:
            yield model.wrong(
                f"{key}={budget} does not hold the longest row: its {model.longest_row} tokens are padded to "
                f"{padded}, a multiple of {multiple}, under cp({model.dims.cp}) and tp({model.dims.tp}). Set "
                f"it to {padded} or more."
            )


def _experts(model: MegatronModel) -> Iterator[UserError]:
    dims, shape, options = model.dims, model.shape, model.options
    assert isinstance(shape, ModelShape)
    if not shape.experts:
        for key, axis, size in (
            ("expert_model_parallel_size", "ep", dims.ep),
            ("expert_tensor_parallel_size", "etp", dims.etp),
        ):
            if size > 1:
                yield model.wrong(
                    f"{axis}({size}): {shape.family} has no experts. Set {model.sizes}.{key}=1."
                )
        for name in options:
            if name.startswith("moe_") and options[name] not in (None, False, "none", 0):
                where = f"{model.keys}.override_transformer_config.{name}"
                yield model.wrong(f"{where}: {shape.family} has no experts. Remove it.")
        return
    if shape.experts % dims.ep:
        yield model.wrong(
            f"{shape.experts} experts do not divide over ep({dims.ep}) ranks. Set "
            f"{model.sizes}.expert_model_parallel_size={_fitting(model, 'ep')}."
        )
    experts = family_of(shape.family).experts
    if options.get("moe_grouped_gemm") and experts is not None and experts.biases:
        yield model.wrong(
            f"{model.keys}.override_transformer_config.moe_grouped_gemm=true for experts with biases "
            f"({shape.family}), which are multiplied one by one. Remove it."
        )
    if dims.tp > 1 and not model.section.sequence_parallel:
        yield model.wrong(
            f"a mixture of experts with tp({dims.tp}) and without sequence parallelism: the dispatcher takes "
            f"each rank's own tokens, and without it all tp ranks have the same. Set "
            f"{model.sizes}.sequence_parallel=true, or {model.sizes}.tensor_model_parallel_size=1."
        )
    if options.get("moe_token_dispatcher_type") == "allgather" and dims.pp > 1:
        yield model.wrong(
            f"moe_token_dispatcher_type=allgather with pp({dims.pp}): pipeline ranks exchange packed rows of "
            f"varying length, which it does not take. Set {model.keys}.override_transformer_config."
            "moe_token_dispatcher_type=alltoall."
        )
    experts = family_of(shape.family).experts
    if experts is not None and experts.groups:
        for name in (name for name in ROUTER_LOSSES if options.get(name) not in (None, 0, "none")):
            yield model.wrong(
                f"{model.keys}.override_transformer_config.{name}={options[name]} for a {shape.family}: its "
                "router does not choose by its logits alone, which the loss would balance. Remove it."
            )
        return
    balancing, coefficient = options.get("moe_router_load_balancing_type"), options.get("moe_aux_loss_coeff")
    if balancing == "none" and coefficient:
        yield model.wrong(
            f"moe_aux_loss_coeff={coefficient} with moe_router_load_balancing_type=none: remove one."
        )
    if balancing == "aux_loss" and not coefficient:
        yield model.wrong("moe_router_load_balancing_type=aux_loss weighs nothing. Set moe_aux_loss_coeff.")


def _recompute(model: MegatronModel) -> Iterator[UserError]:
    options = model.options
    granularity, method = options.get("recompute_granularity"), options.get("recompute_method")
    layers = options.get("recompute_num_layers")
    if granularity == "full" and (method is None or layers is None):
        yield model.wrong(
            "recompute_granularity=full needs recompute_method=uniform|block and recompute_num_layers >= 1."
        )
    if granularity == "selective" and layers is not None:
        yield model.wrong(
            f"recompute_granularity=selective with recompute_num_layers={layers}: it recomputes the "
            "recompute_modules of every layer. Remove recompute_num_layers, or choose full."
        )
    acting = recomputation(options, model.recomputes)
    whole = acting.get("recompute_granularity") == "full" and acting.get("recompute_method") == "uniform"
    if whole and layers and isinstance(model.shape, ModelShape):
        yield from _uniform(model, model.shape.layers, layers)
    others = [name for name in options if name.startswith("recompute_")]
    if options.get("moe_layer_recompute") and others:
        yield model.wrong(
            f"moe_layer_recompute decides all of recomputation. Remove it, or {', '.join(others)}."
        )
    if not isinstance(model.shape, ModelShape) or granularity != "selective":
        return
    here = {"core_attn", "moe" if model.shape.experts else "mlp"}
    absent = sorted(set(options.get("recompute_modules") or ()) - here - set(MODULES))
    if absent:
        yield model.wrong(
            f"recompute_modules names {', '.join(absent)}: a layer of {model.shape.family} has none. It may "
            f"name {', '.join(sorted(here))}."
        )


def _uniform(model: MegatronModel, layers: int, together: int) -> Iterator[UserError]:
    """Layers that are computed again together are of one chunk, which has no others."""
    with contextlib.suppress(ValueError):
        chunks = split_layers(layers, model.dims.pp, model.dims.vpp, model.options)
        counts = sorted({count for stage in chunks for count in stage})
        if any(count % together for count in counts):
            fits = [n for n in range(together - 1, 0, -1) if not any(count % n for count in counts)]
            key = f"{model.keys}.override_transformer_config.recompute_num_layers"
            yield model.wrong(
                f"recompute_method=uniform with recompute_num_layers={together} does not divide chunks of "
                f"{', '.join(map(str, counts))} layers. Set {key}={'|'.join(map(str, fits))}, or "
                "recompute_method=block."
            )


def _gradients(model: MegatronModel) -> Iterator[UserError]:
    """Options of gradient buffers that need each other."""
    if not model.trains:
        return
    options, where = model.section.override_ddp_config, f"{model.keys}.override_ddp_config"
    if options.get("overlap_param_gather") and not model.section.use_distributed_optimizer:
        yield model.wrong(
            f"{where}.overlap_param_gather without the distributed optimizer: every rank updates whole "
            f"weights, so nothing is gathered. Remove it, or set {model.keys}.use_distributed_optimizer=True."
        )
    for name in ("overlap_param_gather", "bucket_size"):
        if options.get(name) and not options.get("overlap_grad_reduce"):
            yield model.wrong(
                f"{where}.{name} without overlap_grad_reduce: gradients are then reduced all at once. "
                f"Remove it, or set {where}.overlap_grad_reduce=True."
            )


def _optimizer(model: MegatronModel) -> Iterator[UserError]:
    """Where AdamW's state lies, and in which types: see siirl/engines/train/megatron/adamw.py."""
    options, where = model.optimizer_options, f"{model.group}.optim.override_optimizer_config"
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        if options.get(name) and not options.get("optimizer_cpu_offload"):
            yield model.wrong(
                f"{where}.{name}: nothing is on the host. Set {where}.optimizer_cpu_offload=True."
            )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        value = options.get(name, "fp32")
        if value != "fp32" and not options.get("use_precision_aware_optimizer"):
            yield model.wrong(
                f"{where}.{name}={value} needs {where}.use_precision_aware_optimizer=True. Set it."
            )
    if "eps" in options and "adam_eps" in options:
        yield model.wrong(f"{where} has eps and adam_eps, which are the same. Remove one of them.")


def check_megatron(model: MegatronModel) -> Iterator[UserError]:
    """All that is wrong with a model under Megatron."""
    checks = (_options, _weights, _adapters, _recompute, _gradients, _rows, _optimizer)
    if isinstance(model.shape, ModelShape):
        checks += (_layers, _attention, _mlp, _vocabulary, _experts)
    for check in checks:
        yield from check(model)


def _fitting(model: MegatronModel, axis: str) -> str:
    """The smaller sizes of tp, ep or etp that divide all that they cut, and the ranks; greatest first."""
    dims, shape = model.dims, model.shape
    assert isinstance(shape, ModelShape)
    beside = {"tp": dims.pp * dims.cp, "ep": dims.etp * dims.pp, "etp": dims.ep * dims.pp}[axis]
    cut = {"ep": (shape.experts,), "etp": (shape.expert_width,)}.get(axis)
    if cut is None:
        cut = (shape.heads, shape.shared_width, shape.intermediate * (shape.moe_layers < shape.layers))
    size = getattr(dims, axis)
    fits = [
        fewer
        for fewer in range(size - 1, 0, -1)
        if not any(width % fewer for width in cut) and dims.world % (fewer * beside) == 0
    ]
    if axis == "tp":
        within = family_of(shape.family).qk_norm != "whole"
        fits = [x for x in fits if shape.kv_heads % x == 0 or (within and x % shape.kv_heads == 0)]
    return "|".join(map(str, fits or [1]))


def advice(model: MegatronModel, ranks: Ranks, ranks_per_node: int, num_micro_batches: int) -> list[str]:
    """What works but is slow or has no effect, a line each. num_micro_batches: of a mini-batch on a rank."""
    dims, options = model.dims, model.options
    lines = []
    if isinstance(model.shape, str):
        lines.append(f"layers, heads and experts are not checked: {model.shape}")
    groups = dims.mesh_groups(ranks).get("tp", ())
    across = next((group for group in groups if len({rank // ranks_per_node for rank in group}) > 1), None)
    if across:
        lines.append(
            f"tp({dims.tp}) reaches over machines (ranks {format_ranks(across)}): every layer then waits for "
            f"the network. Keep tensor_model_parallel_size within the {ranks_per_node} devices of a machine."
        )
    if dims.tp > 1 and not model.section.sequence_parallel:
        lines.append(
            f"tp({dims.tp}) without sequence_parallel keeps norms and residuals whole on every rank. Set "
            f"{model.sizes}.sequence_parallel=true to split them too."
        )
    if dims.pp > 1 and model.trains:
        idle = (dims.pp - 1) / (num_micro_batches * dims.vpp + dims.pp - 1)
        if idle > 0.25:
            lines.append(
                f"pp({dims.pp}) with {num_micro_batches} micro-batches in a mini-batch idles {idle:.0%} of "
                "the time. Make micro-batches smaller, mini-batches larger, or the pipeline shorter."
            )
    granularity = options.get("recompute_granularity")
    if granularity != "selective" and options.get("recompute_modules"):
        lines.append("recompute_modules has no effect without recompute_granularity=selective.")
    if granularity == "selective" and options.get("recompute_method"):
        lines.append("recompute_method has no effect with recompute_granularity=selective.")
    return [f"{model.who}: {line}" for line in lines]
