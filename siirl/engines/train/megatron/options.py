"""megatron-core's own configuration objects, out of ours: sizes and features, then what a user overrides."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig

from siirl.compiler.checks.megatron_options import Kind, passed_on, recomputation, refusal
from siirl.config.common import MegatronConfig, OptimConfig
from siirl.engines.train.hf_model import torch_dtype
from siirl.engines.train.megatron.adamw import OWN_OPTIONS
from siirl.engines.train.megatron.weights import family_of, family_options, head_dim, window_of
from siirl.engines.train.settings import EngineSettings
from siirl.errors import ConfigError
from siirl.models.sizes import has_qk_norm, has_qkv_bias
from siirl.parallel.dims import ParallelDims


def transformer_config(
    hf: PretrainedConfig, settings: EngineSettings, dims: ParallelDims, trains: bool, finalize: Any
) -> TransformerConfig:
    """The configuration of the decoder. ConfigError for overrides that Megatron does not know or refuses.

    finalize: what completes the gradients after the last backward of a mini-batch.
    """
    megatron, said = settings.megatron, hf.to_dict()
    dtype = torch_dtype(megatron.param_dtype, "megatron.param_dtype")
    on_gpu = torch.cuda.is_available()
    fixed: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "ffn_hidden_size": hf.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": getattr(hf, "rms_norm_eps", 1e-5),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": has_qkv_bias(said),
        "rotary_interleaved": family_of(hf).turns_neighbours,
        **_windows(hf),
        "qk_layernorm": has_qk_norm(said) and family_of(hf).qk_norm == "heads",
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": dims.vpp if dims.vpp > 1 else None,
        "context_parallel_size": dims.cp,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "sequence_parallel": megatron.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,  # shares of a loss add up: nothing is averaged
        "variable_seq_lengths": dims.pp > 1,  # only stages tell each other; allgather of experts refuses it
        "finalize_model_grads_func": finalize,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,  # every weight is read
        **family_options(hf),
    }
    chosen: dict[str, Any] = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": fixed["activation_func"] is F.silu,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": False,
    }
    chosen |= _pipeline_options(dims)
    options = megatron.override_transformer_config
    overrides = _passed_on("transformer", options)
    if overrides.get("moe_aux_loss_coeff"):
        chosen["moe_router_load_balancing_type"] = "aux_loss"
    given = {name: value for name, value in overrides.items() if "recompute" not in name}
    given |= recomputation(overrides, trains and settings.model.enable_gradient_checkpointing)
    try:
        kind = MLATransformerConfig if "kv_lora_rank" in fixed else TransformerConfig
        return kind(**(fixed | chosen | given))
    except (ValueError, AssertionError, TypeError, ImportError) as error:
        raise ConfigError(
            f"megatron-core refuses the model's configuration: {error}. Check the megatron group and its "
            "override_transformer_config."
        ) from error


def _windows(hf: PretrainedConfig) -> dict[str, Any]:
    """Which layers see only the last tokens, by Megatron's names."""
    windows = [window_of(hf, layer) for layer in range(hf.num_hidden_layers)]
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {}
    (size,) = sizes
    skips = [int(window is not None) for window in windows]
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": skips}


def _pipeline_options(dims: ParallelDims) -> dict[str, Any]:
    """Messages between stages; an output must live until it is sent, which gloo does in the background."""
    unbatched = dims.vpp > 1
    return {
        "batch_p2p_comm": not unbatched,
        "batch_p2p_sync": False,  # for versions of torch that siirl does not run on
        "overlap_p2p_comm": unbatched,
        "deallocate_pipeline_outputs": torch.cuda.is_available(),
    }


def ddp_config(megatron: MegatronConfig) -> DistributedDataParallelConfig:
    """How gradients are accumulated and reduced."""
    chosen = {"grad_reduce_in_fp32": True, "check_for_nan_in_grad": False, "average_in_collective": False}
    chosen["use_distributed_optimizer"] = megatron.use_distributed_optimizer
    return DistributedDataParallelConfig(**(chosen | _passed_on("ddp", megatron.override_ddp_config)))


def optimizer_config(optim: OptimConfig, megatron: MegatronConfig, ddp: Any) -> OptimizerConfig:
    """AdamW; clipping and the learning rate are ours, `eps` in the overrides is Megatron's adam_eps.

    Where its state lies, and in which types, is not Megatron's to know: see adamw.py.
    """
    dtype = torch_dtype(megatron.param_dtype, "megatron.param_dtype")
    fixed = {
        "optimizer": "adam",
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": megatron.use_distributed_optimizer,
        "clip_grad": 0.0,
    }
    overrides = _passed_on("optimizer", optim.override_optimizer_config or {})
    overrides = {name: value for name, value in overrides.items() if name not in OWN_OPTIONS}
    if "eps" in overrides:
        overrides["adam_eps"] = overrides.pop("eps")
    overlaps = {"overlap_param_gather": ddp.overlap_param_gather}
    return OptimizerConfig(**(fixed | overlaps | overrides))


def _passed_on(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron-Core is given of a map; ConfigError for what `siirl check` refuses, too."""
    for name, value in options.items():
        problem = refusal(kind, name, value, "the role's group")
        if problem:
            raise ConfigError(f"override_{kind}_config.{name}{problem}")
    return passed_on(kind, options)
