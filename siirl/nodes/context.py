"""What an op gets besides its rows: one object, made by the worker for each node and call."""

import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.compiler.plan import NodePlan
from siirl.config import Config
from siirl.dag.ops import INFO
from siirl.data.buffer import RowBuffer
from siirl.dialect.dialect import Dialect, dialect_of
from siirl.nodes.taken_rows import TakenRows
from siirl.nodes.trained_tokens import TrainedTokens
from siirl.observe.metrics import Metrics
from siirl.observe.spans import waiting


@dataclass
class LocalNode:
    """A node on this rank, from the start of the run to its end."""

    plan: NodePlan

    cfg: Config
    """Its resolved configuration."""

    tokenizer: PreTrainedTokenizerBase

    state: dict[str, float] = field(default_factory=dict)
    """What it remembers between steps; part of a checkpoint."""

    buffer: RowBuffer = field(default_factory=RowBuffer)
    """Rows that it keeps between steps; part of a checkpoint."""

    env_rewards: bool = True
    """Whether something beside reward nodes rewards its agent's turns: an environment, or a program."""

    services: dict[str, Any] = field(default_factory=dict)
    """What its op needs, by name: keywords of each call (siirl/nodes/services.py)."""

    @functools.cached_property
    def dialect(self) -> Dialect:
        """How the policy of its configuration speaks."""
        return dialect_of(self.cfg, self.tokenizer)


class StepInfo(NamedTuple):
    """When a call is."""

    step: int
    """1 for the first training step; validation before training has step 0."""

    validate: bool
    """Whether the call belongs to a validation batch."""

    round: int = 0
    """1, 2, ... in the rounds of a node that repeats, else 0."""


class DataGroup(NamedTuple):
    """The ranks whose rows belong to the same batch."""

    group: dist.ProcessGroup
    """For counts; rows move by routes."""

    is_shard_leader: bool = True
    """Of the ranks that hold the same rows (tensor-parallel ones), the one that counts in sums over ranks."""

    has_whole_groups: bool = True
    """Whether all samples of a prompt are on one rank; else they lie by their cost."""


class Samples(NamedTuple):
    """Rows that the user reads as text."""

    rows: list[dict[str, Any]]
    limit: int
    """At most so many of each reward node; -1: all."""

    later: list[Callable[[], None]]
    """What is called at the end of the step: it adds the rows of nodes whose results were still awaited."""

    told_later: bool = False
    """The agent's advantage node tells and shows the rewards, which are more than the scores."""


@dataclass
class OpContext:
    """One call of one node on this rank."""

    node: LocalNode

    now: StepInfo

    peers: DataGroup

    metrics: Metrics
    """What the call measures; with several agents it goes under "agent_N/"."""

    shown: Samples

    writes: tuple[str, ...] = ()
    """Names of the fields to give."""

    others: dict[int, TensorDict] = field(default_factory=dict)
    """In an interaction, what the node reads of other agents' rows of the same episodes: agent -> rows."""

    trained: TrainedTokens | None = None
    """In a step whose trained tokens are written: where ops leave what they know of them."""

    taken: TakenRows | None = None
    """For the ledger, of a node that trains: which rows its optimizer steps take."""

    lost: list[tuple[int, int, str]] = field(default_factory=list)
    """For the ledger: sample_index and group_id of each episode that is left out, and why; of a group: -1."""

    @property
    def node_id(self) -> str:
        return self.node.plan.name

    @property
    def agent(self) -> int:
        return self.node.plan.agent

    @property
    def options(self) -> dict[str, Any]:
        """Further config keys of a node with code of the user's."""
        return self.node.plan.options

    @property
    def cfg(self) -> Config:
        """The node's resolved configuration."""
        return self.node.cfg

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.node.tokenizer

    @property
    def dialect(self) -> Dialect:
        """How the policy of its configuration speaks: stop tokens, reasoning, tool calls."""
        return self.node.dialect

    @property
    def state(self) -> dict[str, float]:
        """What the node remembers between steps; it survives a checkpoint."""
        return self.node.state

    @property
    def step(self) -> int:
        return self.now.step

    @property
    def validate(self) -> bool:
        return self.now.validate

    @property
    def round(self) -> int:
        return self.now.round

    @property
    def group(self) -> dist.ProcessGroup:
        return self.peers.group

    @property
    def is_shard_leader(self) -> bool:
        return self.peers.is_shard_leader

    @property
    def reward_name(self) -> str:
        """Name of the field in which a reward node writes its scores."""
        return next((name for name in self.writes if not name.endswith(INFO)), "score")


NodeContext = OpContext
"""The name by which users' files know it."""


def sum_over_ranks(ctx: OpContext, totals: Tensor) -> Tensor:
    """The float64 totals of all rows: each rank gives those of its own. Collective over ctx.group."""
    totals = totals if ctx.is_shard_leader else torch.zeros_like(totals)
    with waiting():
        dist.all_reduce(totals, group=ctx.group)
    return totals


Op = Callable[..., TensorDict | Future[TensorDict]]
"""(context, rows, **what it needs): rows with the declared reads in, the declared writes out. A Future is
waited for when first read."""

Declared = TypeVar("Declared", bound=Op)


def declare_op(
    *,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    needs: tuple[str, ...] = (),
    model: str | None = None,
    split: str | None = None,
) -> Callable[[Declared], Declared]:
    """Stands above a user's op and says what it is; the compiler reads it from the source, so it is literal.

    Arguments as in OpSpec (siirl/dag/ops.py); which values users' ops can have says siirl/dag/user_ops.py.
    """
    return lambda function: function
