"""The rollout engine on vLLM: one code path for GPU and CPU."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.backends.vllm import vllm_version, writes_in_place
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.engines.rollout.base import TensorShare
from siirl.engines.rollout.served.served_rollout import ServedRollout
from siirl.engines.rollout.vllm.arguments import ARGUMENT as ROUTED_EXPERTS
from siirl.engines.rollout.vllm.arguments import adapter_arguments, engine_arguments, engine_environment
from siirl.engines.weights.engine_loader import EngineWeights
from siirl.engines.weights.in_place import WeightsInPlace
from siirl.engines.weights.shard_plan import Box
from siirl.engines.weights.shard_sync import ArrivingParts, Rounds
from siirl.errors import NotSupportedError, RolloutError, WeightSyncError
from siirl.model_files.directory import model_dir
from siirl.models.config_json import as_built, model_type_of
from siirl.models.sampled import why_not_on_cpu


class VLLMRollout(ServedRollout):
    """Samples with a vLLM engine, see ServedRollout."""

    backend = "vllm"
    title = "vLLM"
    native = "siirl.engines.rollout.vllm.native"
    counters = (
        ("vllm:num_preemptions", "rollout/vllm_preemptions_total"),
        ("vllm:kv_cache_usage_perc", "rollout/vllm_kv_cache_usage"),
    )

    def check_here(self, plan: ModelPlan, cfg: Config, device: torch.device) -> None:
        """See ServedRollout."""
        vllm_version(model_type_of(cfg.actor_rollout_ref.model))
        if _says_experts(plan, cfg) and device.type == "cpu":
            raise NotSupportedError(
                "not supported yet: actor.router_replay.mode=R3 with rollout.name=vllm on a CPU, where vLLM "
                "does not say which experts computed a token. Set rollout.name=hf."
            )
        model, dtype = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout.dtype
        if device.type == "cpu" and (problem := why_not_on_cpu(as_built(model), dtype)):
            raise NotSupportedError(f"not supported yet: rollout.name=vllm: {problem}. Set rollout.name=hf.")

    def engine_arguments(self, plan: ModelPlan, hf_config: Any, num_ranks: int) -> dict[str, Any]:
        """See ServedRollout."""
        cfg = self._cfg
        folder = str(model_dir(cfg.actor_rollout_ref.model.path))
        arguments = engine_arguments(cfg, folder, hf_config, num_ranks, self._device)
        if _says_experts(plan, cfg):
            arguments[ROUTED_EXPERTS] = True
        if plan.is_teacher:
            arguments["max_logprobs"] = max(1, cfg.teacher.top_k)
        return arguments | (adapter_arguments(plan.adapters) if plan.adapters else {})

    def engine_environment(self, num_ranks: int, gpus: list[str]) -> dict[str, str]:
        """See ServedRollout."""
        return engine_environment(num_ranks, self._device, gpus)

    @property
    def keeps(self) -> TensorShare:
        """See RolloutEngine."""
        return "parts" if self._in_place is not None and self._in_place.knows_parts else super().keeps

    @property
    def _in_place(self) -> WeightsInPlace | None:
        return self._weights if isinstance(self._weights, WeightsInPlace) else None

    def kept_boxes(self) -> dict[str, list[Box]] | None:
        """See RolloutEngine."""
        assert self._in_place is not None
        with self.streams_held():
            return self._in_place.kept_boxes(self._process)

    def expect_parts(self, arriving: Rounds | None) -> None:
        """See RolloutEngine."""
        assert self._in_place is not None
        if arriving is not self._in_place.expected:
            with self.streams_held():
                self._in_place.expect_parts(self._process, arriving)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Also parts: all of them come, as it was planned."""
        if not isinstance(weights, ArrivingParts):
            super()._load_weights(weights, version)
            return
        assert self._in_place is not None
        self.wake()
        self._state, self.weight_version = "loading", -1
        try:
            self._in_place.replace_parts(self._process, weights)
        except RolloutError as error:
            raise WeightSyncError(str(error)) from error
        self._state, self.weight_version = "ready", version

    def new_weights(self, plan: ModelPlan) -> EngineWeights:
        """See ServedRollout; or in place."""
        if not writes_in_place(plan, self._cfg):
            return super().new_weights(plan)
        rollout = self._cfg.actor_rollout_ref.rollout
        whole = rollout.replace_weights == "in_place_checked"
        return WeightsInPlace(*self.weight_parts, whole, rollout.weight_buffer_bytes)


def _says_experts(plan: ModelPlan, cfg: Config) -> bool:
    return not plan.is_teacher and cfg.actor_rollout_ref.actor.router_replay.mode == "R3"
