"""Writes the one global instruction list: loads, syncs, reshards, runs, and frees after the last reader.

Row sets have levels: "prompts", one row per prompt, "samples", one row per response, and "rows_of_<node>"
below a node that filters them. A field is looked up by (key, level); fields that are read at a later level
than that of their writer are carried through the nodes that change the rows in between.

A node that repeats is preceded by a region, Repeat to Until, of all nodes above it: its Collect stands at the
end of the region, its Run after it.

A layout has one order of rows: that of the row ids that came first. Columns that come later are laid by them,
so they stay as long as a Reshard into the layout follows.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from siirl.compiler.layouts import LayoutTable, NodePlacement, union
from siirl.compiler.plan import LinkPlan, LoaderPlan, RoutePlan
from siirl.compiler.plan_instructions import (
    Collect,
    Free,
    Instruction,
    Load,
    Repeat,
    Reshard,
    Run,
    Serve,
    SyncWeights,
    Until,
)
from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.config.batch import batch_of
from siirl.dag.graph import Graph
from siirl.errors import DagError
from siirl.parallel.placement import Ranks
from siirl.types import FIELDS, LOADED_FIELDS, FieldKey, Layout

ROUTING = ("row_id", "group_id", "prompt_length", "response_length")
"""The columns by which the transport assigns rows to shards; prompts have no response_length."""


def routing(level: str) -> tuple[str, ...]:
    """ROUTING, as far as a level has it."""
    return ROUTING[:-1] if level == "prompts" else ROUTING


Joins = tuple[tuple[FieldKey, str], ...]
Touched = tuple[list[tuple[FieldKey, str]], list[tuple[FieldKey, str]]]

_DECLARED = {name: position for position, name in enumerate(FIELDS)}


@dataclass
class Sections:
    """What the instruction lists of one plan share: layouts, and the routes and loaders they need."""

    workflow: Workflow
    table: LayoutTable
    links: dict[str, LinkPlan]
    serving: dict[str, Ranks]
    """Entry of an interaction -> ranks that only answer in it."""
    routes: dict[str, RoutePlan] = field(default_factory=dict)
    loaders: dict[str, LoaderPlan] = field(default_factory=dict)

    def emit(self, graph: Graph, places: dict[str, NodePlacement]) -> tuple[Instruction, ...]:
        """The instructions that run the nodes of `graph`, in its order, regions in one piece."""
        section = _Section(self, graph, places)
        section.add_older_weights()
        nodes, above, done = self.workflow.nodes, graph.above, set()
        regions = {node_id: above[node_id] for node_id in graph.order if nodes[node_id].op.repeats}
        for node_id in graph.order:
            until = next((until for until, inside in regions.items() if node_id in inside), None)
            if until is not None and until not in done:
                inside = [nodes[other] for other in graph.order if other in regions[until]]
                section.add_region(nodes[until], inside)
                done |= {until, *regions[until]}
            if node_id not in done:
                section.add(nodes[node_id])
        return with_frees(section.instructions, self)

    def links_of(self, node: ResolvedNode) -> list[LinkPlan]:
        """The weights that must have arrived before a node runs: for an interaction, those of all agents."""
        if not node.op.asks_policy:
            return []
        plan = self.workflow.interactions.get(node.id)
        targets = plan.policies if plan else (node.model,)
        return [link for target in targets for link in self.links.values() if link.target == target]

    def level(self, layout_id: str) -> str:
        return self.table.by_id[layout_id].rowset.rpartition(".")[2]

    def route(self, source: str, target: str) -> RoutePlan:
        """The route between two layouts, old or new."""
        name = f"{source} -> {target}"
        if name not in self.routes:
            ranks = union(self.table.by_id[source], self.table.by_id[target])
            self.routes[name] = RoutePlan(name, source, target, ranks)
        return self.routes[name]


class _Section:
    """One list in the making: which layouts hold which field, and which ranks know that a node has run."""

    def __init__(self, shared: Sections, graph: Graph, places: dict[str, NodePlacement]) -> None:
        self.shared = shared
        self.places = places
        self.graph = graph
        self.instructions: list[Instruction] = []
        self.homes: dict[tuple[FieldKey, str], list[str]] = {}
        self.finished = Finished(layout.ranks for layout in shared.table.by_id.values())
        self.until: dict[str, str] = {}  # node of a region that has ended -> the node that repeated it
        nodes = [shared.workflow.nodes[node_id] for node_id in graph.order]
        self.carried = {node.id: self._carried(node, nodes) for node in nodes if _takes_rows(node)}
        self.loaded = self._loaded(nodes)

    def add_older_weights(self) -> None:
        """Policies' weights for the teachers that they are, before anything of the step trains them."""
        models = [self.shared.workflow.nodes[node_id].model for node_id in self.graph.order]
        for link in self.shared.links.values():
            if link.every_steps is not None and link.target in models:
                self.instructions.append(SyncWeights(link.name, link.ranks))

    def add_region(self, node: ResolvedNode, inside: list[ResolvedNode]) -> None:
        """Between a Repeat and its Until: the nodes `inside`, and the Collect of `node`; then its Run."""
        start = len(self.instructions)
        for other in inside:
            self.add(other)
        reads, _ = self._prepare(node)
        place = self.places[node.id]
        ranks = self.shared.table.by_id[place.source].ranks
        self.instructions.append(Collect(node.id, reads, place.source, ranks))
        everyone = tuple(sorted({rank for ins in self.instructions[start:] for rank in ins.ranks}))
        self.instructions.insert(start, Repeat(node.id, everyone))
        self.instructions.append(Until(node.id, everyone))
        self.finished.met(everyone)  # they agree that there is no further round
        self.until |= {other.id: node.id for other in inside}
        self._run(node, (), ())

    def add(self, node: ResolvedNode) -> None:
        """Everything that must happen for a node to run, then its Run."""
        self._run(node, *self._prepare(node))

    def _prepare(self, node: ResolvedNode) -> tuple[tuple[FieldKey, ...], Joins]:
        """Bring what a node reads or carries; returns these keys, and those of other agents to join."""
        place = self.places[node.id]
        if node.op.is_handed or node.op.is_asked:
            self._wait_for_parents(node, place.source)
            return (), ()
        level, carried = self.shared.level(place.source), self.carried.get(node.id, ())
        joined = [key for key in node.reads if self.shared.workflow.joins(node, key)]
        columns = [FieldKey(place.data_agent, name) for name in routing(level)]
        reads = _ordered({*node.reads, *carried}.difference(joined) or columns[:1])
        self._bring(node, _ordered({*reads, *columns}), place.source, level)
        joins = self._join(node, _ordered(joined), self.shared.table.by_id[place.source])
        self._wait_for_parents(node, place.source)
        return reads, joins

    def _join(self, node: ResolvedNode, keys: Iterable[FieldKey], layout: Layout) -> Joins:
        """Bring fields of other agents of an interaction to where the rows of their episodes lie."""
        of_agent: dict[int, list[FieldKey]] = {}
        for key in keys:
            of_agent.setdefault(key.agent, []).append(key)
        joins: list[tuple[FieldKey, str]] = []
        for agent, wanted in of_agent.items():
            rowset = f"agent_{agent}.samples"
            theirs = self.shared.table.add(Layout(layout.ranks, layout.shards, rowset))
            self._bring(node, wanted, theirs, "samples")
            joins += [(key, theirs) for key in wanted]
        return tuple(joins)

    def _run(self, node: ResolvedNode, reads: tuple[FieldKey, ...], joins: Joins) -> None:
        place = self.places[node.id]
        for link in self.shared.links_of(node):
            self.instructions.append(SyncWeights(link.name, link.ranks))
        if answering := self.shared.serving.get(node.id):
            self.instructions.append(Serve(node.id, answering))
        ranks = self.shared.table.by_id[place.target].ranks
        writes = _ordered({*node.writes, *self.carried.get(node.id, ())})
        self.instructions.append(Run(node.id, reads, writes, place.source, place.target, ranks, joins))
        self._arrive(writes, place.target, self.shared.level(place.target))
        self.finished.ran(node.id, ranks)

    def _carried(self, changer: ResolvedNode, nodes: list[ResolvedNode]) -> tuple[FieldKey, ...]:
        """Fields from above a node that changes the rows, which it hands on because one below reads them."""
        place = self.places[changer.id]
        depth = place.target_depth(changer)
        made_later = {
            key
            for node in nodes
            for key in node.writes
            if self.places[node.id].target_depth(node) >= depth and node is not changer
        } | set(changer.writes)
        wanted = {FieldKey(changer.agent, name) for name in routing(self.shared.level(place.source))}
        for node in nodes:
            if self.places[node.id].depth >= depth:
                wanted.update(
                    key for key in node.reads if key.agent == changer.agent and key not in made_later
                )
        return _ordered(wanted)

    def _loaded(self, nodes: list[ResolvedNode]) -> dict[int, tuple[FieldKey, ...]]:
        """agent -> the columns of its prompts that somebody reads."""
        wanted: dict[int, set[FieldKey]] = {}
        for node in nodes:
            place = self.places[node.id]
            if self.shared.level(place.source) != "prompts" or node.op.is_handed:
                continue
            columns = [FieldKey(place.data_agent, name) for name in routing("prompts")]
            for key in (*node.reads, *self.carried.get(node.id, ()), *columns):
                if key.name in LOADED_FIELDS:
                    wanted.setdefault(key.agent, set()).add(key)
        return {agent: _ordered(keys) for agent, keys in wanted.items()}

    def _bring(self, node: ResolvedNode, keys: Iterable[FieldKey], target: str, level: str) -> None:
        """Load or reshard whatever of `keys` is not in the layout `target` yet."""
        missing: dict[tuple[str, int], list[FieldKey]] = {}
        for key in keys:
            if level == "prompts" and key.name in LOADED_FIELDS and (key, level) not in self.homes:
                self._load(key.agent, target, node)
            homes = self.homes.get((key, level))
            if homes is None:
                raise DagError(self._unreachable(node, key, level))
            if target not in homes:
                missing.setdefault((self._best_home(homes, target), key.agent), []).append(key)
        for (home, agent), wanted in missing.items():
            columns = [FieldKey(agent, name) for name in routing(level)]
            late = [key for key in columns if target not in self.homes[key, level]]
            self._reshard(_ordered({*wanted, *late}), home, target, level)

    def _best_home(self, homes: list[str], target: str) -> str:
        """A layout on the same ranks if there is one, else where the field was made."""
        by_id = self.shared.table.by_id
        own = [home for home in homes if by_id[home].rowset == by_id[homes[0]].rowset]
        return next((home for home in own if by_id[home].ranks == by_id[target].ranks), own[0])

    def _load(self, agent: int, target: str, node: ResolvedNode) -> None:
        name = f"agent_{agent}.prompts"
        if name not in self.shared.loaders:
            layout = self.shared.table.by_id[target]
            own = (
                target
                if layout.rowset == name
                else self.shared.table.add(Layout(layout.ranks, layout.shards, name))
            )
            reader = self.shared.workflow.rollouts.get(agent, node)
            surplus = reader.cfg.actor_rollout_ref.rollout.surplus if reader.op.may_be_stale else 0
            batch = batch_of(reader.cfg)
            ahead = math.ceil(surplus * batch.prompts / batch.generated)
            self.shared.loaders[name] = LoaderPlan(name, agent, reader.id, own, ahead)
        layout_id = self.shared.loaders[name].layout
        ranks = self.shared.table.by_id[layout_id].ranks
        self.instructions.append(Load(name, self.loaded[agent], layout_id, ranks))
        self._arrive(self.loaded[agent], layout_id, "prompts")

    def _reshard(self, keys: tuple[FieldKey, ...], source: str, target: str, level: str) -> None:
        route = self.shared.route(source, target)
        self.instructions.append(Reshard(keys, route.name, route.ranks))
        self._arrive(keys, target, level)
        self.finished.met(route.ranks)

    def _wait_for_parents(self, node: ResolvedNode, source: str) -> None:
        """A node waits for a parent on other ranks even if it reads nothing of it: an exchange without it.

        The rows of a region are gone after it; whoever repeated it knows that it has ended.
        """
        layout = self.shared.table.by_id[source]
        for parent in dict.fromkeys(self.until.get(name, name) for name in self.graph.parents[node.id]):
            if self.finished.is_known(parent, layout.ranks):
                continue
            place = self.places[parent]
            level = self.shared.level(place.target)
            rowset = f"agent_{place.data_agent}.{parent}_before_{node.id}.{level}"  # nobody else's rows
            waiting = self.shared.table.add(Layout(layout.ranks, layout.shards, rowset))
            keys = [FieldKey(place.data_agent, name) for name in routing(level)]
            self._reshard(_ordered(keys), place.target, waiting, level)

    def _arrive(self, keys: Iterable[FieldKey], layout_id: str, level: str) -> None:
        for key in keys:
            homes = self.homes.setdefault((key, level), [])
            if layout_id not in homes:
                homes.append(layout_id)

    def _unreachable(self, node: ResolvedNode, key: FieldKey, level: str) -> str:
        elsewhere = ", ".join(other for known, other in self.homes if known == key) or "other rows"
        changer = f"the rollout of agent {key.agent}"
        if level not in ("prompts", "samples"):
            changer = f"node {level.removeprefix('rows_of_')!r}"
        return (
            f"{node} works on {level} and reads {key}, which exists on {elsewhere} only at that point: their "
            f"rows differ. Let {changer} depend on the node that writes it, and {node} on {changer}."
        )


