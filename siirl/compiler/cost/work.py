"""What one rank has to do in a pass, a rollout or a weight sync: amounts of each kind of work. Pure.

An amount is in the unit of the constant of its name (devices.py), so that a time is a sum of amounts over
rates, and the constants are fitted to measured times by least squares (benchmarks/fit_costs.py).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from siirl.compiler.backends import backend_of
from siirl.compiler.cost.flow import Flow, flow
from siirl.compiler.cost.lengths import RowTokens, decoding
from siirl.compiler.memory.estimate import (
    BYTES,
    ENGINE_CONTEXT_BYTES,
    KEPT_LOGITS_BYTES,
    Activity,
    MemoryLine,
    ModelShape,
    kept_values,
    query_width,
    stays_whole,
    with_repeated_heads,
)
from siirl.compiler.plan import LinkPlan, ModelPlan
from siirl.config import Config
from siirl.config.batch import batch_of
from siirl.config.resolve import COMPUTE_DTYPE, get
from siirl.config.roles import ROLES, role_group, role_model, token_budget
from siirl.parallel.pipeline_layers import split_layers
from siirl.spelling import GIB

Work = dict[str, float]
"""Name of a constant -> amount."""

_TRAINED_TWICE, _FROZEN_ONCE = 2.0, 1.0
"""Matrix products of a backward pass over those of the forward one: of inputs and weights, or of inputs."""
_ATTENTION_BACKWARD = 2.5
"""Five products instead of two (Dao, "FlashAttention-2", 2023)."""
_ACTIVATIONS_BACKWARD = 3.0
"""Each activation is read again; its gradient is written, and read."""
_OPTIMIZER_BYTES = 28
"""AdamW in fp32, of a parameter: its gradient read; itself and two moments read and written."""
_ACCUMULATED_BYTES = 10
"""A parameter's gradient in bf16 read, and added to one in fp32."""

LEAST_SAVING = 0.1
"""As in siirl/engines/train/packed/micro_batches.py; a test holds them equal."""


@dataclass(frozen=True)
class PackedRows:
    """What training engines compute of rows: of those that share a prompt, that once."""

    tokens: RowTokens
    together: int
    """Rows that have one prompt between them; 1: each has its own."""

    @property
    def row(self) -> float:
        """Tokens that are computed of a row."""
        return self.tokens.prompt / self.together + self.tokens.response

    @property
    def square(self) -> float:
        """Pairs of tokens in a row's attention, were it not causal."""
        prompt, response = self.tokens.prompt, self.tokens.response
        return prompt**2 / self.together + 2 * prompt * response + self.tokens.response_square


def packed_rows(model: ModelPlan, cfg: Config, tokens: RowTokens) -> PackedRows:
    """How a backend packs the rows of a prompt: together, where that pays and a micro-batch has room."""
    keys = ROLES[model.role].train if model.trains else ROLES[model.role].forward
    samples = batch_of(cfg).samples
    saved = (samples - 1) / samples * tokens.prompt / tokens.row
    if not backend_of(model).shares_prompts or saved < LEAST_SAVING or _compute_bytes(model, cfg) != 2:
        return PackedRows(tokens, 1)
    assert keys is not None, f"{model.name} computes on no training engine"
    if get(cfg, keys.dynamic):
        room = (token_budget(cfg, model.role, keys) - tokens.prompt) // tokens.response
    else:
        room = get(cfg, keys.max_rows)
    return PackedRows(tokens, max(1, min(samples, room)))


@dataclass(frozen=True)
class Pass:
    """A pass of a model over the rows of a step: what a rank of each pipeline stage does."""

    stages: tuple[Work, ...]
    bubble: float
    """Time in which a stage waits for others, over its own."""


