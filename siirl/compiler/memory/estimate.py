"""What each model keeps on a rank, and when: an estimate from the model's config.json.

Counted: parameters, gradients, AdamW's two moments, gathered weights, activations of one micro-batch, the
log-prob head, the rollout's weights and KV cache. phases.py adds up what is there at once. The
benchmarks' peaks on H200s are within 15% of it (tests/unit/compiler/test_memory_phases.py).
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from siirl.compiler.memory import layer_params as of_config
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.config.batch import batch_of
from siirl.config.common import FLA, FSDPConfig, ModelConfig
from siirl.config.resolve import get
from siirl.config.roles import ROLES, role_group, role_model, token_budget, trained_group
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.dag.fields_read import uses_full_kl
from siirl.models.adapter_targets import expert_targets
from siirl.models.config_json import language_part
from siirl.models.config_values import without_value
from siirl.models.families import Family, family_of, types_with
from siirl.models.overridden import overridden
from siirl.models.sizes import RouterChoices, has_qk_norm, has_qkv_bias, head_size
from siirl.spelling import GIB

SMALL_MODEL_BYTES = 2 << 30
"""Up to so many bytes of fp32 weights a model stays whole under FSDP2 (stays_whole)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
LOGITS_CHUNK = 1 << 28
"""Logits that a log-prob head works on at a time: 1 GiB in fp32."""
KEPT_LOGITS_BYTES = 2 * GIB
"""Up to so many a training micro-batch keeps its logits for backward; else they are computed again."""
ENGINE_GRAPHS_BYTES = 9 * GIB
"""What a vLLM engine has beside its share, sleeping too: CUDA graphs, workspace; 5.5 to 12 GiB measured."""
ENGINE_CONTEXT_BYTES = 2 * GIB
"""The same of an engine without CUDA graphs (enforce_eager)."""
ENGINE_PARTS = ("share of the device", "graphs and context")
"""What a vLLM engine has on a device: not tensors of a trainer's allocator."""

Activity = Literal["idle", "forward", "update", "generate"]
"""What a model does while a node runs: nothing, a pass without gradient, a mini-batch, a rollout."""

ALWAYS: tuple[Activity, ...] = ("idle", "forward", "update", "generate")
COMPUTING: tuple[Activity, ...] = ("forward", "update")


@dataclass(frozen=True)
class ModelShape:
    """What is computed from a model's sizes."""

    family: str
    params: int
    """All, tied ones once."""
    embedding_params: int
    """Embedding and output head, tied ones once."""
    layer_params: int
    """Of the largest layer."""
    layers: int
    hidden: int
    intermediate: int
    """Width of dense MLPs."""
    vocabulary: int
    kv_width: int
    """Of all key heads together."""
    heads: int
    kv_heads: int
    tied: bool
    """Embedding and output head are one tensor."""
    experts: int
    """Of a layer that has some; 0 in a dense model."""
    top_k: int
    """Experts of each token; 0 in a dense model."""
    expert_width: int
    """Of the MLP of each expert."""
    shared_width: int
    """Of the expert that all tokens pass."""
    expert_params: int
    """Of all experts of a layer."""
    moe_layers: int
    """Layers that have experts."""
    norms: int = 2
    """Of a layer, as wide as its hidden states."""
    qk_norms: bool = False
    """Queries and keys are normed."""
    compressed: int = 0
    """Features that keys and values, and maybe queries, are made of; 0 where these are of hidden states."""
    cached: int = 0
    """Values that a rollout keeps of a token in a layer, where these are not its keys and values."""
    layer_tensors: int = 9
    """In the files, of a layer without experts."""
    gated: bool = False
    """What attention gives is multiplied by a gate as wide as its queries, which come with these."""
    nets: of_config.StateNets | None = None
    """In some layers, in the place of attention."""

    @property
    def attending(self) -> int:
        """Layers that have keys and values."""
        return self.layers - (self.nets.layers if self.nets else 0)


_FILE = "<config.json>"
"""In a text, in place of the file's path."""


