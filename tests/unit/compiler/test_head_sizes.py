"""The features of a head, by config.json alone, are those of the model that transformers builds."""

import causal_lms
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from siirl.models.config_json import language_part
from siirl.models.families import known_types, types_with
from siirl.models.sizes import head_size, num_heads

LATENT = types_with(lambda row: row.latent)
VISION_MODELS = types_with(lambda row: row.sees_images)

WIDTHS = {"hidden_size": 48, "n_embd": 48, "d_model": 48, "word_embed_proj_dim": 48}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
"""Four heads of 12, unless head_dim says otherwise."""

ALWAYS_OWN = ("glm4_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")
"""Which transformers does not build without a head_dim."""
CASES = [(kind, own) for kind in known_types("fsdp") if kind not in LATENT for own in (None, 20)]


def built_heads(config) -> set[int]:
    """The head_dim of each attention of the decoder."""
    auto = AutoModelForImageTextToText if config.model_type in VISION_MODELS else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    parts = [module for name, module in model.named_modules() if not {"visual", "mamba"} & {*name.split(".")}]
    sizes = [getattr(part, "head_dim", None) or getattr(part, "head_size", None) for part in parts]
    return {size for size in sizes if isinstance(size, int)}


@pytest.mark.parametrize(("kind", "own"), [case for case in CASES if case[1] or case[0] not in ALWAYS_OWN])
def test_the_heads_of_a_type_are_those_that_transformers_builds(kind, own):
    if kind in VISION_MODELS:
        text = {name: size for name, size in causal_lms.SMALL.items() if name != "head_dim"}
        text = text | WIDTHS | ({"head_dim": own} if own else {})
        config = CONFIG_MAPPING[kind](text_config=text, vision_config=VISION)
    else:
        known = causal_lms.tiny_config(kind)
        widths = {name: size for name, size in WIDTHS.items() if hasattr(known, name)}
        own_size = own or getattr(type(known), "head_dim", None)
        sizes = {"head_dim": own_size} if isinstance(own_size, int) else {}
        if not sizes and "head_dim" in known.to_dict():
            sizes = {"head_dim": None}
        sizes |= {"mamba_d_head": "auto"} if hasattr(known, "mamba_d_head") else {}
        config = causal_lms.tiny_config(kind, **widths | sizes)
    raw = config.to_dict()
    if own is None:  # as a file that does not say
        raw.pop("head_dim", None)
        raw.get("text_config", {}).pop("head_dim", None)
    assert {head_size(language_part(raw))} == built_heads(config)
    assert num_heads(language_part(raw)) == 4


@pytest.mark.parametrize(
    "raw", [{}, {"model_type": "llama"}, {"model_type": "llama", "hidden_size": 64}, {"head_dim": "many"}]
)
def test_a_file_that_does_not_tell_has_no_size(raw):
    assert head_size(raw) == 0