def model_pass(
    model: ModelPlan,
    cfg: Config,
    shape: ModelShape,
    packed: PackedRows,
    share: float,
    machine: int,
    today: bool = True,
) -> Pass:
    """One pass over a share of a step's rows, with backward and optimizer steps if the model trains them.

    share: of the rows; the epochs of a trained model are counted here. machine: devices of one machine.
    today: see step_time.
    """
    batch, dims = batch_of(cfg, model.role if model.trains else "actor"), model.dims
    epochs = batch.epochs if model.trains else 1
    rows = math.ceil(batch.rows / dims.dp) * share * epochs
    micro_rows = _micro_rows(model, cfg, packed)
    steps = batch.optimizer_steps if model.trains else 1
    micro_batches = steps * math.ceil(rows / steps / micro_rows) if rows else 0
    counts = _layers_of_stages(model, cfg, shape)
    stages = []
    for stage, layers in enumerate(counts):
        last = stage == len(counts) - 1
        work = _layers_work(model, cfg, shape, layers, rows, packed, today)
        if last and model.head == "lm":
            _add(work, _head_work(model, cfg, shape, rows, packed.tokens, micro_rows, today))
        _add(work, _weights_work(model, cfg, shape, layers / shape.layers, micro_batches, steps))
        _add(work, _messages(model, cfg, shape, layers, rows * packed.row, micro_batches, steps, machine))
        passes = 1 + (_TRAINED_TWICE + _recomputes(model, cfg)) * model.trains
        _add(work, {"launch": micro_batches * passes * layers})
        stages.append(work)
    waiting = (dims.pp - 1) * steps / max(1, micro_batches * dims.vpp)
    return Pass(tuple(stages), waiting)


def _micro_rows(model: ModelPlan, cfg: Config, packed: PackedRows) -> int:
    """Rows of a micro-batch: so many, or as many as the token budget takes."""
    keys = ROLES[model.role].train if model.trains else ROLES[model.role].forward
    assert keys is not None, f"{model.name} computes on no training engine"
    if get(cfg, keys.dynamic):
        return max(1, int(token_budget(cfg, model.role, keys) / packed.row))
    return get(cfg, keys.max_rows)


def _layers_of_stages(model: ModelPlan, cfg: Config, shape: ModelShape) -> list[int]:
    if model.dims.pp == 1:
        return [shape.layers]
    options = role_group(cfg, model.role).megatron.override_transformer_config
    return [sum(chunks) for chunks in split_layers(shape.layers, model.dims.pp, model.dims.vpp, options)]


