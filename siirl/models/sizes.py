"""Sizes of a model's parts, by its config.json as transformers reads it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from siirl.models.families import family_of

HIDDEN = ("hidden_size", "n_embd")
HEADS = ("num_attention_heads", "n_head")
"""What a config.json calls the query heads of a layer."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What it calls the experts of a layer."""
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k")
"""What it calls the experts of a token."""
DENSE_LAYERS = ("mlp_only_layers", "first_k_dense_replace")
"""Keys by which some layers have no experts."""
STATES = "linear_attention"
"""The kind of layer that has states, gated delta nets and Mamba-2; config.json may only tell of its heads."""
OLDER_KINDS = {"mamba": STATES, "attention": "full_attention"}
"""What older files call kinds of layers, and transformers makes of it."""
LARGEST = 128
"""Experts of a layer that int8 numbers, beside -1."""


def num_heads(config: Mapping[str, Any]) -> int:
    """Query heads of a layer; 0 where config.json does not tell."""
    return _first(config, HEADS)


def head_size(config: Mapping[str, Any]) -> int:
    """Features of a head as transformers builds it; 0 where config.json does not tell. Not of latent ones."""
    own = config.get("head_dim")
    if isinstance(own, int) and own > 0 and not family_of(config.get("model_type")).shares_hidden:
        return own
    return share_of_hidden(config)


def share_of_hidden(config: Mapping[str, Any]) -> int:
    """The hidden size over the heads; 0 where config.json does not tell."""
    heads = num_heads(config)
    return _first(config, HIDDEN) // heads if heads > 0 else 0


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def num_experts(config: Mapping[str, Any]) -> Any:
    """Of a layer that has some, as config.json says it; 0 for a model that has none, or one."""
    return next((config[name] for name in EXPERTS if config.get(name) not in (None, 0, 1)), 0)


def is_expert_layer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture of experts has some: others are dense."""
    if layer < (config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def expert_layers(config: Mapping[str, Any]) -> list[int]:
    """The layers of a mixture of experts that have some."""
    return [layer for layer in range(config["num_hidden_layers"]) if is_expert_layer(config, layer)]


def state_layers(config: Mapping[str, Any]) -> int:
    """How many layers have states. If none are listed: all but every full_attention_interval-th in a model
    with gated delta nets, all in one with Mamba-2."""
    family, layers = family_of(config.get("model_type")), config["num_hidden_layers"]
    if not family.has_states:
        return 0
    if kinds := config.get("layer_types"):
        return [OLDER_KINDS.get(kind, kind) for kind in kinds].count(STATES)
    return layers - (layers // (config.get("full_attention_interval") or 4)) * family.delta_nets


def state_numbers(config: Mapping[str, Any]) -> int:
    """Numbers that a row has in such a layer between two tokens, with the last inputs of its convolution."""
    if family_of(config.get("model_type")).delta_nets:
        heads, k, v = (
            config[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim")
        )
        channels = 2 * config["linear_num_key_heads"] * k + heads * v
        return heads * k * v + channels * config["linear_conv_kernel_dim"]
    width, size = config["mamba_expand"] * config["hidden_size"], config["mamba_d_state"]
    return width * size + (width + 2 * config["mamba_n_groups"] * size) * config["mamba_d_conv"]


def deepstack_layers(whole: Mapping[str, Any]) -> int:
    """First layers to which the tower of a model that sees images adds inner states. whole: config.json."""
    indexes = (whole.get("vision_config") or {}).get("deepstack_visual_indexes")
    return family_of(whole.get("model_type")).deepstack if indexes is None else len(indexes)


def has_qk_norm(config: Mapping[str, Any]) -> bool:
    """Whether queries and keys are normed."""
    return bool(family_of(config.get("model_type")).qk_norm) and bool(config.get("use_qk_norm", True))


def has_qkv_bias(config: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values have biases."""
    key = family_of(config.get("model_type")).qkv_bias
    return key == "always" or bool(config.get(key))


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
    experts, top_k = _first(config, EXPERTS), _first(config, TOP_K)
    if experts < 2 or not top_k:
        return None
    return RouterChoices(len(expert_layers(config)), top_k, experts)
