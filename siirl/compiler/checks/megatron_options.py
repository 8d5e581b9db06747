"""Which options of Megatron-Core a user may set: one table, which needs neither torch nor megatron-core.

An option is passed on if a test holds what it does (tests/contracts/test_megatron_options.py has a case for
each), is accepted at the value that siirl works with anyway, and is refused otherwise, with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from siirl.config.values import closest

Kind = Literal["transformer", "ddp", "optimizer"]
"""The map override_{kind}_config."""

CLASSES: dict[Kind, str] = {
    "transformer": "TransformerConfig",
    "ddp": "DistributedDataParallelConfig",
    "optimizer": "OptimizerConfig",
}
"""The class of megatron.core whose options a map holds."""


@dataclass(frozen=True)
class Option:
    """An option that is passed on."""

    does: str
    """Its effect."""
    takes: Callable[[Any], bool]
    """Whether a value is one."""
    values: str
    """What it can be, in words."""


def _flag(does: str) -> Option:
    return Option(does, lambda value: isinstance(value, bool), "true or false")


def _choice(does: str, *values: str | None) -> Option:
    words = ", ".join("null" if value is None else value for value in values)
    return Option(does, lambda value: value in values, words)


def _count(does: str, least: int = 1) -> Option:
    def takes(value: Any) -> bool:
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)

    return Option(does, takes, f"a whole number, {least} or more, or null")


def _number(does: str, most: float = float("inf")) -> Option:
    def takes(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most

    return Option(does, takes, "a number, 0 or more" if most == float("inf") else f"a share, 0 to {most:g}")


def _modules(does: str, *known: str) -> Option:
    def takes(value: Any) -> bool:
        return value is None or (isinstance(value, list) and set(value) <= set(known))

    return Option(does, takes, f"a list of {', '.join(known)}")


_LAYOUT = Option(
    "the whole cut of the layers into stages and chunks", lambda value: True, "text such as 'Ett|ttL'"
)

OPTIONS: dict[Kind, dict[str, Option]] = {
    "transformer": {
        "recompute_granularity": _choice(
            "what is computed again in the backward pass", "full", "selective", None
        ),
        "recompute_method": _choice("which layers are, with full", "uniform", "block", None),
        "recompute_num_layers": _count("how many layers are, with full"),
        "recompute_modules": _modules("which parts of each layer are", "core_attn", "mlp", "moe"),
        "account_for_embedding_in_pipeline_split": _flag(
            "the embedding counts as a layer of the first stage"
        ),
        "account_for_loss_in_pipeline_split": _flag("the output head counts as a layer of the last stage"),
        "num_layers_in_first_pipeline_stage": _count("layers of the first stage", 0),
        "num_layers_in_last_pipeline_stage": _count("layers of the last stage", 0),
        "pipeline_model_parallel_layout": _LAYOUT,
        "moe_token_dispatcher_type": _choice("how tokens reach their experts", "alltoall", "allgather"),
        "moe_grouped_gemm": _flag("one product for all experts of a rank"),
        "moe_aux_loss_coeff": _number("weight of the balancing loss"),
        "moe_z_loss_coeff": _number("weight of the router's z-loss"),
        "moe_router_dtype": _choice("type of the router's arithmetic", "fp32", "fp64", None),
        "moe_layer_recompute": _flag("expert layers alone are computed again in the backward pass"),
    },
    "ddp": {
        "overlap_grad_reduce": _flag("gradients are reduced during the backward pass"),
        "overlap_param_gather": _flag("updated weights are gathered during the next forward pass"),
        "grad_reduce_in_fp32": _flag("gradients are added up and reduced in float32"),
        "bucket_size": _count("parameters that are reduced at once, with overlap_grad_reduce"),
    },
    "optimizer": {
        "adam_eps": _number("AdamW's epsilon"),
        "eps": _number("AdamW's epsilon, by torch's name"),
        "use_precision_aware_optimizer": _flag("moments may be narrow"),
        "exp_avg_dtype": _choice("type of the first moment", "fp32", "bf16"),
        "exp_avg_sq_dtype": _choice("type of the second moment", "fp32", "bf16"),
        "optimizer_cpu_offload": _flag("AdamW runs on the host"),
        "optimizer_offload_fraction": _number("the share for which it does", 1),
        "overlap_cpu_optimizer_d2h_h2d": _flag("copies to the host overlap with its updates"),
    },
}
"""What is passed on: map -> option."""

_KERNELS = "it needs kernels of Transformer Engine or Apex, which siirl's layers do without"
_MODEL = "the model's config.json decides it, and siirl builds the usual models only"
_GRAPHS = "packed rows have another length in every micro-batch, and a CUDA graph has one"
_ROUTER = "it changes which experts a token goes to, and with it the model that rollouts run"
_UNTESTED = "no test of siirl holds what it does to gradients"

FIXED: dict[Kind, dict[str, tuple[tuple[Any, ...], str]]] = {
    "transformer": {
        **dict.fromkeys(
            ("attention_dropout", "hidden_dropout"), ((0,), "old and new log-probs would differ by chance")
        ),
        "attention_softmax_in_fp32": ((True,), "siirl's attention has its softmax in float32 always"),
        "attention_backend": (("auto",), "attention is siirl's own, by torch's kernels"),
        "apply_query_key_layer_scaling": ((False,), "attention is siirl's own, and scales as the model says"),
        **dict.fromkeys(
            (
                "apply_rope_fusion",
                "masked_softmax_fusion",
                "persist_layer_norm",
                "gradient_accumulation_fusion",
            ),
            ((False,), _KERNELS),
        ),
        **dict.fromkeys(
            (
                "moe_permute_fusion",
                "moe_router_fusion",
                "tp_comm_overlap",
                "cpu_offloading",
                "moe_enable_deepep",
            ),
            ((False,), _KERNELS),
        ),
        "cpu_offloading_num_layers": ((0,), _KERNELS),
        **dict.fromkeys(("fp8", "fp4"), ((None,), _KERNELS)),
        "cross_entropy_loss_fusion": ((False,), "log-probs are siirl's own, and never meet Megatron's loss"),
        **dict.fromkeys(
            ("bias_activation_fusion", "bias_dropout_fusion"),
            ((), "siirl's layers have functions of their own"),
        ),
        **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), ((False,), _GRAPHS)),
        "cuda_graph_impl": (("none",), _GRAPHS),
        **dict.fromkeys(("window_size", "window_attn_skip_freq"), ((None,), _MODEL)),
        "softmax_type": (("vanilla",), _MODEL),
        "moe_layer_freq": ((1,), _MODEL),
        "mtp_num_layers": ((None, 0), "layers that predict further tokens are neither trained nor exported"),
        "qk_clip": ((False,), "it changes weights outside the optimizer, from logits that siirl never has"),
        **dict.fromkeys(("multi_latent_attention", "fp32_residual_connection"), ((False,), _MODEL)),
        **dict.fromkeys(
            (
                *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
                *(
                    "ffn_hidden_size",
                    "normalization",
                    "layernorm_epsilon",
                    "gated_linear_unit",
                    "qk_layernorm",
                ),
                *("activation_func", "add_bias_linear", "add_qkv_bias", "softmax_scale", "num_moe_experts"),
                *("moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "rotary_interleaved"),
                *("moe_router_score_function", "moe_router_topk_scaling_factor"),
                *("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
            ),
            ((), _MODEL),
        ),
        **dict.fromkeys(
            ("moe_token_dropping", "moe_router_enable_expert_bias", "moe_router_force_load_balancing"),
            ((False,), _ROUTER),
        ),
        **dict.fromkeys(("moe_expert_capacity_factor", "moe_input_jitter_eps"), ((None,), _ROUTER)),
        **dict.fromkeys(
            ("batch_p2p_comm", "overlap_p2p_comm"),
            (
                (),
                "siirl batches messages without vpp, and overlaps them with it",
            ),
        ),
        **dict.fromkeys(
            ("fp16", "deterministic_mode", "distribute_saved_activations"), ((False,), _UNTESTED)
        ),
        **dict.fromkeys(("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"), ((False,), _UNTESTED)),
        "moe_router_load_balancing_type": (("none", "aux_loss"), "siirl has no other balancing loss"),
        "calculate_per_token_loss": ((True,), "shares of a loss add up here"),
    },
    "ddp": {
        "average_in_collective": ((False,), "shares of a loss add up: gradients are summed"),
        "check_for_nan_in_grad": ((False,), "siirl skips and counts a step whose gradient is not finite"),
        **dict.fromkeys(
            ("use_megatron_fsdp", "use_custom_fsdp"), ((False,), "strategy=fsdp is siirl's FSDP")
        ),
        "data_parallel_sharding_strategy": (("no_shard",), "strategy=fsdp is siirl's FSDP"),
        "num_distributed_optimizer_instances": ((1,), _UNTESTED),
        **dict.fromkeys(("fp8_param_gather", "nccl_ub", "check_for_large_grads"), ((False,), _UNTESTED)),
        **dict.fromkeys(("align_param_gather", "delay_wgrad_compute"), ((False,), _UNTESTED)),
        **dict.fromkeys(
            ("pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation"),
            ((False,), _UNTESTED),
        ),
    },
    "optimizer": {
        "optimizer": (("adam",), "the optimizer is AdamW"),
        "decoupled_weight_decay": ((True,), "the optimizer is AdamW"),
        "main_params_dtype": (("fp32",), "small updates would be lost in narrow main weights"),
        "fp16": ((False,), _UNTESTED),
        "overlap_param_gather_with_optimizer_step": ((False,), _UNTESTED),
        **dict.fromkeys(
            ("decoupled_lr", "decoupled_min_lr"), ((None,), "all weights have one learning rate")
        ),
        "log_num_zeros_in_grad": ((False,), "nothing would print it"),
    },
}
"""What siirl decides: map -> option -> (the values that say what siirl does, why no others)."""

DECIDED: dict[Kind, dict[str, str]] = {
    "transformer": {
        **{
            name: "{megatron}." + name
            for name in (
                *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
                *("expert_model_parallel_size", "expert_tensor_parallel_size"),
                *("virtual_pipeline_model_parallel_size", "sequence_parallel"),
            )
        },
        "params_dtype": "{megatron}.param_dtype",
        "bf16": "{megatron}.param_dtype",
    },
    "ddp": {"use_distributed_optimizer": "{megatron}.use_distributed_optimizer"},
    "optimizer": {
        "lr": "{role}.optim.lr",
        "min_lr": "{role}.optim.min_lr",
        "weight_decay": "{role}.optim.weight_decay",
        "adam_beta1": "{role}.optim.betas",
        "adam_beta2": "{role}.optim.betas",
        "clip_grad": "{role}.grad_clip",
        "use_distributed_optimizer": "{megatron}.use_distributed_optimizer",
        "overlap_param_gather": "{megatron}.override_ddp_config.overlap_param_gather",
        "params_dtype": "{megatron}.param_dtype",
        "bf16": "{megatron}.param_dtype",
    },
}
"""Options that keys decide: map -> option -> key, of a role's group or its megatron group."""

