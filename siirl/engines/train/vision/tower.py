"""The part of a vision model that sees images: all images of packed rows at once, and no number of the device
is waited for on the way.

Legend: B rows, S tokens of each, X patches, C numbers of a patch, I images, H heads, D head size.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from siirl.engines.train.transfers import sent

TOWER_ATTENTION = "siirl_flash_tower"
"""Name under which transformers finds `tower_attention`. Its towers call what has "flash" in its name once,
with the bounds of all images; another one they call once for each image."""


def tower_of(hf: PreTrainedModel) -> nn.Module | None:
    """The part that sees images: patches in, hidden states of the decoder's size out."""
    return getattr(getattr(hf, hf.base_model_prefix, None), "visual", None)


def prepare_tower(hf: PreTrainedModel) -> None:
    """Have a vision model see as this file says; a model of texts stays as it is."""
    tower: Any = tower_of(hf)
    if tower is None:
        return
    config = tower.config
    # The model's own is read again, for other models, by code that looks for packages.
    own = copy.deepcopy(config)
    own._attn_implementation = TOWER_ATTENTION
    for module in tower.modules():
        if getattr(module, "config", None) is config:
            module.config = own
    decoder: Any = getattr(hf, hf.base_model_prefix).language_model
    if hasattr(decoder, "_deepstack_process"):
        decoder._deepstack_process = _add_inner


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **extra: object,
) -> tuple[Tensor, None]:
    """Attention within each image, or each window of one: all are [1, H, X, D] -> [1, X, H, D].

    In bf16 or fp16 on CUDA by torch's variable-length kernels, else image by image. No communication.
    """
    q_XHD, k_XHD, v_XHD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x.contiguous() for x in (q_XHD, k_XHD, v_XHD))
        bounds, longest = cu_seq_lens_q, max_length_q
        out_XHD: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling)
        return out_XHD.unsqueeze(0), None
    lengths = cu_seq_lens_q.diff().tolist()
    images = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(*qkv, scale=scaling).transpose(1, 2) for qkv in images]
    return torch.cat(found, dim=1), None


AttentionInterface.register(TOWER_ATTENTION, tower_attention)


def see(decoder: Any, ids_BS: Tensor, pixels_XC: Tensor, grids_I3: Tensor, index: Tensor) -> dict[str, Any]:
    """What decoder.language_model reads: the embeddings of tokens, those of images by the vision tower.

    grids_I3: on the host. index: int64, which of all tokens, row by row, are of images, in the order of the
    patches. That is said by place: a policy may sample the image token, and then it is a token as any other.
    Where the tower gives its inner states too (deepstack), they come along.
    """
    features, inner = image_features(decoder.visual, pixels_XC, grids_I3)
    embeds_BSD = decoder.get_input_embeddings()(ids_BS)
    features = features.to(embeds_BSD.dtype)
    embeds_BSD = embeds_BSD.flatten(0, 1).index_copy(0, index, features).view_as(embeds_BSD)
    if inner is None:
        return {"inputs_embeds": embeds_BSD}
    inner = [of_layer.to(embeds_BSD.dtype) for of_layer in inner]
    return {"inputs_embeds": embeds_BSD, "visual_pos_masks": index, "deepstack_visual_embeds": inner}


def image_features(tower: Any, pixels_XC: Tensor, grids_I3: Tensor) -> tuple[Tensor, list[Tensor] | None]:
    """What the decoder has in the place of image tokens, one image after the other, and what its first layers
    add to them (deepstack), if they do. grids_I3: on the host."""
    seen = tower(pixels_XC.type(tower.dtype), grid_thw=grids_I3, **_places(tower, grids_I3, pixels_XC.device))
    return seen.pooler_output, getattr(seen, "deepstack_features", None)


def _places(tower: Any, grids_I3: Tensor, device: torch.device) -> dict[str, Any]:
    """What a tower makes of the sizes of images, by the names under which it takes them instead."""
    merge = tower.config.spatial_merge_size
    found: dict[str, Any] = {
        "cu_seqlens": get_vision_cu_seqlens(grids_I3),
        "position_ids": get_vision_position_ids(grids_I3, merge),
    }
    if hasattr(tower, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids_I3,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    if hasattr(tower, "window_size"):
        found["window_index"], found["cu_window_seqlens"] = get_vision_window_index(
            grids_I3, merge, tower.window_size, tower.patch_size
        )
        found["max_window_seqlen"] = int(found["cu_window_seqlens"].diff().max())
    found["max_seqlen"] = int(found["cu_seqlens"].diff().max())
    return {name: sent(x, device) if isinstance(x, Tensor) else x for name, x in found.items()}


def _add_inner(hidden_BSD: Tensor, index: Tensor, inner: Tensor) -> Tensor:
    """Hidden states, to which a tower's inner states are added at the tokens of images."""
    flat = hidden_BSD.flatten(0, 1)
    return flat.index_add(0, index, inner.to(flat.dtype)).view_as(hidden_BSD)
