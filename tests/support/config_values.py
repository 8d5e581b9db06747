"""What transformers makes of a config.json of each accepted type: siirl/models/config_values.json, made by
`PYTHONPATH=tests/support python tests/support/config_values.py`, and by the tests, to compare."""

import copy
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import causal_lms
import torch
from vision_cases import _config as vision_config

from siirl.models.families import known_types, types_with

VISION_MODELS = types_with(lambda row: row.sees_images)

TABLE = Path(__file__).parents[2] / "siirl" / "models" / "config_values.json"
NOT_OF_A_MODEL = (
    *("id2label", "label2id", "architectures", "transformers_version", "dtype", "problem_type"),
    "chunk_size_feed_forward",
)
"""Values that every configuration has, and that no model is built by."""
MOST_PARAMS = 1 << 22
PATCH = 16


def kinds() -> list[str]:
    """Every accepted type."""
    return sorted({*known_types("fsdp"), *known_types("megatron")})


def text_class(kind: str) -> type:
    """The class of a type's configuration; of a vision model, of its decoder's."""
    from transformers import CONFIG_MAPPING

    return type(CONFIG_MAPPING[kind]().get_text_config())


def absent_and_null(raw: dict[str, Any], names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A config.json without each of the keys, and with null there: which, and all of it."""
    for name in names:
        without = {key: value for key, value in raw.items() if key != name}
        yield from ((f"{name} absent", without), (f"{name} null", {**without, name: None}))


def small_files(kind: str) -> list[dict[str, Any]]:
    """What config.json files of small models of a type say of the decoder; the first has all its parts."""
    if kind in VISION_MODELS:
        return [{**vision_config(kind, 2, PATCH).to_dict()["text_config"], "model_type": kind}]
    found = [{**causal_lms.tiny_config(kind).to_dict(), "model_type": kind}]
    if "layer_types" in found[0]:
        windows = {name: True for name in ("use_sliding_window",) if name in found[0]}
        windows |= {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        found.append({**found[0], "layer_types": ["full_attention"] * 2})
        found += [{**found[0], **windows}] if "sliding_window" in found[0] else []
    if kind == "deepseek_v2":
        found.append({**found[0], "topk_method": "greedy"})
    return found


def runs(raw: dict[str, Any]) -> bool | None:
    """Whether transformers computes what a small config.json describes; None if it is too large to try."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, values = raw["model_type"], copy.deepcopy({**raw})
    auto = AutoModelForImageTextToText if kind in VISION_MODELS else AutoModelForCausalLM
    if kind in VISION_MODELS:
        text = {**values, "model_type": text_class(kind).model_type}
        values = {**vision_config(kind, 2, PATCH).to_dict(), "text_config": text}
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
        with torch.device("meta"):
            if num_params(auto.from_config(config)) > MOST_PARAMS:
                return None
        model = auto.from_config(config, dtype=torch.float32, experts_implementation="eager")
        model(torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits.sum().backward()
    except Exception:  # noqa: BLE001  whatever it raises, of many kinds, says that it does not
        return False
    return True


def num_params(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def defaults(kind: str) -> dict[str, Any]:
    """Key -> what transformers takes where config.json does not have it."""
    found, aliases = {}, getattr(text_class(kind), "attribute_map", {})
    for field in dataclasses.fields(text_class(kind)):
        if field.name in NOT_OF_A_MODEL:
            continue
        made = field.default_factory is not dataclasses.MISSING
        value = field.default_factory() if made else field.default
        found[aliases.get(field.name, field.name)] = value
    return {name: value for name, value in found.items() if value is not dataclasses.MISSING}


def row(kind: str) -> dict[str, Any]:
    """All of a type, as the table has it."""
    (first, *others), by_default = small_files(kind), defaults(kind)
    assert all(runs(raw) for raw in (first, *others)), kind
    aliases = getattr(text_class(kind), "attribute_map", {})
    heads = {aliases.get("num_attention_heads", "num_attention_heads"): 5}
    heads |= {} if first.get("num_key_value_heads", 1) == 1 else {"num_key_value_heads": 5}
    odd = {"whole heads": heads} | ({"all heads": {"head_dim": 20}} if "head_dim" in by_default else {})
    if not isinstance(first.get("head_dim"), int):
        odd["even heads"] = dict.fromkeys(heads, first[aliases.get("hidden_size", "hidden_size")])
    return {
        "defaults": by_default,
        "aliases": {name: own for name, own in aliases.items() if own in by_default},
        "null": [name for name in by_default if runs({**first, name: None})],
        "hidden_is": [name for name, values in odd.items() if runs({**first, **values}) is False],
        "pads": runs({**first, "pad_token_id": 10**6}) is False,
    }


def table() -> dict[str, dict[str, Any]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def main() -> None:
    lines = [f'"{kind}": {json.dumps(row(kind))}' for kind in kinds()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
