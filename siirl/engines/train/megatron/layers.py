"""Modules in the place of Transformer Engine's in megatron-core: a layer, its norms and attention; experts.

Legend: N packed tokens on this rank, H query heads, K key-value heads, D head size. Of experts: T tokens of
all experts of this rank, an expert's after one another, E experts, N output and K input features.
"""

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from siirl.engines.train.attention.packed_attention import packed_attention
from siirl.engines.train.attention.shared_attention import FlashKernels
from siirl.engines.train.experts.grouped_product import GROUPED_MULTIPLE, GroupedProduct, expert_by_expert
from siirl.engines.train.megatron.context_parallel import ContextShard, context_attention
from siirl.engines.train.megatron.fused import Heads, StreamNorm, TurnedHeads, rotated
from siirl.engines.train.packed.sequence_bounds import SequenceBounds
from siirl.engines.train.vision.packed_images import PackedImages

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of the positions, [N, D] each."""


@dataclass
class PackedRows(PackedSeqParams):
    """What the layers and the head need to know of a micro-batch; Megatron hands it through."""

    bounds: SequenceBounds | None = None
    context: ContextShard | None = None
    """This rank's share of the tokens under context parallelism."""
    ropes: Mapping[bool, Rope] = field(default_factory=dict)
    """Of layers with a sliding window, and of others: the same in most models."""
    predict_index: Tensor | None = None
    """As in PackedBatch."""
    target: Tensor | None = None
    """As in PackedBatch."""
    temperature: float = 1.0
    """Logits are divided by it."""
    outputs: tuple[str, ...] = ()
    """What the head computes, by the names of TokenOutputs."""
    ref_hidden: Tensor | None = None
    """As in PackedBatch."""
    top_ids: Tensor | None = None
    """As in PackedBatch."""
    flash: FlashKernels | None = None
    """What attention runs by in bf16 on a GPU, without context parallelism; None: torch's kernels."""
    images: PackedImages | None = None
    """As in PackedBatch."""
    seen_at: Tensor | None = None
    """Places of the tokens of images among this rank's n; those of other ranks have the place n."""
    seen_inside: Sequence[Tensor] = ()
    """What each of the first layers adds to its hidden states there."""
    experts: Tensor | None = None
    """Of this rank's share of the tokens, [n, W]; -1: the router chooses."""
    seen: dict[int, Tensor] = field(default_factory=dict)
    """Where the experts of a layer begin among the W -> those of these tokens, [n, K], once it has run."""


