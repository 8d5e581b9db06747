"""The stages of a Megatron model on this rank, with their weights read from a Hugging Face directory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, mlp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers import PretrainedConfig

from siirl.compiler.plan import Head
from siirl.engines.train.hf_model import VALUE_HEAD
from siirl.engines.train.megatron.clamped_experts import BiasedRouter, ClampedExperts, SinkAttention
from siirl.engines.train.megatron.fused import gated_unit
from siirl.engines.train.megatron.latent_attention import LatentAttention
from siirl.engines.train.megatron.layers import (
    Attention,
    GroupedExperts,
    HeadNorm,
    Layer,
    LayerNorm,
    NoNorm,
    PackedAttention,
    PlainLayerNorm,
    PlainNorm,
    RMSNorm,
)
from siirl.engines.train.megatron.linear_adapters import (
    ExpertAdapter,
    LinearAdapter,
    freeze_base,
    put_adapter,
)
from siirl.engines.train.megatron.parameter_entries import Entry, hf_shapes, runs
from siirl.engines.train.megatron.pipeline_stage import STAGES, Stage, freeze_padding_token, scale_embedding
from siirl.engines.train.megatron.scope import MegatronScope
from siirl.engines.train.megatron.stage_routers import GroupRouter
from siirl.engines.train.megatron.vision_stage import VisionStage
from siirl.engines.train.megatron.weights import embedding_scale, entries, family_of, tied_head
from siirl.engines.train.megatron.whole_norms import WholeNormAttention
from siirl.errors import DataError
from siirl.model_files.directory import check_weight_files
from siirl.model_files.weight_slices import SafetensorsFolder
from siirl.parallel.dims import ParallelDims


def build_stages(
    hf: PretrainedConfig, head: Head, config: TransformerConfig, scope: MegatronScope, dims: ParallelDims
) -> list[Stage]:
    """The model chunks of this rank, in order, without weights. Call it inside the scope."""
    place, last = scope.groups.pp.rank(), dims.pp - 1
    if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16.1 uses it without Transformer Engine
        moe_utils.te_general_gemm = None
    mlp.bias_swiglu_impl = gated_unit
    padded_vocab = -(-hf.vocab_size // dims.tp) * dims.tp
    stage_class = VisionStage if family_of(hf).sees_images else STAGES[head]
    stages = []
    for chunk in range(dims.vpp):
        stage = stage_class(
            config=config,
            transformer_layer_spec=_block_spec(hf, config, chunk if dims.vpp > 1 else None, place),
            vocab_size=padded_vocab,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=place == 0 and chunk == 0,
            post_process=place == last and chunk == dims.vpp - 1,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="none",
            pg_collection=scope.groups,
            vp_stage=chunk if dims.vpp > 1 else None,
        )
        stage.num_words = hf.vocab_size
        if family_of(hf).outer_norms:
            _add_outer_norms(stage, config)
        if "residual_multiplier" in family_of(hf).scales:
            _scale_parts(stage, hf.residual_multiplier)
        scale = embedding_scale(hf, config.params_dtype)
        if stage.pre_process and scale != 1:
            scale_embedding(stage, scale)
        if stage.pre_process and hf.pad_token_id is not None:
            freeze_padding_token(stage, hf.pad_token_id)
        stages.append(stage)
    return stages


def _block_spec(
    hf: PretrainedConfig, config: TransformerConfig, vp_stage: int | None, place: int
) -> TransformerBlockSubmodules:
    """megatron-core's own layers without Transformer Engine, with our norm and attention in them."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=place)
    number = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=place)
    every = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {kind: _layer_spec(hf, config, config.num_moe_experts if kind else None) for kind in set(every)}
    layers = [specs[kind] for kind in every[first : first + number]]
    norm = RMSNorm if family_of(hf).norms_weigh else PlainNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer_spec(hf: PretrainedConfig, config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """One layer, with experts or without."""
    family = family_of(hf)
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.module, parts = Layer, layer.submodules
    if num_experts and config.moe_grouped_gemm:
        parts.mlp.submodules.experts.module = GroupedExperts
    if num_experts and config.moe_router_topk_scaling_factor is not None:
        parts.mlp.submodules.router = GroupRouter
    if num_experts and family.experts.biases:
        # transformers before 5.19 has no names for what its module computes with
        clamp = {"alpha": getattr(hf, "swiglu_alpha", 1.702), "limit": getattr(hf, "swiglu_limit", 7.0)}
        parts.mlp.submodules.experts = ModuleSpec(module=ClampedExperts, params=clamp)
        parts.mlp.submodules.router = BiasedRouter
    norm = LayerNorm if family.norms_weigh else PlainLayerNorm
    parts.input_layernorm = parts.pre_mlp_layernorm = norm if family.mlp_norm else NoNorm
    if isinstance(config, MLATransformerConfig):
        parts.self_attention = ModuleSpec(module=LatentAttention)
        return layer
    kind = SinkAttention if family.sinks else WholeNormAttention if family.qk_norm == "whole" else Attention
    parts.self_attention.module, attention = kind, parts.self_attention.submodules
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.k_layernorm = HeadNorm if config.qk_layernorm else None
    return layer


def _add_outer_norms(stage: Stage, config: TransformerConfig) -> None:
    """Norms of what attention and MLP give, before the residual is added."""

    def norm(module: nn.Module, given: Any, found: tuple[Tensor, Tensor | None]) -> Any:
        return module.outer_norm(found[0]), found[1]

    for layer in stage.decoder.layers:
        for part in (layer.self_attention, layer.mlp):
            part.add_module("outer_norm", RMSNorm(config, config.hidden_size, config.layernorm_epsilon))
            part.register_forward_hook(norm)


def _scale_parts(stage: Stage, scale: float) -> None:
    """Multiply what attention and MLP give by a number, before the residual is added."""

    def scaled(module: nn.Module, given: Any, found: tuple[Tensor, Tensor | None]) -> Any:
        return found[0] * scale, found[1]

    for layer in stage.decoder.layers:
        for part in (layer.self_attention, layer.mlp):
            part.register_forward_hook(scaled)


def adapt_stages(
    stages: list[Stage],
    adapters: Sequence[Entry],
    scale: float,
    config: TransformerConfig,
    scope: MegatronScope,
    dims: ParallelDims,
) -> None:
    """Put adapters, without values, on the layers of this rank, and freeze the rest of it.

    adapters: the entries of both halves of each, one after the other.
    """
    first_expert = _first_expert(stages, scope, dims)
    halves = {a.adapts: (a, b) for a, b in zip(adapters[::2], adapters[1::2], strict=True)}
    for stage in stages:
        for name in [name for name, _ in stage.named_parameters()]:
            if pair := halves.get(_global_name(stage, name, first_expert)):
                if pair[0].expert is None:
                    adapter = LinearAdapter(config, *pair, scale, scope.groups.tp)
                else:
                    adapter = ExpertAdapter(config, *pair, scale, scope.groups.expt_tp)
                put_adapter(stage, name.removesuffix(".weight"), adapter)
        freeze_base(stage)


def wrap_stages(
    stages: list[Stage], config: TransformerConfig, ddp: Any, scope: MegatronScope
) -> list[DistributedDataParallel]:
    """The stages with buffers in which gradients are added up and reduced. Call it inside the scope."""
    return [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp,
            module=stage,
            disable_bucketing=number > 0 and not ddp.overlap_grad_reduce,
            pg_collection=scope.groups,
        )
        for number, stage in enumerate(stages)
    ]


