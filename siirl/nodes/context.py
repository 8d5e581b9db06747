"""What an op gets besides its rows: one object, made by the worker for each node and call."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.observe.metrics import Metrics
from siirl.rewards.scorer import RewardScorer


@dataclass
class NodeContext:
    """One call of one node on this rank.

    cfg: the node's resolved config. group: the ranks of the node's rows (for counts; row data moves by routes).
    train, rollout, scorer: the model workers and services that the node's op declares, else None. validate: the call
    belongs to a validation batch. step: 1 for the first training step; validation before training has step 0.
    """

    node_id: str
    agent: int
    cfg: Config
    step: int
    validate: bool
    group: dist.ProcessGroup
    metrics: Metrics
    tokenizer: PreTrainedTokenizerBase
    train: TrainEngine | None = None
    rollout: RolloutEngine | None = None
    scorer: RewardScorer | None = None


Op = Callable[[NodeContext, TensorDict], TensorDict | Future[TensorDict]]
"""Rows with the node's declared reads in, rows with its declared writes out; a Future is waited for when first read."""

State = dict[str, Any]
