"""What must hold for a Megatron model before anything starts, beyond what ParallelDims.check finds.

Pure: sizes come from the configuration and the model's config.json, names of options from the source of
megatron.core. Rules are those of megatron-core 0.16 unless they name another reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from siirl.config.common import MegatronConfig
from siirl.config.values import closest
from siirl.dag.megatron_layers import SPLIT_OPTIONS, split_layers, suggest_split
from siirl.dag.megatron_options import option_names
from siirl.dag.memory import ModelShape
from siirl.errors import ConfigError, NotSupportedError
from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks, format_ranks

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""model_type of the models whose weights siirl carries to Megatron-Core and back by itself."""

_OWNED = {
    "TransformerConfig": {
        "tensor_model_parallel_size": "{0}.tensor_model_parallel_size",
        "pipeline_model_parallel_size": "{0}.pipeline_model_parallel_size",
        "context_parallel_size": "{0}.context_parallel_size",
        "expert_model_parallel_size": "{0}.expert_model_parallel_size",
        "expert_tensor_parallel_size": "{0}.expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size": "{0}.virtual_pipeline_model_parallel_size",
        "sequence_parallel": "{0}.sequence_parallel",
        "params_dtype": "{0}.param_dtype",
        "bf16": "{0}.param_dtype",
    },
    "DistributedDataParallelConfig": {"use_distributed_optimizer": "{0}.use_distributed_optimizer"},
    "OptimizerConfig": {
        "lr": "{1}.optim.lr",
        "weight_decay": "{1}.optim.weight_decay",
        "adam_beta1": "{1}.optim.betas",
        "adam_beta2": "{1}.optim.betas",
        "clip_grad": "{1}.grad_clip",
        "use_distributed_optimizer": "{0}.use_distributed_optimizer",
        "params_dtype": "{0}.param_dtype",
        "bf16": "{0}.param_dtype",
    },
}
"""Options that keys decide: class -> option -> key. {1}: the role's group; {0}: its megatron group."""


@dataclass(frozen=True)
class MegatronModel:
    """A Megatron model as the checks see it. group: full name of the role's group, "actor_rollout_ref.actor".

    shape: its sizes, or why they are not known; checks that need them are then left to the engine.
    longest_row: most tokens of prompt and response. budgets: key -> tokens of a micro-batch, if it acts.
    """

    who: str
    group: str
    section: MegatronConfig
    optimizer_options: Mapping[str, Any]
    trains: bool
    dims: ParallelDims
    shape: ModelShape | str
    lora_rank: int
    longest_row: int
    budgets: Mapping[str, int]

    @property
    def options(self) -> dict[str, Any]:
        return self.section.override_transformer_config

    @property
    def keys(self) -> str:
        return f"{self.group}.megatron"

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of so many tokens: CP cuts each in 2 cp pieces, SP over tp ranks."""
        cut = 2 * self.dims.cp if self.dims.cp > 1 else 1
        return cut * (self.dims.tp if self.section.sequence_parallel else 1)


HONOURED = {
    *("adam_eps", "eps", "main_params_dtype", "use_precision_aware_optimizer", "exp_avg_dtype"),
    *("exp_avg_sq_dtype", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    *("overlap_cpu_optimizer_d2h_h2d", "overlap_param_gather_with_optimizer_step"),
}
"""Options of OptimizerConfig that act; further ones are accepted, with a warning."""

LATER: dict[str, Callable[[MegatronModel], bool]] = {
    "LoRA adapters (model.lora_rank) under megatron. Set lora_rank=0, or strategy=fsdp": lambda model: (
        model.lora_rank > 0
    ),
}
"""What the engine does not do yet, with the fix -> whether a model asks for it. Entries go as it learns."""


def check_megatron(model: MegatronModel) -> None:
    """ConfigError with all that is wrong, a line each; NotSupportedError for what does not exist yet."""
    for feature, is_asked in LATER.items():
        if is_asked(model):
            raise NotSupportedError(f"not supported yet: {model.who}: {feature}.")
    checks: tuple[Callable[[MegatronModel], Iterator[str]], ...] = (
        _option_names,
        _transport,
        _recompute,
        _rows,
        _optimizer,
    )
    if isinstance(model.shape, ModelShape):
        checks += (_weights, _layers, _attention, _mlp, _vocabulary, _experts)
    problems = [f"{model.who}: {problem}" for check in checks for problem in check(model)]
    if problems:
        raise ConfigError("\n".join(problems))


def _option_names(model: MegatronModel) -> Iterator[str]:
    """Unknown options, and those that a key of ours decides."""
    maps = [("TransformerConfig", f"{model.keys}.override_transformer_config", model.options)]
    if model.trains:
        ddp = ("DistributedDataParallelConfig", f"{model.keys}.override_ddp_config")
        maps += [
            (*ddp, model.section.override_ddp_config),
            ("OptimizerConfig", f"{model.group}.optim.override_optimizer_config", model.optimizer_options),
        ]
    for name, key, options in maps:
        known, owned = option_names(name), _OWNED[name]
        for option in options:
            if option in owned:
                instead = owned[option].format(model.keys, model.group)
                yield f"{key}.{option} would be decided twice: {instead} does. Set that key."
            elif known and option not in known and (name, option) != ("OptimizerConfig", "eps"):
                yield f"{key}.{option}: megatron.core {name} has no such option.{closest(option, known)}"


def _weights(model: MegatronModel) -> Iterator[str]:
    """Somebody must know how the model's weights are named in Megatron-Core."""
    section, shape = model.section, model.shape
    assert isinstance(shape, ModelShape)
    if section.use_dist_checkpointing and not section.dist_checkpointing_path:
        yield (
            f"{model.keys}.use_dist_checkpointing=true without a checkpoint. Set "
            f"{model.keys}.dist_checkpointing_path to the directory that `siirl convert` wrote."
        )
    if section.use_dist_checkpointing and section.use_mbridge:
        yield (
            f"{model.keys}.use_mbridge and use_dist_checkpointing are both true: weights are read from "
            "Hugging Face files by mbridge, or from a converted checkpoint. Set one of them to false."
        )
    if shape.family not in FAMILIES or shape.variant:
        kind = "mixture-of-experts model" if shape.experts else "model"
        variant = f" with {shape.variant}" if shape.variant else ""
        asked = [name for name in ("use_mbridge", "use_dist_checkpointing") if getattr(section, name)]
        helps = f"{' and '.join(asked)} changes where weights are read, not what siirl's layers compute. "
        yield (
            f"{shape.family}{variant} is a {kind} without a weight mapping: siirl builds and maps the usual "
            f"models of {', '.join(FAMILIES)}. {helps if asked else ''}Set {model.group}.strategy=fsdp."
        )


