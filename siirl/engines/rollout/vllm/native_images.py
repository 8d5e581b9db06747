"""Images for vLLM: patches that siirl has made, as the trainer has them, so that no other processor does.

Imported in an engine process, as native.py is, and only for a vision model.
"""

import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl
from vllm import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo
from vllm.multimodal.processing.dummy_inputs import BaseDummyInputsBuilder

from siirl.data.image_reader import Grid, ImageReader
from siirl.data.seen import Seen
from siirl.models.families import FAMILIES, types_with

TORCHVISION_PROCESSOR = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


class ImagePrompts:
    """Makes what vLLM's engine takes of prompts with images.

    As a part of its configuration (additional_config) it is made anew in the processes that an engine of
    several ranks starts.
    """

    def __init__(self, model: str) -> None:
        """Have vLLM start the engine of this process without a processor of its own. model: a directory."""
        self._model, self._reader = model, ImageReader(model)
        _Sizes.reader = self._reader
        for model_class in _model_classes():
            MULTIMODAL_REGISTRY.register_processor(_Largest, info=_Sizes, dummy_inputs=_Nothing)(model_class)
            ModelRegistry.register_model(model_class.__name__, model_class)

    def __reduce__(self) -> tuple[type["ImagePrompts"], tuple[str]]:
        return ImagePrompts, (self._model,)

    def compute_hash(self) -> str:
        """For vLLM, of what it compiles depends on."""
        return hashlib.sha256(self._model.encode()).hexdigest()

    def prompt(self, ids: Sequence[int], seen: Seen) -> dict[str, Any]:
        """Of tokens, with the patches of each image at its own. Image tokens elsewhere are sampled text."""
        patches = [self._reader.read([image]) for image in seen.images]
        lengths = [self._reader.tokens_of(one.grids[0]) for one in patches]
        places = [PlaceholderRange(offset=at, length=n) for at, n in zip(seen.starts, lengths, strict=True)]
        hashes = [hashlib.sha256(image.encode()).hexdigest() for image in seen.images]
        return {
            "type": "multimodal",
            "prompt_token_ids": list(ids),
            "mm_kwargs": MultiModalKwargsItems({"image": [_item(p.pixels_XC, p.grids[0]) for p in patches]}),
            "mm_hashes": {"image": hashes},
            "mm_placeholders": {"image": places},
        }


def _item(pixels_XC: Tensor, grid: Grid) -> MultiModalKwargsItem:
    """The arguments of the vision tower for one image."""
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(pixels_XC)])),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    values = {"pixel_values": pixels_XC, "image_grid_thw": torch.tensor([grid])}
    return MultiModalKwargsItems.from_hf_inputs(values, fields)["image"][0]


def _model_classes() -> list[type]:
    """vLLM's vision models, registered as classes: it would read their files again in another process.

    Those files import transformers' processor for torchvision, and use it in vLLM's own processors only.
    Where torchvision is not installed they get its twin for Pillow, which has the same functions.
    """
    if importlib.util.find_spec("torchvision") is None:
        sys.modules[TORCHVISION_PROCESSOR] = image_processing_pil_qwen2_vl
    places = (FAMILIES[kind].vllm.vision_class.split(":") for kind in types_with(lambda row: row.sees_images))
    return [getattr(importlib.import_module(module), name) for module, name in places]


class _Sizes(BaseProcessingInfo):
    """What vLLM asks about images before it has one."""

    reader: ClassVar[ImageReader]
    """Of the engine's model."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": min(seq_len, self.reader.most_tokens)}


class _Nothing(BaseDummyInputsBuilder):
    """What _Largest takes."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class _Largest(BaseMultiModalProcessor[_Sizes]):
    """In the place of a processor: the largest image, by which vLLM measures the memory of the tower."""

    requires_tokenizer = False  # from 0.32 on

    def apply(self, *_: Any, **__: Any) -> dict[str, Any]:
        reader = self.info.reader
        rows = math.isqrt(min(self.info.ctx.model_config.max_model_len, reader.most_tokens))
        grid = (1, rows * reader.merge, rows * reader.merge)
        width = reader.read([]).pixels_XC.shape[1]
        tokens = reader.tokens_of(grid)
        return {
            "type": "multimodal",
            "prompt_token_ids": [reader.image_token_id] * tokens,
            "mm_kwargs": MultiModalKwargsItems({"image": [_item(torch.zeros(math.prod(grid), width), grid)]}),
            "mm_hashes": {"image": ["largest"]},
            "mm_placeholders": {"image": [PlaceholderRange(offset=0, length=tokens)]},
        }

    def _get_mm_fields_config(self, *_: Any) -> Mapping[str, MultiModalFieldConfig]:
        raise NotImplementedError

    def _get_prompt_updates(self, *_: Any) -> Sequence[Any]:
        raise NotImplementedError