@dataclass(frozen=True)
class MemoryLine:
    """Memory of one kind that a model has on the device of one rank during some of its activities."""

    model: str
    what: str
    """The kind, as reports name it."""
    num_bytes: int
    during: tuple[Activity, ...] = ALWAYS
    host: bool = False
    """In the other activities it waits in host memory."""
    share: float = 0.0
    """Of the device, besides num_bytes."""

    def on_device(self, activity: Activity, device_bytes: int) -> int:
        """Bytes on a device of this size while the model does this."""
        return (self.num_bytes + int(self.share * device_bytes)) * (activity in self.during)

    def on_host(self, activity: Activity) -> int:
        """Bytes in host memory while the model does this."""
        return self.num_bytes * (self.host and activity not in self.during)


def read_shape(cfg: Config, role: str, decoder: bool = False) -> ModelShape | str:
    """The shape of a role's model (decoder: without its tower), or why none is known: it is then left out."""
    model = role_model(cfg, role)
    directory = Path(model.path).expanduser()
    try:
        text = (directory / "config.json").read_text(encoding="utf-8")
        family = family_of(json.loads(text).get("model_type"))
    except (OSError, json.JSONDecodeError) as error:
        return f"{directory / 'config.json'} cannot be read ({type(error).__name__})"
    found = _shape_of(text, json.dumps(model.override_config, default=str), family, decoder)
    return found if isinstance(found, ModelShape) else found.replace(_FILE, str(directory / "config.json"))


@functools.lru_cache(maxsize=64)
def _shape_of(text: str, changes: str, family: Family, decoder: bool) -> ModelShape | str:
    """The shape of a model, by its config.json, override_config in JSON, and the row of its family."""
    raw = language_part(overridden(json.loads(text), json.loads(changes)))
    if not (family_of(raw.get("model_type")).counted or (decoder and family.sees_images)):
        counted = ", ".join(types_with(lambda row: row.counted))
        return f"model_type {raw.get('model_type')!r} is none of {counted}"
    problem = without_value(raw)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not problem and not isinstance(raw.get(name), int):
            problem = f"{name}={raw.get(name)!r}, which is no whole number"
    return f"{_FILE} has {problem}" if problem else model_shape(raw)


def model_shape(raw: Mapping[str, Any]) -> ModelShape:
    """Parameter counts of a Llama-shaped decoder, dense or with experts, from its config.json."""
    raw = language_part(raw)
    hidden, layers, heads = raw["hidden_size"], raw["num_hidden_layers"], raw["num_attention_heads"]
    family, head_dim = family_of(raw["model_type"]), head_size(raw)
    q_width, kv_width = heads * head_dim, (raw.get("num_key_value_heads") or heads) * head_dim
    nets = of_config.state_nets(raw)
    gated = family.delta_nets
    attention = (2 + gated) * hidden * q_width + 2 * hidden * kv_width
    latent = of_config.latent_sizes(raw) if family.latent is not None else {}
    if latent:
        attention, kv_width = latent.pop("params"), latent.pop("kv_width")
    qkv_bias, qk_norms = has_qkv_bias(raw), has_qk_norm(raw)
    output_bias = raw.get("attention_out_bias") or (qkv_bias and family.output_bias)
    attention += (q_width + 2 * kv_width) * bool(qkv_bias) + hidden * bool(output_bias)
    attention += qk_norms * (q_width + kv_width if family.qk_norm == "whole" else 2 * head_dim)
    attention += heads * family.sinks
    norms = 2 * bool(family.mlp_norm) + len(family.outer_norms)
    of_norm = hidden * family.norms_weigh
    mixers = [nets.params] * nets.layers if nets else []  # in whatever order
    mixers += [attention] * (layers - len(mixers))
    per_layer = [mixer + norms * of_norm + of_config.mlp_params(raw, i) for i, mixer in enumerate(mixers)]
    moe_layers = sum(of_config.has_experts(raw, index) for index in range(layers))
    experts = of_config.experts_of(raw) if moe_layers else 0
    dense = of_config.dense_width(raw)
    expert_width = (raw.get(family.experts.width) if family.experts else None) or dense
    embedding = raw["vocab_size"] * hidden
    copies = 1 if raw.get("tie_word_embeddings") else 2
    return ModelShape(
        family=raw["model_type"],
        params=sum(per_layer) + of_norm + copies * embedding,
        embedding_params=copies * embedding,
        layer_params=max(per_layer, default=0),
        layers=layers,
        hidden=hidden,
        intermediate=dense,
        vocabulary=raw["vocab_size"],
        kv_width=kv_width,
        heads=heads,
        kv_heads=heads if latent else raw.get("num_key_value_heads") or heads,
        tied=copies == 1,
        experts=experts,
        top_k=raw["num_experts_per_tok"] if moe_layers else 0,
        expert_width=expert_width,
        shared_width=of_config.shared_width(raw) if moe_layers else 0,
        expert_params=experts * of_config.expert_params(raw, expert_width),
        moe_layers=moe_layers,
        norms=norms,
        qk_norms=qk_norms,
        layer_tensors=7
        + norms * family.norms_weigh
        + 2 * qk_norms
        + 3 * bool(qkv_bias)
        + bool(output_bias)
        - family.fused_mlp
        - 2 * family.fused_qkv
        + (3 if raw.get("q_lora_rank") else 1) * bool(latent),
        gated=gated,
        nets=nets,
        **latent,
    )