MODULES = {
    "layernorm": "Megatron discards their outputs by Transformer Engine's linear layers",
    "moe_act": "siirl's experts have no part of that name to discard",
    "shared_experts": "moe is, and they with it",
    "mla_up_proj": "the latent attention of siirl has no part of that name",
}
"""Parts that Megatron-Core could recompute, and why it cannot here."""


def refusal(kind: Kind, name: str, value: Any, role: str) -> str | None:
    """Why an option cannot have a value, with what to do; None if it can. role: full name of its group."""
    if name in DECIDED[kind]:
        key = DECIDED[kind][name].format(megatron=f"{role}.megatron", role=role)
        return f"would be decided twice: {key} does. Set that key."
    if name in FIXED[kind]:
        values, why = FIXED[kind][name]
        if any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values):
            return None
        only = f" It may only be {' or '.join(map(_show, values))}." if values else ""
        return f"={_show(value)} is refused: {why}.{only} Remove it."
    if name not in OPTIONS[kind]:
        known = [*OPTIONS[kind], *FIXED[kind], *DECIDED[kind]]
        return (
            f"is none of the options of megatron.core {CLASSES[kind]} that siirl passes on: "
            f"{', '.join(OPTIONS[kind])}. No test of siirl holds what others do.{closest(name, known)} "
            "Remove it."
        )
    option = OPTIONS[kind][name]
    if option.takes(value):
        return None
    wrong = [part for part in value if part in MODULES] if isinstance(value, list) else []
    why = "".join(f" {part} cannot be recomputed: {MODULES[part]}." for part in wrong)
    return f"={_show(value)}: it is {option.values}.{why}"


def passed_on(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a map's options that Megatron-Core is given: the others say what siirl does anyway."""
    return {name: value for name, value in options.items() if name in OPTIONS[kind]}


def recomputation(options: Mapping[str, Any], whole_layers: bool) -> dict[str, Any]:
    """The recompute_* options that act. whole_layers: the default, of model.enable_gradient_checkpointing."""
    if options.get("moe_layer_recompute"):
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    given = {name: value for name, value in options.items() if name.startswith("recompute_")}
    if not whole_layers or given.get("recompute_granularity", "full") != "full":
        return given
    default = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return default | given


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
