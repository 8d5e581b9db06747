"""A vision tower: what transformers computes of images, at once, and nothing that waits for the device."""

import pytest
import torch
import vision_cases as vision
from transformers import AttentionInterface, AutoModelForImageTextToText

from siirl.engines.train.attention.packed_attention import PACKED_ATTENTION
from siirl.engines.train.hf_model import build_skeleton
from siirl.engines.train.vision.tower import TOWER_ATTENTION, prepare_tower, see, tower_of

GRIDS = torch.tensor([[1, 4, 8], [1, 6, 2], [1, 2, 2]])
"""Of three images: frames, rows and columns of patches."""


def config_of(kind):
    return vision._config(kind, 3, 14 if kind == "qwen2_5_vl" else 16)


@pytest.mark.parametrize("kind", vision.KINDS)
def test_all_images_at_once_are_what_transformers_computes_of_them(kind):
    """Hidden states that the decoder's layers add to those of images, too."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind), dtype=torch.float32).eval()
    patch = model.config.vision_config.patch_size
    pixels = torch.randn(int(GRIDS.prod(1).sum()), 3 * 2 * patch**2)
    length = int(GRIDS.prod(1).sum()) // 4
    index, ids = torch.arange(3, 3 + length), torch.full((1, length + 5), 40)
    place = torch.arange(length + 5).expand(3, 1, -1)
    wanted = model.model.get_image_features(pixels, GRIDS, return_dict=True)
    is_image = torch.zeros_like(ids, dtype=torch.bool).index_fill(1, index, True)
    embeds = model.model.get_input_embeddings()(ids)
    embeds = embeds.masked_scatter(is_image.unsqueeze(-1), torch.cat(wanted.pooler_output))
    given = {"inputs_embeds": embeds}
    if inner := getattr(wanted, "deepstack_features", None):
        given |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": [torch.cat(x) for x in inner]}
    wanted = model.model.language_model(**given, position_ids=place, use_cache=False).last_hidden_state
    prepare_tower(model)
    assert tower_of(model).blocks[0].attn.config._attn_implementation == TOWER_ATTENTION
    read = see(model.model, ids, pixels, GRIDS, index)
    found = model.model.language_model(**read, position_ids=place, use_cache=False).last_hidden_state
    assert (found - wanted).abs().max() < 1e-6 and found.std() > 0.1


@pytest.mark.parametrize("kind", vision.KINDS)
def test_no_number_of_the_device_is_read_on_the_way(kind, monkeypatch):
    """Tensors without values have none that could be."""
    calls = []

    def attended(module, query, *others, **extra):
        calls.append(module)
        return query.transpose(1, 2), None

    for name in (PACKED_ATTENTION, TOWER_ATTENTION):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, attended)
    model = build_skeleton(config_of(kind), torch.float32, False)
    patch, patches = model.config.vision_config.patch_size, int(GRIDS.prod(1).sum())
    with torch.device("meta"):
        ids, index = torch.zeros(1, 40, dtype=torch.int64), torch.zeros(patches // 4, dtype=torch.int64)
        pixels, place = torch.zeros(patches, 6 * patch**2), torch.zeros(3, 1, 40, dtype=torch.int64)
    read = see(model.model, ids, pixels, GRIDS, index)
    model.model.language_model(**read, position_ids=place, use_cache=False).last_hidden_state.sum().backward()
    assert len(calls) == 2 + 3, "each layer of the tower once, and of the text"
