"""Models of a plan: which lives on which ranks, with which backend and sizes, fed by which link."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from siirl.compiler.checks.megatron_checks import MegatronModel, advice, check_megatron
from siirl.compiler.interactions.adapters import with_bases
from siirl.compiler.memory.estimate import (
    BYTES,
    MemoryLine,
    ModelShape,
    fsdp_lines,
    full_kl_lines,
    head_lines,
    hf_rollout_lines,
    micro_batch_tokens,
    micro_batches,
    read_shape,
    vllm_lines,
)
from siirl.compiler.memory.megatron_memory import MegatronMemory, megatron_lines
from siirl.compiler.model_types import check_trained_model
from siirl.compiler.plan import LinkPlan, ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config import Config
from siirl.config.actor import ActorConfig, RefConfig
from siirl.config.critic import CriticConfig
from siirl.config.resolve import get
from siirl.config.reward import RewardModelConfig
from siirl.config.roles import ROLE_GROUPS, ROLES, role_group, role_model
from siirl.dag.ops import ModelRole
from siirl.errors import ConfigError, DagError, NotSupportedError, PlacementError
from siirl.findings import Findings, ReadsBroken
from siirl.parallel.dims import ParallelDims
from siirl.parallel.megatron_groups import megatron_groups
from siirl.parallel.placement import Ranks, format_ranks, parse_placement
from siirl.spelling import suggest


@dataclass(frozen=True)
class Backend:
    """What the compiler knows of a backend.

    dims: the parallel sizes it gets on so many ranks. groups: the rank tuples that it communicates over, of
    its sizes on its ranks. memory: what a rank holds; the last argument is the rows of a shard. check: what
    must hold beyond the product of the sizes; raises UserError. advice: what works, but badly, a line each.
    environment: variables that the processes of a model of these sizes need before CUDA starts. five_sizes:
    tp, pp, cp, ep and dp are always named. weights: it needs weights. offloads: keys in a model's group that
    move it to host memory while it is idle; offloads_trained: further ones of a model that trains. later: why
    it cannot be used yet.
    """

    dims: Callable[[Config, ModelRole, int], ParallelDims]
    memory: Callable[[ModelPlan, Config, ModelShape, int], list[MemoryLine]]
    groups: Callable[[ParallelDims, Ranks], Iterable[Ranks]] = lambda dims, ranks: ()
    check: Callable[[Config, ModelRole, ParallelDims, ResolvedNode], None] = lambda *model: None
    environment: Callable[[ParallelDims], dict[str, str]] = lambda dims: {}
    five_sizes: bool = False
    advice: Callable[[ModelPlan, Config], list[str]] = lambda model, cfg: []
    weights: bool = True
    offloads: tuple[str, ...] = ()
    offloads_trained: tuple[str, ...] = ()
    later: str = ""


def _along(*axes: str) -> Callable[[ParallelDims, Ranks], Iterable[Ranks]]:
    """The groups of some mesh axes, in the order of the axes."""

    def groups(dims: ParallelDims, ranks: Ranks) -> Iterable[Ranks]:
        lines = dims.mesh_groups(ranks)
        return [group for axis in axes for group in lines.get(axis, ())]

    return groups


def _fsdp_dims(cfg: Config, role: ModelRole, world: int) -> ParallelDims:
    size = role_group(cfg, role).fsdp_config.fsdp_size
    shard = world if size < 1 or size > world else size
    return ParallelDims(world, dp_shard=shard, dp_replicate=-(-world // shard))


def _megatron_dims(cfg: Config, role: ModelRole, world: int) -> ParallelDims:
    section = role_group(cfg, role).megatron
    tp, pp, cp = (
        section.tensor_model_parallel_size,
        section.pipeline_model_parallel_size,
        section.context_parallel_size,
    )
    return ParallelDims(
        world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=section.expert_model_parallel_size,
        etp=section.expert_tensor_parallel_size,
        vpp=section.virtual_pipeline_model_parallel_size or 1,
        dp_replicate=max(1, world // (tp * pp * cp)),
    )


def _megatron_environment(dims: ParallelDims) -> dict[str, str]:
    """Megatron-Core issues messages of tensor and context parallel groups ahead of the matrix products that
    hide them, and counts on one hardware queue to keep the order (megatron-core 0.16.1,
    tensor_parallel/layers.py). FSDP2 wants several queues, so that its prefetches overlap."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if max(dims.tp, dims.cp) > 1 else {}


