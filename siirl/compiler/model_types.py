"""Which models the training engines compute exactly, by the model_type of their config.json. No torch.

One table, which `siirl check` and the engines read. A type stands in it because it was run: for each,
tests/contracts/test_accepted_models.py builds a small model with random weights and compares its log-probs,
its gradient and the names of its weights with those of transformers.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from siirl.compiler.adapter_targets import why_not_adapted
from siirl.compiler.compiled_layers import why_not_compiled
from siirl.compiler.config_values import as_read, why_not_built
from siirl.compiler.head_sizes import head_size, num_heads
from siirl.compiler.overridden import overridden
from siirl.compiler.vllm_models import why_not_in_vllm
from siirl.config import Config
from siirl.config.common import ModelConfig, TrainedConfig
from siirl.config.roles import ROLE_GROUPS, ROLES, Head, role_group, role_model, sequence_ranks
from siirl.errors import NotSupportedError

OF_ANY_HEAD = (
    *("arcee", "diffllama", "exaone4", "gemma", "glm", "glm4", "gpt_oss", "helium", "llama", "ministral"),
    *("ministral3", "mistral", "mixtral", "persimmon", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("seed_oss", "smollm3", "starcoder2"),
)
"""What fsdp trains as a language model, and with a value or score head."""
LANGUAGE_MODELS = (
    *("aria_text", "cwm", "deepseek_v2", "deepseek_v3", "ernie4_5", "flex_olmo", "gemma3_text", "glm4_moe"),
    *("gpt2", "gpt_bigcode", "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hyperclovax", "jais2", "mellum", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
)
"""What fsdp trains as a language model only: transformers has no value or score head for them."""
VISION_MODELS = ("qwen2_5_vl", "qwen3_vl")
"""What fsdp trains as a language model that sees images: a vision tower, and a decoder as any other."""
MEGATRON = (
    *("glm4", "llama", "ministral", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "seed_oss",
)
"""What megatron trains, with any head."""
MEGATRON_LANGUAGE_MODELS = ("cwm", "deepseek_v2", "deepseek_v3", "gemma3_text", "glm4_moe")
"""What megatron trains as a language model only."""
MBRIDGE = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Types that mbridge was seen to read as siirl does."""
QKV_BIAS = ("glm4", "glm4_moe", "seed_oss")
"""Whose attention_bias is one of queries, keys and values alone."""

GELU_MLPS = ("gemma3_text",)
"""Whose MLPs have a GELU, by the tanh, and whose two kinds of layers have rotary embeddings of their own."""
LATENT = ("deepseek_v2", "deepseek_v3")
"""Whose keys and values are computed of a compressed one, and were compared."""
SINKS = ("gpt_oss",)
"""Whose attention has a learned logit more in each softmax, of each head."""
GROUP_ROUTED = ("deepseek_v2", "deepseek_v3", "glm4_moe")
"""Whose routers choose experts by groups, or by a bias that balances them, not by their logits alone."""
OWN_TYPE = ("e_score_correction_bias",)
"""Tensors of the files, by the end of their names, that keep their own type whatever the model's."""
DELTA_NETS = "linear_attention"
"""The kind of layer that Qwen3-Next's gated delta nets are of; config.json may tell of their heads only."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
SCALES = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FLOAT8 = (
    *("arcee", "cwm", "diffllama", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm", "glm4"),
    *("gpt_bigcode", "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "llama", "ministral"),
    *("ministral3", "mistral", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi3", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "starcoder2"),
)
"""Whose linear layers fsdp was seen to multiply in FP8: without experts, images and compressed keys."""
FLOAT8_MULTIPLE = 16
"""What the sides of a linear layer are multiples of, for its products to be in FP8."""
SIDES = ("hidden_size", "intermediate_size", "ffn_dim", "n_inner")
"""What a config.json calls sides of linear layers."""
PARTS = ("vision_config", "audio_config", "text_config")
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose frequencies change if the longest row of a batch is beyond the model's first training."""


