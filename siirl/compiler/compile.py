"""compile_plan: DAG, configuration and cluster size in, Plan out. Pure; the same result in every process."""

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from siirl.compiler.backends import backend_of
from siirl.compiler.checks.table import CHECKS
from siirl.compiler.instructions import Sections
from siirl.compiler.interactions.credit_reads import turns_of_training, validating, with_credit, with_totals
from siirl.compiler.interactions.env_shorthand import with_environments
from siirl.compiler.interactions.find import with_interactions
from siirl.compiler.layouts import AgentRows, LayoutTable, NodePlacement, agent_rows, place_nodes
from siirl.compiler.ledger_fields import with_ledger
from siirl.compiler.memory.resident_engines import with_shares
from siirl.compiler.models import plan_links, plan_models
from siirl.compiler.plan import InteractionPlan, LinkPlan, ModelPlan, NodePlan, Plan, RoutePlan
from siirl.compiler.plan_instructions import Instruction, Repeat
from siirl.compiler.pruning import prune, with_moved_rows
from siirl.compiler.resolved_node import ResolvedNode, resolve_nodes
from siirl.compiler.serving import heads_of, place_interactions, serving_ranks
from siirl.compiler.teachers import with_teachers
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config import Config
from siirl.dag.fields_read import uses_critic
from siirl.dag.filters import idle_nodes, with_filters
from siirl.dag.graph import Graph, build_graph
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagSpec, dag_spec
from siirl.dag.yaml_file import TEMPLATES, load_dag_file
from siirl.errors import DagError, Place, PlacementError, UserError, joined
from siirl.findings import Findings, ReadsBroken
from siirl.parallel.placement import Ranks
from siirl.types import Layout
from siirl.user_code.load_object import load_object

MOST_RANKS = 1 << 20
"""More are a slip of the keyboard, and a plan of them takes all memory."""


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
    if cfg.service.enable:
        return "serve.yaml"
    loss, gives_data = cfg.actor_rollout_ref.actor.loss, cfg.actor_rollout_ref.rollout.gives_data
    if gives_data and cfg.reward_model.enable:
        return "reward_training.yaml"
    if loss.distills:
        return "distill.yaml"
    if gives_data:
        return "dpo.yaml" if loss.pairs else "sft.yaml"
    if cfg.algorithm.filter_groups.enable or cfg.algorithm.workflow_type == "dapo":
        return "dapo.yaml"
    if cfg.algorithm.estimator.uses_greedy:
        return "remax.yaml"
    if cfg.reward_model.enable:
        return "ppo_reward_model.yaml" if uses_critic(cfg) else "grpo_reward_model.yaml"
    return "ppo.yaml" if uses_critic(cfg) else "grpo.yaml"


def compile_plan(dag: DagSpec, cfg: Config, world_size: int) -> tuple[Plan, dict[str, Config]]:
    """The plan of a workflow on `world_size` ranks, and the configuration of each kept node.

    Raises DagError, PlacementError, ConfigError or NotSupportedError, with the node and the fix.
    """
    if world_size > MOST_RANKS:
        nodes, devices = cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
        raise PlacementError(
            f"trainer.nnodes={nodes} with trainer.n_gpus_per_node={devices}: a plan has {MOST_RANKS} ranks "
            f"at most, not {world_size}. Set the machines and devices that there are."
        )
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
    read, idle, graph = _read(dag, found)
    resolved = _resolve(read, graph, cfg, found)
    talking = with_totals(_interact(resolved, found))
    pruned = prune(talking)
    kept, models = _check(talking, pruned, world_size, found)
    placed = _place(kept, models, world_size, found)
    return _emit(placed, dag.dag_id, idle | pruned, found)


def _read(dag: DagSpec, found: Findings) -> tuple[DagSpec, dict[str, str], Graph | None]:
    """The DAG with its filters as nodes, without those that compute nothing; why each of these is left out.

    And the graph of the nodes that are left; None if there is something wrong with it.
    """
    filtered = with_filters(dag)
    with found.at():
        graph, idle = build_graph(filtered), idle_nodes(filtered)
        busy = [node for node in filtered.nodes if node.node_id not in idle]
        return dag_spec(dag.dag_id, busy, dag.description), idle, graph.without(idle)
    return filtered, {}, None


