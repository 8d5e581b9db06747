"""Tiny models with random weights: of a kind that transformers knows, or of a user's model's family."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from siirl.errors import DataError, NotSupportedError
from siirl.models.families import family_of

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "word_embed_proj_dim": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""Sizes under all names that configurations have for them."""
KEPT = ("pad_token_id", "eos_token_id", "bos_token_id", "tie_word_embeddings")
"""Of the user's config.json."""
NEVER_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
DEVIATION = 0.1
"""Of the random numbers: log-probs are then far from uniform, and no token is certain."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of two small layers; whatever transformers raises where these sizes do not do."""
    from transformers import CONFIG_MAPPING

    kind_of_config = CONFIG_MAPPING[kind]
    known = kind_of_config()
    derived = {name for name in dir(kind_of_config) if isinstance(getattr(kind_of_config, name), property)}
    sizes = {name: value for name, value in SMALL.items() if hasattr(known, name) and name not in derived}
    return kind_of_config(**sizes | family_of(kind).tiny | changes)


def write_model(
    folder: Path, config: Any, seed: int = 0, head: Literal["lm", "score"] = "lm", deviation: float = 0.1
) -> Path:
    """Write a model, fp32, whose weights and biases are all random. head: score, of one label."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    made = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    if head == "score":
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(deviation * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def tiny_of(source: Path, out: Path, seed: int, positions: int, head: Literal["lm", "score"] = "lm") -> Path:
    """Write a tiny model of the family of the model in `source`, with all its files but weights; returns it.

    positions: at least so many. Only config.json and the tokenizer are read of it. DataError without a
    config.json, NotSupportedError for a family of which no tiny model can be made.
    """
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{source}/config.json cannot be read: {error}. A test needs it, and the tokenizer, of "
            "each model: name a folder that has them."
        ) from error
    kind = str(config.get("model_type"))
    if family_of(kind).sees_images:
        raise NotSupportedError(
            f"not supported yet: a tiny model of {kind}, which sees images ({source}). Test with a small "
            "model of that family, as it is: --no-tiny."
        )
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix not in NEVER_COPIED and not file.name.endswith(".index.json"):
            shutil.copy(file, out / file.name)
    kept = {name: config[name] for name in KEPT if name in config}
    kept |= {"vocab_size": _vocabulary(source, config)}
    try:
        known = tiny_config(kind)
        room = {
            name: positions for name in ("max_position_embeddings", "n_positions") if hasattr(known, name)
        }
        write_model(out, tiny_config(kind, **kept | room), seed, head, DEVIATION)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise NotSupportedError(
            f"not supported yet: a tiny model of {kind} ({source}): {type(error).__name__}: {error}. Test "
            "with a small model of that family, as it is: --no-tiny."
        ) from error
    return out


def _vocabulary(source: Path, config: Mapping[str, Any]) -> int:
    """Words of the model, or, where these are more, of its tokenizer."""
    from transformers import AutoTokenizer

    words = int(config.get("vocab_size") or 0)
    if (source / "tokenizer.json").is_file() or (source / "tokenizer_config.json").is_file():
        words = max(words, len(AutoTokenizer.from_pretrained(source)))
    return words or SMALL["vocab_size"]