def _layers(model: MegatronModel) -> Iterator[str]:
    dims, shape = model.dims, model.shape
    assert isinstance(shape, ModelShape)
    try:
        chunks = split_layers(shape.layers, dims.pp, dims.vpp, model.options)
    except ValueError as error:
        options = suggest_split(shape.layers, dims.pp, dims.vpp)
        settings = " ".join(f"+{model.keys}.override_transformer_config.{k}={v}" for k, v in options.items())
        fits = [str(pp) for pp in range(1, shape.layers + 1) if shape.layers % (pp * dims.vpp) == 0]
        given = ", ".join(name for name in SPLIT_OPTIONS if name in model.options)
        remedy = f"Set {settings}" if settings else f"Remove {given}"
        yield (
            f"{error}. {remedy}, or a pipeline_model_parallel_size that divides them "
            f"({', '.join(fits)} with vpp({dims.vpp}))."
        )
        return
    empty = [stage for stage, counts in enumerate(chunks) if sum(counts) == 0]
    if len(empty) > 0 and "pipeline_model_parallel_layout" not in model.options:
        yield (
            f"pipeline rank {empty[0]} of pp({dims.pp}) would hold none of the {shape.layers} layers. Lower "
            f"{model.keys}.pipeline_model_parallel_size."
        )


def _attention(model: MegatronModel) -> Iterator[str]:
    tp, shape = model.dims.tp, model.shape
    assert isinstance(shape, ModelShape)
    key = f"{model.keys}.tensor_model_parallel_size"
    if shape.heads % tp:
        fits = _common_divisors(shape.heads, tp)
        yield f"{shape.heads} attention heads do not divide over tp({tp}) ranks. Set {key}={fits}."
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        fits = _common_divisors(shape.kv_heads, tp)
        yield (
            f"tp({tp}) is neither a divisor nor a multiple of the {shape.kv_heads} KV heads: they can be "
            f"split over ranks or repeated, not both. Set {key}={fits}."
        )