def with_frees(instructions: list[Instruction], shared: Sections) -> tuple[Instruction, ...]:
    """The instructions, with columns dropped after the last instruction that makes, reads or follows them."""
    touched = [_touched(instruction, shared) for instruction in instructions]
    _follow_orders(instructions, touched)
    needed: set[tuple[FieldKey, str]] = set()
    backwards: list[Instruction] = []
    for instruction, (used, made) in zip(reversed(instructions), reversed(touched), strict=True):
        dead: dict[str, list[FieldKey]] = {}
        for key, layout_id in dict.fromkeys([*used, *made]):
            if (key, layout_id) not in needed:
                dead.setdefault(layout_id, []).append(key)
        for layout_id, keys in reversed(dead.items()):
            columns = tuple((key, layout_id) for key in _ordered(keys))
            backwards.append(Free(columns, shared.table.by_id[layout_id].ranks))
        backwards.append(instruction)
        needed.update(used)
    return tuple(reversed(backwards))


def _follow_orders(instructions: list[Instruction], touched: list[Touched]) -> None:
    """Add to what each Reshard uses the row ids that its target has had before, which new columns follow."""
    orders: dict[str, list[tuple[FieldKey, str]]] = {}
    for instruction, (used, made) in zip(instructions, touched, strict=True):
        if isinstance(instruction, Reshard):
            used += orders.get(made[0][1], ())
        for key, layout_id in made:
            if key.name == "row_id":
                orders.setdefault(layout_id, []).append((key, layout_id))


