"""The workflow as the passes of the compiler ask for it: who depends on whom, what nodes are, who talks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from siirl.compiler.plan import InteractionPlan, StagePlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.dag.graph import Graph
from siirl.types import FieldKey

Nodes = Mapping[str, ResolvedNode]
Interactions = Mapping[str, InteractionPlan]


@dataclass(frozen=True)
class Workflow:
    """Read only: a pass that changes something gives a new one."""

    run: Config
    """What the user set for the whole run; each node has its own."""

    graph: Graph

    nodes: Nodes
    """By id: as declared, or once some are pruned in the order of execution."""

    interactions: Interactions = field(default_factory=dict)
    """By entry node."""

    @cached_property
    def bases(self) -> dict[int, int]:
        """Agent -> the agent on whose frozen base it trains an adapter of its own."""
        trained = {node.agent for node in self.nodes.values() if node.op.trains_policy}
        sampling = [node for node in self.rollouts.values() if not node.op.gives_data]
        able = [node for node in sampling if node.agent in trained and node.lora_rank]
        return {node.agent: node.shares for node in able if node.shares is not None}

    @cached_property
    def own_bases(self) -> tuple[int, ...]:
        """Agents whose adapter goes to the engine alone, on their own base (rollout.merge_lora=false)."""
        trained = {node.agent for node in self.nodes.values() if node.op.trains_policy}
        asked = (node.agent for node in self.nodes.values() if node.op.is_asked and node.lora_rank)
        return *asked, *(
            agent
            for agent, node in self.rollouts.items()
            if agent in trained - self.bases.keys() and not node.op.gives_data and node.lora_rank
            if not node.cfg.actor_rollout_ref.rollout.merge_lora
        )

    def shared_policy(self, node: ResolvedNode) -> int | None:
        """The agent with whose policy a rollout speaks instead of its own, if it does."""
        return None if node.agent in self.bases or node.op.gives_data else node.shares

    @cached_property
    def rollouts(self) -> dict[int, ResolvedNode]:
        """Agent -> its rollout."""
        return {node.agent: node for node in self.nodes.values() if node.op.is_rollout}

    @cached_property
    def talking(self) -> frozenset[int]:
        """The agents whose rows are those of an interaction: their rollout writes episode_id."""
        return frozenset(
            agent for agent, node in self.rollouts.items() if FieldKey(agent, "episode_id") in node.writes
        )

    def branching(self, agent: int) -> bool:
        """Whether the episodes of an agent branch."""
        return any(plan.branching for plan in self.interactions.values() if agent in plan.homes)

    @cached_property
    def stages(self) -> dict[str, StagePlan]:
        """Node of an interaction -> what happens there."""
        return {stage.node: stage for plan in self.interactions.values() for stage in plan.stages}

    @cached_property
    def silent(self) -> frozenset[str]:
        """Nodes of interactions without an instruction of their own: environments, agents without rows."""
        return frozenset(
            node for node, stage in self.stages.items() if node not in self.interactions and not stage.rows
        )

    def joins(self, node: ResolvedNode, key: FieldKey) -> bool:
        """Whether a node reads a field of another agent by episode, as both are in an interaction."""
        return key.agent != node.agent and key.agent in self.talking and node.agent in self.talking

    def without(self, removed: Collection[str]) -> "Workflow":
        """The workflow of the other nodes, in the order of execution."""
        graph = self.graph.without(removed)
        return replace(
            self,
            graph=graph,
            nodes={node_id: self.nodes[node_id] for node_id in graph.order},
            interactions={entry: x for entry, x in self.interactions.items() if entry not in removed},
        )
