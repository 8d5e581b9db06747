"""Packed tokens in, log-probs of response tokens out: the root module that a strategy shards.

Legend: N packed tokens, M response tokens among them, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl.algorithms.log_probs import linear_log_prob_entropy
from siirl.engines.train.attention import SequenceBounds
from siirl.engines.train.packing import PackedBatch

CHUNK_ELEMENTS = 1 << 28
"""Logits worked on at a time: 1 GiB in fp32."""
KEEP_LOGITS_BYTES = 2 << 30
"""Up to this size a training micro-batch keeps its logits for backward; else it computes them again."""


class PackedLanguageModel(nn.Module):
    """A causal language model over packed rows, output head included, so that its gathered weight is used."""

    def __init__(self, hf: PreTrainedModel):
        super().__init__()
        self.hf = hf

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        bounds: SequenceBounds,
        predict_index: Tensor,
        target: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(log_prob [M], entropy [M] or None) in nats at `temperature`, fp32.

        Arguments as in PackedBatch. Full logits in fp32 are never held. Communicates only where the strategy
        gathers weights.
        """
        decoder = getattr(self.hf, self.hf.base_model_prefix)
        hidden_ND = decoder(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, sequence_bounds=bounds
        ).last_hidden_state[0]
        weight_VD = self.hf.get_output_embeddings().weight
        num_logits = predict_index.numel() * weight_VD.shape[0]
        return linear_log_prob_entropy(
            hidden_ND.index_select(0, predict_index),
            weight_VD,
            target,
            temperature,
            with_entropy=with_entropy,
            chunk=max(1, CHUNK_ELEMENTS // weight_VD.shape[0]),
            keep_logits=torch.is_grad_enabled()
            and num_logits * weight_VD.element_size() <= KEEP_LOGITS_BYTES,
        )


def run_packed(
    model: nn.Module, batch: PackedBatch, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a (sharded) PackedLanguageModel on a packed micro-batch; results in their [B, T] places."""
    log_prob_M, entropy_M = model(
        batch.input_ids,
        batch.position_ids,
        batch.bounds,
        batch.predict_index,
        batch.target,
        temperature,
        with_entropy,
    )
    return batch.to_cells(log_prob_M), None if entropy_M is None else batch.to_cells(entropy_M)


def model_flops(hf: PreTrainedModel, lengths: list[int], backward: bool) -> float:
    """Model FLOPs of a pass over rows of these token counts; three times as many with backward.

    2 per weight and token, and causal attention. Weights: all matrices that tokens are multiplied by, the
    output head once (a tied one too), the embedding table not. Source: Chowdhery et al., "PaLM" (2022),
    appendix B, with causal attention counted as half.
    """
    config = hf.config
    head = hf.get_output_embeddings().weight
    tied = hf.get_input_embeddings().weight is head
    names = {id(p): p for p in hf.parameters() if p.ndim >= 2}
    num_weights = sum(p.numel() for p in names.values()) - (0 if tied else head.numel())
    heads_size = config.num_attention_heads * getattr(
        config, "head_dim", config.hidden_size // config.num_attention_heads
    )
    pairs = sum(length * length for length in lengths) / 2
    forward = 2.0 * num_weights * sum(lengths) + 4.0 * config.num_hidden_layers * heads_size * pairs
    return forward * (3.0 if backward else 1.0)
