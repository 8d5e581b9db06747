"""The rollout engine on SGLang."""

from typing import Any

import torch

from siirl.compiler.checks.packages import sglang_version
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.engines.rollout.served.served_rollout import ServedRollout
from siirl.engines.rollout.sglang.sglang_arguments import engine_arguments, engine_environment
from siirl.model_files.directory import model_dir


class SGLangRollout(ServedRollout):
    """Samples with an SGLang engine on one GPU, or on the CPU, see ServedRollout."""

    backend = "sglang"
    title = "SGLang"
    native = "siirl.engines.rollout.sglang.native_engine"

    def check_here(self, plan: ModelPlan, cfg: Config, device: torch.device) -> None:
        """See ServedRollout."""
        sglang_version()

    def engine_arguments(self, plan: ModelPlan, hf_config: Any, num_ranks: int) -> dict[str, Any]:
        """See ServedRollout."""
        folder = str(model_dir(self._cfg.actor_rollout_ref.model.path))
        return engine_arguments(self._cfg, folder, hf_config, self._device)

    def engine_environment(self, num_ranks: int, gpus: list[str]) -> dict[str, str]:
        """See ServedRollout."""
        return engine_environment(self._device, gpus)