def _megatron_model(
    cfg: Config, role: ModelRole, dims: ParallelDims, who: str, trains: bool
) -> MegatronModel:
    group = role_group(cfg, role)
    return MegatronModel(
        who=who,
        group=ROLE_GROUPS[role],
        section=group.megatron,
        optimizer_options=_optimizer_options(group),
        trains=trains,
        dims=dims,
        shape=read_shape(cfg, role),
        lora_rank=role_model(cfg, role).lora_rank,
        longest_row=cfg.actor_rollout_ref.rollout.prompt_length
        + cfg.actor_rollout_ref.rollout.response_length,
        budgets=_token_budgets(cfg, role),
    )


def _token_budgets(cfg: Config, role: ModelRole) -> dict[str, int]:
    """Key -> tokens of a micro-batch, of the budgets that a role's model has."""
    batches = [keys for keys in (ROLES[role].train, ROLES[role].forward) if keys is not None]
    return {keys.max_tokens: get(cfg, keys.max_tokens) for keys in batches if get(cfg, keys.dynamic)}


def _check_megatron(cfg: Config, role: ModelRole, dims: ParallelDims, node: ResolvedNode) -> None:
    model = _megatron_model(cfg, role, dims, str(node), node.op.trains)
    dims.check(model.who, range(dims.world), model.section.sequence_parallel)
    check_megatron(model)


def _megatron_advice(model: ModelPlan, cfg: Config) -> list[str]:
    described = _megatron_model(cfg, model.role, model.dims, f"node {model.node!r}", model.trains)
    num_micro_batches = micro_batches(model, cfg) if model.trains else 0
    return advice(described, model.ranks, cfg.trainer.n_gpus_per_node, num_micro_batches)


