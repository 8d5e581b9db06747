"""Which modules of a model are its blocks."""

from types import SimpleNamespace

import pytest
from torch import nn

from siirl.engines.train.hf_model import decoder_layers
from siirl.errors import NotSupportedError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()


class Experts(nn.Module):
    """Named beside the block that holds it, as Aria's are in transformers 5.17."""


class Model(nn.Module):
    _no_split_modules = ("Block", "Experts")
    config = SimpleNamespace(model_type="own")

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(11))
        self.layers_of_images = Experts()


def test_what_is_named_within_a_block_is_a_part_of_it_and_the_order_stays():
    model = Model()
    assert decoder_layers(model) == [*model.layers, model.layers_of_images]


def test_a_model_that_names_none_is_refused():
    model = Model()
    model._no_split_modules = None
    with pytest.raises(NotSupportedError, match="own names no blocks"):
        decoder_layers(model)
