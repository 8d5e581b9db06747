"""Where each node's rows lie: by the real parallel groups of its model, or where they come from."""

import itertools
from dataclasses import dataclass, field, replace

from siirl.compiler.backends import backend_of
from siirl.compiler.interactions.credit_reads import check_groups
from siirl.compiler.plan import ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Nodes, Workflow
from siirl.config.batch import BatchArithmetic, batch_of
from siirl.config.resolve import get
from siirl.config.roles import ROLES
from siirl.dag.graph import Graph
from siirl.errors import DagError, NotSupportedError, PlacementError
from siirl.findings import Findings
from siirl.parallel.placement import Ranks, format_ranks, parse_placement
from siirl.types import Layout


@dataclass
class LayoutTable:
    """Distinct layouts under ids "<rowset>/<number>", in order of first use."""

    by_id: dict[str, Layout] = field(default_factory=dict)
    _ids: dict[Layout, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, layout: Layout) -> str:
        """The id of a layout, old or new."""
        if layout not in self._ids:
            number = self._counts.get(layout.rowset, 0)
            self._counts[layout.rowset] = number + 1
            self._ids[layout] = f"{layout.rowset}/{number}"
            self.by_id[self._ids[layout]] = layout
        return self._ids[layout]


@dataclass(frozen=True)
class AgentRows:
    """How many rows one agent makes in a step, and how its trainers cut them."""

    agent: int
    rollout: str
    """Node id."""
    prompts: int
    """What is trained on."""
    generated: int
    """Prompts of one rollout: others with dynamic sampling."""
    n: int
    """Responses of each prompt."""
    mini_batch_rows: dict[str, int]
    """Group of a trainer -> rows of its mini-batches, 0 for the whole batch."""
    balance: bool
    """Rows are spread over ranks by cost."""
    talks: bool
    """In an interaction, where row counts vary."""

    @property
    def samples(self) -> int:
        """Responses that are trained on."""
        return self.prompts * self.n


@dataclass(frozen=True)
class NodePlacement:
    """Where the rows of a node lie."""

    source: str
    """Layout (id) of the rows that it takes."""
    target: str
    """That of the rows that it gives: another one where the op changes rows."""
    data_agent: int
    """Whose rows they are."""
    depth: int
    """How many nodes above it have changed the rows of its agent; 0 where a row is a prompt."""

    def target_depth(self, node: ResolvedNode) -> int:
        """The depth of the rows that the node gives."""
        return self.depth + node.op.changes_rows


def agent_rows(workflow: Workflow) -> dict[int, AgentRows]:
    """The agents that have a rollout. DagError unless the mini-batches of their trainers divide the batch.

    How many rows an agent of an interaction gets is known when it has spoken: its mini-batches are runs of
    prompts, of any number of rows.
    """
    kept = workflow.nodes
    trainers = [node for node in kept.values() if node.op.trains]
    rows: dict[int, AgentRows] = {}
    for node in kept.values():
        if not node.op.is_rollout:
            continue
        batch = batch_of(node.cfg)
        own = [trainer for trainer in trainers if trainer.agent == node.agent]
        mini = {_trainer(trainer): _mini_batch_rows(trainer, batch) for trainer in own}
        if node.id in workflow.stages:
            mini = dict.fromkeys(mini, 0)
        balance = any(
            x.cfg.trainer.balance_batch or batch_of(x.cfg, _role(x)).optimizer_steps > 1 for x in own
        )
        filters = any(
            x.op.changes_rows and not x.op.is_rollout and x.agent == node.agent for x in kept.values()
        )
        rows[node.agent] = AgentRows(
            node.agent,
            node.id,
            batch.prompts,
            batch.generated,
            batch.samples,
            mini,
            balance or filters,
            node.id in workflow.stages,
        )
    return rows


def _role(trainer: ResolvedNode) -> str:
    assert trainer.op.model is not None, f"{trainer} trains no model"
    return trainer.op.model


def _mini_batch_rows(trainer: ResolvedNode, sampled: BatchArithmetic) -> int:
    """Rows of one optimizer step on the batch that is sampled; 0: all of it."""
    mini, prompts = batch_of(trainer.cfg, _role(trainer)).mini_prompts, sampled.prompts
    if mini > prompts or prompts % mini:
        raise DagError(
            f"{trainer}: ppo_mini_batch_size = {mini} prompts does not divide data.train_batch_size = "
            f"{prompts}: the last mini-batch would be short. Set it to a divisor of {prompts}."
        )
    return 0 if mini == prompts else mini * sampled.samples