def _touched(instruction: Instruction, shared: Sections) -> Touched:
    """(columns that an instruction reads, columns that it makes)."""
    match instruction:
        case Load(_, keys, layout):
            return [], [(key, layout) for key in keys]
        case Reshard(keys, route_name, _):
            route = shared.routes[route_name]
            agents = dict.fromkeys(key.agent for key in keys)
            level = shared.level(route.source)
            columns = [FieldKey(agent, name) for agent in agents for name in routing(level)]
            used = dict.fromkeys([*keys, *columns])
            return [(key, route.source) for key in used], [(key, route.target) for key in keys]
        case Collect(_, reads, source, _):
            return [(key, source) for key in reads], []
        case Run(_, reads, writes, source, target, _, joins):
            return [*((key, source) for key in reads), *joins], [(key, target) for key in writes]
    return [], []


def _takes_rows(node: ResolvedNode) -> bool:
    """Whether a node makes other rows of rows that it is given; agents' turns come with their own prompts."""
    return node.op.changes_rows and not node.op.is_handed


def _ordered(keys: Iterable[FieldKey]) -> tuple[FieldKey, ...]:
    """Keys by agent, then as FIELDS declares them, others last by name."""
    return tuple(sorted(keys, key=lambda key: (key.agent, _DECLARED.get(key.name, len(_DECLARED)), key.name)))


