"""The table of model families: all that siirl knows of a model type besides its code. Pure.

A row is found by the model_type of config.json. What is asked of a model is asked of its row; no other file
compares names of types. A row says only what was run and compared: tests/contracts/test_accepted_models.py
builds a small model of each type with random weights and holds log-probs, gradients and names of weights
against transformers'.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from siirl.models.in_vllm import LATENT, LATENT_SOFTMAX, SINKS, InVLLM

FSDP, BOTH = ("fsdp",), ("fsdp", "megatron")


@dataclass(frozen=True)
class Experts:
    """The mixtures of experts of a family's layers."""

    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """What the files call the gate, up and down matrix of an expert."""
    stacked: tuple[str, str] | None = None
    """What the files call the tensors of all experts of a layer, where they have such: of gates and ups, and
    of downs."""
    module: str = "mlp"
    """Where they stand in a layer."""
    router: str = "gate"
    """What the files call their router there."""
    width: str = "moe_intermediate_size"
    """The key of config.json that says how wide an expert is."""
    normed_by: str = "norm_topk_prob"
    """The key that says whether the weights of a token's experts sum up to 1; "": they do."""
    groups: Literal["", "softmax", "sigmoid"] = ""
    """By what a router ranks experts that it chooses by groups, or by a bias that balances them; "": it
    chooses by its logits alone."""
    shared: Literal["", "plain", "gated"] = ""
    """The expert that all tokens pass, and whether a gate weighs it; "": there is none."""
    choice_bias: bool = False
    """Its router has a bias that is not trained (e_score_correction_bias)."""
    biases: bool = False
    """Experts and router have biases; matrices of experts are stored as [in, out], each gate beside its up,
    and their gated unit is clamped (swiglu_limit)."""
    adapted: bool = False
    """LoRA adapters are put on them, too: on those of families without a shared expert, of whose adapters
    peft would lose a part."""
    replayed: bool = True
    """Its router was seen to take given experts in the place of its own (actor.router_replay)."""


@dataclass(frozen=True)
class Latent:
    """Keys and values that are computed of a compressed vector of each token."""

    reads_kv_heads: bool
    """num_key_value_heads is read: there are as many as heads."""
    turns_head_dim: bool
    """head_dim, where it is given, is the part that positions turn."""


_NO_MODEL = InVLLM("vLLM has no model of this type")
_NOT_SEEN = InVLLM("weight syncs of this type were not tested")