@dataclass(frozen=True)
class Trainable:
    """What a strategy trains."""

    any_head: tuple[str, ...]
    """Types that it trains as a language model, and with a value or score head."""

    lm_only: tuple[str, ...]
    """Types that it trains as a language model only."""

    lacks: Callable[[Mapping[str, Any]], Iterator[str]]
    """What of a config.json it does not compute, besides what none does."""

    own_code: bool
    """It takes a model of code of its own as it is."""


TRAINABLE = {
    "fsdp": Trainable(OF_ANY_HEAD, LANGUAGE_MODELS + VISION_MODELS, lambda config: iter(()), own_code=True),
    "megatron": Trainable(
        MEGATRON, MEGATRON_LANGUAGE_MODELS, lambda config: _as_megatron_builds(config), own_code=False
    ),
}
"""Strategy -> what it trains."""


def known_types(strategy: str, head: Head = "lm") -> tuple[str, ...]:
    """The model types that a strategy trains with a head, in alphabetical order."""
    row = TRAINABLE[strategy]
    return tuple(sorted(row.any_head + (row.lm_only if head == "lm" else ())))


def sees_images(model_type: str | None) -> bool:
    """Whether a config.json of this type is that of a vision model."""
    return model_type in VISION_MODELS


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers reads of the decoder in a config.json, defaults of absent keys included: of all of
    it, or of a vision model, old or new, of its text part."""
    return as_read(_of_decoder(config))


def _of_decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is written there of it."""
    if not sees_images(config.get("model_type")):
        return config
    text = {**config, **(config.get("text_config") or {}), "model_type": config["model_type"]}
    return {name: value for name, value in text.items() if name not in PARTS}


def check_trained_model(cfg: Config, role: str, who: str) -> None:
    """NotSupportedError if a role's strategy cannot train its model, as far as config.json tells.

    A config.json that cannot be read is left to others, a model of code of its own to its engine, and what a
    rollout engine runs, to that; but teachers there are of types that fsdp knows, and so were seen in both.
    """
    scored = ROLES[role].generates and ROLES[role].is_teacher
    if ROLES[role].generates and not scored:
        return
    model, strategy = role_model(cfg, role), role_group(cfg, role).strategy
    raw = config_json(model)
    if "model_type" not in raw or not (scored or strategy in TRAINABLE):
        return
    rules = "fsdp" if scored else strategy
    own_code = model.external_lib or (model.trust_remote_code and "auto_map" in raw)
    config = overridden(raw, model.override_config)
    written = _of_decoder(config)
    problem = why_not(config, rules, ROLES[role].head) or why_not_with_images(config, cfg, role)
    config = as_read(written)
    problem = problem or _why_no_router_loss(model)
    problem = problem or why_not_in_vllm(config, cfg, role)
    problem = problem or _why_not_adapted(config, cfg, role)
    if rules == "fsdp":
        problem = problem or _why_not_these_kernels(config, model, ROLES[role].model)
        problem = problem or _why_not_with_sinks(config, cfg, role)
    if strategy == "fsdp":
        problem = problem or _why_not_with_experts(config, cfg, role)
        problem = problem or _why_not_dealt(config, cfg, role)
        problem = problem or _why_not_split(config, cfg, role)
        problem = problem or _why_not_float8(config, cfg, role)
    problem = problem or why_not_compiled(config, cfg, role)
    has_experts = any(config.get(name) not in (None, 0, 1) for name in EXPERTS)
    problem = problem or why_not_adapted(config, model, ROLES[role].model, has_experts)
    problem = problem or why_not_built(written)
    if not problem:
        rollout = cfg.actor_rollout_ref.rollout
        problem = why_not_so_long(
            config, max(rollout.prompt_length + rollout.response_length, rollout.max_model_len or 0)
        )
    if problem and not (own_code and TRAINABLE[rules].own_code):
        raise NotSupportedError(
            f"not supported yet: {who}, {ROLE_GROUPS[role]}.strategy={strategy}: {problem}"
        )


def attention_heads(cfg: Config, role: str) -> int:
    """Of queries in a layer of a role's model; 0 where config.json does not tell."""
    return num_heads(as_built(role_model(cfg, role)))


def as_built(model: ModelConfig) -> Mapping[str, Any]:
    """What config.json says of the decoder, with override_config; nothing where it cannot be read."""
    return language_part(overridden(config_json(model), model.override_config))


