"""The plan: what the compiler makes of a DAG, and all that a worker needs to know of it. Data only, no torch.

A plan is the same for every rank, process and hash seed; it travels to the workers as JSON (`to_json`).
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from siirl.parallel.dims import ParallelDims
from siirl.types import FieldKey, Layout

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ModelPlan:
    """One model of one role: a model worker lives on each of its ranks.

    name: "agent_0.actor". node: the node whose resolved config it is built from; nodes: all that use it.
    """

    name: str
    agent: int
    role: Literal["actor", "ref", "rollout", "critic", "reward"]
    backend: str
    head: Literal["lm", "value", "score"]
    trains: bool
    ranks: Ranks
    dims: ParallelDims
    node: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class LinkPlan:
    """Weights of `source` (a training engine) are copied into `target` (a rollout engine)."""

    name: str
    source: str
    target: str
    ranks: Ranks
    kind: Literal["local", "broadcast"]


@dataclass(frozen=True)
class RoutePlan:
    """Rows move from layout `source` to layout `target` (ids into Plan.layouts) within the group of `ranks`."""

    name: str
    source: str
    target: str
    ranks: Ranks


@dataclass(frozen=True)
class LoaderPlan:
    """Prompts of one agent, loaded by the ranks of `layout`."""

    name: str
    agent: int
    node: str
    layout: str


@dataclass(frozen=True)
class Load:
    """Take the next batch of prompts into the store."""

    loader: str
    keys: tuple[FieldKey, ...]
    layout: str
    ranks: Ranks


@dataclass(frozen=True)
class Reshard:
    """Copy fields from one layout to another."""

    keys: tuple[FieldKey, ...]
    route: str
    ranks: Ranks


@dataclass(frozen=True)
class Run:
    """Run a node's op: rows with `reads` in layout `source` go in, rows with `writes` in layout `target` come out."""

    node: str
    reads: tuple[FieldKey, ...]
    writes: tuple[FieldKey, ...]
    source: str
    target: str
    ranks: Ranks


@dataclass(frozen=True)
class SyncWeights:
    """Bring a rollout engine to its trainer's weights; does nothing when the versions already agree."""

    link: str
    ranks: Ranks


@dataclass(frozen=True)
class Free:
    """Drop columns (field, layout id) that nobody reads any more."""

    keys: tuple[tuple[FieldKey, str], ...]
    ranks: Ranks


Instruction = Load | Reshard | Run | SyncWeights | Free


@dataclass(frozen=True)
class Plan:
    """The compiled workflow. `instructions` is one training step; `validation` one validation batch.

    groups: distinct rank tuples, in creation order; every rank creates all of them in this order. nodes: kept node
    ids in execution order. pruned: node id -> why it costs nothing in this run.
    """

    dag_id: str
    world_size: int
    nodes: tuple[str, ...]
    pruned: dict[str, str]
    models: dict[str, ModelPlan]
    layouts: dict[str, Layout]
    routes: dict[str, RoutePlan]
    links: dict[str, LinkPlan]
    loaders: dict[str, LoaderPlan]
    groups: tuple[Ranks, ...]
    instructions: tuple[Instruction, ...]
    validation: tuple[Instruction, ...]

    def of_rank(self, rank: int, section: Literal["instructions", "validation"] = "instructions"):
        """The instructions of one rank, in the one global order."""
        return [ins for ins in getattr(self, section) if rank in ins.ranks]
