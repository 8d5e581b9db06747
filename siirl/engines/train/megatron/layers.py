"""Modules that take the place of Transformer Engine's in megatron-core's layers: norm, attention, head.

Legend: N packed tokens on this rank, H query heads, K key-value heads, D head size or hidden size, M
predicted tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from siirl.engines.train.attention import SequenceBounds, packed_attention
from siirl.engines.train.megatron.context import ContextShard, context_attention
from siirl.engines.train.megatron.vocab_parallel import vocab_parallel_log_prob

CHUNK_ELEMENTS = 1 << 28
"""Logits worked on at a time: 1 GiB in fp32."""
KEEP_LOGITS_BYTES = 2 << 30
"""Up to this size a training micro-batch keeps its logits for backward; else it computes them again."""


@dataclass
class PackedRows(PackedSeqParams):
    """What the layers and the head need to know of a micro-batch; Megatron hands it through.

    context: this rank's share of the tokens under context parallelism. rope: cosines and sines of the
    positions, [N, D] each. predict_index, target: as in PackedBatch. outputs: what the head computes, by the
    names of TokenOutputs.
    """

    bounds: SequenceBounds | None = None
    context: ContextShard | None = None
    rope: tuple[Tensor, Tensor] | None = None
    predict_index: Tensor | None = None
    target: Tensor | None = None
    temperature: float = 1.0
    outputs: tuple[str, ...] = ()


class RMSNorm(nn.Module):
    """RMSNorm by torch, which also works with sequence parallelism: Megatron's wrapper of it refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedAttention(nn.Module):
    """Rotary embedding and causal attention within each packed sequence."""

    def __init__(self, config: Any, layer_number: int, *args: Any, softmax_scale: Any = None, **kwargs: Any):
        super().__init__()
        self.scale = softmax_scale

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
        assert packed_seq_params is not None and packed_seq_params.bounds is not None
        cos_N1D, sin_N1D = (table.unsqueeze(1) for table in packed_seq_params.rope or ())
        query, key = _rotated(query, cos_N1D, sin_N1D), _rotated(key, cos_N1D, sin_N1D)
        if packed_seq_params.context is not None:
            return context_attention(query, key, value, packed_seq_params.context, self.scale)
        out, _ = packed_attention(
            self,
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
            None,
            sequence_bounds=packed_seq_params.bounds,
            scaling=self.scale,
        )
        return out[0]


def _rotated(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotary embedding of halves, as Hugging Face's models pair dimensions."""
    first, second = x_NHD.chunk(2, dim=-1)
    return x_NHD * cos_N1D + torch.cat([-second, first], dim=-1) * sin_N1D


class PackedGPT(GPTModel):
    """A stage of a language model; the last one gives log-probs of the predicted tokens, not logits."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRows, **kwargs: Any):
        """Hidden states, or on the last stage {output: fp32 [M]}, the same on all tensor-parallel ranks."""
        if not self.post_process:
            return hidden_states
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        rows = packed_seq_params
        return self._log_probs(hidden_states[:, 0].index_select(0, rows.predict_index), rows)

    def _log_probs(self, hidden_MD: Tensor, rows: PackedRows) -> dict[str, Tensor]:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        place, num_rows = self.pg_collection.tp.rank(), weight.shape[0]
        num_words = min(num_rows, self.num_words - place * num_rows)
        log_prob_M, entropy_M = vocab_parallel_log_prob(
            hidden_MD,
            weight[:num_words],
            rows.target,
            place * num_rows,
            rows.temperature,
            self.pg_collection.tp,
            with_entropy="entropy" in rows.outputs,
            chunk=max(1, CHUNK_ELEMENTS // num_rows),
            keep_logits=torch.is_grad_enabled()
            and len(hidden_MD) * num_rows * weight.element_size() <= KEEP_LOGITS_BYTES,
        )
        both = {"log_prob": log_prob_M, "entropy": entropy_M}
        return {name: both[name] for name in rows.outputs}

    num_words: int
    """Words of the tokenizer: the rows of embedding and head beyond them are padding."""


def freeze_padding_token(stage: PackedGPT, token: int) -> None:
    """Send no gradient into the embedding of a token, as Hugging Face's models do for their pad_token_id."""

    def mask(module: nn.Module, arguments: tuple[Tensor, ...], embedded: Tensor) -> None:
        if embedded.requires_grad:
            is_token = arguments[0] == token
            if (
                embedded.shape[:2] != is_token.shape
            ):  # sequence parallel: this rank's run of tokens, [N, 1, D]
                tp = stage.pg_collection.tp
                is_token = is_token[0].chunk(tp.size())[tp.rank()].unsqueeze(1)
            embedded.register_hook(lambda grad: grad.masked_fill(is_token.unsqueeze(-1), 0.0))

    stage.embedding.word_embeddings.register_forward_hook(mask)