def _resolve(dag: DagSpec, graph: Graph | None, cfg: Config, found: Findings) -> Workflow:
    """The nodes with op and configuration, environments among them, and who depends on whom."""
    nodes = resolve_nodes(dag, cfg, found)
    if graph is None or len(nodes) < len(dag.nodes):
        found.close()
        raise ReadsBroken
    whole, environments = with_environments(dag, nodes)
    if not environments:
        return Workflow(cfg, graph, nodes)
    return Workflow(cfg, graph.with_followers(environments), resolve_nodes(whole, cfg, found, nodes))


def _interact(workflow: Workflow, found: Findings) -> Workflow:
    """The workflow with its interactions. Raises where later checks would only repeat what is wrong."""
    so_far = len(found)
    found.ask(CHECKS, "ops", nodes=workflow.nodes)
    with found.at():
        credited = with_credit(with_teachers(with_interactions(workflow)))
        found.ask(CHECKS, "interactions", nodes=credited.nodes, talking=credited)
        if len(found) == so_far:
            return credited
    found.close()
    raise ReadsBroken


def _check(
    whole: Workflow, pruned: dict[str, str], world_size: int, found: Findings
) -> tuple[Workflow, dict[str, ModelPlan]]:
    """The nodes that are left, and their models. Raises if anything is wrong with them."""
    so_far, kept = len(found), with_moved_rows(whole.without(pruned))
    found.ask(CHECKS, "nodes", kept=kept, whole=whole, world=world_size)
    models = plan_models(kept, world_size, found)
    if len(found) > so_far:
        found.close()
    return kept, models


@dataclass(frozen=True)
class Placed:
    """A workflow on its ranks."""

    workflow: Workflow
    models: dict[str, ModelPlan]
    world_size: int
    agents: dict[int, AgentRows]
    table: LayoutTable
    running: Graph
    """The nodes that have an instruction of their own."""
    places: dict[str, NodePlacement]

    def place(self, graph: Graph, found: Findings) -> dict[str, NodePlacement]:
        """The layouts of some of the nodes."""
        drivers = {
            stage.node: heads_of(self.models[talk.policies[0]])
            for talk in self.workflow.interactions.values()
            for stage in talk.stages
        }
        return place_nodes(
            self.workflow, graph, self.models, self.agents, self.table, self.world_size, drivers, found
        )


def _place(kept: Workflow, models: dict[str, ModelPlan], world_size: int, found: Findings) -> Placed:
    """Where models and rows lie. Raises if anything is wrong with that."""
    interactions, moved = place_interactions(kept.interactions, models, kept.nodes)
    shared = replace(kept, interactions=interactions, nodes=with_shares(interactions, moved, kept.nodes))
    configs = {node.id: node.cfg for node in shared.nodes.values()}
    found.ask(CHECKS, "engines", interactions=interactions, models=moved, configs=configs)
    running = kept.graph.without(shared.silent)
    unplaced = Placed(shared, moved, world_size, agent_rows(shared), LayoutTable(), running, {})
    placed = replace(unplaced, places=unplaced.place(running, found))
    nodes = {name: shared.nodes[name] for name in running.order}
    found.ask(CHECKS, "places", nodes=nodes, graph=running, places=placed.places)
    found.close()
    return placed


