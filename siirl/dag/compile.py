"""compile_plan: DAG, configuration and cluster size in, Plan out. Pure; the same result in every process."""

import traceback
from collections.abc import Iterable
from pathlib import Path

from siirl.config import Config
from siirl.config.algorithm_choice import estimator_of
from siirl.config.checks import contradictions
from siirl.dag.awake import check_awake, with_shares
from siirl.dag.check import (
    check_agents,
    check_critics,
    check_kept,
    check_readers,
    check_resampling,
    check_reward_models,
    check_reward_weights,
    check_sampling,
    check_writers,
    prune,
)
from siirl.dag.credit import turns_of_training, with_credit
from siirl.dag.emit import Sections
from siirl.dag.environments import with_environments
from siirl.dag.filters import with_filters
from siirl.dag.graph import Graph, build_graph
from siirl.dag.idle_nodes import without_idle
from siirl.dag.interactions import (
    Interactions,
    check_agents_of,
    find_interactions,
    silent_nodes,
    with_interactions,
)
from siirl.dag.layouts import LayoutTable, agent_rows, place_nodes
from siirl.dag.models import backend_of, plan_links, plan_models
from siirl.dag.node_config import with_node_config
from siirl.dag.ops import uses_critic
from siirl.dag.plan import Instruction, LinkPlan, ModelPlan, NodePlan, Plan, Repeat, RoutePlan
from siirl.dag.resolve import ResolvedNode, check_node_config, resolve_nodes
from siirl.dag.rounds import check_rounds
from siirl.dag.serving import heads_of, place_interactions, serving_ranks
from siirl.dag.spec import DagSpec, load_object
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import DagError, Place, UserError, joined
from siirl.findings import Findings, ReadsBroken
from siirl.parallel.placement import Ranks
from siirl.types import Layout

TEMPLATES = Path(__file__).parents[2] / "dag_templates"


def load_dag(cfg: Config) -> DagSpec:
    """The DAG of dag.custom_pipeline_fn, of dag.workflow_path, or the algorithm's template.

    With what dag.node_config says of its nodes.
    """
    return with_node_config(_dag(cfg), cfg.dag.node_config)


def _dag(cfg: Config) -> DagSpec:
    function = cfg.dag.custom_pipeline_fn
    if function:
        return _built(function)
    return load_dag_file(cfg.dag.workflow_path or TEMPLATES / template_of(cfg))


def _built(function: str) -> DagSpec:
    """The DAG that the user's function returns. DagError for whatever it raises, with the line."""
    key, own = "dag.custom_pipeline_fn", "Build it by siirl.dag.spec.DagBuilder (docs/dag_authoring.md)."
    build = load_object(function, key)
    if not callable(build):
        raise DagError(
            f"{key}={function} is {type(build).__name__}, not a function that returns a DAG. {own}"
        )
    try:
        dag = build()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code runs here: it may raise anything
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise DagError(
            f"{key}={function} raised {type(error).__name__}: {error} ({line.filename}, line {line.lineno}). "
            f"A pipeline of another framework's classes is none here. {own}"
        ) from error
    if not isinstance(dag, DagSpec):
        raise DagError(
            f"{key}={function} returned {type(dag).__module__}.{type(dag).__name__}, not a DagSpec: a "
            f"pipeline of another framework's classes is none here. {own} End it with builder.build()."
        )
    return dag


def template_of(cfg: Config) -> str:
    """The file in dag_templates/ that fits the algorithm."""
    if cfg.algorithm.filter_groups.enable or cfg.algorithm.workflow_type == "dapo":
        return "dapo.yaml"
    if estimator_of(cfg).uses_greedy:
        return "remax.yaml"
    if cfg.reward_model.enable:
        return "ppo_reward_model.yaml" if uses_critic(cfg) else "grpo_reward_model.yaml"
    return "ppo.yaml" if uses_critic(cfg) else "grpo.yaml"


def compile_plan(dag: DagSpec, cfg: Config, world_size: int) -> tuple[Plan, dict[str, Config]]:
    """The plan of a workflow on `world_size` ranks, and the configuration of each kept node.

    Raises DagError, PlacementError, ConfigError or NotSupportedError, with the node and the fix.
    """
    found = Findings(Place.WORKFLOW)
    try:
        compiled = _compile(dag, cfg, world_size, found)
    except UserError as error:
        found.add(error)
        raise joined(found.problems) from error
    except ReadsBroken:
        found.close()
        raise
    found.close()
    return compiled


