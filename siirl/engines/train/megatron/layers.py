"""Modules that take the place of Transformer Engine's in megatron-core's layers: norm and attention.

Legend: N packed tokens on this rank, H query heads, K key-value heads, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from siirl.engines.train.attention import packed_attention
from siirl.engines.train.megatron.context_parallel import ContextShard, context_attention
from siirl.engines.train.sequence_bounds import SequenceBounds
from siirl.engines.train.shared_attention import FlashKernels

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
    experts: Tensor | None = None
    """Of this rank's share of the tokens, [n, W]; -1: the router chooses."""
    seen: dict[int, Tensor] = field(default_factory=dict)
    """Where the experts of a layer begin among the W -> those of these tokens, [n, K], once it has run."""


def new_parameter(config: Any, shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter without values where megatron-core would create it."""
    device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


class RMSNorm(nn.Module):
    """RMSNorm by torch, which also works with sequence parallelism: Megatron's wrapper of it refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.from_one = config.layernorm_zero_centered_gamma
        self.weight = new_parameter(config, (hidden_size,))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.from_one:
            return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


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
        cos_N1D, sin_N1D = (table.unsqueeze(1) for table in rows.ropes[self.is_narrow])
        rotate = _rotated_by_one_kernel if heads[0].is_cuda else _rotated
        return tuple(rotate(x, cos_N1D, sin_N1D, self.turns_neighbours) for x in heads)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        """Of heads that are turned already."""
        assert rows.bounds is not None
        if rows.context is not None:
            return context_attention(query, key, value, rows.context, self.scale, self.window)
        out, _ = packed_attention(
            self,
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
            None,
            sequence_bounds=rows.bounds,
            scaling=self.scale,
            sliding_window=self.window,
            flash=rows.flash,
        )
        return out.squeeze(0)


def _rotated(x_NHD: Tensor, cos_N1R: Tensor, sin_N1R: Tensor, neighbours: bool = False) -> Tensor:
    """Rotary embedding of the first R dimensions; i and i + R/2 are turned together, or neighbours."""
    size = cos_N1R.shape[-1]
    turned, kept = x_NHD[..., :size], x_NHD[..., size:]
    if neighbours:
        cos_N1R, sin_N1R = (x[..., : size // 2].repeat_interleave(2, dim=-1) for x in (cos_N1R, sin_N1R))
        across = torch.stack([-turned[..., 1::2], turned[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        across = torch.cat([-second, first], dim=-1)
    out = turned * cos_N1R + across * sin_N1R
    return torch.cat([out, kept], dim=-1) if kept.shape[-1] else out


_rotated_by_one_kernel = torch.compile(_rotated, dynamic=True)
"""On a GPU the passes over memory of the separate operations are 4% of an update (1.7B, H200)."""
