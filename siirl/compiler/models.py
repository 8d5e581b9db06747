"""Models of a plan: which lives on which ranks, with which backend and sizes, fed by which link."""

from dataclasses import replace

from siirl.compiler.backends import backend_of, choose_backend
from siirl.compiler.backends.base import Backend
from siirl.compiler.interactions.adapters import with_bases
from siirl.compiler.interactions.opponents import pool_of
from siirl.compiler.plan import LinkPlan, ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config import Config
from siirl.config.resolve import first_difference
from siirl.config.roles import ROLES
from siirl.errors import DagError, PlacementError
from siirl.findings import Findings, ReadsBroken
from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks, format_ranks, parse_placement

OF_ENGINE = (
    *("strategy", "optim.", "fsdp_config.", "megatron.", "grad_clip", "grad_offload", "checkpoint."),
    *("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"),
)
"""Keys of the actor that say how its model is built and stepped: one thing for all that train it."""
OF_SCORER = ("model.", "max_length", "strategy", "fsdp_config.", "megatron.", "micro_batch", "forward_max")
"""Keys of a reward model that say what it reads and how it is built: one thing for all that score by it."""


def plan_models(workflow: Workflow, world_size: int, found: Findings) -> dict[str, ModelPlan]:
    """Name -> model, in execution order of the first node that uses it; what is wrong goes to `found`."""
    users: dict[str, list[ResolvedNode]] = {}
    for node in workflow.nodes.values():
        if node.model is not None:
            users.setdefault(node.model, []).append(node)
    models: dict[str, ModelPlan] = {}
    for name, of_model in users.items():
        with found.at():
            models[name] = _plan_model(name, of_model, world_size, found)
    if len(models) < len(users):
        raise ReadsBroken
    nodes = {node.id: node for nodes in users.values() for node in nodes}
    _check_policies_agree(models, nodes)
    return with_bases(models | _weight_sources(models, nodes, found), workflow)


def plan_links(models: dict[str, ModelPlan], nodes: Nodes) -> dict[str, LinkPlan]:
    """One link for each rollout, from the actor of its agent, or of whom it is an opponent's version of, and
    for each teacher that is a policy.

    nodes: the kept ones by id.
    """
    links: dict[str, LinkPlan] = {}
    for target in models.values():
        if target.is_rollout and backend_of(target).weights and not nodes[target.node].op.is_asked:
            pool = pool_of(nodes[target.node])
            source = models[f"agent_{target.agent if pool is None else pool.policy}.actor"]
            name = f"agent_{target.agent}.weights"
            union = tuple(sorted({*source.ranks, *target.ranks}))
            kind = "local" if union == source.ranks else "broadcast"
            if nodes[target.node].cfg.actor_rollout_ref.rollout.weight_link == "checkpoint":
                kind = "checkpoint"
            links[name] = LinkPlan(name, source.name, target.name, union, kind, pool=pool)
    return links | _links_to_teachers(models, nodes)


def _links_to_teachers(models: dict[str, ModelPlan], nodes: Nodes) -> dict[str, LinkPlan]:
    """One link for each teacher that is a policy."""
    links: dict[str, LinkPlan] = {}
    for target in models.values():
        teacher = nodes[target.node].cfg.teacher
        if target.is_teacher and teacher.policy is not None:
            source = models[f"agent_{teacher.policy}.actor"]
            union = tuple(sorted({*source.ranks, *target.ranks}))
            kind = "local" if union == source.ranks else "broadcast"
            name = f"{target.name}.weights"
            times = (teacher.sync_steps, teacher.update_rate)
            links[name] = LinkPlan(name, source.name, target.name, union, kind, *times)
    return links


def _weight_sources(
    models: dict[str, ModelPlan], nodes: dict[str, ResolvedNode], found: Findings
) -> dict[str, ModelPlan]:
    """For each rollout without an actor (trainer.rollout_only) one that no node runs: it reads the weights
    from actor_rollout_ref.model.path, shards them over the rollout's ranks, and gives them to it."""
    sources: dict[str, ModelPlan] = {}
    for target in models.values():
        name = f"agent_{target.agent}.actor"
        node = nodes[target.node]
        if pool_of(node) is None and target.is_rollout and backend_of(target).weights and name not in models:
            backend_name, backend = choose_backend("actor", node)
            dims = _checked_sizes(backend, "actor", node, node.cfg, target.ranks, found)
            sources[name] = replace(
                target, name=name, role="actor", backend=backend_name, dims=dims, nodes=()
            )
    return sources


def _checked_sizes(
    backend: Backend, role: str, node: ResolvedNode, cfg: Config, ranks: Ranks, found: Findings
) -> ParallelDims:
    """The sizes of a model on its ranks, if its backend takes it; else ReadsBroken, and why in `found`."""
    so_far, dims = len(found), backend.dims(cfg, role, len(ranks))
    found.ask(backend.checks, "model", cfg=cfg, role=role, dims=dims, node=node)
    if len(found) > so_far:
        raise ReadsBroken
    dims.check(str(node), ranks)
    return dims


def _plan_model(name: str, nodes: list[ResolvedNode], world_size: int, found: Findings) -> ModelPlan:
    builder = min(nodes, key=lambda node: (not node.op.trains, node.agent != node.model_agent))
    role = builder.op.model
    assert role is not None
    _check_overrides_agree(name, builder, nodes)
    ranks = _ranks(name, nodes, world_size)
    backend_name, backend = choose_backend(role, builder)
    dims = _checked_sizes(backend, role, builder, ROLES[role].engine_cfg(builder.cfg), ranks, found)
    return ModelPlan(
        name=name,
        agent=builder.agent,
        role=role,
        backend=backend_name,
        head=(builder.op.trains and ROLES[role].trained_head) or ROLES[role].head,
        trains=builder.op.trains,
        ranks=ranks,
        dims=dims,
        node=builder.id,
        nodes=tuple(node.id for node in nodes),
    )


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
    groups = ("actor_rollout_ref.", "critic.", *(f"reward_model.{name}" for name in OF_SCORER))
    of_engine = tuple(f"actor_rollout_ref.actor.{name}" for name in OF_ENGINE)
    for node in nodes:
        of_agent = ("actor_rollout_ref.rollout.", "actor_rollout_ref.actor.")
        own_rows = () if node.agent == builder.agent else of_agent
        for key, value in node.overrides.items():
            of_rows = key.startswith(own_rows) and not (node.op.trains_policy and key.startswith(of_engine))
            if key in ("critic.share_instance", "reward_model.share_instance") or of_rows:
                continue
            if key.startswith(groups) and builder.value(key) != node.value(key):
                raise DagError(
                    f"{node} sets {key}={value}, but model {name}, which it shares with {builder}, is built "
                    "from "
                    f"the latter, where it is {builder.value(key)}. Set it on both nodes, or on "
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
            difference = first_difference(rollout.cfg, actor.cfg, key)
            if difference:
                where, one, other = difference
                raise DagError(
                    f"{rollout} has {where}={one} and {actor} has {other}: they are one policy (agent "
                    f"{target.agent}) "
                    "on one batch. Set it on the rollout node only: it then holds for the whole agent."
                )
