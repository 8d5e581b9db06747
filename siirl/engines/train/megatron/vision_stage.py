"""A decoder that sees images: transformers' own vision tower on the first pipeline stage, Megatron's layers.

Each rank that embeds has the whole tower and runs it over all images of a micro-batch, so under tensor
parallelism they see alike. Where each has a share of the tokens (sequence and context parallelism), each puts
in its place what lies in its share, and gradients of the tower are added up, as those of norms are.

Legend: n tokens of this rank's share, D hidden size, X tokens of images.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from siirl.engines.train.hf_model import build_skeleton, recompute_activations
from siirl.engines.train.megatron.layers import PackedRows
from siirl.engines.train.megatron.parameter_entries import Block, Entry
from siirl.engines.train.megatron.pipeline_stage import LanguageStage
from siirl.engines.train.settings import EngineSettings
from siirl.engines.train.vision.tower import image_features, prepare_tower, tower_of
from siirl.model_files.file_parts import file_parts
from siirl.models.families import family_of
from siirl.models.sizes import deepstack_layers

TOWER = "visual"
"""The module of the tower in its stage."""


def decoder_config(whole: PretrainedConfig) -> PretrainedConfig:
    """What config.json says of the decoder, under the type of the whole, by which its family is found."""
    if not family_of(whole.model_type).sees_images:
        return whole
    text: Any = copy.deepcopy(whole.get_text_config())
    kind = type(text)
    text.__class__ = type(kind.__name__, (kind,), {"model_type": whole.model_type})
    text.model_type = whole.model_type
    text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def decoder_place(whole: PretrainedConfig) -> str:
    """Where transformers' modules have the decoder, and adapters with them, whatever the files say."""
    return "model.language_model" if family_of(whole.model_type).sees_images else "model"


class VisionStage(LanguageStage):
    """A stage of such a decoder."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedRows,
        **options: Any,
    ) -> Any:
        """As any stage's; the first one embeds what the tower makes of the images in the place of their
        tokens."""
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            options["decoder_input"] = self._seeing(embedded, packed_seq_params)
        return super().forward(
            input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, **options
        )

    def _seeing(self, embedded_n1D: Tensor, rows: PackedRows) -> Tensor:
        """Embedded tokens, those of images by the tower, whose inner states it leaves for the layers."""
        assert rows.images is not None and rows.seen_at is not None
        features_XD, inner = image_features(self.get_submodule(TOWER), rows.images.pixels, rows.images.grids)
        features_XD = features_XD.to(embedded_n1D.dtype)
        room_n1D = F.pad(embedded_n1D, (0, 0, 0, 0, 0, 1))  # a place more, for what is not of this rank
        hidden_n1D = room_n1D.index_copy(0, rows.seen_at, features_XD.unsqueeze(1))[:-1]
        rows.seen_inside = inner = [x_XD.to(hidden_n1D.dtype) for x_XD in inner or ()]
        if any(x_XD.requires_grad for x_XD in inner):
            rows.seen_inside = [x_XD.detach().requires_grad_() for x_XD in inner]
            return GradientsOfLayers.apply(hidden_n1D, rows.seen_inside, *inner)
        return hidden_n1D


class GradientsOfLayers(torch.autograd.Function):
    """Embedded tokens as they are; its backward, which runs after that of all layers, hands on to the tower
    what these left at stand-ins of its inner states.

    Layers that are computed again run a backward pass of their own each, and would run the tower's in each.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stand_ins: Sequence[Tensor], *inner: Tensor) -> Tensor:
        ctx.stand_ins = stand_ins
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None, *(x.grad for x in ctx.stand_ins)


def _add_inner(
    number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any], found: tuple[Tensor, None]
) -> tuple[Tensor, None]:
    """What a layer gives, with what the tower adds to it."""
    rows: PackedRows = kwargs["packed_seq_params"]
    hidden_n1D, at = found[0], rows.seen_at
    own_XD = rows.seen_inside[number] * (at < len(hidden_n1D)).unsqueeze(1)
    # no view: a stage frees the memory of what it has sent on
    return hidden_n1D.index_add(0, at.clamp(max=len(hidden_n1D) - 1), own_XD.unsqueeze(1)), None


def add_tower(
    stages: Sequence[Any], whole: PretrainedConfig, settings: EngineSettings, trains: bool
) -> list[Entry]:
    """Put the tower, without values, on the first stage; its entries, on every rank: none of a text model.

    No communication.
    """
    if not family_of(whole.model_type).sees_images:
        return []
    first, dtype = stages[0], stages[0].config.params_dtype
    skeleton: Any = build_skeleton(whole, dtype, trust_remote_code=False)
    entries = _entries(skeleton)
    if not first.pre_process:
        return entries
    model = getattr(skeleton, skeleton.base_model_prefix)
    with no_init_weights():  # not on the meta device: buffers that no file has are computed
        model.visual = type(model.visual)._from_config(whole.vision_config, dtype=dtype)
    prepare_tower(skeleton)
    first.add_module(TOWER, model.visual)
    for param in model.visual.parameters():
        param.sequence_parallel = first.config.sequence_parallel
    if settings.freeze_vision_tower:
        model.visual.requires_grad_(False)
    elif trains and settings.model.enable_gradient_checkpointing:
        recompute_activations(skeleton, {})
    for number, layer in enumerate(first.decoder.layers[: deepstack_layers(whole.to_dict())]):
        layer.register_forward_hook(functools.partial(_add_inner, number), with_kwargs=True)
    return entries


def _entries(skeleton: Any) -> list[Entry]:
    """Those of the tower of a whole model, whole on every rank that has it."""
    tower: Any = tower_of(skeleton)
    inside = {id(param): name for name, param in tower.named_parameters()}
    own = {name: inside[id(x)] for name, x in skeleton.named_parameters() if id(x) in inside}
    parts = file_parts(skeleton, {name: tuple(skeleton.get_parameter(name).shape) for name in own})
    found = []
    for name, (part,) in parts.items():
        rows, *sizes = part.shape
        block, columns = (Block(part.name, 0, rows),), sizes[0] if sizes else None
        found.append(Entry(f"{TOWER}.{own[name]}", block, columns, "whole", inner=tuple(sizes[1:])))
    return found
