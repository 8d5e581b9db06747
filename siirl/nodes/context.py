"""What an op gets besides its rows: one object, made by the worker for each node and call."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.dag.ops import INFO
from siirl.data.buffer import RowBuffer
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.observe.metrics import Metrics
from siirl.rewards.conversations import ConversationEncoder
from siirl.rewards.judge import Judge
from siirl.rewards.scorer import RewardScorer

if TYPE_CHECKING:
    from siirl.nodes.interaction import Interaction


@dataclass
class NodeContext:
    """One call of one node on this rank.

    interaction: what the rollouts of an interaction share on this rank (siirl/nodes/interaction.py).
    cfg: the node's resolved config. group: the ranks of its rows (for counts; rows move by routes). train,
    rollout, scorer, encoder, judge: the model workers and services that the op declares, else None. validate:
    the call belongs to a validation batch. step: 1 for the first training step; validation before training
    has step 0. samples: where an op puts rows for the user to read, at most sample_limit of them (-1: all).
    state: what the node remembers between steps; it survives a checkpoint, as do the rows in buffer.
    round: 1, 2, ... in the rounds of a node that repeats, else 0.
    options: further config keys of a custom node. speaks: of the ranks of `group` that hold the same rows
    (tensor-parallel ones), the one that counts in sums over ranks. writes: names of the fields to give.
    others: in an interaction, what the node reads of other agents' rows of the same episodes: agent -> rows.
    """

    node_id: str
    agent: int
    cfg: Config
    step: int
    validate: bool
    group: dist.ProcessGroup
    metrics: Metrics
    samples: list[dict[str, Any]]
    sample_limit: int
    tokenizer: PreTrainedTokenizerBase
    train: TrainEngine | None = None
    rollout: RolloutEngine | None = None
    interaction: "Interaction | None" = None
    scorer: RewardScorer | None = None
    encoder: ConversationEncoder | None = None
    judge: Judge | None = None
    judge_tokenizer: PreTrainedTokenizerBase | None = None
    state: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    buffer: RowBuffer = field(default_factory=RowBuffer)
    round: int = 0
    speaks: bool = True
    writes: tuple[str, ...] = ()
    others: dict[int, TensorDict] = field(default_factory=dict)

    @property
    def reward_name(self) -> str:
        """Name of the field in which a reward node writes its scores."""
        return next((name for name in self.writes if not name.endswith(INFO)), "score")


def sum_over_ranks(ctx: NodeContext, totals: Tensor) -> Tensor:
    """The float64 totals of all rows: each rank gives those of its own. Collective over ctx.group."""
    totals = totals if ctx.speaks else torch.zeros_like(totals)
    dist.all_reduce(totals, group=ctx.group)
    return totals


Op = Callable[[NodeContext, TensorDict], TensorDict | Future[TensorDict]]
"""Rows with the declared reads in, the declared writes out; a Future is waited for when first read."""

Collector = Callable[[NodeContext, TensorDict], None]
"""Rows of one round in; the op of the node gives those that it kept, after the last round."""
