"""The parallel sizes that the models of a plan could have on so many ranks: those that divide. Pure.

A compiler's checks decide what of them runs; docs/tuning.md says what a search makes of them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from siirl.compiler.backends import backend_of
from siirl.compiler.choices import Changes
from siirl.compiler.memory.estimate import ModelShape, longest_row, read_shape
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config
from siirl.config.aliases import MEGATRON_SIZES
from siirl.config.resolve import FOLLOWS
from siirl.config.roles import ROLES, role_group
from siirl.errors import ConfigError
from siirl.parallel.dims import divisors
from siirl.parallel.pipeline_layers import LAYOUT, SPLIT_OPTIONS, suggest_split

TOKENS_OF_RANK = 4096
"""Rows are split over ranks (context or sequence parallelism) as far as each has so many tokens."""
CHUNKS = (1, 2, 4)
"""Of a pipeline rank: more take more memory, and pipelines wait less."""
MEGATRON = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
)
FINE_SIZES = (*MEGATRON[4:6], *SPLIT_OPTIONS)
"""Of layouts that differ in these alone, one is worth showing."""
FSDP_SIZE, FSDP_EXPERTS, ULYSSES = "fsdp_size", "expert_parallel_size", "ulysses_sequence_parallel_size"
ENGINE_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_FOLLOWING = "actor_rollout_ref.ref"
"""Has the actor's sizes where nobody sets its own."""
_OPTIONS = "override_transformer_config"
_OWN_OPTIONS = f"{_FOLLOWING}.megatron.{_OPTIONS}"

Configs = Mapping[str, Config]


def trainer_sizes(plan: Plan, configs: Configs, ranks: int) -> Iterator[Changes]:
    """Sizes of the models on training engines on so many ranks, the same for all under one strategy.

    ConfigError for a model whose config.json is not known.
    """
    models = [model for model in plan.models.values() if not model.generates]
    follow: Changes = {key: None for model in models for key in _own_sizes(configs[model.node])}
    following = [model for model in models if ROLES[model.role].group == _FOLLOWING]
    models = [model for model in models if model not in following]
    own = [model for model in following if _OWN_OPTIONS in configs[model.node].explicit]
    cut = [model for model in models if backend_of(model).five_sizes]
    sharded = [model for model in models if backend_of(model).gathers_weights]
    of_sharded = list(_fsdp_sizes(sharded, configs, ranks)) if sharded else [Changes()]
    for sizes in _megatron_sizes(cut, configs, ranks) if cut else (Changes(),):
        splits = _splits_as_the_actor(own, configs, sizes)
        yield from (follow | sizes | splits | more for more in of_sharded)


def _splits_as_the_actor(models: Sequence[ModelPlan], configs: Configs, sizes: Changes) -> Changes:
    """How the layers of models are cut that have the actor's sizes, and options of their own."""
    actor, maps = f"{ROLES['actor'].group}.megatron.{_OPTIONS}.", f"{_FOLLOWING}.megatron.{_OPTIONS}."
    own = {name for model in models for name in SPLIT_OPTIONS if _options(model, configs).get(name)}
    splits = {key.removeprefix(actor): value for key, value in sizes.items() if key.startswith(actor)}
    return {f"{maps}{name}": splits.get(name) for name in sorted(own | splits.keys())} if models else {}


def engine_sizes(plan: Plan, configs: Configs, ranks: int) -> Iterator[Changes]:
    """GPUs of a vLLM engine on so many ranks, within a machine; nothing of others."""
    engines = [model for model in plan.models.values() if model.is_rollout and model.backend == "vllm"]
    shapes = [_shape(model, configs) for model in engines]
    machine = next(iter(configs.values())).trainer.n_gpus_per_node
    for tp in divisors(min(machine, ranks)) if engines else ():
        if ranks % tp == 0 and not any(shape.heads % tp for shape in shapes):
            yield {ENGINE_TP: tp}
    if not engines:
        yield {}


def _own_sizes(cfg: Config) -> list[str]:
    """Keys of sizes that somebody set for the reference."""
    sizes = (*MEGATRON_SIZES, ULYSSES, FSDP_EXPERTS)
    own = (key for key in cfg.explicit if key.startswith(f"{_FOLLOWING}.") and key in FOLLOWS)
    return sorted(key for key in own if key.rpartition(".")[2] in sizes)


