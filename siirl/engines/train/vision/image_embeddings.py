"""Vision models of transformers: images into the embeddings that the decoder reads.

Legend: B rows, S tokens of each, D hidden size, X patches, C numbers of a patch, I images.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def tower_of(hf: PreTrainedModel) -> nn.Module | None:
    """The part that sees images: patches in, hidden states of the decoder's size out."""
    return getattr(getattr(hf, hf.base_model_prefix, None), "visual", None)


def see(
    decoder: nn.Module, ids_BS: Tensor, pixels_XC: Tensor, grids_I3: Tensor, is_image_BS: Tensor
) -> dict[str, Any]:
    """What decoder.language_model reads: the embeddings of tokens, those of images by the vision tower.

    is_image_BS: which tokens are of images, in the order of the patches. That is said by place: a policy may
    sample the image token, and then it is a token as any other. Where the tower gives its inner states too
    (deepstack), they come along.
    """
    seen = decoder.get_image_features(pixels_XC, grids_I3, return_dict=True)
    embeds_BSD = decoder.get_input_embeddings()(ids_BS)
    features_SD = _of_all_images(seen.pooler_output).to(embeds_BSD.dtype)
    embeds_BSD = embeds_BSD.masked_scatter(is_image_BS.unsqueeze(-1), features_SD)
    inner = getattr(seen, "deepstack_features", None)
    if inner is None:
        return {"inputs_embeds": embeds_BSD}
    inner = [_of_all_images(of_layer).to(embeds_BSD.dtype) for of_layer in inner]
    return {
        "inputs_embeds": embeds_BSD,
        "visual_pos_masks": is_image_BS,
        "deepstack_visual_embeds": inner,
    }


def _of_all_images(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Which of them come image by image differs between versions of transformers."""
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))