def place_nodes(
    workflow: Workflow,
    graph: Graph,
    models: dict[str, ModelPlan],
    agents: dict[int, AgentRows],
    table: LayoutTable,
    world: int,
    drivers: dict[str, Ranks],
    found: Findings,
) -> dict[str, NodePlacement]:
    """The layouts of the nodes of `graph`, which are among those of the workflow, in execution order.

    drivers: rollout of an interaction -> the ranks that play it, which make its rows. Rows that do not go
    with a layout go to `found`.
    """
    kept, above = workflow.nodes, graph.above
    places: dict[str, NodePlacement] = {}
    assigned: set[tuple] = set()
    for node_id in graph.order:
        node = kept[node_id]
        agent = _data_agent(node, agents)
        rows = agents.get(agent)
        changers = _row_changers(node, agent, kept, above)
        rowset = f"agent_{agent}.{_level(changers)}"
        if node_id in drivers:
            heads = drivers[node_id]
            source = Layout(heads, tuple(range(len(heads))), rowset)
        elif node.model is not None:
            source = _model_layout(node, models[node.model], rowset, rows)
        else:
            source = _compute_layout(node, graph, places, table, rowset, world)
        target = source
        if node.op.changes_rows:
            target = replace(source, rowset=f"agent_{agent}.{_level([*changers, node])}")
        places[node_id] = NodePlacement(table.add(source), table.add(target), agent, len(changers))
        with found.at():
            check_groups(node, source)
            check_joins(node, source, workflow, places, table)
            check_rows_pair(node, agent, source, agents, workflow)
            if rows is not None and _assignment(source) not in assigned:
                assigned.add(_assignment(source))
                _check_full(node, source, rows)
    return places


def _row_changers(
    node: ResolvedNode, agent: int, kept: Nodes, above: dict[str, frozenset[str]]
) -> list[ResolvedNode]:
    """The nodes above that change the rows of an agent, in the order in which they do."""
    found = [
        kept[other] for other in above[node.id] if kept[other].op.changes_rows and kept[other].agent == agent
    ]
    found.sort(key=lambda changer: (len(above[changer.id]), changer.id))
    for first, second in itertools.pairwise(found):
        if first.id not in above[second.id]:
            raise DagError(
                f"{node} depends on {first} and {second}, which both change the rows of agent {agent}, side "
                "by side: nothing says which rows it works on. Let one of the two depend on the other."
            )
    return found


def _level(changers: list[ResolvedNode]) -> str:
    """What the rows are called that these nodes have made."""
    if not changers:
        return "prompts"
    last = changers[-1]
    return "samples" if last.op.is_rollout else f"rows_of_{last.id.replace('.', ':')}"


def _data_agent(node: ResolvedNode, agents: dict[int, AgentRows]) -> int:
    """The agent whose rows a node works on: its own, or without a rollout that of its first read."""
    if node.agent in agents or not node.reads:
        return node.agent
    return node.reads[0].agent


def _model_layout(node: ResolvedNode, model: ModelPlan, rowset: str, rows: AgentRows | None) -> Layout:
    shards = model.dims.data_shards()
    if node.op.split == "cost" and rows is not None and rows.balance and model.dims.dp > 1:
        split = "prompt_cost" if backend_of(model).shares_prompts else "cost"
        mini = rows.mini_batch_rows.get(_trainer(node), rows.mini_batch_rows.get(ROLES["actor"].trainer, 0))
        if not model.trains and mini < len(set(shards)):
            mini = 0  # it has the whole batch at once, and its rows do not lie as a trainer's can
        return Layout(model.ranks, shards, rowset, split, mini)
    return Layout(model.ranks, shards, rowset)


def _trainer(node: ResolvedNode) -> str:
    """The group with the mini-batches that the rows of a model node are balanced in: where its agent does not
    train that model, those of the policy are."""
    assert node.op.role is not None, f"{node} has no model"
    return node.op.role.trainer


def _compute_layout(
    node: ResolvedNode,
    graph: Graph,
    places: dict[str, NodePlacement],
    table: LayoutTable,
    rowset: str,
    world: int,
) -> Layout:
    """Where the rows of the first parent (if placed: on the same ranks) already are, else a shard a rank."""
    ranks = None if node.spec.placement is None else parse_placement(node.spec.placement, world, str(node))
    parents = [table.by_id[places[parent].target] for parent in graph.parents[node.id]]
    parents.sort(key=lambda layout: layout.rowset != rowset)
    found = next((layout for layout in parents if ranks is None or layout.ranks == ranks), None)
    if found is None:
        ranks = tuple(range(world)) if ranks is None else ranks
        return Layout(ranks, tuple(range(len(ranks))), rowset)
    if found.rowset != rowset or node.op.split == "group":
        return Layout(found.ranks, found.shards, rowset)
    return found


def _assignment(layout: Layout) -> tuple:
    """How rows are assigned to shards: what fills them for one node fills them for another."""
    return layout.ranks, layout.shards, layout.split, layout.mini_batch_rows


def _check_full(node: ResolvedNode, layout: Layout, rows: AgentRows) -> None:
    """PlacementError if a shard would get no rows."""
    shards = layout.num_shards
    if layout.split != "group":
        unit = "rows of a mini-batch" if layout.mini_batch_rows else "rows of a batch"
        count = layout.mini_batch_rows or rows.samples
        mini = f"{_trainer(node)}.ppo_mini_batch_size" if layout.mini_batch_rows else "data.train_batch_size"
        keys = f"{mini} or actor_rollout_ref.rollout.n"
        arithmetic = f" ({count // rows.n} prompts x {rows.n} responses)"
    else:
        unit, count, arithmetic = "prompts of a batch", rows.generated, ""
        keys = "data.train_batch_size" if rows.generated == rows.prompts else "data.gen_batch_size"
    if count < shards:
        raise PlacementError(
            f"{node}: {count} {unit}{arithmetic} for {shards} data-parallel shards (ranks "
            f"{format_ranks(layout.ranks)}): "
            f"some would be empty. Raise {keys}, or place the node on fewer ranks."
        )