class Finished:
    """For each node that has run: who knows it of which of its ranks.

    Ranks that are in the same sets of ranks throughout know the same, so they are one class of ranks. After
    an exchange all who took part know what any of them knew before.
    """

    def __init__(self, ranks: Iterable[Ranks]) -> None:
        """ranks: the sets of ranks that nodes run on."""
        member: dict[int, int] = {}
        for index, together in enumerate(dict.fromkeys(ranks)):
            for rank in together:
                member[rank] = member.get(rank, 0) | 1 << index
        classes = {sets: number for number, sets in enumerate(dict.fromkeys(member.values()))}
        self._class = {rank: classes[sets] for rank, sets in member.items()}
        self._known: dict[str, tuple[int, dict[int, int]]] = {}
        self._bits = functools.cache(self._classes_of)
        sizes = [0] * len(classes)
        for number in self._class.values():
            sizes[number] += 1
        self._alone = [size == 1 for size in sizes]

    def ran(self, node: str, ranks: Ranks) -> None:
        """A node has run; each of its ranks knows that of itself."""
        bits = self._bits(ranks)
        own = {number: 1 << number if self._alone[number] else 0 for number in _members(bits)}
        self._known[node] = bits, own

    def met(self, ranks: Ranks) -> None:
        """An exchange that ends on no rank before all have begun it."""
        everyone = self._bits(ranks)
        for _, known in self._known.values():
            for number, bits in known.items():
                if (bits | 1 << number) & everyone:
                    known[number] = bits | everyone

    def is_known(self, node: str, ranks: Ranks) -> bool:
        """Whether each of `ranks` has run the node itself, or knows that all of its ranks have."""
        own, known = self._known[node]
        others = self._bits(ranks) & ~own
        return all(not others & ~bits for bits in known.values())

    def _classes_of(self, ranks: Ranks) -> int:
        bits = 0
        for rank in ranks:
            bits |= 1 << self._class[rank]
        return bits


def _members(bits: int) -> list[int]:
    return [number for number in range(bits.bit_length()) if bits >> number & 1]