def _add(work: Work, more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        work[name] = work.get(name, 0.0) + amount


def active_layer_params(shape: ModelShape) -> float:
    """Parameters of a layer, on average, that a token is multiplied by: of its experts those chosen."""
    idle = shape.moe_layers * shape.expert_params * (1 - shape.top_k / max(1, shape.experts))
    return (shape.params - shape.embedding_params - idle) / shape.layers


def _recomputes(model: ModelPlan, cfg: Config) -> bool:
    """Whether whole layers are computed again in the backward pass."""
    return backend_of(model).recomputes(cfg, model.role)


def _layers_work(
    model: ModelPlan,
    cfg: Config,
    shape: ModelShape,
    layers: int,
    rows: float,
    packed: PackedRows,
    today: bool,
) -> Work:
    """Matrix products, attention and activations of a stage's layers on a rank."""
    dims, keys = model.dims, role_model(cfg, model.role)
    split, has_adapter = dims.tp * dims.cp, keys.lora_rank > 0
    by_keys = backend_of(model).layers_by_keys
    fused = by_keys and keys.fuses_layers
    compiled = keys.compile_layers if by_keys else today
    products, attention, moved = 1.0, 1.0, 1.0
    if model.trains:
        again = 1.0 if _recomputes(model, cfg) else 0.0
        products += again + (_FROZEN_ONCE if has_adapter else _TRAINED_TWICE)
        attention += again + _ATTENTION_BACKWARD
        moved += again + _ACTIVATIONS_BACKWARD
    per_layer = 2 * active_layer_params(shape) * rows * packed.row
    causal = 2 * packed.square * query_width(shape) * rows * shape.attending / shape.layers
    if shape.nets:  # as model_flops has them
        per_layer += (
            shape.nets.flops * shape.nets.state * rows * packed.row * shape.nets.layers / shape.layers
        )
    kept = kept_values(shape, fused) * rows * packed.row * _compute_bytes(model, cfg)
    routed = shape.moe_layers / shape.layers * shape.top_k * shape.hidden * _compute_bytes(model, cfg)
    routed *= rows * packed.row * dims.etp  # each rank that has a part of an expert has all of its tokens
    return ({"experts": products * layers * routed / split} if shape.experts else {}) | {
        "matmul": products * layers * per_layer / split,
        "attention": attention * layers * causal / split,
        "activations_compiled" if compiled else "activations": moved * layers * kept / split,
    }


def _compute_bytes(model: ModelPlan, cfg: Config) -> int:
    return BYTES[get(cfg, f"{ROLES[model.role].group}.{COMPUTE_DTYPE[model.backend]}")]


def _head_work(
    model: ModelPlan,
    cfg: Config,
    shape: ModelShape,
    rows: float,
    tokens: RowTokens,
    micro_rows: int,
    today: bool,
) -> Work:
    """Logits of response tokens, kept for the backward pass; before today, not where they are many."""
    products = 1.0
    if model.trains:
        logits = micro_rows * tokens.response * shape.vocabulary // model.dims.tp
        again = not today and logits * _compute_bytes(model, cfg) > KEPT_LOGITS_BYTES
        products += 2 + again
    split = model.dims.tp * model.dims.cp
    return {"matmul": products * 2 * shape.vocabulary * shape.hidden * rows * tokens.response / split}


def _weights_work(
    model: ModelPlan, cfg: Config, shape: ModelShape, part: float, micro_batches: int, steps: int
) -> Work:
    """Weights, gradients and moments that are read and written: each micro-batch, and each optimizer step."""
    dims, width = model.dims, _compute_bytes(model, cfg)
    experts = shape.moe_layers * shape.expert_params * part
    whole, dense = shape.params * part / dims.tp, (shape.params * part - experts) / dims.tp
    experts /= dims.ep * (dims.tp if backend_of(model).gathers_weights else dims.etp)
    params = dense + experts
    gathers = backend_of(model).gathers_weights
    cast = BYTES[role_group(cfg, model.role).fsdp_config.model_dtype] if gathers else 0
    moved = micro_batches * params * (cast + width) * (2 if model.trains else 1)
    if model.trains and not role_model(cfg, model.role).lora_rank:
        updated = dense / (dims.dp * dims.cp) + experts / dims.expert_dp
        if gathers:
            updated = whole / dims.weight_shards
        moved += micro_batches * params * _ACCUMULATED_BYTES + steps * updated * _OPTIMIZER_BYTES
    return {"memory": moved}


def _messages(
    model: ModelPlan,
    cfg: Config,
    shape: ModelShape,
    layers: int,
    tokens: float,
    micro_batches: int,
    steps: int,
    machine: int,
) -> Work:
    """Bytes that a rank receives, by what they travel on: links within a machine, or the network."""
    dims, width, work = model.dims, _compute_bytes(model, cfg), Work()
    params = shape.params * layers / shape.layers / dims.tp
    if backend_of(model).gathers_weights:
        shards = dims.weight_shards
        received = (shards - 1) / shards
        whole = stays_whole(shape.params, shards, role_group(cfg, model.role).fsdp_config)
        gathers = steps if whole else micro_batches
        each = width + ((0 if whole else width) + 4) * model.trains  # again in backward, and gradients
        sharded = shape.moe_layers * shape.expert_params * layers / shape.layers if dims.ep > 1 else 0.0
        _add(work, {_way(shards, machine): gathers * (params - sharded) * each * received})
        if dims.ep > 1:
            passes = (2 + _recomputes(model, cfg)) if model.trains else 1
            split = tokens / dims.cp * shape.hidden * width
            _add(work, {_way(shards, machine): passes * _to_experts(shape, layers, split, dims.ep)})
        if model.trains and dims.dp_replicate > 1:
            copies = dims.dp_replicate
            summed = 8 * params / shards * (copies - 1) / copies
            _add(work, {_way(dims.world, machine): steps * summed})
        if dims.cp > 1:
            passes = (2 + _recomputes(model, cfg)) if model.trains else 1
            values = 2 * query_width(shape) + 2 * with_repeated_heads(shape, dims.cp).kv_width
            sent = values * width * tokens / dims.cp * (dims.cp - 1) / dims.cp
            _add(work, {_way(dims.cp, machine): passes * layers * sent})
        return work
    split = tokens / dims.cp * shape.hidden * width
    if dims.tp > 1:
        exchanges = _tensor_parallel_exchanges(model, cfg)
        _add(work, {_way(dims.tp, machine): exchanges * layers * split * (dims.tp - 1) / dims.tp})
    there_and_back = 3 if model.trains else 1
    if dims.cp > 1:
        keys = 2 * shape.kv_width / dims.tp * width * tokens * (dims.cp - 1) / dims.cp
        _add(work, {_way(dims.tp * dims.cp, machine): there_and_back * layers * keys})
    if dims.ep > 1:
        sent = _to_experts(shape, layers, split / dims.tp, dims.ep)
        _add(work, {_way(dims.etp * dims.ep, machine): there_and_back * sent})
    if dims.pp > 1:
        _add(work, {_way(dims.world, machine): (2 if model.trains else 1) * split / dims.tp})
    if model.trains and dims.dp * dims.cp > 1 and not role_model(cfg, model.role).lora_rank:
        of_experts = shape.moe_layers * shape.expert_params * layers / shape.layers
        parts = (
            (params - of_experts / dims.tp, dims.dp * dims.cp),
            (of_experts / (dims.ep * dims.etp), dims.expert_dp),
        )
        summed = (4 + width) * sum(size * (copies - 1) / copies for size, copies in parts)
        _add(work, {_way(dims.world // dims.pp, machine): steps * summed})
    return work


def _to_experts(shape: ModelShape, layers: int, token_bytes: float, ranks: int) -> float:
    """Bytes of a rank's tokens to the ranks of their experts, and back, in so many layers."""
    return 2 * shape.top_k * token_bytes * (ranks - 1) / ranks * layers * shape.moe_layers / shape.layers


def _tensor_parallel_exchanges(model: ModelPlan, cfg: Config) -> int:
    """Gathers and scatters of activations in a layer: two and two forward, as many backward.

    With sequence parallelism two more, as the backward pass gathers the inputs of products again.
    """
    if not model.trains:
        return 4
    sequence = role_group(cfg, model.role).megatron.sequence_parallel
    return 8 + 2 * sequence + 4 * _recomputes(model, cfg)


def _way(span: int, machine: int) -> str:
    """What messages of ranks that lie so far apart travel on."""
    return "link" if span <= machine else "network"


def rollout_work(
    model: ModelPlan,
    cfg: Config,
    shape: ModelShape,
    tokens: RowTokens,
    rows: int,
    device_bytes: float,
    flops_of_a_byte: float,
    machine: int,
) -> Work:
    """What a rank of a vLLM engine does for the responses of a batch: of the engine with the longest one.

    rows: in flight on the engine, those of a surplus too, of which a step takes its share.
    """
    rollout, tp = cfg.actor_rollout_ref.rollout, model.dims.tp
    width, row_bytes = BYTES[rollout.dtype], _row_bytes(cfg, shape, tp)
    own, found = _own(cfg, rows), engine_flow(model, cfg, shape, tokens, rows, device_bytes)
    read = own / batch_of(cfg).samples * tokens.prompt + found.read_again
    prefill = 2 * active_layer_params(shape) * shape.layers * read
    steps, products = 0.0, 0.0
    for more, together in found.spans:
        steps += more
        products += more * _weights_of_a_token(shape, width, together, flops_of_a_byte) / tp
    cached = tokens.prompt * tokens.response + tokens.response_square / 2
    work = {
        "memory": products + row_bytes * own * cached,
        "matmul": prefill / tp,
        "decode_layer": steps * shape.layers,
    }
    if tp > 1:
        work["decode_exchange"] = 2.0 * steps * shape.layers
    if tp > machine:  # what an all-reduce sums goes around a ring twice; the first byte, up a tree and down
        work["network"] = 4.0 * shape.layers * own * tokens.response * shape.hidden * width * (tp - 1) / tp
        work["decode_hop"] = work["decode_exchange"] * 2 * math.log2(tp / machine)
    return work


def engine_flow(
    model: ModelPlan, cfg: Config, shape: ModelShape, tokens: RowTokens, rows: int, device_bytes: float
) -> Flow:
    """What an engine decodes in a step. rows: as for rollout_work; those that the KV cache or max_num_seqs
    does not admit wait for others."""
    rollout, tp = cfg.actor_rollout_ref.rollout, model.dims.tp
    weights = shape.params * BYTES[rollout.dtype] / tp
    cache = max(rollout.device_share * device_bytes - weights - ENGINE_CONTEXT_BYTES, GIB)
    room = int(cache / _row_bytes(cfg, shape, tp) / tokens.held)
    at_once = max(1, min(rows, rollout.max_num_seqs, room))
    own, samples, engines = _own(cfg, rows), batch_of(cfg).samples, model.dims.dp
    if not rollout.max_lag:
        return Flow(decoding(tokens, own, at_once, engines), 0.0, 0.0)
    groups = max(1, own // samples)
    return flow(tokens, groups, samples, at_once, engines, rollout.surplus, rollout.max_lag)


def _own(cfg: Config, rows: int) -> int:
    """Rows that an engine gives in a step, of those that are in flight on it."""
    return math.ceil(rows / (1 + cfg.actor_rollout_ref.rollout.surplus))


def _row_bytes(cfg: Config, shape: ModelShape, tp: int) -> float:
    """Keys and values of a token."""
    width = BYTES[cfg.actor_rollout_ref.rollout.dtype]
    return shape.attending * (shape.cached or 2 * shape.kv_width / min(tp, shape.kv_heads)) * width


def _weights_of_a_token(shape: ModelShape, width: int, together: float, flops_of_a_byte: float) -> float:
    """Bytes that are read for the next token of so many rows: weights, of experts those that some row chose;
    where products take longer, what could be read meanwhile."""
    seen = shape.params - (0 if shape.tied else shape.vocabulary * shape.hidden)
    if shape.experts:
        seen -= shape.moe_layers * shape.expert_params * (1 - shape.top_k / shape.experts) ** together
    computed = 2 * (active_layer_params(shape) * shape.layers + shape.vocabulary * shape.hidden) * together
    return max(seen * width, computed / flops_of_a_byte)


def sync_work(link: LinkPlan, source: ModelPlan, cfg: Config, shape: ModelShape, machine: int) -> Work:
    """What it takes to bring a rollout engine to its trainer's weights: tensors by their number, and what a
    rank gathers of them."""
    shared = 4 if shape.shared_width else 0  # an expert and its gate
    of_experts = shape.moe_layers * (3 * shape.experts + 1 - 3 + shared)  # and the router, in place of an MLP
    work = {"sync_tensor": float(shape.layers * shape.layer_tensors + of_experts + 2 + (not shape.tied))}
    if len(link.ranks) > 1:
        work["sync_ranks"] = 1.0
    width = BYTES[cfg.actor_rollout_ref.rollout.dtype]
    if link.kind != "local":
        way = _way(max(link.ranks) - min(link.ranks) + 1, machine)
        return work | {way: float(shape.params * width)}
    _add(work, _gathered(source, shape, width, machine))
    return work


def _gathered(source: ModelPlan, shape: ModelShape, width: int, machine: int) -> Work:
    """Bytes that a trainer's rank receives until it has seen all weights: of shards, then of other stages."""
    dims, experts = source.dims, shape.moe_layers * shape.expert_params
    cut = [(shape.params - experts, dims.tp), (experts, dims.ep * dims.etp)]
    if backend_of(source).gathers_weights:
        cut = [(shape.params, dims.weight_shards)]
    work = Work()
    for params, shards in cut:
        of_stage = params * width / dims.pp
        received = {_way(shards, machine): of_stage * (shards - 1) / shards}
        _add(received, {_way(dims.world, machine): of_stage * (dims.pp - 1)})
        _add(work, {way: amount for way, amount in received.items() if amount})
    return work


def host_work(lines: Iterable[MemoryLine], activity: Activity) -> Work:
    """Bytes of offloaded parts that come to a device for what a model does, and go back.

    lines: those of parts that are in host memory otherwise.
    """
    away = sum(line.num_bytes for line in lines if activity in line.during)
    return {"host": 2.0 * away} if away else {}