def _mlp(model: MegatronModel) -> Iterator[str]:
    dims, shape = model.dims, model.shape
    assert isinstance(shape, ModelShape)
    widths = [("tensor_model_parallel_size", "tp", dims.tp, "shared expert width", shape.shared_width)]
    if shape.moe_layers < shape.layers:
        widths.append(("tensor_model_parallel_size", "tp", dims.tp, "intermediate_size", shape.intermediate))
    if shape.experts:
        widths.append(("expert_tensor_parallel_size", "etp", dims.etp, "expert width", shape.expert_width))
    for key, axis, size, what, width in widths:
        if width % size:
            fits = _common_divisors(width, size)
            yield f"{what} {width} does not divide over {axis}({size}) ranks. Set {model.keys}.{key}={fits}."


def _vocabulary(model: MegatronModel) -> Iterator[str]:
    """Ranks hold equal shares of the words, rounded up; the last one must still have some."""
    tp, shape = model.dims.tp, model.shape
    assert isinstance(shape, ModelShape)
    if (tp - 1) * -(-shape.vocabulary // tp) >= shape.vocabulary:
        yield (
            f"a vocabulary of {shape.vocabulary} words leaves some of tp({tp}) ranks without any. Lower "
            f"{model.keys}.tensor_model_parallel_size."
        )


def _rows(model: MegatronModel) -> Iterator[str]:
    """Context parallelism cuts each row into 2 cp equal pieces, so a row is padded first."""
    multiple = model.row_multiple
    padded = -(-model.longest_row // multiple) * multiple
    for key, budget in model.budgets.items():
        if budget < padded:
            yield (
                f"{key}={budget} does not hold the longest row: its {model.longest_row} tokens are padded to "
                f"{padded}, a multiple of {multiple}, under cp({model.dims.cp}) and tp({model.dims.tp}). Set "
                f"it to {padded} or more."
            )


def _experts(model: MegatronModel) -> Iterator[str]:
    dims, shape, options = model.dims, model.shape, model.options
    assert isinstance(shape, ModelShape)
    if not shape.experts:
        for key, axis, size in (
            ("expert_model_parallel_size", "ep", dims.ep),
            ("expert_tensor_parallel_size", "etp", dims.etp),
        ):
            if size > 1:
                yield f"{axis}({size}): {shape.family} has no experts. Set {model.keys}.{key}=1."
        return
    if shape.experts % dims.ep:
        fits = _common_divisors(shape.experts, dims.ep)
        yield (
            f"{shape.experts} experts do not divide over ep({dims.ep}) ranks. Set "
            f"{model.keys}.expert_model_parallel_size={fits}."
        )
    if dims.tp > 1 and not model.section.sequence_parallel:
        yield (
            f"a mixture of experts with tp({dims.tp}) and without sequence parallelism: the dispatcher takes "
            f"each rank's own tokens, and without it all tp ranks have the same. Set "
            f"{model.keys}.sequence_parallel=true, or tensor_model_parallel_size=1."
        )
    dispatcher = options.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher not in ("allgather", "alltoall", "flex"):
        yield f"moe_token_dispatcher_type={dispatcher}: known are alltoall, allgather and flex (DeepEP)."
    if dispatcher == "allgather" and dims.pp > 1:
        yield (
            f"moe_token_dispatcher_type=allgather with pp({dims.pp}): pipeline ranks exchange packed rows of "
            "varying length, which it does not take. Set moe_token_dispatcher_type=alltoall."
        )
    if options.get("moe_layer_recompute") and options.get("recompute_granularity") == "full":
        yield "moe_layer_recompute with recompute_granularity=full: that recomputes all. Remove one of them."


def _transport(model: MegatronModel) -> Iterator[str]:
    """Interleaved pipelines must not batch their sends: with two ranks the wrong tensors meet, silently."""
    dims, options = model.dims, model.options
    batched, overlapped = options.get("batch_p2p_comm"), options.get("overlap_p2p_comm")
    where = f"{model.keys}.override_transformer_config"
    if dims.vpp > 1 and batched and overlapped:
        yield f"{where} sets both batch_p2p_comm and overlap_p2p_comm: they exclude each other. Set one."
    elif dims.vpp > 1 and dims.pp == 2 and (batched or overlapped is False):
        setting = "batch_p2p_comm=True" if batched else "overlap_p2p_comm=False"
        yield (
            f"{where}.{setting} with pp(2) and vpp({dims.vpp}): the previous and the next pipeline rank are "
            "the same one, batched messages of two chunks are mixed up, and gradients are wrong without an "
            "error. Remove it: siirl then overlaps unbatched sends."
        )
    for option in ("cpu_offloading", "cpu_offloading_num_layers"):
        if options.get(option) and dims.pp > 1:
            yield f"{where}.{option} with pp({dims.pp}): activations are not offloaded under pipelining."


def _recompute(model: MegatronModel) -> Iterator[str]:
    options = model.options
    granularity, method = options.get("recompute_granularity"), options.get("recompute_method")
    layers = options.get("recompute_num_layers")
    if granularity not in (None, "full", "selective"):
        yield f"recompute_granularity={granularity}: known are full and selective; null recomputes nothing."
    if method not in (None, "uniform", "block"):
        yield f"recompute_method={method}: known are uniform and block."
    if granularity == "full" and (method is None or layers is None):
        yield "recompute_granularity=full needs recompute_method=uniform|block and recompute_num_layers >= 1."
    if granularity == "selective" and layers is not None:
        yield (
            f"recompute_granularity=selective with recompute_num_layers={layers}: it recomputes the "
            "recompute_modules of every layer. Remove recompute_num_layers, or choose full."
        )
    if isinstance(layers, int) and layers < 1:
        yield f"recompute_num_layers={layers}: it is 1 or more."


def _optimizer(model: MegatronModel) -> Iterator[str]:
    """Where AdamW's state lies, and in which types: see siirl/engines/train/megatron/adamw.py."""
    options, where = model.optimizer_options, f"{model.group}.optim.override_optimizer_config"
    share = options.get("optimizer_offload_fraction", 1.0)
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        yield f"{where}.optimizer_offload_fraction={share}: it is a share, 0 to 1."
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        if options.get(name) and not options.get("optimizer_cpu_offload"):
            yield f"{where}.{name}: nothing is on the host. Set {where}.optimizer_cpu_offload=True."
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        value = options.get(name, "fp32")
        if value not in ("fp32", "bf16"):
            yield f"{where}.{name}={value}: moments are kept in fp32 or bf16. Set one of them."
        elif value != "fp32" and not options.get("use_precision_aware_optimizer"):
            yield f"{where}.{name}={value} needs {where}.use_precision_aware_optimizer=True. Set it."
    if options.get("main_params_dtype", "fp32") != "fp32":
        yield (
            f"{where}.main_params_dtype={options['main_params_dtype']}: small updates would be lost. Main "
            "weights are in fp32: remove it."
        )


def _common_divisors(width: int, size: int) -> str:
    """The divisors of width up to size, greatest first: sizes that fit."""
    return "|".join(str(d) for d in range(size, 0, -1) if width % d == 0)


def advice(model: MegatronModel, ranks: Ranks, ranks_per_node: int, num_micro_batches: int) -> list[str]:
    """What works but is slow or has no effect, a line each. num_micro_batches: of a mini-batch on a rank."""
    dims, options = model.dims, model.options
    lines = []
    if isinstance(model.shape, str):
        lines.append(f"layers, heads and experts are not checked: {model.shape}")
    groups = dims.mesh_groups(ranks).get("tp", ())
    across = next((group for group in groups if len({rank // ranks_per_node for rank in group}) > 1), None)
    if across:
        lines.append(
            f"tp({dims.tp}) reaches over machines (ranks {format_ranks(across)}): every layer then waits for "
            f"the network. Keep tensor_model_parallel_size within the {ranks_per_node} devices of a machine."
        )
    if dims.tp > 1 and not model.section.sequence_parallel:
        lines.append(
            f"tp({dims.tp}) without sequence_parallel keeps norms and residuals whole on every rank. Set "
            f"{model.keys}.sequence_parallel=true to split them too."
        )
    if dims.pp > 1 and model.trains:
        idle = (dims.pp - 1) / (num_micro_batches * dims.vpp + dims.pp - 1)
        if idle > 0.25:
            lines.append(
                f"pp({dims.pp}) with {num_micro_batches} micro-batches in a mini-batch idles {idle:.0%} of "
                "the time. Make micro-batches smaller, mini-batches larger, or the pipeline shorter."
            )
    inert = sorted(set(model.optimizer_options) - HONOURED) if model.trains else []
    if inert:
        names = ", ".join(inert)
        lines.append(f"override_optimizer_config.{names}: no effect: the optimizer is torch's AdamW.")
    granularity = options.get("recompute_granularity")
    if granularity != "selective" and options.get("recompute_modules"):
        lines.append("recompute_modules has no effect without recompute_granularity=selective.")
    if granularity == "selective" and options.get("recompute_method"):
        lines.append("recompute_method has no effect with recompute_granularity=selective.")
    return [f"{model.who}: {line}" for line in lines]