def _shape(model: ModelPlan, configs: Configs) -> ModelShape:
    found = read_shape(ROLES[model.role].engine_cfg(configs[model.node]), model.role)
    if isinstance(found, str):
        raise ConfigError(f"nothing can be predicted: {found}.")
    return found


def _row(models: Sequence[ModelPlan], configs: Configs) -> int:
    """Tokens of the longest row of the model that has the shortest."""
    return min(longest_row(configs[model.node], model.role) for model in models)


def _megatron_sizes(models: Sequence[ModelPlan], configs: Configs, ranks: int) -> Iterator[Changes]:
    """TP within a machine, PP, CP where rows are long, EP, experts whole or cut as the rest, virtual PP."""
    shapes, row = [_shape(model, configs) for model in models], _row(models, configs)
    experts = math.gcd(*(shape.experts or 1 for shape in shapes))
    machine = next(iter(configs.values())).trainer.n_gpus_per_node
    dense = itertools.product(divisors(min(machine, ranks)), divisors(ranks), divisors(ranks))
    for tp, pp, cp in dense:
        if ranks % (tp * pp * cp) or (cp > 1 and row < TOKENS_OF_RANK * cp):
            continue
        if not all(_can_be_cut(shape, tp, pp) for shape in shapes):
            continue
        chunks = CHUNKS if pp > 1 else (1,)
        for ep, etp, vpp in itertools.product(divisors(experts), sorted({1, tp}), chunks):
            splits = [suggest_split(shape.layers, pp, vpp) for shape in shapes]
            by_layout = vpp > 1 and any(LAYOUT in split for split in splits)
            if ranks % (etp * ep * pp) or (etp > 1 and experts == 1) or by_layout:
                continue
            values = (tp, pp, cp, ep, etp, vpp if vpp > 1 else None, tp > 1)
            sizes: Changes = dict(zip(MEGATRON, values, strict=True))
            yield {
                key: value
                for model, split in zip(models, splits, strict=True)
                for key, value in _of_group(model, configs, sizes, split)
            }


def _can_be_cut(shape: ModelShape, tp: int, pp: int) -> bool:
    """Whole heads on each rank, with keys and values split or repeated, and at least a layer."""
    whole = shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    return whole and shape.heads % tp == 0 and shape.layers >= pp


def _of_group(
    model: ModelPlan, configs: Configs, sizes: Changes, split: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """(key, value) of a model's sizes, and of how its layers are cut into stages."""
    keys = f"{ROLES[model.role].group}.megatron"
    given = _options(model, configs)
    yield from ((f"{keys}.{name}", value) for name, value in sizes.items())
    for name in SPLIT_OPTIONS:
        if name in split or given.get(name):
            yield f"{keys}.{_OPTIONS}.{name}", split.get(name)


def _options(model: ModelPlan, configs: Configs) -> Mapping[str, Any]:
    return role_group(configs[model.node], model.role).megatron.override_transformer_config


def _fsdp_sizes(models: Sequence[ModelPlan], configs: Configs, ranks: int) -> Iterator[Changes]:
    """Shards over all ranks or over a machine; sequence parallelism where rows are long; experts sharded or
    gathered."""
    shapes, row = [_shape(model, configs) for model in models], _row(models, configs)
    experts = math.gcd(*(shape.experts or 1 for shape in shapes))
    machine = min(next(iter(configs.values())).trainer.n_gpus_per_node, ranks)
    for shards, cp in itertools.product(sorted({ranks, machine}), divisors(machine)):
        if ranks % shards or shards % cp or (cp > 1 and row < TOKENS_OF_RANK * cp):
            continue
        if any(shape.heads % cp for shape in shapes):
            continue
        for ep in (1, shards) if shards > 1 and experts % shards == 0 else (1,):
            sizes = {f"fsdp_config.{FSDP_SIZE}": -1 if shards == ranks else shards, ULYSSES: cp}
            sizes[f"fsdp_config.{FSDP_EXPERTS}"] = ep
            groups = [ROLES[model.role].group for model in models]
            yield {f"{group}.{name}": value for group in groups for name, value in sizes.items()}
