"""Table of docs/models.md of what `siirl check` refuses for a model, and why.

Types are those of the rows of siirl/models/families.py; tests/unit/test_models_page.py asks for each line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from siirl.models.families import FAMILIES, WHY_NOT, Family, types_with
from siirl.models.sampled import CPU_DELTA_NETS, CPU_HEAD_SIZES, CPU_LATENT

COLUMNS = ("refused", "for", "why")
_WIDEST = 160
"""Characters of a line of a page."""
_POLICY = "actor_rollout_ref"
_ACTOR, _MODEL, _ROLLOUT = f"{_POLICY}.actor", f"{_POLICY}.model", f"{_POLICY}.rollout"
_VLLM, _MEGATRON, _ON_CPU = f"{_ROLLOUT}.name=vllm", f"{_ACTOR}.strategy=megatron", "trainer.device=cpu"
_VLM = "data.dataset_type=vlm"


@dataclass(frozen=True)
class Limit:
    """One line of the table."""

    what: str
    types: tuple[str, ...]
    why: str
    keys: tuple[str, ...] = ()
    """Of a job that has it."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Of its config.json."""
    of: str = ""
    """The types in words; "": by name."""
    words: str = ""
    """A part of what `siirl check` says; "": `why`."""


def limit_rows() -> Iterator[str]:
    """The lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for one in limits():
        yield from _lines(one.what, [one.of] if one.of else list(one.types), one.why)


def _lines(what: str, names: list[str], why: str) -> Iterator[str]:
    line = f"| {what} | {', '.join(names)} | {why} |"
    if len(line) <= _WIDEST or len(names) < 2:
        yield line
        return
    for some in (names[: len(names) // 2], names[len(names) // 2 :]):
        yield from _lines(what, some, why)


def limits() -> list[Limit]:
    """All of them: of training, of keys, of vLLM."""
    return [*_of_training(), *_of_megatron(), *_of_keys(), *_of_vllm()]


def _with_experts(row: Family) -> bool:
    return row.experts is not None


def _of_training() -> Iterator[Limit]:
    for why in dict.fromkeys(WHY_NOT.values()):
        yield Limit("training", tuple(kind for kind in WHY_NOT if WHY_NOT[kind] == why), why)
    yield Limit(
        "training",
        ("phimoe", "bamba", "olmo_hybrid", "lfm2"),
        "not compared with transformers (Phi-MoE's router adds noise, LFM2 has other layers)",
        of="any other type, such as Phi-MoE, Bamba, OLMo Hybrid, LFM2",
        words="is no model type whose results under fsdp were compared",
    )
    yield Limit(
        "training, if its logits are scaled or capped",
        ("llama", "gemma3_text"),
        "the output head is not a plain matrix, or attention likewise",
        values={"logit_scale": 0.5},
        of="all but Granite (scale) and gemma2 (cap)",
        words="an output head that is not a plain matrix",
    )
    yield Limit(
        "training, if all layers have states",
        types_with(lambda row: row.delta_nets),
        "nothing tells how long a row is that is decoded",
        values={"layer_types": ["linear_attention"] * 2},
        of="gated delta nets",
    )
    yield Limit(
        "training with `time_step_limit` above 0",
        types_with(lambda row: row.mamba2),
        "padding would change the state",
        values={"time_step_limit": [0.1, 1.0]},
        words="steps that are never 0, so that padding decays",
    )
    yield Limit(
        "files of AWQ, GPTQ, bitsandbytes and others",
        ("llama", "qwen3_moe"),
        "fp8 and mxfp4 are read",
        values={"quantization_config": {"quant_method": "awq"}},
        of="any",
        words="quant_method=awq is not read",
    )
    yield Limit(
        "files in MXFP4",
        ("llama", "qwen3_moe"),
        "only gpt-oss was released in it",
        values={"quantization_config": {"quant_method": "mxfp4"}},
        of=f"all but {', '.join(types_with(lambda row: row.mxfp4))}",
        words="quant_method=mxfp4 is read of",
    )
    yield Limit(
        "quantised files with `rollout.name=sglang`",
        types_with(lambda row: row.sglang),
        "that SGLang takes plain weights beside such files was not seen",
        keys=(f"{_ROLLOUT}.name=sglang",),
        values={"quantization_config": {"quant_method": "fp8"}},
        words="sglang",
    )


def _of_megatron() -> Iterator[Limit]:
    yield Limit(
        "`strategy=megatron`",
        types_with(lambda row: row.delta_nets),
        "megatron-core 0.16's gated delta net takes no packed rows",
        (_MEGATRON,),
        of="gated delta nets",
    )
    yield Limit(
        "... with biases of the attention's output or of MLPs",
        ("llama", "deepseek_v3"),
        "siirl builds its layers without",
        (_MEGATRON,),
        {"attention_bias": True},
        of="any",
        words="attention_bias=True",
    )
    yield Limit(
        "... with an activation other than SiLU (gemma3_text: tanh GELU)",
        ("llama", "qwen3_moe"),
        "siirl builds its layers with it",
        (_MEGATRON,),
        {"hidden_act": "gelu"},
        of="any",
        words="hidden_act=gelu",
    )
    yield Limit(
        "... with `clip_qkv`",
        ("olmo", "olmoe"),
        "siirl does not clip queries, keys and values there",
        (_MEGATRON,),
        {"clip_qkv": 8.0},
        words="clip_qkv=8",
    )
    yield Limit(
        "... with more tensor-parallel ranks than key-value heads",
        types_with(lambda row: row.qk_norm == "whole" and "megatron" in row.strategies),
        "a norm that spans them is not split within one",
        (_MEGATRON, f"{_ACTOR}.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"),
        {"num_key_value_heads": 1},
        words="it is not split within a head",
    )
    yield Limit(
        "... with `context_parallel_size` above 1",
        types_with(lambda row: row.sinks),
        "ranks that share rows compute no sinks",
        (_MEGATRON, f"{_ACTOR}.megatron.context_parallel_size=2", "trainer.n_gpus_per_node=2"),
        words="with attention sinks",
    )
    yield Limit(
        "... with `moe_grouped_gemm`",
        types_with(lambda row: row.experts and row.experts.biases),
        "experts with biases are multiplied one by one",
        (_MEGATRON, f"{_ACTOR}.megatron.override_transformer_config.moe_grouped_gemm=true"),
        words="for experts with biases",
    )
    yield Limit(
        "... with values wider than keys",
        types_with(lambda row: row.latent and "megatron" in row.strategies),
        "attention kernels have one head size, of the keys",
        (_MEGATRON,),
        {"v_head_dim": 64},
        words="values wider than keys",
    )
    yield Limit(
        "... if the chosen groups have fewer experts than a token needs",
        types_with(lambda row: row.experts and row.experts.groups and "megatron" in row.strategies),
        "experts of other groups would be chosen",
        (_MEGATRON,),
        {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "topk_method": "group_limited_greedy"},
        words="the best groups have",
    )
    yield Limit(
        "... with one expert a token at weight 1",
        ("mixtral",),
        "the router learns nothing",
        (_MEGATRON,),
        {"num_experts_per_tok": 1},
        of="mixtures of experts",
        words="whose router learns nothing",
    )
    yield Limit(
        "... with a first pipeline stage of fewer layers than take features of images",
        types_with(lambda row: row.deepstack),
        "its tower is there, and sends nothing on",
        (_MEGATRON, _VLM, f"{_ACTOR}.megatron.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2"),
        {"text_config": {"num_hidden_layers": 4}},
        words="its inner states to the first 3 (deepstack)",
    )
    yield Limit(
        "`megatron.use_mbridge`",
        types_with(lambda row: "megatron" in row.strategies and not row.mbridge),
        f"it reads {', '.join(types_with(lambda row: row.mbridge))} as siirl does; others were not seen",
        (_MEGATRON, f"{_ACTOR}.megatron.use_mbridge=true"),
        of="other types",
        words="that mbridge reads it as siirl does has not been seen",
    )


def _of_keys() -> Iterator[Limit]:
    yield Limit(
        "`ulysses_sequence_parallel_size` above 1",
        types_with(lambda row: row.mamba2),
        "the heads of a Mamba-2 scan share keys and queries",
        (f"{_ACTOR}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"),
        of="granitemoehybrid, vision models",
        words="share keys and queries",
    )
    yield Limit(
        "`model.use_liger`",
        types_with(lambda row: row.has_states or (row.experts and not row.sees_images)),
        "its kernels replace each expert, or were not compared",
        (f"{_MODEL}.use_liger=true",),
        of="mixtures of experts, models with states, vision models",
        words="iger",
    )
    yield Limit(
        "`model.attention_kernels` other than torch",
        types_with(lambda row: row.sinks or "attn_logit_softcapping" in row.scales or row.latent),
        "sinks, caps and compressed keys were compared with torch only",
        (f"{_MODEL}.attention_kernels=flash_attn_4",),
        words="attention_kernels=flash_attn_4",
    )
    yield Limit(
        "`fsdp_config.moe_aux_loss_coeff`",
        types_with(lambda row: row.experts and row.experts.groups),
        "their routers use groups or a bias",
        (f"{_ACTOR}.fsdp_config.moe_aux_loss_coeff=0.01",),
        words="does not choose by its logits alone",
    )
    yield Limit(
        "`output_router_logits`, `router_aux_loss_coef`",
        ("mixtral", "qwen3_moe"),
        "transformers' loss is of a micro-batch by itself: use `moe_aux_loss_coeff`",
        values={"output_router_logits": True},
        of="mixtures of experts",
        words="output_router_logits=True",
    )
    yield Limit(
        "`router_replay.mode`",
        types_with(lambda row: row.experts and not row.experts.replayed),
        "not seen with their routers",
        (f"{_ACTOR}.router_replay.mode=R3", _VLLM),
        words="router_replay",
    )
    yield Limit(
        "LoRA beyond the attention",
        types_with(lambda row: row.experts and not row.experts.adapted and not row.latent),
        "peft would lose some adapters of a shared expert; others were not compared",
        (f"{_MODEL}.lora_rank=4",),
        of='mixtures of experts with "attention" in the table',
        words="LoRA adapters on experts",
    )
    yield Limit(
        "LoRA",
        types_with(lambda row: row.latent),
        "not compared on compressed keys and values",
        (f"{_MODEL}.lora_rank=4", f"{_MODEL}.target_modules=[q_proj]"),
        words="LoRA adapters on compressed keys and values",
    )
    yield Limit(
        "LoRA",
        types_with(lambda row: row.turned),
        "its matrices are stored as [in, out]",
        (f"{_MODEL}.lora_rank=4",),
        words="whose matrices are stored as [in, out]",
    )
    yield Limit(
        "`model.compile_layers`",
        types_with(lambda row: not row.compiled),
        f"{', '.join(types_with(lambda row: row.compiled))} were compared when compiled",
        (f"{_MODEL}.compile_layers=true",),
        of="other types",
        words="was compared with nothing when compiled",
    )


def _of_vllm() -> Iterator[Limit]:
    for why in dict.fromkeys(row.vllm.why_not for row in FAMILIES.values() if row.vllm.why_not):
        types = types_with(lambda row, why=why: row.vllm.why_not == why)
        yield Limit("`rollout.name=vllm`", types, why, (_VLLM,))
    yield Limit(
        "... on a GPU",
        types_with(lambda row: not row.vllm.on_gpu),
        "their states were seen on a CPU alone",
        (_VLLM,),
        of="models with states but Qwen3.5 without experts",
        words="has been seen on a CPU alone",
    )
    newest = max(row.vllm.since for row in FAMILIES.values())
    yield Limit(
        f"... before vLLM 0.{newest}",
        types_with(lambda row: row.vllm.since == newest),
        "weight syncs of such a model miss some there",
    )
    yield Limit(
        "... with sliding windows in some layers",
        types_with(lambda row: row.vllm.windows.endswith(("above", "below"))),
        "vLLM has them in all layers or in none (qwen2_moe: none)",
        (_VLLM,),
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        words="with sliding windows in some of its layers",
    )
    yield Limit(
        "... with another order of windows, or `rope_type` but yarn",
        types_with(lambda row: row.vllm.windows == "every second"),
        "vLLM does not read them from config.json",
        (_VLLM,),
        {"layer_types": ["full_attention", "sliding_attention"]},
        words="with sliding windows in some of its layers",
    )
    yield Limit(
        "... with `head_dim` other than `hidden_size / num_attention_heads`",
        types_with(lambda row: row.vllm.shares_hidden),
        "vLLM cuts larger weights silently",
        (_VLLM,),
        {"head_dim": 64},
        words="and leaves out the other weights",
    )
    for kind in types_with(lambda row: row.vllm.only):
        only = FAMILIES[kind].vllm.only
        name, value = next((name, value) for name, value in only.items() if isinstance(value, bool | int))
        where, keys = ("", (_VLLM,)) if FAMILIES[kind].vllm.on_gpu else (" on a CPU", (_VLLM, _ON_CPU))
        yield Limit(
            f"...{where}, unless {', '.join(f'`{name}={value}`' for name, value in only.items())}",
            (kind,),
            "not read by vLLM",
            keys,
            {name: not value if isinstance(value, bool) else value + 1},
            words="it computes others, it has",
        )
    yield Limit(
        "... on a CPU, unless `rollout.dtype=bfloat16`, and keys and values have "
        f"{' or '.join(str(size) for size, _ in CPU_DELTA_NETS)} features",
        types_with(lambda row: row.vllm.cpu_dtype),
        "its kernels compute nothing else",
        (_VLLM, _ON_CPU, f"{_ROLLOUT}.dtype=float32"),
        of="gated delta nets",
        words="its kernels for gated delta nets on a CPU compute in",
    )
    yield Limit(
        f"... on a CPU, unless `kv_lora_rank={CPU_LATENT[0]}`, `qk_rope_head_dim={CPU_LATENT[1]}`",
        types_with(lambda row: row.latent and not row.vllm.why_not),
        "its attention has no other kernel",
        (_VLLM, _ON_CPU),
        words="its attention on a CPU has a kernel for kv_lora_rank=",
    )
    yield Limit(
        f"... on a CPU, unless heads have {', '.join(map(str, CPU_HEAD_SIZES))} features",
        ("llama", "qwen3"),
        "its attention has no other kernel",
        (_VLLM, _ON_CPU),
        {"head_dim": 40},
        of="any",
        words="its attention on a CPU has no kernel for heads of 40 features",
    )
