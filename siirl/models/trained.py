"""Whether a strategy trains the model of a config.json exactly, and if not, why. No torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from siirl.models.config_json import PARTS, language_part
from siirl.models.families import TEXT_PARTS, WHY_NOT, Experts, family_of, known_types, types_with
from siirl.models.sizes import STATES, state_layers

OWN_TYPE = ("e_score_correction_bias", ".expert_bias")
"""Tensors of the files, by the end of their names, that keep their own type whatever the model's."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
FACTORS, CAPS = ("logits_scaling", "logit_scale"), ("final_logit_softcapping", "attn_logit_softcapping")
"""Keys of what logits, or those of attention, are multiplied with, and of what they stay below."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose frequencies change if the longest row of a batch is beyond the model's first training."""


@dataclass(frozen=True)
class Trainable:
    """What a strategy trains, besides the families whose rows name it."""

    lacks: Callable[[Mapping[str, Any]], Iterator[str]]
    """What of a config.json it does not compute, besides what none does."""

    own_code: bool
    """It takes a model of code of its own as it is."""


TRAINABLE = {
    "fsdp": Trainable(lambda config: iter(()), own_code=True),
    "megatron": Trainable(lambda config: _as_megatron_builds(config), own_code=False),
}
"""Strategy -> what it trains."""


def own_type(kind: str | None) -> tuple[str, ...]:
    """Ends of the names of all tensors of a model type that keep their own type in what is written."""
    return OWN_TYPE + family_of(kind).in_float32


def why_not(config: Mapping[str, Any], strategy: str, head: str = "lm") -> str:
    """Why a strategy does not train the model of a config.json, and the fix; empty if it does."""
    problem = _problem(config, strategy, head)
    if not problem:
        return ""
    others = [other for other in TRAINABLE if not _problem(config, other, head)]
    instead = f"Set strategy={others[0]}, or use" if others else "Use"
    return f"{problem}. {instead} a usual model of {', '.join(known_types(strategy, head))}."


def _problem(config: Mapping[str, Any], strategy: str, head: str) -> str:
    kind = config.get("model_type")
    if reason := WHY_NOT.get(kind or ""):
        return f"{kind}, {reason}"
    traits = _traits(config, strategy)
    if kind in known_types(strategy):
        config = language_part(config)
        traits = chain(_traits(config, strategy), TRAINABLE[strategy].lacks(config))
    if trait := next(traits, ""):
        return f"{kind} with {trait}"
    if kind in known_types(strategy, head):
        return ""
    if kind in known_types(strategy):
        why = f"under {strategy} was not seen" if family_of(kind).any_head else "transformers does not have"
        return f"{kind} with a {head} head, which {why}"
    return f"{kind} is no model type whose results under {strategy} were compared with transformers'"


def _traits(config: Mapping[str, Any], strategy: str) -> Iterator[str]:
    """What a strategy does not compute, of whatever family."""
    named = set(config.get("layer_types") or ())
    kinds = named - PACKED_LAYERS
    kinds |= {STATES} if config.get("linear_num_value_heads") else set()
    family = family_of(config.get("model_type"))
    if family.has_states:
        if strategy == "megatron" and family.delta_nets:
            yield f"layers of kind {STATES} (megatron-core 0.16's gated delta net takes no packed rows)"
        layers = config.get("num_hidden_layers")
        few = not named and isinstance(layers, int) and state_layers(config) == layers
        if few or named == {STATES}:
            yield f"layers of kind {STATES} alone (nothing tells how long a row is that is decoded)"
        kinds -= {STATES}
    if family.mamba2 and (config.get("time_step_limit") or (0,))[0] != 0:
        yield f"time_step_limit={config['time_step_limit']} (steps that are never 0, so that padding decays)"
    if kinds:
        yield f"layers of kind {', '.join(sorted(kinds))} (their state would leak between packed rows)"
    computed = family.scales if strategy in family.strategies else ()
    for name in (*FACTORS, *CAPS):
        if config.get(name) is None or (name in FACTORS and config[name] == 1):
            continue
        if name in CAPS and name in computed and not config[name] > 0:
            yield f"{name}={config[name]} (logits stay below a positive number)"
        elif name not in computed:
            yield f"{name}={config[name]} (an output head that is not a plain matrix, or attention likewise)"
    for name in PARTS:
        if config.get(name):
            yield f"a {name} (it is made of several models{_text_part(config, strategy)})"
    if config.get("kv_lora_rank") and family_of(config.get("model_type")).latent is None:
        yield f"kv_lora_rank={config['kv_lora_rank']} (keys and values that are compressed)"
    if problem := why_not_plain(config.get("model_type"), config):
        yield f"a quantization_config (its weights are no plain numbers, and {problem})"
    if config.get("output_router_logits"):
        yield (
            "output_router_logits=True (a loss of the router, which transformers has of each micro-batch "
            "by itself; set it to false by override_config, and moe_aux_loss_coeff for one of mini-batches)"
        )
    if config.get("use_bidirectional_attention"):
        yield "use_bidirectional_attention (its tokens see the future)"