def stays_whole(params: int, shards: int, fsdp: FSDPConfig) -> bool:
    """Whether FSDP2 keeps a model of so many parameters whole on each of the ranks that share its weights.

    In a mini-batch weights are then gathered once, and gradients added up whole, in reduce_dtype, and reduced
    once, in the last backward pass; in a pass without gradient weights are gathered once, too.
    """
    return shards == 1 or not fsdp.reshard_after_forward or 4 * params <= SMALL_MODEL_BYTES


def fsdp_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int) -> list[MemoryLine]:
    """What one rank holds of a model under FSDP2.

    A model that stays whole gathers all layers; others two at a time. Embedding and head stay gathered in a
    mini-batch. Whole gradients go as the ranks' shards of them come: counted is what they are more. The
    gradient of a layer, which is large where there are experts, is whole before ranks reduce it. Experts that
    are sharded over ranks are not gathered: a rank has its own in the compute type, those of one layer, or of
    all that backward needs.
    """
    fsdp, name = role_group(cfg, model.role).fsdp_config, model.name
    master, compute = BYTES[fsdp.model_dtype], BYTES[fsdp.mixed_precision.param_dtype]
    shards = model.dims.weight_shards
    sharded = shape.expert_params if model.dims.ep > 1 else 0
    gathered = shape.params - sharded * shape.moe_layers
    whole = stays_whole(shape.params, shards, fsdp)
    adapter = adapter_params(role_model(cfg, model.role), shape) if model.trains else 0
    own = (shape.params if model.base in (None, name) else 0) + adapter
    lines = [offloadable(name, "parameters", -(-own // shards) * master, fsdp.param_offload, COMPUTING)]
    if model.trains:
        trained = -(-(adapter or shape.params) // shards)
        held = 2 * trained
        if trained_group(cfg, model.role).optim.name == "muon":
            held = trained + -(-shape.embedding_params // shards)
            lines.append(
                MemoryLine(name, "orthogonal update", 6 * largest_matrix(shape) * master, ("update",))
            )
        moments = offloadable(name, "optimizer", held * master, fsdp.optimizer_offload, ("update",))
        lines += [MemoryLine(name, "gradients", trained * master, ("update",)), moments]
        reduced, summed = BYTES[fsdp.mixed_precision.reduce_dtype], adapter or gathered
        if whole and (more := summed * reduced - -(-summed // shards) * master) > 0:
            lines.append(MemoryLine(name, "whole gradients", more, ("update",)))
        if shape.experts and not adapter:
            whole_layer = (shape.layer_params - sharded) * (compute + reduced)
            lines.append(MemoryLine(name, "gradients of a layer", whole_layer, ("update",)))
    if not whole:
        gathered = 2 * (shape.layer_params - sharded) + shape.embedding_params
    stays = cfg.service.enable and len(model.ranks) == 1  # FSDPEngine.passing
    lines.append(MemoryLine(name, "gathered layers", gathered * compute, ALWAYS if stays else COMPUTING))
    if sharded:
        lines += _sharded_lines(model, cfg, shape, compute)
    keys, attended = role_model(cfg, model.role), with_repeated_heads(shape, model.dims.cp)
    fused = keys.fuses_layers
    of_layer = kept_values(attended, fused)
    if keys.compile_layers and not shape.qk_norms:  # values come in one tensor with both
        of_layer += query_width(attended) + attended.kv_width
    if model.dims.cp > 1:  # what attention gives, before it is exchanged and after
        of_layer += query_width(shape)
    kept, passing, largest = of_layer * shape.attending, forward_values(shape, fused), of_layer
    if nets := shape.nets:
        row = longest_row(cfg, model.role) if keys.attention_kernels == FLA else None
        of_net, through = nets.of_token(compute, row)
        of_net += kept_beside_attention(shape, fused)
        kept, largest = kept + of_net * nets.layers, max(largest, of_net)
        passing = max(passing, 4 * shape.hidden + through)
    if keys.enable_gradient_checkpointing:
        kept = shape.layers * shape.hidden + largest
    lines += activation_lines(model, cfg, kept, passing, compute)
    if model.head == "lm":
        lines += head_lines(model, cfg, shape.vocabulary, shape.hidden, compute)
    return (
        lines
        + full_kl_lines(model, cfg, shape, rows_per_shard, compute)
        + teacher_lines(model, cfg, shape, rows_per_shard)
        + expert_lines(model, cfg, shape, rows_per_shard)
    )


def _sharded_lines(model: ModelPlan, cfg: Config, shape: ModelShape, width: int) -> list[MemoryLine]:
    """A rank's experts in the compute type: of a layer, and in an update of all that are not recomputed."""
    own, line = shape.expert_params // model.dims.ep * width, MemoryLine
    lines = [line(model.name, "experts in compute", own, ("forward",))]
    if model.trains:
        layers = 1 if role_model(cfg, model.role).enable_gradient_checkpointing else shape.moe_layers
        gradient = own * (role_model(cfg, model.role).lora_rank == 0)
        lines.append(line(model.name, "experts in compute", own * layers + gradient, ("update",)))
    return lines


def offloadable(
    model: str, what: str, num_bytes: int, offload: bool, during: tuple[Activity, ...]
) -> MemoryLine:
    """Memory that is on the device always or, offloaded, during some activities."""
    return MemoryLine(model, what, num_bytes, during if offload else ALWAYS, host=offload)


def with_repeated_heads(shape: ModelShape, ranks: int) -> ModelShape:
    """The shape with the keys and values that attention has where so many ranks take whole heads of it."""
    times = math.lcm(shape.kv_heads, ranks) // shape.kv_heads
    return replace(shape, kv_heads=shape.kv_heads * times, kv_width=shape.kv_width * times)


def activation_lines(
    model: ModelPlan, cfg: Config, kept: float, passing: float, width: int
) -> list[MemoryLine]:
    """Activations of a rank's tokens of a micro-batch: `kept` values of each for backward, `passing` without
    gradient."""
    line = MemoryLine
    tokens = _own_tokens(model, cfg, trains=False)
    lines = [line(model.name, "activations", int(tokens * passing) * width, ("forward",))]
    if model.trains:
        tokens = _own_tokens(model, cfg, trains=True)
        lines.append(line(model.name, "activations", int(tokens * kept) * width, ("update",)))
    return lines


def head_lines(model: ModelPlan, cfg: Config, vocabulary: int, hidden: int, width: int) -> list[MemoryLine]:
    """The log-prob head of so many words on a rank: logits, whole where they are few, else a chunk of them;
    in a mini-batch its weight's gradient too, in fp32 and twice in the compute type."""
    forward = min(LOGITS_CHUNK, _own_tokens(model, cfg, trains=False) * vocabulary)
    lines = [MemoryLine(model.name, "log-prob head", forward * width, ("forward",))]
    if model.trains:
        logits = _own_tokens(model, cfg, trains=True) * vocabulary
        kept = logits if logits * width <= KEPT_LOGITS_BYTES else min(LOGITS_CHUNK, logits)
        update = kept * width + vocabulary * hidden * (4 + 2 * width)
        lines.append(MemoryLine(model.name, "log-prob head", update, ("update",)))
    return lines


def largest_matrix(shape: ModelShape) -> int:
    """Numbers of the largest matrix of a layer without experts."""
    family, keys = family_of(shape.family), 2 * shape.kv_width
    attention = (1 + shape.gated) * query_width(shape) + keys * family.fused_qkv
    return shape.hidden * max(attention, (1 + family.fused_mlp) * shape.intermediate)


def query_width(shape: ModelShape) -> int:
    """Features of all query heads together."""
    return shape.kv_width // shape.kv_heads * shape.heads


def kept_values(shape: ModelShape, fused: bool) -> int:
    """Values per token that a layer keeps for its backward pass, of the compute type's width.

    Fused (Liger, the compiler, Megatron-Core): norms keep input and output (4 h of two); norms of query and
    key their input (q + k); attention its inputs and output (2 q + 2 k); the MLP gate, up and their product.
    Without, each norm keeps a copy in fp32 and the normalised input, and the activation its output.
    """
    q_width = query_width(shape)
    qk_norm = (q_width + shape.kv_width) * shape.qk_norms
    attention = (2 + 3 * shape.gated) * q_width + 2 * shape.kv_width + 2 * shape.compressed
    return kept_beside_attention(shape, fused) + (1 if fused else 3) * qk_norm + attention


def kept_beside_attention(shape: ModelShape, fused: bool) -> int:
    """Of them those of the layer's norms and MLP."""
    each, widths = (2, 3) if fused else (4, 4)
    return each * shape.norms * shape.hidden + mlp_values(shape, widths)


def forward_values(shape: ModelShape, fused: bool) -> int:
    """Values per token at the fullest point of a pass without gradient, inside an MLP."""
    return 4 * shape.hidden + mlp_values(shape, 3 if fused else 4)


def mlp_values(shape: ModelShape, widths: int) -> int:
    """Values that the MLP of a layer has of a token, so many of its width; each chosen expert gets a copy."""
    if not shape.experts:
        return widths * shape.intermediate
    return shape.top_k * (widths * shape.expert_width + 2 * shape.hidden) + widths * shape.shared_width


def full_kl_lines(
    model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int, width: int
) -> list[MemoryLine]:
    """What the KL over the whole vocabulary adds: the reference's last hidden states of all rows of a rank,
    on the host until the update; at the actor those of a micro-batch, and the reference's output layer.

    width: bytes of a number in the type that the model computes in.
    """
    if not uses_full_kl(cfg) or not ((model.trains and model.is_policy) or model.is_reference):
        return []
    tokens = rows_per_shard * cfg.actor_rollout_ref.rollout.response_length
    if model.is_reference:
        return [MemoryLine(model.name, "hidden states", tokens * shape.hidden * width, (), host=True)]
    tokens = min(tokens, micro_batch_tokens(model, cfg, trains=True))
    words = -(-shape.vocabulary // model.dims.tp)
    return [MemoryLine(model.name, "hidden states", (words + tokens) * shape.hidden * width)]


def teacher_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int) -> list[MemoryLine]:
    """What distributions of teachers add: those of all rows of a rank, on the host until the update, at each
    teacher (of another tokenizer twice: by its words, and by the policy's) and at the policy (moved there, or
    mixed); at the policy on the device those of a micro-batch by both, their gradient, and what the
    divergence computes of them."""
    top_k = cfg.teacher.top_k if model.is_teacher else cfg.actor_rollout_ref.actor.distill.top_k
    learns = model.trains and model.is_policy and cfg.actor_rollout_ref.actor.distribution
    if top_k == SAMPLED or not (model.is_teacher or learns):
        return []
    each = distribution_bytes(top_k, shape.vocabulary)
    tokens = rows_per_shard * cfg.actor_rollout_ref.rollout.response_length
    waiting = MemoryLine(model.name, "distributions", tokens * each, (), host=True)
    if model.is_teacher:
        twice = replace(waiting, num_bytes=2 * waiting.num_bytes)
        return [twice if cfg.teacher.is_aligned else waiting]
    width = shape.vocabulary if top_k == WHOLE else min(top_k, shape.vocabulary)
    tokens = min(tokens, micro_batch_tokens(model, cfg, trains=True))
    computed = tokens * (each + width * 3 * BYTES["float32"])
    return [waiting, MemoryLine(model.name, "distributions", computed)]


def expert_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows_per_shard: int) -> list[MemoryLine]:
    """The experts that tokens were computed by, of all rows of a rank, on the host until the update."""
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    if actor.router_replay.mode == "disabled" or not (model.is_policy and model.trains):
        return []
    choices = RouterChoices(shape.moe_layers, shape.top_k, shape.experts)
    tokens = rows_per_shard * (rollout.prompt_length + rollout.response_length)
    return [MemoryLine(model.name, "chosen experts", tokens * choices.token_bytes, (), host=True)]


def distribution_bytes(top_k: int, vocabulary: int) -> int:
    """What a teacher says of one token: log-probs of all words; or of the likeliest, and which they are."""
    if top_k == WHOLE:
        return vocabulary * BYTES["float32"]
    return min(top_k, vocabulary) * (BYTES["float32"] + 8)


def adapter_params(model: ModelConfig, shape: ModelShape) -> int:
    """Numbers in a LoRA adapter, those on experts included; fewer target_modules may have fewer."""
    q_width = shape.hidden if not shape.heads else query_width(shape)
    queries = q_width * (1 + shape.gated)
    widths = [(shape.hidden, queries), (q_width, shape.hidden), *2 * [(shape.hidden, shape.kv_width)]]
    sides = shape.attending * sum(map(sum, widths))
    if not shape.experts:
        sides += 3 * shape.layers * (shape.hidden + shape.intermediate)
        sides += shape.nets.layers * shape.nets.adapted if shape.nets else 0
    return model.lora_rank * sides + expert_adapter_params(model, shape)


def expert_adapter_params(model: ModelConfig, shape: ModelShape) -> int:
    """Those on matrices of experts."""
    matrices = len(expert_targets(shape.family, model.target_modules)) * shape.moe_layers * shape.experts
    return model.lora_rank * matrices * (shape.hidden + shape.expert_width)


def micro_batch_tokens(model: ModelPlan, cfg: Config, trains: bool) -> int:
    """The most tokens of a micro-batch: whole rows of the longest kind, at least one.

    trains: in a mini-batch, not in a pass without gradient.
    """
    row = longest_row(cfg, model.role)
    keys = ROLES[model.role].train if trains else ROLES[model.role].forward
    assert keys is not None, f"{model.name} computes on no training engine"
    dynamic, rows = get(cfg, keys.dynamic), get(cfg, keys.max_rows)
    return (max(token_budget(cfg, model.role, keys) // row, 1) if dynamic else rows) * row


def longest_row(cfg: Config, role: str) -> int:
    """Tokens of the longest row that a role's model computes."""
    rollout = cfg.actor_rollout_ref.rollout
    row = rollout.prompt_length + rollout.response_length
    own = ROLES[role].own_length
    return (get(cfg, own) or row) if own else row


def _own_tokens(model: ModelPlan, cfg: Config, trains: bool) -> int:
    """The most tokens of a micro-batch on one of the ranks that share its rows."""
    return -(-micro_batch_tokens(model, cfg, trains) // model.dims.cp)


def micro_batches(model: ModelPlan, cfg: Config) -> int:
    """Micro-batches of a mini-batch on a rank of a trained model; by token budget, of the longest rows."""
    rollout = cfg.actor_rollout_ref.rollout
    row = rollout.prompt_length + rollout.response_length
    rows = -(-batch_of(cfg, model.role).mini_rows // model.dims.dp)
    return -(-rows * row // micro_batch_tokens(model, cfg, trains=True))
