"""Which models vLLM (0.32) does not sample as they are trained. No torch.

tests/contracts/test_vllm_types.py runs all others that are trained; tests/contracts/test_vllm_heads.py builds
them with heads of all sizes, and asks vLLM's attention on a CPU for each.
"""

from collections.abc import Mapping
from typing import Any

from siirl.compiler.head_sizes import head_size, share_of_hidden
from siirl.config import Config
from siirl.config.roles import ROLES

NOT_IN_VLLM = ("aria_text", "diffllama", "helium", "ministral", "persimmon")
"""Of which vLLM has no model of its own."""
NOT_SEEN = ("deepseek_v2", "deepseek_v3")
LAYERS_ALIKE = ("qwen2", "qwen2_moe", "qwen3")
"""Whose layers all have a sliding window in vLLM, or none has."""
SHARED_HEADS = ("granitemoe", "granitemoeshared", "olmoe", "qwen2", "qwen2_moe")
"""Whose heads in vLLM are shares of the hidden size, whatever head_dim says: it cuts larger ones silently."""
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Features of a head that its attention on a CPU has a kernel for, in any dtype and with any window."""
_PAST_UPDATES = (
    "its loader of this model copies experts and sinks past what takes weights into an engine that runs, so "
    "that they would not arrive"
)
WHY_NOT = {
    **dict.fromkeys(NOT_IN_VLLM, "it has no model of this type"),
    **dict.fromkeys(NOT_SEEN, "that it takes weights as they are trained has not been seen"),
    "gpt_oss": _PAST_UPDATES,
}
"""Model type -> what is the matter with it in vLLM."""


def why_not_in_vllm(config: Mapping[str, Any], cfg: Config, role: str) -> str:
    """Why vLLM does not sample, or score with, a role's model as asked, and the fix; empty if it does."""
    sampled = role == "actor" and cfg.actor_rollout_ref.rollout.name == "vllm"
    if not (sampled or ROLES[role].generates):
        return ""
    kind = config.get("model_type")
    problem = WHY_NOT.get(kind or "", "")
    if not problem and _windows_differ(config):
        problem = (
            "with sliding windows in some of its layers it computes others, it has them in all or in none"
        )
    problem = problem or _why_not_these_heads(config)
    if cfg.trainer.device == "cpu":
        problem = problem or why_not_on_cpu(config)
    fix = "actor_rollout_ref.rollout.name=hf" if sampled else "teacher.strategy=fsdp"
    return f"a {kind} in vLLM: {problem}. Set {fix}." if problem else ""


def why_not_on_cpu(config: Mapping[str, Any]) -> str:
    """Why vLLM's attention on a CPU does not take a model; empty if it does, or config.json does not tell."""
    size = head_size(config)
    if size in (0, *CPU_HEAD_SIZES):
        return ""
    return (
        f"its attention on a CPU has no kernel for heads of {size} features, only of "
        f"{', '.join(map(str, CPU_HEAD_SIZES))}"
    )


def _why_not_these_heads(config: Mapping[str, Any]) -> str:
    """Why vLLM would cut a model's heads; empty if it does not."""
    size, share = head_size(config), share_of_hidden(config)
    if config.get("model_type") not in SHARED_HEADS or size == share or not share:
        return ""
    return (
        f"with head_dim={size} it computes heads of {share} features, the hidden size over the heads, and "
        "leaves out the other weights"
    )


def _windows_differ(config: Mapping[str, Any]) -> bool:
    """Whether a model of LAYERS_ALIKE has sliding windows in some layers. Older files do not list them."""
    kind, kinds = config.get("model_type"), config.get("layer_types")
    if kind not in LAYERS_ALIKE:
        return False
    if kinds:
        return len(set(kinds)) > 1
    if not config.get("use_sliding_window") or config.get("sliding_window", 1) is None:
        return False
    bound = config.get("max_window_layers", 28)  # both as transformers takes them
    layers = config.get("num_hidden_layers", 32)
    return bound > 0 if kind == "qwen2_moe" else 0 < bound < layers  # every second one below; all above
