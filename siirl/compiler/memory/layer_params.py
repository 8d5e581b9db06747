"""Parameters of the parts of a layer, from a model's config.json. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siirl.models.families import family_of
from siirl.models.sizes import EXPERTS, is_expert_layer, num_experts, state_layers, state_numbers

_CHUNK = 64
"""Tokens that the kernel of a gated delta net computes at a time, with a state for each."""


@dataclass(frozen=True)
class StateNets:
    """What some layers of a model have in the place of attention: gated delta nets, or Mamba-2.

    What they keep is measured of torch's kernels, and of what fla's save (test_state_net_memory.py).
    """

    layers: int
    params: int
    """Of a net."""
    adapted: int
    """Sides of its linear layers, all together."""
    state: int
    """Numbers in fp32 that a row has in a net between two tokens."""
    kept: int
    """Numbers in fp32 that a net keeps of a token for its backward pass, computing in bfloat16."""
    passing: int
    """The same at the fullest point of a pass without gradient."""
    kept_by_fla: int
    """Numbers in bfloat16 that it keeps of a token with fla's kernels, which compute all else again."""
    passing_by_fla: int
    """The same at the fullest point of a pass without gradient."""
    in_fp32: float
    """So many times as many are kept where it computes in fp32: some are copied."""
    flops: int
    """Of a token, for each number of the state, in a forward pass."""

    def of_token(self, width: int, row: int | None) -> tuple[int, int]:
        """Values of a compute type's width that a net keeps, and those at the fullest point of a pass.

        row: fla's kernels, and tokens of a row, each of which may start with the state of its prompt.
        """
        if row is not None:
            return self.kept_by_fla + 2 * self.state // row, self.passing_by_fla
        return self.values(self.kept, width), self.values(self.passing, width)

    def values(self, numbers: int, width: int) -> int:
        """So many numbers in fp32 as values of a compute type's width."""
        return numbers * 4 // width if width < 4 else int(numbers * self.in_fp32)


def state_nets(raw: Mapping[str, Any]) -> StateNets | None:
    """Those of a config.json; None where it has none."""
    layers = state_layers(raw)
    if not layers:
        return None
    return (_mamba2 if family_of(raw["model_type"]).mamba2 else _delta_nets)(raw, layers)


def _delta_nets(raw: Mapping[str, Any], layers: int) -> StateNets:
    """Kept: of each value head ten that are as wide as its keys, and as many as its values, the state of each
    chunk, and what lies between its tokens. By fla: what the convolution reads, queries, keys and values,
    what lies between the tokens of a chunk, and what the norm and the projection behind it read."""
    hidden, heads, key_heads = (
        raw[name] for name in ("hidden_size", "linear_num_value_heads", "linear_num_key_heads")
    )
    k, v, width = (
        raw[name] for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    )
    keys, values = 2 * key_heads * k, heads * v
    made = keys + 2 * values + 2 * heads
    return StateNets(
        layers=layers,
        params=hidden * (made + values) + (keys + values) * width + 2 * heads + v,
        adapted=5 * hidden + made + values,
        state=state_numbers(raw),
        kept=3 * keys // 2 + heads * (10 * (k + v) + k * v // _CHUNK + 300),
        passing=heads * (8 * k + 7 * v + 160),
        kept_by_fla=keys + values + heads * (2 * k + 4 * v + _CHUNK + 14),
        passing_by_fla=keys + values + heads * (7 * k + 6 * v + _CHUNK + k * v // _CHUNK),
        in_fp32=1.2,
        flops=7,
    )


def _mamba2(raw: Mapping[str, Any], layers: int) -> StateNets:
    """Kept: of each head its keys and queries, which those of a group share, what lies between the tokens of
    a chunk, and the state of each; by fla no more than the first, and the norm's, which is torch's."""
    hidden, heads, size, chunk = (
        raw[name] for name in ("hidden_size", "mamba_n_heads", "mamba_d_state", "mamba_chunk_size")
    )
    wide, shared = raw["mamba_expand"] * hidden, raw["mamba_n_groups"] * size
    channels = wide + 2 * shared
    made = wide + channels + heads
    biases = (made + hidden) * bool(raw.get("mamba_proj_bias")) + channels * bool(raw.get("mamba_conv_bias"))
    states = wide * size // chunk
    return StateNets(
        layers=layers,
        params=hidden * (made + wide) + channels * raw["mamba_d_conv"] + 3 * heads + wide + biases,
        adapted=2 * hidden + made + wide,
        state=state_numbers(raw),
        kept=13 * wide + heads * (5 * size + 3 * chunk) + 2 * states + 4 * shared,
        passing=8 * wide + 3 * heads * (size + chunk) + 3 * states + 2 * shared,
        kept_by_fla=made + channels + 11 * wide + heads * (2 * size + 9),
        passing_by_fla=made + channels + 8 * wide + 2 * heads * size + wide * size // _CHUNK,
        in_fp32=1.1,
        flops=5,
    )


def latent_sizes(raw: Mapping[str, Any]) -> dict[str, int]:
    """Of attention whose keys and values, maybe queries too, are made of compressed ones.

    params: its weights; kv_width: the mean of what keys and values have; others are fields of ModelShape.
    """
    hidden, heads, of_kv, of_q = (
        raw[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, turned, value = (raw[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = heads * (plain + turned)
    params = hidden * (of_kv + turned) + of_kv + of_kv * heads * (plain + value) + heads * value * hidden
    params += queries * hidden if of_q is None else hidden * of_q + of_q + of_q * queries
    width = heads * (plain + turned + value) // 2
    return {
        "params": params,
        "kv_width": width,
        "compressed": (of_q or 0) + of_kv + turned,
        "cached": of_kv + turned,
    }


def experts_of(raw: Mapping[str, Any]) -> int:
    """Experts of a layer that has some."""
    return next(raw[name] for name in EXPERTS if raw.get(name))


def shared_width(raw: Mapping[str, Any]) -> int:
    """Of the expert that all tokens pass; 0 without one."""
    own = (raw.get("n_shared_experts") or 0) * raw.get("moe_intermediate_size", 0)
    return own or raw.get("shared_expert_intermediate_size") or raw.get("shared_intermediate_size", 0)


def dense_width(raw: Mapping[str, Any]) -> int:
    """Of the MLP of a layer without experts; 0 without one."""
    if family_of(raw["model_type"]).mamba2 and not num_experts(raw):
        return raw["shared_intermediate_size"]  # what all tokens pass is all that there is
    return raw.get("intermediate_size") or 0


def has_experts(raw: Mapping[str, Any], layer: int) -> bool:
    return (
        family_of(raw["model_type"]).experts is not None
        and bool(num_experts(raw))
        and is_expert_layer(raw, layer)
    )


def expert_params(raw: Mapping[str, Any], width: int) -> int:
    """Of one expert."""
    hidden, experts = raw["hidden_size"], family_of(raw["model_type"]).experts
    return 3 * hidden * width + (2 * width + hidden) * (experts is not None and experts.biases)


def mlp_params(raw: Mapping[str, Any], layer: int) -> int:
    hidden, experts = raw["hidden_size"], family_of(raw["model_type"]).experts
    if experts is None or not has_experts(raw, layer):
        width = dense_width(raw)
        return 3 * hidden * width + (2 * width + hidden if raw.get("mlp_bias") else 0)
    count = experts_of(raw)
    router = (hidden + experts.biases) * count
    shared = 3 * hidden * shared_width(raw) + hidden * (experts.shared == "gated")
    return count * expert_params(raw, raw[experts.width]) + router + shared