@dataclass(frozen=True)
class Family:
    """One model type."""

    strategies: tuple[str, ...] = FSDP
    """That train it."""
    any_head: bool = False
    """It trains with a value or score head, too: transformers has these for it, or parts to build them of."""
    headed_by: tuple[str, ...] = field(default=BOTH, kw_only=True)
    """Of those strategies the ones that train it so."""
    vllm: InVLLM = field(default_factory=InVLLM)
    sglang: bool = False
    """SGLang was seen to take its weights as they are trained, and to give their log-probs."""
    mbridge: bool = False
    """mbridge was seen to read its files as siirl does."""
    float8: bool = False
    """Its linear layers were seen to multiply in FP8, under fsdp and in vLLM; with experts, images and
    compressed keys they were not."""
    mxfp4: bool = False
    """Its files may have experts in MXFP4."""
    compiled: bool = False
    """Its layers, those of its text, were compared when compiled (model.compile_layers)."""
    turned: bool = False
    """Matrices are stored as [in, out], so that adapters do not merge into them as into others."""
    counted: bool = False
    """The parameters of its layers are known to the memory estimate: what follows describes them."""

    scales: tuple[str, ...] = ()
    """Keys by which config.json scales or caps its logits, those of attention, what is embedded and what a
    layer adds, that the strategies compute."""
    delta_nets: bool = False
    """Some of its layers are gated delta nets (layer_types, "linear_attention")."""
    mamba2: bool = False
    """Some of its layers are those of Mamba-2 (the same, or "mamba")."""
    in_float32: tuple[str, ...] = ()
    """Ends of the names of weights that are trained and computed with in float32, whatever others are in."""
    sees_images: bool = False
    """It has a vision tower, and a decoder as any other."""
    deepstack: int = 0
    """First layers to which its tower adds inner states, unless deepstack_visual_indexes names others."""
    decoder: str = "model"
    """Where the files have embedding, layers and last norm."""
    latent: Latent | None = None
    sinks: bool = False
    """Its attention has a learned logit more in each softmax, of each head."""
    experts: Experts | None = None
    """None: it has none, or more than is said of them here is in config.json."""
    shares_hidden: bool = False
    """A head is the share of the hidden size, whatever head_dim says."""
    qkv_bias: str = "attention_bias"
    """The key that says whether queries, keys and values have biases; "always": they have."""
    output_bias: bool = True
    """attention_bias is of the output projection, too."""
    qk_norm: Literal["", "heads", "whole"] = ""
    """What of queries and keys is normed, unless use_qk_norm says that nothing is: each head, or all."""
    fused_qkv: bool = False
    """The files have queries, keys and values in one tensor."""
    fused_mlp: bool = False
    """The files have gate and up in one tensor."""
    mlp_norm: str = "post_attention_layernorm"
    """What the files call the norm of what the MLP is given; "": neither it nor attention is given norms."""
    norms_weigh: bool = True
    """Norms have weights; without these they are LayerNorms, of an epsilon of 1e-5."""
    outer_norms: tuple[str, ...] = ()
    """What the files call norms of what attention and MLP give; none in most."""
    centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    gelu: bool = False
    """MLPs have a GELU, by the tanh, and two kinds of layers rotary embeddings of their own."""
    query_scale: str = ""
    """The key of the number whose inverse square root scales queries; "": a head's features."""
    scales_embedding: bool = False
    """Embedded tokens are multiplied by the square root of their size."""
    turns_neighbours: bool = False
    """The rotary embedding turns dimensions 2i and 2i + 1 together, not i and i + D/2."""
    windows: bool = False
    """Attention sees no further than sliding_window, where config.json has one."""
    window_unread: Literal["", "without windowed layers", "without layer_types"] = ""
    """When nothing reads sliding_window."""
    tiny: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What config.json of a tiny model has besides sizes, so that all its parts are there (siirl test)."""

    @property
    def has_states(self) -> bool:
        """Some of its layers have a state of each row in the place of keys and values."""
        return self.delta_nets or self.mamba2


_TINY_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_TINY_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 12, "topk_method": "group_limited_greedy", **_TINY_GROUPS},
}
_TINY_DELTA_NETS = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}
_TINY_GATED_EXPERT = {"shared_expert_intermediate_size": 16}
_TINY_MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2},
    **{"mamba_chunk_size": 8, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"]},
}
_TINY_SCALES = {
    **{"logits_scaling": 3.0, "attention_multiplier": 0.2},
    **{"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
}
_TINY_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}

_SEEN = InVLLM(in_place=True)
_QWEN2 = InVLLM(windows="all above", shares_hidden=True, in_place=True)
_CUT = InVLLM(shares_hidden=True)
_GROUPED = Family(vllm=_NOT_SEEN, experts=Experts(groups="sigmoid", choice_bias=True, replayed=False))
_GROUPED_SHARED = Family(
    vllm=_NOT_SEEN, experts=Experts(groups="sigmoid", shared="plain", choice_bias=True, replayed=False)
)
_SCALES = tuple(_TINY_SCALES)
_STATES = InVLLM(cpu_dtype="bfloat16", on_gpu=False, since=32)
_STATES_BESIDE_IMAGES = replace(_STATES, package="torchvision")
_DECAYS = ("linear_attn.A_log",)
_DENSE = Family(float8=True)
_NORMED_AFTER = Family(
    BOTH,
    float8=True,
    counted=True,
    qk_norm="whole",
    mlp_norm="",
    outer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_OF_ANY_HEAD = Family(any_head=True, float8=True)


def _vision(in_vllm: str, **more: Any) -> Family:
    place = f"vllm.model_executor.models.{in_vllm}ForConditionalGeneration"
    seen = InVLLM(vision_class=place)
    return Family(BOTH, any_head=True, headed_by=FSDP, vllm=seen, compiled=True, sees_images=True, **more)


FAMILIES: dict[str, Family] = {
    "afmoe": _GROUPED_SHARED,
    "arcee": _OF_ANY_HEAD,
    "aria_text": Family(vllm=_NO_MODEL, experts=Experts(replayed=False)),
    "cwm": Family(BOTH, float8=True, counted=True, windows=True),
    "deepseek_v2": Family(
        BOTH,
        vllm=LATENT_SOFTMAX,
        counted=True,
        latent=Latent(reads_kv_heads=True, turns_head_dim=False),
        experts=Experts(groups="softmax", shared="plain", replayed=False),
        tiny={**_TINY_LATENT, "q_lora_rank": None},
    ),
    "deepseek_v3": Family(
        BOTH,
        vllm=LATENT,
        counted=True,
        latent=Latent(reads_kv_heads=False, turns_head_dim=True),
        experts=Experts(groups="sigmoid", shared="plain", choice_bias=True),
        tiny={**_TINY_LATENT, "q_lora_rank": 16},
    ),
    "dots1": replace(_GROUPED_SHARED, vllm=_NO_MODEL, tiny={"n_shared_experts": 1, **_TINY_GROUPS}),
    "diffllama": Family(any_head=True, float8=True, vllm=_NO_MODEL),
    "ernie4_5": _DENSE,
    "ernie4_5_moe": Family(
        vllm=_NOT_SEEN,
        in_float32=("mlp.gate.weight", "e_score_correction_bias"),
        experts=Experts(groups="softmax", shared="plain", choice_bias=True, replayed=False),
    ),
    "exaone_moe": _GROUPED_SHARED,
    "exaone4": Family(any_head=True, float8=True, window_unread="without windowed layers"),
    "flex_olmo": Family(experts=Experts(adapted=True)),
    "gemma": _OF_ANY_HEAD,
    "gemma2": Family(
        any_head=True,
        vllm=_NOT_SEEN,
        scales=tuple(_TINY_CAPS),
        tiny=_TINY_CAPS | {"query_pre_attn_scalar": 8},
    ),
    "gemma3_text": Family(
        BOTH,
        vllm=InVLLM(in_place=True),
        float8=True,
        counted=True,
        qk_norm="heads",
        mlp_norm="pre_feedforward_layernorm",
        outer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        centered_norms=True,
        gelu=True,
        query_scale="query_pre_attn_scalar",
        scales_embedding=True,
        windows=True,
    ),
    "glm": _OF_ANY_HEAD,
    "glm4": Family(
        BOTH,
        any_head=True,
        float8=True,
        counted=True,
        output_bias=False,
        fused_mlp=True,
        outer_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        turns_neighbours=True,
    ),
    "glm4_moe": Family(
        BOTH,
        counted=True,
        experts=Experts(groups="sigmoid", shared="plain", choice_bias=True),
        output_bias=False,
        qk_norm="heads",
        tiny={"head_dim": 8, **_TINY_GROUPS},
    ),
    "glm4_moe_lite": Family(
        vllm=_NOT_SEEN,
        latent=Latent(reads_kv_heads=False, turns_head_dim=True),
        experts=Experts(groups="sigmoid", shared="plain", choice_bias=True, replayed=False),
        tiny={**_TINY_LATENT, "q_lora_rank": 16, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "gpt2": Family(turned=True, shares_hidden=True),
    "gpt_bigcode": Family(float8=True, shares_hidden=True, tiny={"num_key_value_heads": 1}),
    "gpt_oss": Family(
        BOTH,
        any_head=True,
        vllm=SINKS,
        mxfp4=True,
        counted=True,
        sinks=True,
        experts=Experts(
            stacked=("experts.gate_up_proj", "experts.down_proj"),
            router="router",
            width="intermediate_size",
            normed_by="",
            biases=True,
        ),
        windows=True,
    ),
    "gpt_neox": Family(vllm=_NOT_SEEN, shares_hidden=True),
    "granite": Family(BOTH, float8=True, counted=True, scales=_SCALES, tiny=_TINY_SCALES),
    "granitemoe": Family(
        BOTH,
        vllm=_CUT,
        counted=True,
        scales=_SCALES,
        experts=Experts(
            stacked=("input_linear.weight", "output_linear.weight"),
            module="block_sparse_moe",
            router="router.layer",
            width="intermediate_size",
            normed_by="",
        ),
        tiny=_TINY_SCALES,
    ),
    "granitemoeshared": Family(vllm=_CUT, scales=_SCALES, experts=Experts(), tiny=_TINY_SCALES),
    "granitemoehybrid": Family(
        vllm=InVLLM(only={"mamba_n_groups": 1}, on_gpu=False, since=32),
        scales=_SCALES,
        mamba2=True,
        in_float32=("mamba.A_log",),
        counted=True,
        experts=Experts(width="intermediate_size", replayed=False),
        tiny=_TINY_SCALES | _TINY_MAMBA,
    ),
    "helium": Family(any_head=True, float8=True, vllm=_NO_MODEL),
    "hunyuan_v1_dense": _DENSE,
    "hunyuan_v1_moe": Family(experts=Experts()),
    "hyperclovax": _DENSE,
    "jais2": _DENSE,
    "llama": Family(BOTH, True, _SEEN, mbridge=True, float8=True, compiled=True, counted=True),
    "mellum": Family(experts=Experts(adapted=True)),
    "ministral": Family(
        BOTH,
        any_head=True,
        vllm=_NO_MODEL,
        float8=True,
        counted=True,
        windows=True,
        window_unread="without layer_types",
    ),
    "ministral3": _OF_ANY_HEAD,
    "minimax_m2": _GROUPED,
    "mistral": Family(BOTH, True, float8=True, compiled=True, counted=True, windows=True),
    "mixtral": Family(
        BOTH,
        any_head=True,
        mbridge=True,
        counted=True,
        experts=Experts(
            ("w1", "w3", "w2"),
            module="block_sparse_moe",
            width="intermediate_size",
            normed_by="",
            adapted=True,
        ),
        windows=True,
    ),
    "olmo": Family(BOTH, float8=True, counted=True, norms_weigh=False),
    "olmo2": _NORMED_AFTER,
    "olmo3": replace(_NORMED_AFTER, windows=True),
    "olmoe": Family(
        BOTH,
        vllm=_CUT,
        counted=True,
        experts=Experts(width="intermediate_size", adapted=True),
        qk_norm="whole",
    ),
    "opt": Family(float8=True, shares_hidden=True),
    "persimmon": Family(any_head=True, float8=True, vllm=_NO_MODEL, shares_hidden=True),
    "phi3": Family(
        BOTH, any_head=True, float8=True, counted=True, fused_qkv=True, fused_mlp=True, windows=True
    ),
    "qwen2": Family(
        BOTH,
        any_head=True,
        vllm=_QWEN2,
        mbridge=True,
        float8=True,
        compiled=True,
        counted=True,
        qkv_bias="always",
        output_bias=False,
        windows=True,
    ),
    "qwen2_moe": Family(
        BOTH,
        any_head=True,
        vllm=InVLLM(windows="every second below", shares_hidden=True),
        counted=True,
        experts=Experts(shared="gated"),
        qkv_bias="qkv_bias",
        output_bias=False,
        windows=True,
    ),
    "qwen2_5_vl": _vision("qwen2_5_vl:Qwen2_5_VL", shares_hidden=True, qkv_bias="always", windows=True),
    "qwen3": Family(
        BOTH,
        any_head=True,
        vllm=InVLLM(windows="all above", in_place=True),
        sglang=True,
        mbridge=True,
        float8=True,
        compiled=True,
        counted=True,
        qk_norm="heads",
        windows=True,
    ),
    "qwen3_moe": Family(
        BOTH,
        any_head=True,
        vllm=_SEEN,
        mbridge=True,
        counted=True,
        experts=Experts(adapted=True),
        qk_norm="heads",
        windows=True,
    ),
    "qwen3_5_moe_text": Family(
        vllm=_STATES_BESIDE_IMAGES,
        counted=True,
        delta_nets=True,
        in_float32=_DECAYS,
        experts=Experts(shared="gated", normed_by="", replayed=False),
        qk_norm="heads",
        tiny=_TINY_DELTA_NETS | _TINY_GATED_EXPERT,
    ),
    "qwen3_5_text": Family(
        vllm=replace(_STATES_BESIDE_IMAGES, on_gpu=True, since=24),
        compiled=True,
        counted=True,
        delta_nets=True,
        in_float32=_DECAYS,
        qk_norm="heads",
        tiny=_TINY_DELTA_NETS,
    ),
    "qwen3_next": Family(
        any_head=True,
        vllm=_STATES,
        counted=True,
        delta_nets=True,
        in_float32=_DECAYS,
        experts=Experts(shared="gated", replayed=False),
        qk_norm="heads",
        tiny=_TINY_DELTA_NETS | _TINY_GATED_EXPERT,
    ),
    "qwen3_vl": _vision("qwen3_vl:Qwen3VL", qk_norm="heads", decoder="model.language_model", deepstack=3),
    "seed_oss": Family(BOTH, True, float8=True, counted=True, output_bias=False),
    "smollm3": Family(any_head=True, float8=True),
    "solar_open": replace(_GROUPED_SHARED, vllm=_NO_MODEL),
    "starcoder2": _OF_ANY_HEAD,
}
"""model_type of config.json -> what is known of it."""
TEXT_PARTS = (
    *("exaone4_5", "gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("qwen3_5", "qwen3_5_moe", "smolvlm", "vipllava"),
)
"""Types made of several models, whose text part was seen to compute of texts what the whole does."""
WHY_NOT = {
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), "of which transformers has no model (Ling)"),
    "falcon_h1": "each of whose layers has a state beside keys and values, which no rollout of siirl keeps",
    **dict.fromkeys(
        ("gemma4", "gemma4_text"),
        "whose layers have heads of two sizes, and may take keys and values of other layers, which no "
        "rollout keeps (Gemma 2 and 3 train)",
    ),
    "nemotron_h": "some of whose layers are an MLP alone, for which no rollout of siirl has a cache",
}
"""Types that are asked for -> why they are not trained."""
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
"""What config.json calls a type -> what transformers calls it."""
UNKNOWN = Family(strategies=())
"""What is known of all others: nothing was run."""


def family_of(model_type: str | None) -> Family:
    """The row of a model_type; UNKNOWN for one that has none."""
    kind = model_type if isinstance(model_type, str) else ""  # a file may have anything there
    return FAMILIES.get(OTHER_NAMES.get(kind, kind), UNKNOWN)


def types_with(has: Callable[[Family], object]) -> tuple[str, ...]:
    """The types whose rows have something, in alphabetical order."""
    return tuple(sorted(name for name, row in FAMILIES.items() if has(row)))


def known_types(strategy: str, head: str = "lm") -> tuple[str, ...]:
    """The model types that a strategy trains with a head, in alphabetical order."""

    def trains(row: Family) -> bool:
        return strategy in row.strategies and (head == "lm" or (row.any_head and strategy in row.headed_by))

    return types_with(trains)
