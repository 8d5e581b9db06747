"""The stages of a decoder for each head: the last one gives numbers of predicted tokens, never logits.

Legend: N packed tokens on this rank, M predicted tokens, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from siirl.algorithms.full_kl import linear_full_kl
from siirl.algorithms.log_probs import linear_log_prob_entropy
from siirl.algorithms.top_log_probs import WordShard, linear_log_probs_of, linear_top_log_probs
from siirl.compiler.memory.estimate import LOGITS_CHUNK
from siirl.compiler.plan import Head
from siirl.config.teacher import WHOLE
from siirl.engines.train.hf_model import VALUE_HEAD
from siirl.engines.train.kept_logits import kept_logits_bytes
from siirl.engines.train.megatron.layers import PackedRows, new_parameter


class Stage(GPTModel, ABC):
    """A stage of a decoder with a head on the last one."""

    outputs: tuple[str, ...]
    """What the head computes, by the names of TokenOutputs."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRows, **kwargs: Any):
        """Hidden states, or on the last stage {output: fp32 [M]}, the same on all tensor-parallel ranks."""
        if not self.post_process:
            return hidden_states
        hidden_ND = self._whole(hidden_states).squeeze(1)
        return self.head(hidden_ND.index_select(0, packed_seq_params.predict_index), packed_seq_params)

    @abstractmethod
    def _whole(self, hidden_states: Tensor) -> Tensor:
        """Hidden states of all tokens; its backward knows whether ranks have gradients or shares of them."""

    @abstractmethod
    def head(self, hidden_MD: Tensor, rows: PackedRows) -> dict[str, Tensor]:
        """The outputs that rows.outputs names."""


class LanguageStage(Stage):
    """Log-probs and entropies over a vocabulary that is split over the tensor-parallel ranks."""

    outputs = ("log_prob", "entropy", "prob_square", "hidden", "full_kl", "top_log_prob", "top_ids")
    reference_head: Tensor | None = None
    """This rank's words of the head as it was read from model.path, where full_kl is asked for."""
    top_k: int = WHOLE
    """Of how many words top_log_prob is, where the rows do not say of which."""
    num_words: int
    """Words of the tokenizer: the rows of embedding and head beyond them are padding."""

    def _whole(self, hidden_states: Tensor) -> Tensor:
        """Each rank's gradient is the share of its words: they are added up."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_states, group=group)
        return copy_to_tensor_model_parallel_region(hidden_states, group=group)

    def keep_reference_head(self) -> None:
        """Before the first step, and before a checkpoint is loaded; on the last stage. No communication."""
        self.reference_head = self._words()[0].detach().clone()

    def _words(self) -> tuple[Tensor, int]:
        """(rows of the output head for this rank's words, the first of them), padding left out."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        first = self.pg_collection.tp.rank() * weight.shape[0]
        return weight[: self.num_words - first], first

    def head(self, hidden_MD: Tensor, rows: PackedRows) -> dict[str, Tensor]:
        weight_VD, first_word = self._words()
        num_words, group = len(weight_VD), self.pg_collection.tp
        chunk = max(1, LOGITS_CHUNK // num_words)
        join = partial(join_words, group) if group.size() > 1 else None
        log_prob_M, entropy_M, square_M = linear_log_prob_entropy(
            hidden_MD,
            weight_VD,
            rows.target - first_word,
            rows.temperature,
            with_entropy="entropy" in rows.outputs,
            with_square="prob_square" in rows.outputs,
            chunk=chunk,
            kept_bytes=kept_logits_bytes(
                len(hidden_MD), weight_VD, by_room=self.pg_collection.pp.size() == 1
            ),
            join=join,
        )
        found = {"log_prob": log_prob_M, "entropy": entropy_M, "prob_square": square_M, "hidden": hidden_MD}
        if "full_kl" in rows.outputs:
            ref_MD = rows.ref_hidden.to(self.reference_head.dtype)
            found["full_kl"] = linear_full_kl(
                hidden_MD,
                weight_VD,
                ref_MD,
                self.reference_head,
                rows.temperature,
                chunk=max(1, chunk // 4),
                join=partial(join_words, group),
            )
        at = {
            "temperature": rows.temperature,
            "chunk": max(1, chunk // 4),
            "shard": WordShard(first_word, self.num_words, group.rank(), group.size()),
            "join": partial(join_words, group),
        }
        if "top_ids" in rows.outputs:
            top = linear_top_log_probs(hidden_MD, weight_VD, self.top_k, **at)
            found["top_log_prob"], found["top_ids"] = top
        elif "top_log_prob" in rows.outputs:
            found["top_log_prob"] = linear_log_probs_of(hidden_MD, weight_VD, rows.top_ids, **at)
        return {name: found[name] for name in rows.outputs}


def join_words(group: dist.ProcessGroup, value: Tensor, how: Literal["max", "sum"]) -> Tensor:
    """Numbers of tokens, joined in place over the ranks that share the vocabulary. Collective."""
    if group.size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=group)
    return value


class ValueStage(Stage):
    """A value of each response token, from the state before it: one linear output, in fp32.

    The head is whole on every tensor-parallel rank, and so is every gradient of it and of its input.
    """

    outputs = ("value",)
    has_bias = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.output_layer = None
            self.add_module(VALUE_HEAD, TokenHead(config, self.has_bias))

    def _whole(self, hidden_states: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return hidden_states
        group = self.pg_collection.tp
        return gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=group
        )

    def head(self, hidden_MD: Tensor, rows: PackedRows) -> dict[str, Tensor]:
        return {self.outputs[0]: self.get_submodule(VALUE_HEAD)(hidden_MD)}


class ScoreStage(ValueStage):
    """What a reward model says of the conversation before each response token."""

    outputs = ("score",)


class TrainedScoreStage(ScoreStage):
    """The same of a reward model in training."""

    has_bias = False


class TokenHead(nn.Module):
    """One linear output, computed in fp32."""

    def __init__(self, config: Any, has_bias: bool):
        super().__init__()
        self.weight = new_parameter(config, (1, config.hidden_size))
        self.bias = new_parameter(config, (1,)) if has_bias else None

    def forward(self, hidden_MD: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return linear(hidden_MD.float(), self.weight.float(), bias).squeeze(-1)


STAGES: dict[Head, type[Stage]] = {
    "lm": LanguageStage,
    "value": ValueStage,
    "score": ScoreStage,
    "trained_score": TrainedScoreStage,
}


def freeze_padding_token(stage: Stage, token: int) -> None:
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


def scale_embedding(stage: Stage, scale: float) -> None:
    """Multiply embedded tokens by a number."""

    def scaled(module: nn.Module, arguments: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        return embedded * scale

    stage.embedding.register_forward_hook(scaled)


class KnownShapes(P2PCommunicator):
    """megatron-core's messages of one run of the 1F1B schedule, without its exchange of shapes.

    That exchange waits for the device twice a message. All stages of a pipeline cut the same rows into the
    same micro-batches, and activations and gradients arrive in their order. Build it inside the model's
    scope; no communication.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, config: Any, shapes: Sequence[tuple[int, ...]]):
        """shapes: of the activations that each micro-batch sends from stage to stage, on this rank."""
        super().__init__(group, config)
        self._activations, self._gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what arrives from the previous and from the next stage."""
        return next(self._activations) if recv_prev else (), next(self._gradients) if recv_next else ()
