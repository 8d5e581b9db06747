"""Packed tokens in, numbers of response tokens out: the root module of each head, which a strategy shards.

Legend: N packed tokens, M response tokens among them, D hidden size, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from siirl.algorithms.full_kl import linear_full_kl
from siirl.algorithms.log_probs import linear_log_prob_entropy
from siirl.algorithms.top_log_probs import linear_log_probs_of, linear_top_log_probs
from siirl.compiler.memory.estimate import LOGITS_CHUNK
from siirl.compiler.plan import Head
from siirl.config.teacher import WHOLE
from siirl.engines.train.kept_logits import kept_logits_bytes
from siirl.engines.train.packed.packing import PackedBatch
from siirl.engines.train.packed.sequence_bounds import SequenceBounds
from siirl.engines.train.vision.packed_images import PackedImages
from siirl.engines.train.vision.tower import see, tower_of
from siirl.models.families import family_of
from siirl.models.sizes import EXPERTS, STATES, TOP_K, head_size


class PackedModel(nn.Module, ABC):
    """A decoder over packed rows with a head on top, head included, so that its gathered weight is used."""

    outputs: tuple[str, ...]
    """What the head can compute of a response token, by the names of TokenOutputs."""

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
        outputs: tuple[str, ...],
        ref_hidden: Tensor | None = None,
        top_ids: Tensor | None = None,
        images: PackedImages | None = None,
    ) -> dict[str, Tensor]:
        """Name -> fp32 [M] for each of `outputs`, from the hidden state before each response token.

        Arguments as in PackedBatch. Communicates only where the strategy gathers weights.
        """
        decoder, read = getattr(self.hf, self.hf.base_model_prefix), {"input_ids": input_ids}
        if images is not None:
            read = see(decoder, input_ids, images.pixels, images.grids, images.index)
            decoder = decoder.language_model
        hidden_ND = decoder(
            **read, position_ids=position_ids, use_cache=False, sequence_bounds=bounds
        ).last_hidden_state.squeeze(0)
        hidden_MD = hidden_ND.index_select(0, predict_index)
        temperature *= logits_scale(self.hf.config)
        return self.head(hidden_MD, target, temperature, outputs, ref_hidden, top_ids)

    @abstractmethod
    def head(
        self,
        hidden_MD: Tensor,
        target_M: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
        ref_hidden_MD: Tensor | None,
        top_ids_MK: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The outputs of hidden states."""


