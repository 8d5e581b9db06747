"""How many experts each token of a model passes, from its config.json. Pure, no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from siirl.compiler.model_types import EXPERTS, language_part
from siirl.compiler.overridden import overridden
from siirl.config.common import ModelConfig

REPLAYED = (
    *("deepseek_v3", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe"),
    *("mellum", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
)
"""Types whose routers were seen to take given experts in the place of their own."""
TOP_K = ("num_experts_per_tok", "moe_topk")
"""What a config.json calls the experts of a token."""
LARGEST = 128
"""Experts of a layer that int8 numbers, beside -1."""


@dataclass(frozen=True)
class RouterChoices:
    """What the routers of a model choose for a token."""

    layers: int
    """That have experts."""
    top_k: int
    """Experts of a token in each."""
    experts: int
    """Of a layer."""

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.layers * self.top_k

    @property
    def dtype(self) -> Literal["int8", "int16"]:
        """Of the fields that hold them."""
        return "int8" if self.experts <= LARGEST else "int16"

    @property
    def token_bytes(self) -> int:
        return self.width * (1 if self.dtype == "int8" else 2)


def router_choices(config: Mapping[str, Any]) -> RouterChoices | None:
    """Those of a config.json; None for a model without experts, or whose layers differ."""
    experts, top_k = (
        next((found for name in names if isinstance(found := config.get(name), int)), 0)
        for names in (EXPERTS, TOP_K)
    )
    if experts < 2 or not top_k:
        return None
    return RouterChoices(len(expert_layers(config)), top_k, experts)


def expert_layers(config: Mapping[str, Any]) -> list[int]:
    """The layers of a mixture of experts that have some."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return [
        layer
        for layer in range(config.get("first_k_dense_replace") or 0, config["num_hidden_layers"])
        if layer not in dense and (layer + 1) % step == 0
    ]


def read_router_choices(model: ModelConfig) -> RouterChoices | None:
    """Those of model.path, whose config.json is there."""
    text = (Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8")
    return router_choices(language_part(overridden(json.loads(text), model.override_config)))
