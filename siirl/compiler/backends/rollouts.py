"""Rollout engines but vLLM: transformers here, SGLang, and services of OpenAI's interface. Pure."""

import importlib.metadata
from collections.abc import Iterator

from siirl.compiler.backends.base import Backend, replicas
from siirl.compiler.checks.other_engines import TENSOR, another_engine
from siirl.compiler.memory.engine_memory import hf_rollout_lines, vllm_lines
from siirl.compiler.memory.estimate import MemoryLine, ModelShape
from siirl.compiler.plan import ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.errors import ConfigError, DagError, NotSupportedError, UserError
from siirl.findings import Check
from siirl.models.config_json import config_json, model_type_of
from siirl.models.families import family_of, types_with
from siirl.parallel.dims import ParallelDims

SGLANG = "0.5.17"
"""The version of SGLang that siirl works with: its interfaces change with each."""
_DRAWS = "siirl draws the tokens, one after another and by their seeds. Remove it."
_LOADS = "siirl loads the weights. Remove it."
_ROUNDS = "numbers below 16 bits were not seen to stay near the trainer's log-probs. Remove it."
_RANKS = "an engine has one GPU. Remove it, and place the rollout on more ranks."
_ADAPTERS = "adapters are merged into the weights that each sync sends. Remove it."

NOT_GIVEN = {
    "mem_fraction_static": "memory is planned by rollout.gpu_memory_utilization. Set that.",
    "sampling_backend": _DRAWS,
    "speculative_algorithm": _DRAWS,
    "custom_weight_loader": _LOADS,
    "load_format": _LOADS,
    "skip_tokenizer_init": "requests and answers are token ids. Remove it.",
    "quantization": _ROUNDS,
    "kv_cache_dtype": _ROUNDS,
    "torchao_config": _ROUNDS,
    "enable_lora": _ADAPTERS,
    "lora_paths": _ADAPTERS,
    "tp_size": _RANKS,
    "pp_size": _RANKS,
    "dp_size": _RANKS,
    "ep_size": _RANKS,
}
"""Arguments of SGLang's engine that cannot be given, and why."""


def check_hf(cfg: Config, node: ResolvedNode) -> Iterator[UserError]:
    """A rank has the whole model."""
    tensor = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    if tensor > 1:
        yield ConfigError(
            f"{node}: {TENSOR}={tensor} with rollout.name=hf, which has the whole model on each rank. "
            f"{another_engine(cfg, '')}"
        )


class HF(Backend):
    """A transformers model in the worker."""

    checks = (Check("model", ("cfg", "node"), check_hf),)
    takes_images = True
    base_keys = ("name", "dtype")

    def dims(self, cfg: Config, role: str, world: int) -> ParallelDims:
        return replicas(world)

    def memory(self, model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
        return hf_rollout_lines(model, cfg, shape, rows)

    def no_experts(self, cfg: Config) -> str:
        return ""


def check_service(cfg: Config, node: ResolvedNode) -> Iterator[UserError]:
    """A service has an address, and speaks in interactions, where nothing is trained on what it says."""
    url = cfg.actor_rollout_ref.rollout.agent.endpoint.url
    if not (url or "").startswith(("http://", "https://")):
        yield ConfigError(
            f"{node}: rollout.agent.endpoint.url={url!r}: rollout.name=openai needs the http(s) address of a "
            "service, e.g. http://localhost:8000/v1/chat/completions."
        )
    if not node.op.is_handed or node.writes:
        yield DagError(
            f"{node} has rollout.name=openai: a service speaks in interactions, but not first, and cannot be "
            "trained (its tokens are unknown). Let the node depend on a rollout of another agent, and give "
            "its agent no other nodes."
        )


class OpenAI(Backend):
    """A service that speaks in interactions."""

    checks = (Check("model", ("cfg", "node"), check_service),)
    weights = False

    def dims(self, cfg: Config, role: str, world: int) -> ParallelDims:
        return replicas(world)

    def memory(self, model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
        return []


def check_sglang(cfg: Config, dims: ParallelDims, node: ResolvedNode) -> Iterator[UserError]:
    """What is asked of SGLang and was not seen with siirl."""
    rollout, kind = cfg.actor_rollout_ref.rollout, model_type_of(cfg.actor_rollout_ref.model)
    if dims.tp > 1:
        yield NotSupportedError(
            f"not supported yet: {node}: actor_rollout_ref.rollout.tensor_model_parallel_size={dims.tp} with "
            "rollout.name=sglang: an SGLang engine of several GPUs was not seen with siirl. "
            f"{another_engine(cfg, 'sglang')}"
        )
    if kind and not family_of(kind).sglang:
        yield NotSupportedError(
            f"not supported yet: {node}: a {kind} with rollout.name=sglang: that SGLang takes its weights as "
            f"they are trained has been seen of {', '.join(types_with(lambda row: row.sglang))} only. "
            f"{another_engine(cfg, 'sglang')}"
        )
    if config_json(cfg.actor_rollout_ref.model).get("quantization_config"):
        yield NotSupportedError(
            f"not supported yet: {node}: a quantization_config with rollout.name=sglang: that it takes plain "
            f"numbers beside such files was not seen. {another_engine(cfg, 'sglang')}"
        )
    for name, why in NOT_GIVEN.items():
        if name in rollout.engine_kwargs.sglang:
            yield ConfigError(f"{node}: actor_rollout_ref.rollout.engine_kwargs.sglang.{name}: {why}")


def sglang_version() -> str:
    """The installed version of SGLang. ConfigError: none, or one that siirl does not work with."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang: SGLang is not installed. Install "
            "siirl[sglang] (GPU), or set actor_rollout_ref.rollout.name=vllm or hf."
        ) from None
    if version != SGLANG:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=sglang: SGLang {version} is installed, siirl works with "
            f"{SGLANG}. Install that one."
        )
    return version


class SGLang(Backend):
    """Engines of SGLang, in processes of their own."""

    checks = (Check("model", ("cfg", "dims", "node"), check_sglang),)
    works_alone = device_share = True

    def dims(self, cfg: Config, role: str, world: int) -> ParallelDims:
        return replicas(world, cfg.actor_rollout_ref.rollout.tensor_model_parallel_size)

    def memory(self, model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
        return vllm_lines(model, cfg, shape, rows)

    def packages(self, cfg: Config, role: str) -> str:
        return sglang_version()