def new_parameter(config: Any, shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter without values where megatron-core would create it."""
    device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


class RMSNorm(nn.Module):
    """RMSNorm that also works with sequence parallelism: Megatron's wrapper of torch's refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.from_one = config.layernorm_zero_centered_gamma
        self.weight = new_parameter(config, (hidden_size,))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.with_stream(x, None)[1]

    def with_stream(self, x: Tensor, stream: Tensor | None) -> tuple[Tensor, Tensor]:
        """x added to the stream, if there is one yet, and its norm."""
        return StreamNorm.apply(x, stream, self.weight, self.eps, self.from_one)


class LayerNorm(RMSNorm):
    """At the beginning of a layer's part."""

    def forward(self, x: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.with_stream(x, stream)


class PlainNorm(nn.Module):
    """LayerNorm without weights."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x.float(), x.shape[-1:], eps=1e-5).type_as(x)


class PlainLayerNorm(PlainNorm):
    """At the beginning of a layer's part."""

    def forward(self, x: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if stream is None else stream + x
        return total, super().forward(total)


class NoNorm(nn.Module):
    """In the place of LayerNorm where a part is given the stream as it is."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, x: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if stream is None else stream + x
        return total, total


class HeadNorm(RMSNorm):
    """Of queries or keys."""

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Without heads its weight: they are normed as they are turned. (Megatron waits for weights that are
        still gathered before a module is called.)"""
        return self.weight if x is None else super().forward(x)


class Vector(nn.Module):
    """One number for each of this rank's heads, or their features. (Why a module: see HeadNorm.)"""

    def __init__(self, config: Any, length: int):
        super().__init__()
        self.weight = new_parameter(config, (length,))

    def forward(self) -> Tensor:
        return self.weight


class Layer(TransformerLayer):
    """A layer without dropout and biases: what a part of it gives is added to the stream as it is normed."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[n, 1, hidden] of this rank's run of the tokens -> the same, and no context."""
        stream, normed = self.input_layernorm(hidden_states)
        found, _bias = self.self_attention(
            normed, attention_mask=attention_mask, packed_seq_params=packed_seq_params
        )
        stream, normed = self.pre_mlp_layernorm(found, stream)
        found, _bias = checkpoint(self.mlp, False, normed) if self.recompute_mlp else self.mlp(normed)
        return stream + found, None


class Attention(SelfAttention):
    """megatron-core's, but heads are cut out of their product, normed and turned in one function."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[n, 1, hidden] -> the same, and no bias."""
        assert packed_seq_params is not None
        if self.config.num_query_groups < self.world_size:  # a rank has a share of a group
            return super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params)
        mixed, _bias = self.linear_qkv(hidden_states)
        heads = self.heads(mixed, packed_seq_params)
        attend = partial(self.core_attention.attended, rows=packed_seq_params)
        recomputes = self.checkpoint_core_attention and self.training
        attended_NHD = checkpoint(attend, False, *heads) if recomputes else attend(*heads)
        return self.linear_proj(attended_NHD.reshape(len(mixed), 1, -1))

    def heads(self, mixed: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [N, heads, D] of their product; the first two normed and turned."""
        core, norm = self.core_attention, self.q_layernorm
        weights = (None, None) if norm is None else (norm(), self.k_layernorm())
        how = Heads(
            groups=self.num_query_groups_per_partition,
            size=self.hidden_size_per_attention_head,
            neighbours=core.turns_neighbours,
            eps=0.0 if norm is None else norm.eps,
            from_one=norm is not None and norm.from_one,
        )
        return TurnedHeads.apply(mixed, *rows.ropes[core.is_narrow], *weights, how)


class PackedAttention(nn.Module):
    """Rotary embedding and causal attention within each packed sequence."""

    def __init__(self, config: Any, layer_number: int, *args: Any, softmax_scale: Any = None, **kwargs: Any):
        super().__init__()
        self.scale = softmax_scale
        self.is_narrow = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] + 1 if self.is_narrow else None
        self.turns_neighbours = config.rotary_interleaved
        self.sink: Vector | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """query [N, H, D], key and value [N, K, D] -> [N, H, D]."""
        assert packed_seq_params is not None
        query, key = self.turned((query, key), packed_seq_params)
        return self.attended(query, key, value, packed_seq_params)

    def turned(self, heads: tuple[Tensor, Tensor], rows: PackedRows) -> tuple[Tensor, ...]:
        """Heads [N, H, D] with the rotary embedding of their tokens."""
        rotate = _rotated if heads[0].is_cuda else rotated
        turned = (rotate(x, *rows.ropes[self.is_narrow], self.turns_neighbours) for x in heads)
        return tuple(x.type_as(head) for x, head in zip(turned, heads, strict=True))

    def attended(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        """Of heads that are turned already."""
        assert rows.bounds is not None
        assert rows.context is None or self.sink is None, "sinks with context parallelism"
        if rows.context is not None:
            return context_attention(query, key, value, rows.context, self.scale, self.window)
        out, _ = packed_attention(
            self,
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
            None,
            sequence_bounds=rows.bounds,
            scaling=self.scale,
            sliding_window=self.window,
            s_aux=None if self.sink is None else self.sink(),
            flash=rows.flash,
        )
        return out.squeeze(0)


_rotated = torch.compile(rotated, dynamic=True)
"""On a GPU the passes over memory of the separate operations are 4% of an update (1.7B, H200)."""


class GroupedExperts(SequentialMLP):
    """The experts of a rank, by one grouped product for each of their matrices (moe_grouped_gemm).

    The router's weights are applied between the two. Parameters stay those of megatron-core's SequentialMLP,
    one pair for each expert, so that weights and checkpoints do not depend on how they are multiplied.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, K] and, for each expert, its number of tokens -> [T, K]; no communication."""
        counts = tokens_per_expert.tolist()
        first = [expert.linear_fc1 for expert in self.local_experts]
        second = [expert.linear_fc2 for expert in self.local_experts]
        both = _with_adapters(permuted_local_hidden_states, first, counts)
        weight_T1 = permuted_probs.unsqueeze(-1)
        if self.config.bias_activation_fusion:
            inner = weighted_bias_swiglu_impl(both, None, weight_T1, False)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = (silu(gate) * up * weight_T1).to(both.dtype)
        return _with_adapters(inner, second, counts), None


def _with_adapters(x_TK: Tensor, layers: Sequence[Any], counts: Sequence[int]) -> Tensor:
    """What the same linear layer of each expert makes of the expert's tokens, its LoRA adapter included."""
    out_TN = grouped_linear(x_TK, [layer.weight for layer in layers], counts)
    if not hasattr(layers[0], "lora"):
        return out_TN
    first, second = zip(*(layer.lora.halves() for layer in layers), strict=True)
    added_TN = grouped_linear(grouped_linear(x_TK, first, counts), second, counts)
    return out_TN + added_TN * layers[0].lora.scale


def grouped_linear(x_TK: Tensor, weights_NK: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Each expert's tokens times its weight [N, K]; counts: tokens of each expert. No communication.

    By the package grouped_gemm if it is there, else by torch's grouped product; in fp32, without any token,
    and where these do not take the sides of a weight, expert by expert.
    """
    odd = any(side % GROUPED_MULTIPLE for side in weights_NK[0].shape)
    if x_TK.dtype != torch.bfloat16 or not len(x_TK) or odd:
        return expert_by_expert(x_TK, weights_NK, counts)
    library = grouped_gemm() if x_TK.is_cuda else None
    if library is not None:
        sizes = torch.tensor(counts, dtype=torch.int64)
        return library.ops.gmm(x_TK, torch.stack(list(weights_NK)), sizes, trans_b=True)
    ends_E = torch.tensor(counts, device=x_TK.device).cumsum(0).to(torch.int32)
    return GroupedProduct.apply(x_TK, ends_E, *weights_NK)


@functools.cache
def grouped_gemm() -> Any:
    """The package of that name; None if it is not installed."""
    found = importlib.util.find_spec("grouped_gemm")
    return importlib.import_module("grouped_gemm") if found else None
