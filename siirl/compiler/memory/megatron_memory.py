"""The memory estimate of a Megatron model on its busiest rank. docs/scaling.md works two cases by hand.

Counted: weights, the gradient buffer, optimizer states (main weights and two moments), activations of the
micro-batches in flight, the log-prob head. Not counted: communication buffers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl.compiler.checks.megatron_options import recomputation
from siirl.compiler.memory.estimate import (
    BYTES,
    COMPUTING,
    MemoryLine,
    ModelShape,
    forward_values,
    kept_values,
    mlp_values,
    offloadable,
)
from siirl.compiler.plan import ModelPlan
from siirl.config.common import MegatronConfig
from siirl.parallel.pipeline_layers import split_layers

_DTYPES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class MegatronMemory:
    """What the estimate reads of the configuration."""

    section: MegatronConfig
    optimizer_options: Mapping[str, Any]
    recompute: bool
    """The engine recomputes whole layers by default."""
    train_tokens: int
    """Of a micro-batch of a data-parallel shard in an optimizer step, before context parallelism cuts it."""
    forward_tokens: int
    """The same of a pass without gradient."""
    head: Sequence[MemoryLine]
    """What the last stage's log-prob head takes."""
    adapter: int = 0
    """Numbers in its LoRA adapter, which alone trains then; half of them are whole on every TP rank."""
    on_experts: int = 0
    """Of these, those of experts."""


def megatron_lines(model: ModelPlan, shape: ModelShape, settings: MegatronMemory) -> list[MemoryLine]:
    """What the pipeline rank that needs most memory holds of a model."""
    options, dims = settings.section.override_transformer_config, model.dims
    chunks = split_layers(shape.layers, dims.pp, dims.vpp, options)
    stages = [_stage_lines(model, shape, settings, stage, counts) for stage, counts in enumerate(chunks)]
    doing = "update" if model.trains else "forward"
    return max(stages, key=lambda lines: sum(line.on_device(doing, 0) for line in lines))


def rank_params(model: ModelPlan, shape: ModelShape, stage: int, layers: int) -> tuple[int, int]:
    """Parameters (outside experts, in experts) on a rank of a pipeline stage that has so many layers.

    Embedding and output head sit on the first and the last stage; tied ones are one tensor only where both
    are on one stage. A model of values or scores has no output head to speak of.
    """
    dims = model.dims
    copies = 1 if shape.tied else 2
    head = shape.embedding_params // copies
    tied_here = shape.tied and dims.pp == 1
    body = shape.params - shape.embedding_params - shape.moe_layers * shape.expert_params
    whole = layers * shape.compressed * shape.hidden  # what compresses is small, and not cut
    dense = layers * body / shape.layers - whole
    if stage == 0:
        dense += head
    if stage == dims.pp - 1 and model.head == "lm" and not tied_here:
        dense += head
    experts = layers * shape.moe_layers / shape.layers * shape.expert_params
    return int(dense / dims.tp + whole), int(experts / (dims.ep * dims.etp))


def layers_in_flight(pp: int, vpp: int, stage: int, chunks: tuple[int, ...]) -> int:
    """Layers whose activations wait for their backward pass at once, on a rank of a pipeline stage.

    One forward, one backward: stage s holds pp - s micro-batches. Interleaved: 2 (pp - s - 1) + (vpp - 1) pp
    + 1 chunks. Source: Narayanan et al., "Efficient Large-Scale Language Model Training" (2021), section 2.2.
    """
    if vpp == 1:
        return (pp - stage) * chunks[0]
    return (2 * (pp - stage - 1) + (vpp - 1) * pp + 1) * max(chunks)


def _stage_lines(
    model: ModelPlan, shape: ModelShape, settings: MegatronMemory, stage: int, chunks: tuple[int, ...]
) -> list[MemoryLine]:
    section, dims, name = settings.section, model.dims, model.name
    dense, experts = rank_params(model, shape, stage, sum(chunks))
    width = BYTES[section.param_dtype]
    adapter = (settings.adapter - settings.on_experts) * sum(chunks) // shape.layers if model.trains else 0
    on_experts = settings.on_experts * sum(chunks) // (shape.layers * dims.ep) if model.trains else 0
    held = (dense + experts + adapter + on_experts) * width
    lines = [offloadable(name, "parameters", held, section.param_offload, COMPUTING)]
    if model.trains:
        dense, experts = (adapter, on_experts) if settings.adapter else (dense, experts)
        reduced = 4 if section.override_ddp_config.get("grad_reduce_in_fp32", True) else width
        buffer = (dense + experts) * reduced
        lines.append(offloadable(name, "gradients", buffer, section.grad_offload, ("update",)))
        lines += _optimizer_lines(model, settings, dense, experts)
        tokens = -(-settings.train_tokens // dims.cp)
        in_flight = layers_in_flight(dims.pp, dims.vpp, stage, chunks)
        values = _activations(shape, section, dims.tp, settings.recompute, in_flight)
        lines.append(MemoryLine(name, "activations", int(tokens * values) * width, ("update",)))
    tokens = -(-settings.forward_tokens // dims.cp)
    split = dims.tp if section.sequence_parallel else 1
    whole = 4 * shape.hidden
    values = whole / split + (forward_values(shape, fused=True) - whole) / dims.tp
    lines.append(MemoryLine(name, "activations", int(tokens * values) * width, ("forward",)))
    return [*lines, *(settings.head if stage == dims.pp - 1 else ())]


def _optimizer_lines(
    model: ModelPlan, settings: MegatronMemory, dense: int, experts: int
) -> list[MemoryLine]:
    """Main weights and two moments; ZeRO-1 shards them over data-parallel and context-parallel ranks."""
    section, options, dims = settings.section, settings.optimizer_options, model.dims
    if section.use_distributed_optimizer:
        dense, experts = -(-dense // (dims.dp * dims.cp)), -(-experts // dims.expert_dp)
    aware = bool(options.get("use_precision_aware_optimizer"))
    kinds = ("exp_avg_dtype", "exp_avg_sq_dtype")
    each = sum(_DTYPES.get(str(options.get(kind, "fp32")), 4) if aware else 4 for kind in kinds)
    total = (dense + experts) * (each + 4 * (section.param_dtype != "float32"))
    share = options.get("optimizer_offload_fraction", 1.0) if options.get("optimizer_cpu_offload") else 0.0
    on_host = int(total * share)
    away = section.optimizer_offload
    lines = [offloadable(model.name, "optimizer", total - on_host, away, ("update",))]
    if on_host:
        lines.append(MemoryLine(model.name, "optimizer on the host", on_host, (), host=True))
    return lines


def _unsplit(shape: ModelShape) -> int:
    """Values per token that tensor parallelism alone leaves whole: what norms keep."""
    return 2 * shape.norms * shape.hidden


def _activations(
    shape: ModelShape, section: MegatronConfig, tp: int, recompute: bool, in_flight: int
) -> float:
    """Values per token: what the layers in flight keep, and the layer that computes in full."""
    options = recomputation(section.override_transformer_config, recompute)
    split = tp if section.sequence_parallel else 1
    whole, mlp = _unsplit(shape), mlp_values(shape, 3) / tp
    attention = whole / split + (kept_values(shape, fused=True) - whole) / tp - mlp
    layer, layer_input = attention + mlp, shape.hidden / split
    granularity = options.get("recompute_granularity")
    if granularity == "full":
        return in_flight * layer_input / options.get("recompute_num_layers", 1) + layer
    if granularity == "selective" and {"mlp", "moe"} & set(options.get("recompute_modules") or ()):
        return in_flight * attention + layer
    return in_flight * layer or layer
