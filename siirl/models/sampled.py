"""Whether vLLM (0.32) samples a model as it is trained. No torch.

tests/contracts/test_vllm_types.py runs all that are trained but those refused here; test_vllm_heads.py
beside it builds them with heads of all sizes, and asks vLLM's attention on a CPU for each.
"""

from collections.abc import Mapping
from typing import Any

from siirl.models.families import family_of
from siirl.models.sizes import head_size, share_of_hidden

CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Features of a head that its attention on a CPU has a kernel for, in any dtype and with any window."""

CPU_DELTA_NETS = ((64, 64), (128, 128))
"""Features of a key and of a value that its gated delta nets on a CPU have a kernel for."""

CPU_LATENT = (512, 64)
"""Features of a compressed vector, and of what positions turn beside it, that it has one for."""


def why_not_in_vllm(config: Mapping[str, Any], on_cpu: bool, dtype: str) -> str:
    """Why vLLM does not sample a model as it is trained; empty if it does, or config.json does not tell.

    dtype: of its weights there, rollout.dtype.
    """
    vllm = family_of(config.get("model_type")).vllm
    size, share = head_size(config), share_of_hidden(config)
    if vllm.why_not:
        return vllm.why_not
    if not (on_cpu or vllm.on_gpu):
        return "what it computes of the states of its layers has been seen on a CPU alone"
    if _windows_differ(config):
        kinds = "each second one" if vllm.windows == "every second" else "all or in none"
        return f"with sliding windows in some of its layers it computes others, it has them in {kinds}"
    for name, value in vllm.only.items():
        if config.get(name, value) != value:
            return f"with {name}={config[name]} it computes others, it has {value}"
    if vllm.windows == "every second" and (rope := _rope_type(config)) != "yarn":
        return f"with rope_type={rope} it computes others, it has yarn"
    if vllm.shares_hidden and size != share and share:
        return (
            f"with head_dim={size} it computes heads of {share} features, the hidden size over the heads, "
            "and leaves out the other weights"
        )
    return why_not_on_cpu(config, dtype) if on_cpu else ""


def why_not_on_cpu(config: Mapping[str, Any], dtype: str) -> str:
    """Why vLLM's kernels for a CPU do not take a model; empty if they do, or config.json does not tell."""
    only = family_of(config.get("model_type")).vllm.cpu_dtype
    if only and dtype != only:
        return f"its kernels for gated delta nets on a CPU compute in {only}, not in rollout.dtype={dtype}"
    sizes = tuple(config.get(f"linear_{name}_head_dim") for name in ("key", "value"))
    if sizes != (None, None) and sizes not in CPU_DELTA_NETS:
        known = " or ".join(str(size) for size, _ in CPU_DELTA_NETS)
        return (
            f"its gated delta nets on a CPU have kernels for {known} features of a key and as many of a "
            f"value, not for {sizes[0]} with {sizes[1]}"
        )
    if family_of(config.get("model_type")).latent is not None:
        sizes = tuple(config.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        if sizes == CPU_LATENT:
            return ""
        return (
            f"its attention on a CPU has a kernel for kv_lora_rank={CPU_LATENT[0]} with qk_rope_head_dim="
            f"{CPU_LATENT[1]} alone, not for {sizes[0]} with {sizes[1]}"
        )
    size = head_size(config)
    if size in (0, *CPU_HEAD_SIZES):
        return ""
    return (
        f"its attention on a CPU has no kernel for heads of {size} features, only of "
        f"{', '.join(map(str, CPU_HEAD_SIZES))}"
    )


def _windows_differ(config: Mapping[str, Any]) -> bool:
    """Whether a model has sliding windows in some layers, where vLLM has them in all or in none. Older files
    do not list them."""
    windows, kinds = family_of(config.get("model_type")).vllm.windows, config.get("layer_types")
    if windows == "any layers":
        return False
    if windows == "every second":
        wanted = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(len(kinds or ()))]
        return bool(kinds) and list(kinds) != wanted
    if kinds:
        return len(set(kinds)) > 1
    if not config.get("use_sliding_window") or config.get("sliding_window", 1) is None:
        return False
    bound = config.get("max_window_layers", 28)  # both as transformers takes them
    layers = config.get("num_hidden_layers", 32)
    return bound > 0 if windows == "every second below" else 0 < bound < layers


def _rope_type(config: Mapping[str, Any]) -> str:
    """Of a gpt-oss, of which transformers makes yarn where config.json says nothing."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "yarn"}
    return rope.get("rope_type") or rope.get("type") or "default"