def check_joins(
    node: ResolvedNode,
    layout: Layout,
    workflow: Workflow,
    places: dict[str, NodePlacement],
    table: LayoutTable,
) -> None:
    """Rows of other agents in an interaction can be joined where it left all rows of an episode together."""
    joined = {key.agent for key in node.reads if workflow.joins(node, key)}
    for agent in sorted(joined):
        made = table.by_id[places[workflow.rollouts[agent].id].target]
        if layout.num_shards > 1 and (layout.ranks, layout.shards) != (made.ranks, made.shards):
            raise PlacementError(
                f"{node} on ranks {format_ranks(layout.ranks)} reads fields of agent {agent}, whose rows lie "
                f"on ranks {format_ranks(made.ranks)} after their interaction: only there are all rows of an "
                "episode together. Remove its placement, or place it on one rank."
            )
        if layout.split != "group" or not layout.rowset.endswith(".samples"):
            raise NotSupportedError(
                f"not supported yet: {node} reads fields of agent {agent} where its own rows are filtered or "
                "lie by compute cost. Make a reward node its first dependency."
            )


def check_rows_pair(
    node: ResolvedNode, agent: int, layout: Layout, agents: dict[int, AgentRows], workflow: Workflow
) -> None:
    """Fields of other agents can be read where their rows pair up one to one with the node's own.

    That is so where all have the same prompts in the same order and as many samples, cut into equal runs of
    whole groups. Agents of an interaction are left to check_joins.
    """
    own = agents.get(agent)
    paired = [key for key in node.reads if not workflow.joins(node, key)]
    for other_agent in dict.fromkeys(key.agent for key in paired if key.agent != agent):
        other = agents.get(other_agent)
        if own and other and (own.talks or other.talks):
            raise NotSupportedError(
                f"not supported yet: {node} reads fields of agents {agent} and {other_agent}, whose rows do "
                "not pair up: agents that talk have any number of rows. What the others said and got is in "
                "the column conversation, and in extra_info of reward functions."
            )
        if own is None or other is None or (own.prompts, own.n) != (other.prompts, other.n):
            raise NotSupportedError(
                f"not supported yet: {node} reads fields of agents {agent} and {other_agent}, whose rows "
                "do not pair up: both need a rollout, the same data.train_batch_size and the same rollout.n."
            )
        check_same_prompts(node, workflow.nodes[own.rollout], workflow.nodes[other.rollout])
        if layout.split != "group" or own.prompts % layout.num_shards:
            raise NotSupportedError(
                f"not supported yet: {node} reads fields of agents {agent} and {other_agent} where rows lie "
                f"by compute cost, or {own.prompts} prompts do not divide by {layout.num_shards} shards. "
                "Make a reward node its first dependency, and choose a train_batch_size that divides."
            )


PROMPT_ORDER = (
    "data.train_files",
    "data.val_files",
    "data.shuffle",
    "data.seed",
    "data.curriculum_key",
    "data.curriculum_steps",
    "data.mixture",
    "data.filter_overlong_prompts",
)
"""What decides which row of which file is the k-th prompt of a batch."""
PROMPT_LENGTHS = (
    "data.max_prompt_length",
    "data.prompt_key",
    "data.json_columns",
    "data.tokenizer",
    "data.apply_chat_template_kwargs",
    "actor_rollout_ref.model.path",
)
"""What decides, too, where prompts that are too long are dropped: an agent's model brings its tokenizer."""


def check_same_prompts(node: ResolvedNode, one: ResolvedNode, other: ResolvedNode) -> None:
    """DagError unless the k-th prompt of two rollouts' batches is the same row of the same file."""
    keys = PROMPT_ORDER + PROMPT_LENGTHS * one.cfg.data.filter_overlong_prompts
    for key in keys:
        here, there = get(one.cfg, key), get(other.cfg, key)
        if here != there:
            drops = key in PROMPT_LENGTHS
            raise DagError(
                f"{node} reads fields of agents {one.agent} and {other.agent}, whose rows pair up by their "
                f"place in the batch, but {key} is {here} at {one} and {there} at {other}"
                f"{', which decides what data.filter_overlong_prompts drops' if drops else ''}: rows of "
                "different prompts would be joined. Give both rollouts the same"
                f"{', or drop long prompts from the file itself' if drops else ''}."
            )


def union(*layouts: Layout) -> Ranks:
    """All ranks of some layouts, sorted."""
    if all(layout.ranks == layouts[0].ranks for layout in layouts):
        return layouts[0].ranks
    return tuple(sorted({rank for layout in layouts for rank in layout.ranks}))