class LocalParams:
    """This rank's parameters, and buffers that are not trained, under their global names, with the entries
    that they are shards of."""

    def __init__(
        self,
        hf: PretrainedConfig,
        head: Head,
        stages: list[Stage],
        scope: MegatronScope,
        dims: ParallelDims,
        more: Sequence[Entry] = (),
    ):
        """more: those of adapters, and of a vision tower."""
        self.entries = [*entries(hf, head), *more]
        self.places = {"dense": (scope.groups.tp.rank(), dims.tp)}
        self.places["expert"] = (scope.groups.expt_tp.rank(), dims.etp)
        known = {entry.name: entry for entry in self.entries}
        if hf.tie_word_embeddings:
            known["output_layer.weight"] = tied_head(hf)
        first_expert = _first_expert(stages, scope, dims)
        self.by_name: dict[str, tuple[Tensor, Entry]] = {}
        self.adapters: dict[str, LinearAdapter] = {}
        for stage in stages:
            for name, module in stage.named_modules():
                if isinstance(module, LinearAdapter):
                    linear = _global_name(stage, name, first_expert).removesuffix(".lora")
                    self.adapters[f"{linear}.weight"] = module
            for name, param in (*stage.named_parameters(), *stage.named_buffers()):
                full = _global_name(stage, name, first_expert)
                if full not in known and not isinstance(param, nn.Parameter):
                    continue
                self.by_name[full] = (param, known[full])
                _declare(param, known[full], scope.groups.expt_tp.rank())

    def place(self, entry: Entry) -> tuple[int, int]:
        """(place, size) of this rank on the axis that cuts the entry."""
        return self.places["dense" if entry.expert is None else "expert"]

    def __iter__(self) -> Iterator[tuple[Tensor, Entry]]:
        return iter(self.by_name.values())

    @property
    def frozen_names(self) -> list[str]:
        """Hugging Face names of what stays as it is beside adapters; none without."""
        base = (x for x in self.entries if not x.adapts and not x.name.startswith(VALUE_HEAD))
        return list(hf_shapes(list(base))) if any(entry.adapts for entry in self.entries) else []