def model_type_of(model: ModelConfig) -> str:
    """What config.json calls it; empty where it cannot be read."""
    return str(config_json(model).get("model_type") or "")


def config_json(model: ModelConfig, file: str = "config.json") -> dict[str, Any]:
    """What the file of a model's directory says; nothing where it cannot be read."""
    try:
        raw = json.loads((Path(model.path).expanduser() / file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def why_not_with_images(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why a role's model does not go with the dataset, or not as asked, and the fix; empty if it does."""
    model, keys = role_model(cfg, role), ROLES[role].model
    kind, known = config.get("model_type"), ", ".join(VISION_MODELS)
    if not sees_images(config.get("model_type")):
        return (
            f"data.dataset_type=vlm with a {kind}, which sees no images. Use a model of {known}, or set "
            "data.dataset_type=llm."
            if cfg.data.has_images
            else ""
        )
    if not cfg.data.has_images:
        return (
            f"a {kind} with data.dataset_type={cfg.data.dataset_type}: a vision model is trained on prompts "
            "that may have images. Set data.dataset_type=vlm; rows without images have null in their column."
        )
    if model.lora_rank:
        return f"LoRA adapters on a {kind}. Set {keys}.lora_rank=0."
    if model.use_liger:
        return f"Liger kernels in a {kind}. Set {keys}.use_liger=false."
    if model.attention_kernels != "torch":
        return f"attention_kernels={model.attention_kernels} in a {kind}. Set {keys}.attention_kernels=torch."
    return ""


def _why_no_router_loss(model: ModelConfig) -> str:
    """Why the loss of a router that is asked for is not there, and the fix; empty if none is."""
    coefficient = model.override_config.get("router_aux_loss_coef")
    if not coefficient:
        return ""
    return (
        f"override_config.router_aux_loss_coef={coefficient}: transformers' loss of the router is that of "
        "a micro-batch by itself, and is not added. Remove it; the loss over a mini-batch is weighed by "
        "fsdp_config.moe_aux_loss_coeff, or megatron.override_transformer_config.moe_aux_loss_coeff."
    )


def _why_not_adapted(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why LATENT has no adapters, and the fix; empty if none are asked for."""
    kind, keys = config.get("model_type"), ROLES[role].model
    if kind in LATENT and role_model(cfg, role).lora_rank:
        return f"LoRA adapters on compressed keys and values ({kind}). Set {keys}.lora_rank=0."
    return ""


def _why_not_these_kernels(config: Mapping[str, Any], model: ModelConfig, keys: str) -> str:
    """Why attention kernels do not take a model's heads, and the fix; empty if they do."""
    kind, kernels = config.get("model_type"), model.attention_kernels
    if kind in LATENT and kernels != "torch":
        return f"attention_kernels={kernels} in a {kind}. Set {keys}.attention_kernels=torch."
    return ""


def _why_not_with_sinks(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why a model of SINKS does not go with what is asked, and the fix; empty if it does."""
    model, kind = role_model(cfg, role), config.get("model_type")
    if kind not in SINKS:
        return ""
    if model.attention_kernels != "torch":
        return (
            f"attention_kernels={model.attention_kernels} for attention sinks ({kind}). "
            f"Set {ROLES[role].model}.attention_kernels=torch."
        )
    return ""


def _why_not_with_experts(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why fsdp does not treat the experts of a role's model as asked, and the fix; empty if it does."""
    model, keys = role_model(cfg, role), ROLES[role].model
    group = role_group(cfg, role)
    coefficient = group.fsdp_config.moe_aux_loss_coeff if isinstance(group, TrainedConfig) else 0.0
    has_experts = any(config.get(name) not in (None, 0, 1) for name in EXPERTS)
    if not has_experts:
        problem = f"fsdp_config.moe_aux_loss_coeff={coefficient}: this model has no experts. Set it to 0."
        return problem if coefficient else ""
    kind = config.get("model_type")
    if coefficient and kind in GROUP_ROUTED:
        return (
            f"fsdp_config.moe_aux_loss_coeff={coefficient} for a {kind}: its router does not "
            "choose by its logits alone, which the loss would balance. Set it to 0."
        )
    if model.use_liger:
        return (
            f"{keys}.use_liger=True for a mixture of experts: its kernels take the place of each expert, and "
            "transformers has all in one tensor. Set it to false."
        )
    return ""


def _why_not_dealt(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why ranks cannot have some of the experts of a role's model each, and the fix; empty if they can."""
    ranks = role_group(cfg, role).fsdp_config.expert_parallel_size
    if ranks == 1:
        return ""
    key = f"{ROLE_GROUPS[role]}.fsdp_config.expert_parallel_size={ranks}"
    experts = next((config[name] for name in EXPERTS if config.get(name) not in (None, 0, 1)), 0)
    if not experts:
        return f"{key}: this model has no experts. Set it to 1."
    if isinstance(experts, int) and experts % ranks:
        return (
            f"{key} does not divide the {experts} experts of a layer: each rank has whole ones. Set it to 1."
        )
    return ""


def _why_not_split(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why ranks cannot share the sequences of a role's model as asked, and the fix; empty if they can."""
    ranks, key = sequence_ranks(cfg, role), f"{ROLE_GROUPS[role]}.ulysses_sequence_parallel_size"
    heads = num_heads(config)
    if ranks > 1 and sees_images(config.get("model_type")):
        return f"{key}={ranks} for a {config['model_type']}, a vision model. Set it to 1."
    if heads % ranks:
        fits = [size for size in range(1, ranks) if heads % size == ranks % size == 0]
        return (
            f"{key}={ranks} does not divide the model's {heads} attention heads: in attention each rank has "
            f"whole heads. Set it to {' or '.join(map(str, fits))}."
        )
    return ""


def _why_not_float8(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why a role's model does not multiply in FP8 as asked, and the fix; empty if it does."""
    fsdp, key = role_group(cfg, role).fsdp_config, f"{ROLE_GROUPS[role]}.fsdp_config.float8"
    if not fsdp.float8:
        return ""
    dtype, kind = fsdp.mixed_precision.param_dtype, config.get("model_type")
    if dtype != "bfloat16" and (cfg.trainer.device != "cpu" or dtype == "float16"):
        return (
            f"{key}=True with mixed_precision.param_dtype={dtype}: FP8 products come in 16 bits. Set "
            f"{ROLE_GROUPS[role]}.fsdp_config.mixed_precision.param_dtype=bfloat16."
        )
    if kind not in FLOAT8:
        return (
            f"{key}=True for a {kind}, whose products in FP8 were compared with nothing (mixtures of experts "
            f"have theirs in kernels of their own). Set {key}=false, or use a usual model of "
            f"{', '.join(FLOAT8)}."
        )
    sides = {name: config[name] for name in SIDES if isinstance(config.get(name), int)}
    heads, width = num_heads(config), head_size(config)
    if heads and width:
        sides |= {"num_attention_heads * head_dim": heads * width}
        kv_heads = config.get("num_key_value_heads")
        sides |= {"num_key_value_heads * head_dim": kv_heads * width} if isinstance(kv_heads, int) else {}
    for name, side in sides.items():
        if side % FLOAT8_MULTIPLE:
            return (
                f"{key}=True with {name}={side}: FP8 products are of linear layers whose sides are multiples "
                f"of {FLOAT8_MULTIPLE}. Set {key}=false."
            )
    return ""


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


def why_not(config: Mapping[str, Any], strategy: str, head: Head = "lm") -> str:
    """Why a strategy does not train the model of a config.json, and the fix; empty if it does."""
    problem = _problem(config, strategy, head)
    if not problem:
        return ""
    others = [other for other in TRAINABLE if not _problem(config, other, head)]
    instead = f"Set strategy={others[0]}, or use" if others else "Use"
    return f"{problem}. {instead} a usual model of {', '.join(known_types(strategy, head))}."


def _problem(config: Mapping[str, Any], strategy: str, head: Head) -> str:
    kind = config.get("model_type")
    traits = _traits(config)
    if kind in known_types(strategy):
        config = language_part(config)
        traits = chain(_traits(config), TRAINABLE[strategy].lacks(config))
    if trait := next(traits, ""):
        return f"{kind} with {trait}"
    if kind in known_types(strategy, head):
        return ""
    if kind in known_types(strategy):
        return f"{kind} with a {head} head, which transformers does not have"
    return f"{kind} is no model type whose results under {strategy} were compared with transformers'"


def _traits(config: Mapping[str, Any]) -> Iterator[str]:
    """What neither strategy computes."""
    kinds = set(config.get("layer_types") or ()) - PACKED_LAYERS
    kinds |= {DELTA_NETS} if config.get("linear_num_value_heads") else set()
    if kinds:
        why = "their state would leak between packed rows"
        if DELTA_NETS in kinds:
            why += ", of which megatron-core 0.16's gated delta net takes none at all"
        yield f"layers of kind {', '.join(sorted(kinds))} ({why})"
    for name in SCALES:
        if config.get(name) not in (None, 1, 1.0):
            yield f"{name}={config[name]} (an output head that is not a plain matrix, or attention likewise)"
    for name in PARTS:
        if config.get(name):
            yield f"a {name} (it is made of several models)"
    if config.get("kv_lora_rank") and config.get("model_type") not in LATENT:
        yield f"kv_lora_rank={config['kv_lora_rank']} (keys and values that are compressed)"
    if config.get("quantization_config"):
        yield f"a quantization_config (its weights are no plain numbers{_as_plain_numbers(config)})"
    if config.get("output_router_logits"):
        yield (
            "output_router_logits=True (a loss of the router, which transformers has of each micro-batch "
            "by itself; set it to false by override_config, and moe_aux_loss_coeff for one of mini-batches)"
        )
    if config.get("use_bidirectional_attention"):
        yield "use_bidirectional_attention (its tokens see the future)"


def _as_plain_numbers(config: Mapping[str, Any]) -> str:
    """How quantised weights of a kind that trains come to be plain numbers, where that was looked up."""
    mxfp4 = config["quantization_config"].get("quant_method") == "mxfp4"
    return "; docs/models.md has the lines that make plain ones of them" if mxfp4 else ""


def _as_megatron_builds(config: Mapping[str, Any]) -> Iterator[str]:
    """What the layers that are built of megatron-core do not have."""
    for name in ("attention_bias", "attention_out_bias", "mlp_bias"):
        if config.get(name) and (name != "attention_bias" or config.get("model_type") not in QKV_BIAS):
            yield f"{name}={config[name]}"
    if config.get("model_type") in GELU_MLPS:
        if config["hidden_activation"] != "gelu_pytorch_tanh":
            yield f"hidden_activation={config['hidden_activation']}"
        if config["sliding_window"] is None:
            yield "sliding_window=null (layers are told apart by it)"
    elif config["hidden_act"] not in ("silu", "swish"):
        yield f"hidden_act={config['hidden_act']}"
    if config.get("model_type") in LATENT:
        key = sum(config[name] or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        if (config["v_head_dim"] or 0) > key:
            yield f"v_head_dim={config['v_head_dim']} (values wider than keys, of {key} features)"
    if config.get("model_type") in GROUP_ROUTED:
        yield from _as_megatron_routes(config)
    normalised = config.get("model_type") == "mixtral" or config.get("norm_topk_prob")
    if config.get("num_experts_per_tok") == 1 and normalised:
        yield "one expert a token at weight 1, whose router learns nothing"


def _as_megatron_routes(config: Mapping[str, Any]) -> Iterator[str]:
    """What the routers of GROUP_ROUTED, and what stands beside them, do not have there."""
    if not config["n_shared_experts"]:
        yield f"n_shared_experts={config['n_shared_experts']} (without an expert that all tokens pass)"
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"] or 0
    method = config["topk_method"] if config.get("model_type") == "deepseek_v2" else ""
    if method not in ("", "greedy", "group_limited_greedy"):
        yield f"topk_method={method}"
    names = ("n_group", "topk_group") if method != "greedy" else ()
    groups, best = [config.get(name) or 1 for name in names] or (1, 1)
    if experts and experts < 2 * groups:
        yield f"n_group={groups} (groups of one expert, which two are to rank)"
    elif experts and chosen > experts // groups * best:
        yield f"num_experts_per_tok={chosen} (the best groups have {experts // groups * best})"
