"""Every causal language model that transformers knows, as a tiny one with random weights."""

from pathlib import Path
from typing import Any

from siirl.testing.tiny_models import SMALL as SMALL
from siirl.testing.tiny_models import tiny_config
from siirl.testing.tiny_models import write_model as write_model

TOWER = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"patch_size": 4, "image_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
}
MAX_PARAMS = 1 << 24
"""Models of parts that these sizes do not reach, as image encoders, are not built."""


def model_types() -> list[str]:
    """What config.json of a causal language model may name as its model_type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]


def write_seeing_model(folder: Path, kind: str, text: str, tied: bool = False, **sizes: Any) -> Any:
    """Write a small model with a tower and a text part, and a tensor that transformers has no place for."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    made, known = CONFIG_MAPPING[kind], CONFIG_MAPPING[kind]().vision_config
    tower = {name: size for name, size in TOWER.items() if hasattr(known, name)}
    decoder = tiny_config(text, tie_word_embeddings=tied, **sizes).to_dict()
    vision = {**tower, "model_type": known.model_type}
    torch.manual_seed(0)
    config = made(text_config=decoder, vision_config=vision, tie_word_embeddings=tied, image_token_id=9)
    config.eos_token_id = [5, 6]
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"mtp.fc.weight": torch.ones(2, 3)}, folder / "model.safetensors", {"format": "pt"})
    return model


def num_params(config: Any) -> int:
    """Weights of a model, built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