def _megatron_lines(model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
    group = role_group(cfg, model.role)
    width, words = BYTES[group.megatron.param_dtype], -(-shape.vocabulary // model.dims.tp)
    settings = MegatronMemory(
        section=group.megatron,
        optimizer_options=_optimizer_options(group),
        recompute=role_model(cfg, model.role).enable_gradient_checkpointing,
        train_tokens=micro_batch_tokens(model, cfg, trains=True) if model.trains else 0,
        forward_tokens=micro_batch_tokens(model, cfg, trains=False),
        head=head_lines(model, cfg, words, shape.hidden, width) if model.head == "lm" else (),
    )
    full_kl = full_kl_lines(model, cfg, shape, rows, width)
    return megatron_lines(model, shape, settings) + full_kl


def _optimizer_options(group: ActorConfig | RefConfig | CriticConfig | RewardModelConfig) -> dict[str, Any]:
    trained = isinstance(group, ActorConfig | CriticConfig)
    return group.optim.override_optimizer_config or {} if trained else {}


def _replicas(cfg: Config, role: ModelRole, world: int) -> ParallelDims:
    return ParallelDims(world, dp_replicate=world)


def _tensor_parallel_replicas(cfg: Config, role: ModelRole, world: int) -> ParallelDims:
    tp = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    return ParallelDims(world, tp=tp, dp_replicate=max(1, world // tp))


def _check_openai(cfg: Config, role: ModelRole, dims: ParallelDims, node: ResolvedNode) -> None:
    url = cfg.actor_rollout_ref.rollout.agent.endpoint.url
    if not (url or "").startswith(("http://", "https://")):
        raise ConfigError(
            f"{node}: rollout.agent.endpoint.url={url!r}: rollout.name=openai needs the http(s) address of a "
            "service, e.g. http://localhost:8000/v1/chat/completions."
        )
    if not node.op.is_handed or node.writes:
        raise DagError(
            f"{node} has rollout.name=openai: a service speaks in interactions, but not first, and cannot be "
            "trained (its tokens are unknown). Let the node depend on a rollout of another agent, and give "
            "its agent no other nodes."
        )


def _check_vllm(cfg: Config, role: ModelRole, dims: ParallelDims, node: ResolvedNode) -> None:
    key = f"actor_rollout_ref.rollout.tensor_model_parallel_size={dims.tp}"
    if dims.tp > cfg.trainer.n_gpus_per_node:
        raise PlacementError(
            f"{node}: {key} is more than trainer.n_gpus_per_node={cfg.trainer.n_gpus_per_node}: the GPUs of "
            "one engine are on one machine. Lower it."
        )
    shape = read_shape(cfg, role)
    if isinstance(shape, str) or dims.tp == 1:
        return
    for what, count in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
        whole = count % dims.tp == 0 or (count == shape.kv_heads and dims.tp % count == 0)
        if not whole:
            fits = [size for size in range(1, dims.tp) if count % size == 0]
            raise PlacementError(
                f"{node}: {key} does not divide the model's {count} {what}: each GPU holds whole heads. "
                f"Set it to {' or '.join(map(str, fits))}."
            )


TRAIN_BACKENDS = {
    "fsdp": Backend(
        _fsdp_dims,
        fsdp_lines,
        groups=_along("dp_shard", "dp_replicate"),
        offloads=("fsdp_config.param_offload",),
        offloads_trained=("fsdp_config.optimizer_offload",),
    ),
    "megatron": Backend(
        _megatron_dims,
        _megatron_lines,
        groups=megatron_groups,
        check=_check_megatron,
        advice=_megatron_advice,
        environment=_megatron_environment,
        five_sizes=True,
        offloads=("megatron.param_offload",),
        offloads_trained=("megatron.grad_offload", "megatron.optimizer_offload"),
    ),
}
ROLLOUT_BACKENDS = {
    "hf": Backend(_replicas, hf_rollout_lines),
    "vllm": Backend(_tensor_parallel_replicas, vllm_lines, groups=_along("tp"), check=_check_vllm),
    "openai": Backend(_replicas, lambda *model: [], check=_check_openai, weights=False),
    "sglang": Backend(_tensor_parallel_replicas, vllm_lines, groups=_along("tp"), later="the sglang rollout"),
}


def backend_of(model: ModelPlan) -> Backend:
    """What the compiler knows of the backend that a model runs on."""
    return (ROLLOUT_BACKENDS if model.generates else TRAIN_BACKENDS)[model.backend]


def plan_models(workflow: Workflow, world_size: int, found: Findings) -> dict[str, ModelPlan]:
    """Name -> model, in execution order of the first node that uses it; what is wrong goes to `found`."""
    users: dict[str, list[ResolvedNode]] = {}
    for node in workflow.nodes.values():
        if node.model is not None:
            users.setdefault(node.model, []).append(node)
    models: dict[str, ModelPlan] = {}
    for name, of_model in users.items():
        with found.at():
            models[name] = _plan_model(name, of_model, world_size)
    if len(models) < len(users):
        raise ReadsBroken
    nodes = {node.id: node for nodes in users.values() for node in nodes}
    _check_policies_agree(models, nodes)
    return with_bases(models | _weight_sources(models, nodes), workflow)


def plan_advice(models: Iterable[ModelPlan], configs: dict[str, Config]) -> list[str]:
    """What works, but badly, and what could not be checked; configs: the configuration of each node."""
    return [line for model in models for line in backend_of(model).advice(model, configs[model.node])]


def plan_links(models: dict[str, ModelPlan], nodes: Nodes) -> dict[str, LinkPlan]:
    """One link for each rollout, from the actor of its agent; nodes: the kept ones by id."""
    links: dict[str, LinkPlan] = {}
    for target in models.values():
        if target.is_rollout and backend_of(target).weights:
            source = models[f"agent_{target.agent}.actor"]
            name = f"agent_{target.agent}.weights"
            union = tuple(sorted({*source.ranks, *target.ranks}))
            kind = "local" if union == source.ranks else "broadcast"
            if nodes[target.node].cfg.actor_rollout_ref.rollout.weight_link == "checkpoint":
                kind = "checkpoint"
            links[name] = LinkPlan(name, source.name, target.name, union, kind)
    return links


def _weight_sources(models: dict[str, ModelPlan], nodes: dict[str, ResolvedNode]) -> dict[str, ModelPlan]:
    """For each rollout without an actor (trainer.rollout_only) one that no node runs: it reads the weights
    from actor_rollout_ref.model.path, shards them over the rollout's ranks, and gives them to it."""
    sources: dict[str, ModelPlan] = {}
    for target in models.values():
        name = f"agent_{target.agent}.actor"
        if target.is_rollout and backend_of(target).weights and name not in models:
            node = nodes[target.node]
            backend_name, backend = _backend("actor", node)
            dims = backend.dims(node.cfg, "actor", len(target.ranks))
            dims.check(str(node), target.ranks)
            check_trained_model(node.cfg, "actor", str(node))
            backend.check(node.cfg, "actor", dims, node)
            sources[name] = replace(
                target, name=name, role="actor", backend=backend_name, dims=dims, nodes=()
            )
    return sources


def _plan_model(name: str, nodes: list[ResolvedNode], world_size: int) -> ModelPlan:
    builder = min(nodes, key=lambda node: (not node.op.trains, node.agent != node.model_agent))
    role = builder.op.model
    assert role is not None
    _check_overrides_agree(name, builder, nodes)
    ranks = _ranks(name, nodes, world_size)
    backend_name, backend = _backend(role, builder)
    cfg = ROLES[role].engine_cfg(builder.cfg)
    dims = backend.dims(cfg, role, len(ranks))
    dims.check(str(builder), ranks)
    check_trained_model(cfg, role, str(builder))
    backend.check(cfg, role, dims, builder)
    return ModelPlan(
        name=name,
        agent=builder.agent,
        role=role,
        backend=backend_name,
        head=ROLES[role].head,
        trains=builder.op.trains,
        ranks=ranks,
        dims=dims,
        node=builder.id,
        nodes=tuple(node.id for node in nodes),
    )


def _backend(role: ModelRole, node: ResolvedNode) -> tuple[str, Backend]:
    generates = ROLES[role].generates
    key = f"{ROLES[role].group}.{'name' if generates else 'strategy'}"
    name, known = get(node.cfg, key) or "", ROLLOUT_BACKENDS if generates else TRAIN_BACKENDS
    if name not in known:
        raise ConfigError(f"{node}: unknown {key}={name}. {suggest(name, known)} Known: {', '.join(known)}.")
    if known[name].later:
        available = ", ".join(other for other, backend in known.items() if not backend.later)
        raise NotSupportedError(
            f"not supported yet: {node}: {key}={name}: {known[name].later}. Available: {available}."
        )
    return name, known[name]


def _ranks(name: str, nodes: list[ResolvedNode], world_size: int) -> Ranks:
    """The ranks that the nodes of a model are placed on; all of them when none says anything."""
    placed = [
        (node, parse_placement(node.spec.placement, world_size, str(node)))
        for node in nodes
        if node.spec.placement is not None
    ]
    if not placed:
        return tuple(range(world_size))
    first, first_ranks = placed[0]
    for node, ranks in placed:
        if ranks != first_ranks:
            raise PlacementError(
                f"{first} is placed on ranks {format_ranks(first_ranks)} and {node} on "
                f"{format_ranks(ranks)}, but both "
                f"use model {name}, which lives in one place. Give both the same placement."
            )
    return first_ranks


def _check_overrides_agree(name: str, builder: ResolvedNode, nodes: list[ResolvedNode]) -> None:
    groups = ("actor_rollout_ref.", "critic.")
    for node in nodes:
        of_agent = ("actor_rollout_ref.rollout.", "actor_rollout_ref.actor.")
        own_rows = () if node.agent == builder.agent else of_agent
        for key, value in node.overrides.items():
            if key == "critic.share_instance" or key.startswith(own_rows):
                continue
            if key.startswith(groups) and _value(builder.cfg, key) != _value(node.cfg, key):
                raise DagError(
                    f"{node} sets {key}={value}, but model {name}, which it shares with {builder}, is built "
                    "from "
                    f"the latter, where it is {_value(builder.cfg, key)}. Set it on both nodes, or on "
                    "neither."
                )


def _check_policies_agree(models: dict[str, ModelPlan], nodes: dict[str, ResolvedNode]) -> None:
    """A rollout takes its trainer's weights, and its trainer takes its rows."""
    for target in models.values():
        source = models.get(f"agent_{target.agent}.actor")
        if not target.is_rollout or source is None:
            continue
        rollout, actor = nodes[target.node], nodes[source.node]
        for key in ("actor_rollout_ref.model", "actor_rollout_ref.rollout.n", "data.train_batch_size"):
            difference = _difference(_value(rollout.cfg, key), _value(actor.cfg, key), key)
            if difference:
                where, one, other = difference
                raise DagError(
                    f"{rollout} has {where}={one} and {actor} has {other}: they are one policy (agent "
                    f"{target.agent}) "
                    "on one batch. Set it on the rollout node only: it then holds for the whole agent."
                )


def _value(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = cfg.get(name) if isinstance(cfg, dict) else getattr(cfg, name)
    return cfg


def _difference(one: Any, other: Any, key: str) -> tuple[str, Any, Any] | None:
    """(key, value, value) of the first leaf in which two configuration groups differ."""
    if not dataclasses.is_dataclass(one):
        return None if one == other else (key, one, other)
    for item in dataclasses.fields(one):
        found = _difference(getattr(one, item.name), getattr(other, item.name), f"{key}.{item.name}")
        if found:
            return found
    return None