def _emit(
    placed: Placed, dag_id: str, pruned: dict[str, str], found: Findings
) -> tuple[Plan, dict[str, Config]]:
    """The plan, and the configuration of each node of it."""
    workflow, models, table, world_size = placed.workflow, placed.models, placed.table, placed.world_size
    nodes = workflow.nodes
    links = plan_links(models, nodes)
    serving = {entry: serving_ranks(talk, models) for entry, talk in workflow.interactions.items()}
    sections = Sections(with_ledger(workflow), table, links, serving)
    instructions = sections.emit(placed.running, placed.places)
    told = validating(workflow)
    validated = placed.running.without(nodes.keys() - _validated(told.nodes))
    filters = any(node.op.changes_rows and not node.op.is_rollout for node in nodes.values())
    places = placed.place(validated, found) if filters else placed.places
    validation = replace(sections, workflow=told).emit(validated, places)
    turns = turns_of_training(nodes)
    planned = {node.id: _node_plan(node, workflow, turns.get(node.id, {}), models) for node in nodes.values()}
    meeting = [talk for entry, talk in workflow.interactions.items() if planned[entry].runs_in_background]
    plan = Plan(
        dag_id=dag_id,
        world_size=world_size,
        nodes=planned,
        pruned=pruned,
        models=models,
        layouts=table.by_id,
        routes=sections.routes,
        links=links,
        loaders=sections.loaders,
        interactions=dict(workflow.interactions),
        groups=_groups(
            world_size,
            models,
            [*table.by_id.values(), *sections.routes.values(), *links.values()],
            instructions,
            [talk.connected for talk in meeting if talk.streams],
        ),
        instructions=instructions,
        validation=validation,
    )
    configs = {node.id: node.cfg for node in nodes.values()}
    found.ask(CHECKS, "plan", plan=plan, run=workflow.run, configs=configs)
    return plan, configs


def _validated(nodes: Nodes) -> set[str]:
    """Rollouts, reward nodes, what tells a reward, and whatever writes a field that these need."""
    writers = {key: node.id for node in nodes.values() for key in node.writes}
    given = {node.agent for node in nodes.values() if node.op.gives_data}
    todo = [
        node.id
        for node in nodes.values()
        if (node.op.is_rollout or node.op.scores or _tells(node)) and node.agent not in given
    ]
    found: set[str] = set()
    while todo:
        node_id = todo.pop()
        if node_id not in found:
            found.add(node_id)
            todo.extend(writers[key] for key in nodes[node_id].reads if key in writers)
    return found


def _tells(node: ResolvedNode) -> bool:
    """Whether an advantage node only tells the rewards that it adds up."""
    return node.op.credits and not node.writes


def _node_plan(
    node: ResolvedNode, workflow: Workflow, more: dict[str, int], models: dict[str, ModelPlan]
) -> NodePlan:
    max_lag = node.cfg.actor_rollout_ref.rollout.max_lag if node.op.may_be_stale else 0
    return NodePlan(
        name=node.id,
        agent=node.agent,
        dependencies=workflow.graph.parents[node.id],
        op=node.op.name,
        model=node.model,
        executable=node.spec.executable_ref,
        overrides=node.overrides,
        options=node.options | more,
        own_needs=node.op.needs if node.spec.executable_ref else (),
        max_lag=max_lag,
        runs_in_background=max_lag > 0 and _goes_on(node, workflow.interactions, models),
    )


def _goes_on(node: ResolvedNode, talks: Mapping[str, InteractionPlan], models: dict[str, ModelPlan]) -> bool:
    """Whether what a rollout asks for can go on while others train: on the ranks of its engines no model
    computes for others.

    An interaction asks and answers in threads, so that any engine works then that is in no other one.
    """
    others = {rank for model in models.values() if model.computes_between for rank in model.ranks}
    if (talk := talks.get(node.id)) is None:
        model = models.get(str(node.model))
        return (
            model is not None
            and "engine" in node.op.needs
            and backend_of(model).works_alone
            and others.isdisjoint(model.ranks)
        )
    asked = [name for other in talks.values() for name in other.policies]
    return all(asked.count(name) == 1 and others.isdisjoint(models[name].ranks) for name in talk.policies)


def _groups(
    world_size: int,
    models: Mapping[str, ModelPlan],
    others: Iterable[Layout | RoutePlan | LinkPlan],
    instructions: Iterable[Instruction],
    more: Iterable[Ranks],
) -> tuple[Ranks, ...]:
    """The distinct rank tuples that anything communicates over, the world first."""
    groups: dict[Ranks, None] = {tuple(range(world_size)): None}
    for model in models.values():
        groups[model.ranks] = None
        groups.update(dict.fromkeys(backend_of(model).groups(model.dims, model.ranks)))
    for item in (*others, *(ins for ins in instructions if isinstance(ins, Repeat))):
        groups[item.ranks] = None
    groups.update(dict.fromkeys(more))
    return tuple(groups)