class PackedLanguageModel(PackedModel):
    """Log-probs of response tokens and entropies, in nats at the temperature; full logits are never held."""

    outputs = ("log_prob", "entropy", "prob_square", "hidden", "full_kl", "top_log_prob", "top_ids")
    reference_head: Tensor | None = None
    """[V, D] as it was read from model.path, whole on every rank, where full_kl is asked for."""
    top_k: int = WHOLE
    """Of how many words top_log_prob is, where the rows do not say of which."""

    def keep_reference_head(self, dtype: torch.dtype) -> None:
        """Collective over the model's ranks; before the first step, and before a checkpoint is loaded."""
        weight_VD = self.hf.get_output_embeddings().weight
        self.reference_head = weight_VD.detach().full_tensor().to(dtype, copy=True)

    def head(
        self,
        hidden_MD: Tensor,
        target_M: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
        ref_hidden_MD: Tensor | None,
        top_ids_MK: Tensor | None = None,
    ) -> dict[str, Tensor]:
        weight_VD = self.hf.get_output_embeddings().weight
        chunk = max(1, LOGITS_CHUNK // weight_VD.shape[0])
        cap = getattr(self.hf.config, "final_logit_softcapping", None)
        log_prob_M, entropy_M, square_M = linear_log_prob_entropy(
            hidden_MD,
            weight_VD,
            target_M,
            temperature,
            with_entropy="entropy" in outputs,
            with_square="prob_square" in outputs,
            chunk=chunk,
            kept_bytes=kept_logits_bytes(len(target_M), weight_VD),
            cap=cap,
        )
        found = {"log_prob": log_prob_M, "entropy": entropy_M, "prob_square": square_M, "hidden": hidden_MD}
        if "full_kl" in outputs:
            reference_VD = self.reference_head
            ref_hidden_MD = ref_hidden_MD.to(reference_VD.dtype)
            found["full_kl"] = linear_full_kl(
                hidden_MD,
                weight_VD,
                ref_hidden_MD,
                reference_VD,
                temperature,
                chunk=max(1, chunk // 4),
                cap=cap,
            )
        at = {"temperature": temperature, "chunk": max(1, chunk // 4), "cap": cap}
        if "top_ids" in outputs:
            top = linear_top_log_probs(hidden_MD, weight_VD, self.top_k, **at)
            found["top_log_prob"], found["top_ids"] = top
        elif "top_log_prob" in outputs:
            found["top_log_prob"] = linear_log_probs_of(hidden_MD, weight_VD, top_ids_MK, **at)
        return {name: found[name] for name in outputs}


class PackedValueModel(PackedModel):
    """A value of each response token, from the state before it: one linear output, `score`, in fp32."""

    outputs = ("value",)

    def head(
        self,
        hidden_MD: Tensor,
        target_M: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
        ref_hidden_MD: Tensor | None,
        top_ids_MK: Tensor | None = None,
    ) -> dict[str, Tensor]:
        score = self.hf.score
        bias = None if score.bias is None else score.bias.float()
        value_M1 = linear(hidden_MD.float(), score.weight.float(), bias)
        value_M = value_M1.squeeze(-1).clone()  # FSDP2 hooks what leaves the model, and a view loses the hook
        return {self.outputs[0]: value_M}


class PackedScoreModel(PackedValueModel):
    """What a reward model says of the conversation before each response token, in fp32."""

    outputs = ("score",)


PACKED_MODELS: dict[Head, type[PackedModel]] = {
    "lm": PackedLanguageModel,
    "value": PackedValueModel,
    "score": PackedScoreModel,
    "trained_score": PackedScoreModel,
}


def run_packed(
    model: nn.Module, batch: PackedBatch, temperature: float, outputs: tuple[str, ...]
) -> dict[str, Tensor]:
    """Run a (sharded) PackedModel on a packed micro-batch; name -> values in their [B, T] places."""
    values = model(
        batch.input_ids,
        batch.position_ids,
        batch.bounds,
        batch.predict_index,
        batch.target,
        temperature,
        outputs,
        batch.ref_hidden,
        batch.top_ids,
        batch.images,
    )
    return {name: batch.to_cells(value_M) for name, value_M in values.items()}


def logits_scale(config: PretrainedConfig) -> float:
    """What a model divides its logits by."""
    return config.logits_scaling if "logits_scaling" in family_of(config.model_type).scales else 1.0


def seen_back(hf: PreTrainedModel) -> float:
    """Tokens of a row, itself included, that each layer sees from any token: inf where that is all of them.

    0 for models whose layers may do otherwise: experts, which weigh tokens against each other, and code that
    is not transformers' own; and for those whose logits of attention are capped, which share no prompts.
    """
    config = hf.config.get_text_config()
    experts = any(getattr(config, name, None) for name in EXPERTS)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return 0
    if experts or not type(config).__module__.startswith("transformers."):
        return 0
    windows = [getattr(module, "sliding_window", None) for module in hf.modules()]
    if getattr(config, "use_sliding_window", True):
        windows.append(getattr(config, "sliding_window", None))
    return min((window for window in windows if window is not None), default=math.inf)


class MultipliedWeights(NamedTuple):
    """How many weights of a whole model a token is multiplied by, and a patch of an image.

    All matrices, a tied output head too, the table not. Of experts, which transformers has as one tensor
    [E, ...] each layer, those that a token chooses. Of a vision tower its matrices, without its attention.
    """

    by_token: float
    by_patch: float

    @classmethod
    def of(cls, hf: PreTrainedModel) -> Self:
        config = hf.config.get_text_config()
        head, table = hf.get_output_embeddings(), hf.get_input_embeddings().weight
        tied = head is not None and head.weight is table
        by_token = 0 if tied else -table.numel()
        tower = tower_of(hf)
        of_tower = {id(p): p for p in tower.parameters()} if tower is not None else {}
        for param in {id(p): p for p in hf.parameters() if id(p) not in of_tower}.values():
            if param.ndim == 3 and param.shape[1] > 1:  # of a convolution of each channel by itself it is 1
                by_token += param.numel() * _experts_of_a_token(config) // param.shape[0]
            elif param.ndim > 1:
                by_token += param.numel()
        return cls(by_token, sum(p.numel() for p in of_tower.values() if p.ndim == 2))


def model_flops(
    hf: PreTrainedModel,
    lengths: list[int],
    backward: bool,
    num_patches: int = 0,
    weights: MultipliedWeights | None = None,
) -> float:
    """pass_flops of a whole Hugging Face model. weights: its own, of a caller that has them."""
    by_token, by_patch = weights or MultipliedWeights.of(hf)
    seeing = 2.0 * num_patches * by_patch * (3.0 if backward else 1.0)
    return pass_flops(by_token, hf.config.get_text_config(), lengths, backward) + seeing


def _experts_of_a_token(config: PretrainedConfig) -> int:
    """As config.json says it: the same number in all layers."""
    found = next(getattr(config, name) for name in TOP_K if hasattr(config, name))
    return found[0] if isinstance(found, list) else found


def pass_flops(num_weights: float, config: PretrainedConfig, lengths: list[int], backward: bool) -> float:
    """Model FLOPs of a pass over rows of these token counts; three times as many with backward.

    2 per token and weight that it is multiplied by (num_weights: the output head once, the embedding table
    not), and causal attention; of a gated delta net, what its rule takes of a token: 7 for each number of its
    state, of which 1 lets it decay, and 2 each read it by the key, write it and read it by the query; of
    Mamba-2, whose scan does not read it by the key, 5.
    Source: Chowdhery et al., "PaLM" (2022), appendix B, with causal attention counted as half.
    """
    features = float(head_size(config.to_dict()))
    if getattr(config, "kv_lora_rank", None):  # a head's keys and values differ in size
        features = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    heads_size = config.num_attention_heads * features
    pairs = sum(length * length for length in lengths) / 2
    with_states = (getattr(config, "layer_types", None) or []).count(STATES)
    if with_states and family_of(config.model_type).mamba2:
        num_weights += 2.5 * with_states * config.mamba_expand * config.hidden_size * config.mamba_d_state
    elif with_states:
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        num_weights += 3.5 * with_states * state
    attending = config.num_hidden_layers - with_states
    forward = 2.0 * num_weights * sum(lengths) + 4.0 * attending * heads_size * pairs
    return forward * (3.0 if backward else 1.0)