def _compile(dag: DagSpec, cfg: Config, world_size: int, found: Findings) -> tuple[Plan, dict[str, Config]]:
    dag, idle = with_filters(dag), {}
    with found.at():
        build_graph(dag)
        dag, idle = without_idle(dag)
    nodes = resolve_nodes(dag, cfg, found)
    if len(nodes) < len(dag.nodes):
        found.close()
        raise ReadsBroken
    dag = with_environments(dag, nodes)
    full_graph, nodes = build_graph(dag), resolve_nodes(dag, cfg, found)
    nodes, interactions = _with_interactions(nodes, full_graph, found)
    together = [{stage.node for stage in plan.stages} for plan in interactions.values()]
    pruned = prune(nodes, full_graph, cfg.trainer.rollout_only, together)
    so_far = len(found)
    found.take(check_kept(nodes, pruned, cfg.trainer.rollout_only, interactions))
    interactions = {entry: plan for entry, plan in interactions.items() if entry not in pruned}
    graph = full_graph.without(set(pruned))
    kept = {node_id: nodes[node_id] for node_id in graph.order}
    found.take(check_critics(kept, graph))
    found.take(check_sampling(kept, interactions))
    found.take(check_resampling(kept, graph, interactions))
    found.take(check_reward_models(nodes.values(), cfg))
    found.take(check_reward_weights(nodes.values(), cfg))
    found.take(check_readers(kept.values(), nodes, full_graph))
    of_run = {str(problem) for problem in contradictions(cfg)}
    for node in kept.values():
        found.take(check_node_config(node, of_run))
    models = plan_models(kept.values(), world_size, found)
    if len(found) > so_far:
        found.close()
    interactions, models = place_interactions(interactions, models, kept)
    kept = with_shares(interactions, models, kept)
    with found.at():
        check_awake(interactions, models, {node_id: node.cfg for node_id, node in kept.items()})
    links = plan_links(models, kept)
    agents = agent_rows(kept, interactions)
    table = LayoutTable()
    whole_graph, graph = graph, graph.without(silent_nodes(interactions))
    drivers = {
        stage.node: heads_of(models[plan.policies[0]])
        for plan in interactions.values()
        for stage in plan.stages
    }
    places = place_nodes(kept, graph, models, agents, table, world_size, drivers, found)
    emitted = {node_id: kept[node_id] for node_id in graph.order}
    with found.at():
        check_rounds(emitted, graph, places)
    found.close()
    serving = {entry: serving_ranks(plan, models) for entry, plan in interactions.items()}
    sections = Sections(kept, table, links, interactions, serving)
    instructions = sections.emit(graph, places)
    validated = graph.without(set(kept) - _validated(kept))
    if any(node.op.changes_rows and not node.op.is_rollout for node in kept.values()):
        to_validate = {node_id: kept[node_id] for node_id in validated.order}
        places = place_nodes(to_validate, validated, models, agents, table, world_size, drivers, found)
    validation = sections.emit(validated, places)
    turns = turns_of_training(kept)
    plan = Plan(
        dag_id=dag.dag_id,
        world_size=world_size,
        nodes={node.id: _node_plan(node, whole_graph, turns.get(node.id, {})) for node in kept.values()},
        pruned=idle | pruned,
        models=models,
        layouts=table.by_id,
        routes=sections.routes,
        links=links,
        loaders=sections.loaders,
        interactions=interactions,
        groups=_groups(
            world_size,
            models.values(),
            [*table.by_id.values(), *sections.routes.values(), *links.values()],
            instructions,
        ),
        instructions=instructions,
        validation=validation,
    )
    return plan, {node_id: node.cfg for node_id, node in kept.items()}


def _with_interactions(
    nodes: dict[str, ResolvedNode], graph: Graph, found: Findings
) -> tuple[dict[str, ResolvedNode], Interactions]:
    """The nodes as parts of their interactions. Raises where later checks would only repeat what is wrong."""
    so_far = len(found)
    found.take(check_agents(nodes))
    with found.at():
        interactions = find_interactions(nodes, graph)
        nodes = with_credit(with_interactions(nodes, interactions), graph)
        found.take(check_writers(nodes))
        check_agents_of(interactions, nodes)
        if len(found) == so_far:
            return nodes, interactions
    found.close()
    raise ReadsBroken


def _validated(kept: dict[str, ResolvedNode]) -> set[str]:
    """Rollouts, reward nodes, and whatever writes a field that these need."""
    writers = {key: node.id for node in kept.values() for key in node.writes}
    todo = [node.id for node in kept.values() if node.op.is_rollout or node.op.scores]
    found: set[str] = set()
    while todo:
        node_id = todo.pop()
        if node_id not in found:
            found.add(node_id)
            todo.extend(writers[key] for key in kept[node_id].reads if key in writers)
    return found


def _node_plan(node: ResolvedNode, graph: Graph, more: dict[str, int]) -> NodePlan:
    return NodePlan(
        name=node.id,
        agent=node.agent,
        dependencies=graph.parents[node.id],
        op=node.op.name,
        model=node.model,
        executable=node.spec.executable_ref,
        overrides=node.overrides,
        options=node.options | more,
        own_needs=node.op.needs if node.spec.executable_ref else (),
    )


def _groups(
    world_size: int,
    models: Iterable[ModelPlan],
    others: Iterable[Layout | RoutePlan | LinkPlan],
    instructions: Iterable[Instruction],
) -> tuple[Ranks, ...]:
    """The distinct rank tuples that anything communicates over, the world first."""
    groups: dict[Ranks, None] = {tuple(range(world_size)): None}
    for model in models:
        groups[model.ranks] = None
        groups.update(dict.fromkeys(backend_of(model).groups(model.dims, model.ranks)))
    for item in (*others, *(ins for ins in instructions if isinstance(ins, Repeat))):
        groups[item.ranks] = None
    return tuple(groups)
