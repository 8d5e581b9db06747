"""Which models vLLM (0.32) does not sample as they are trained. No torch.

tests/contracts/test_vllm_types.py runs all others that are trained.
"""

from collections.abc import Mapping
from typing import Any

from siirl.config import Config
from siirl.config.roles import ROLES

NOT_IN_VLLM = ("aria_text", "diffllama", "helium", "ministral", "persimmon")
"""Of which vLLM has no model of its own."""
NOT_SEEN = ("deepseek_v2", "deepseek_v3")
LAYERS_ALIKE = ("qwen2", "qwen2_moe", "qwen3")
"""Whose layers all have a sliding window in vLLM, or none has."""
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
    fix = "actor_rollout_ref.rollout.name=hf" if sampled else "teacher.strategy=fsdp"
    return f"a {kind} in vLLM: {problem}. Set {fix}." if problem else ""


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
