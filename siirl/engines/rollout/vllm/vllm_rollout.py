"""The rollout engine on vLLM: one code path for GPU and CPU."""

from typing import Any

from siirl.compiler.checks.packages import vllm_version
from siirl.compiler.plan import ModelPlan
from siirl.engines.rollout.served.served_rollout import ServedRollout
from siirl.engines.rollout.vllm.arguments import adapter_arguments, engine_arguments, engine_environment
from siirl.model_files.directory import model_dir


class VLLMRollout(ServedRollout):
    """Samples with a vLLM engine, see ServedRollout."""

    backend = "vllm"
    title = "vLLM"
    native = "siirl.engines.rollout.vllm.native"
    counters = (
        ("vllm:num_preemptions", "rollout/vllm_preemptions_total"),
        ("vllm:kv_cache_usage_perc", "rollout/vllm_kv_cache_usage"),
    )

    def check_installed(self) -> None:
        """See ServedRollout."""
        vllm_version()

    def engine_arguments(self, plan: ModelPlan, hf_config: Any, num_ranks: int) -> dict[str, Any]:
        """See ServedRollout."""
        cfg = self._cfg
        folder = str(model_dir(cfg.actor_rollout_ref.model.path))
        arguments = engine_arguments(cfg, folder, hf_config, num_ranks, self._device)
        if plan.is_teacher:
            arguments["max_logprobs"] = max(1, cfg.teacher.top_k)
        return arguments | (adapter_arguments(plan.adapters) if plan.adapters else {})

    def engine_environment(self, num_ranks: int, gpus: list[str]) -> dict[str, str]:
        """See ServedRollout."""
        return engine_environment(num_ranks, self._device, gpus)