def _first_expert(stages: list[Stage], scope: MegatronScope, dims: ParallelDims) -> int:
    """The number of the first expert that this rank has of each layer."""
    experts = getattr(stages[0].config, "num_moe_experts", None) or 0
    return scope.groups.ep.rank() * (experts // dims.ep)


def _declare(param: Tensor, entry: Entry, expert_place: int) -> None:
    """Say which parameters are cut, for gradient norms, and which are of experts, for their reduction.

    Megatron says the first only where it draws weights, and the second (allreduce=False) only with ep > 1.
    But copies of an expert lie on other ranks than those of a dense weight wherever etp is not tp: with ep 1
    and etp 1 on every tensor-parallel rank, each of which has the tokens of its part of the sequence. So of
    the half of an expert's adapter that is whole, the first expert tensor-parallel rank counts its copy.
    """
    param.allreduce = entry.expert is None
    whole = entry.cut == "whole"
    if whole and entry.expert is not None:
        param.shared = expert_place > 0
    if (not whole or entry.expert is not None) and not hasattr(param, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(param, True, 1 if entry.cut == "columns" else 0, 1)


def _global_name(stage: Stage, name: str, first_expert: int) -> str:
    """A parameter's name with its layer and expert counted over the whole model."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(stage.decoder.layers[int(words[2])].layer_number - 1)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        words[at] = str(int(words[at]) + first_expert)
    return ".".join(words)


@torch.no_grad()
def read_weights(params: LocalParams, folder: Path, fresh: Mapping[str, Tensor]) -> None:
    """Fill this rank's parameters from safetensors files: each rank reads its own slices, nothing more.

    fresh: name -> what a tensor is that the files may lack. DataError if another one is missing, or has
    another shape. No communication.
    """
    check_weight_files(folder)
    shapes = hf_shapes(params.entries)
    with SafetensorsFolder(folder) as files:
        for param, entry in params:
            read_parameter(params, param, entry, files, shapes, fresh)


def read_parameter(
    params: LocalParams,
    param: Tensor,
    entry: Entry,
    files: SafetensorsFolder,
    shapes: Mapping[str, tuple[int, ...]],
    fresh: Mapping[str, Tensor],
) -> None:
    """Fill one parameter of this rank. shapes: of all Hugging Face tensors; fresh: as in read_weights."""
    param.zero_()
    place, size = params.place(entry)
    for run in runs(entry, place, size):
        target = param[run.start : run.start + run.num_rows]
        columns = None if entry.columns is None else (run.column, run.column + param.shape[1])
        rows = (run.row, run.row + run.num_rows)
        if run.hf in fresh and not files.has(run.hf):
            target.copy_(fresh[run.hf][slice(*rows)][..., slice(*(columns or (None, None)))])
        else:
            expert = entry.expert if entry.stacked else None
            target.copy_(files.read(run.hf, shapes[run.hf], rows, columns, expert))


def all_agree(problem: Exception | None, group: dist.ProcessGroup, what: str) -> None:
    """Raise on every rank of the group if one of them has a problem, its own where it has one. Collective."""
    failed = torch.tensor([problem is not None], dtype=torch.int64)
    dist.all_reduce(failed, group=group)
    if problem:
        raise problem
    if failed.item():
        raise DataError(f"another rank of the model could not {what}: see its message.")
