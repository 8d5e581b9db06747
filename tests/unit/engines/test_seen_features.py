"""What transformers gives of images comes image by image, or whole, as its version has it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from siirl.engines.train.vision.packed_images import see

SIZES = [2, 3]


class Decoder(nn.Module):
    """Tokens and images in two numbers each."""

    def __init__(self, whole: tuple[str, ...]) -> None:
        super().__init__()
        self._tokens, self._whole = nn.Embedding(8, 2), whole
        torch.manual_seed(0)
        nn.init.normal_(self._tokens.weight)

    def get_input_embeddings(self) -> nn.Embedding:
        return self._tokens

    def get_image_features(self, pixels, grids, return_dict):
        pooled, inner = torch.arange(10.0).view(5, 2), torch.arange(10.0, 20.0).view(5, 2)
        return SimpleNamespace(
            pooler_output=pooled if "pooled" in self._whole else pooled.split(SIZES),
            deepstack_features=[inner if "inner" in self._whole else inner.split(SIZES)],
        )


@pytest.mark.parametrize("whole", [(), ("inner",), ("pooled",), ("pooled", "inner")])
def test_features_of_images_are_the_same_whole_and_one_by_one(whole):
    is_image = torch.tensor([[True, True, False, True, True, True]])
    read = see(Decoder(whole), torch.ones(1, 6, dtype=torch.int64), torch.empty(0), torch.empty(0), is_image)
    assert read["inputs_embeds"][is_image].tolist() == torch.arange(10.0).view(5, 2).tolist()
    assert [layer.tolist() for layer in read["deepstack_visual_embeds"]] == [
        torch.arange(10.0, 20.0).view(5, 2).tolist()
    ]