def _text_part(config: Mapping[str, Any], strategy: str) -> str:
    """What to do where the text part of a model made of several trains."""
    text = config.get("text_config")
    if config.get("model_type") not in TEXT_PARTS or not isinstance(text, Mapping):
        return ""
    if _problem(text, strategy, "lm"):
        return ""
    return (
        f", of which the {text['model_type']} trains on texts: `siirl convert --text MODEL FOLDER` writes "
        "it, then set model.path=FOLDER"
    )


def why_not_plain(kind: str | None, config: Mapping[str, Any]) -> str:
    """Why quantised weights of a model are not read as plain numbers; empty if they are, or are plain."""
    family, quantised = family_of(kind), config.get("quantization_config") or {}
    method, form = quantised.get("quant_method"), quantised.get("fmt", "e4m3")
    if not quantised:
        return ""
    if method not in ("mxfp4", "fp8"):
        return f"quant_method={method} is not read: fp8 and mxfp4 are"
    if method == "mxfp4" and not family.mxfp4:
        return f"quant_method=mxfp4 is read of {', '.join(types_with(lambda row: row.mxfp4))} only"
    if method == "fp8" and form != "e4m3":
        return f"fmt={form} is not read: e4m3 is"
    return "such were not seen of models that see images" if family.sees_images else ""


def weight_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a matrix in FP8 that a factor of its files is of; None: one is of all, or there is
    none."""
    height, width = (config.get("quantization_config") or {}).get("weight_block_size") or (0, 0)
    return (height, width) if height > 0 and width > 0 else None


def _as_megatron_builds(config: Mapping[str, Any]) -> Iterator[str]:
    """What the layers that are built of megatron-core do not have."""
    family = family_of(config.get("model_type"))
    of_qkv = family.qkv_bias == "attention_bias" and not family.output_bias
    for name in ("attention_bias", "attention_out_bias", "mlp_bias"):
        if config.get(name) and not (name == "attention_bias" and (of_qkv or family.sinks)):
            yield f"{name}={config[name]}"
    if config.get("clip_qkv") is not None:
        yield f"clip_qkv={config['clip_qkv']}"
    if family.gelu:
        if config["hidden_activation"] != "gelu_pytorch_tanh":
            yield f"hidden_activation={config['hidden_activation']}"
        if config["sliding_window"] is None:
            yield "sliding_window=null (layers are told apart by it)"
    elif config["hidden_act"] not in ("silu", "swish"):
        yield f"hidden_act={config['hidden_act']}"
    if family.latent is not None:
        key = sum(config[name] or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        if (config["v_head_dim"] or 0) > key:
            yield f"v_head_dim={config['v_head_dim']} (values wider than keys, of {key} features)"
    if family.experts is not None:
        yield from _as_megatron_routes(config, family.experts)


def _as_megatron_routes(config: Mapping[str, Any], experts: Experts) -> Iterator[str]:
    """What routers, and what stands beside them, do not have there."""
    if experts.groups:
        yield from _as_megatron_chooses_groups(config, experts)
    normalised = not experts.normed_by or config.get(experts.normed_by)
    if config.get("num_experts_per_tok") == 1 and normalised:
        yield "one expert a token at weight 1, whose router learns nothing"


def _as_megatron_chooses_groups(config: Mapping[str, Any], row: Experts) -> Iterator[str]:
    if not config["n_shared_experts"]:
        yield f"n_shared_experts={config['n_shared_experts']} (without an expert that all tokens pass)"
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"] or 0
    method = config["topk_method"] if row.groups == "softmax" else ""
    if method not in ("", "greedy", "group_limited_greedy"):
        yield f"topk_method={method}"
    names = ("n_group", "topk_group") if method != "greedy" else ()
    groups, best = [config.get(name) or 1 for name in names] or (1, 1)
    if experts and experts < 2 * groups:
        yield f"n_group={groups} (groups of one expert, which two are to rank)"
    elif experts and chosen > experts // groups * best:
        yield f"num_experts_per_tok={chosen} (the best groups have {experts // groups * best})"


def why_not_so_long(config: Mapping[str, Any], longest: int) -> str:
    """Why rows of so many tokens would not be computed as each by itself, and the fix; empty if they are.

    What is packed into one batch, or decoded in one, has one set of frequencies.
    """
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type")
        name = "original_max_position_embeddings"
        first = rope.get(name) or config.get(name) if kind == "longrope" else None
        original = first or config.get("max_position_embeddings")
        if kind in LENGTH_DEPENDENT and isinstance(original, int) and longest > original:
            return (
                f"rope_type={kind}, with rows of up to {longest} tokens: beyond {original} tokens its "
                "frequencies follow the longest row of a batch, so that a row would depend on others. Lower "
                "data.max_prompt_length + data.max_response_length (and rollout.max_model_len) to "
                f"{original}, or set another rope_type, e.g. yarn, by model.override_config."
            )
    return ""


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of rotary embeddings: one, or one for each kind of layer."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        return []
    return [found, *(part for part in found.values() if isinstance(part, Mapping))]
