"""What every training engine offers, whatever its strategy: one model of one role on the ranks of its node.

What it computes of a token follows from its head (ModelPlan.head): "lm" gives "log_prob", "entropy", without
gradient "prob_square" (the sum of the squared probabilities of all words) and "hidden" (the last hidden state
before the token, D numbers in the type that the model computes in) and, from rows with ref_hidden, "full_kl"
(the KL over the whole vocabulary from the model as it was built; config asks for it), and "top_log_prob",
log-probs [B, T, K] of the rows' top_ids, or without these of the K likeliest words, which "top_ids" are, or
of all words, in order, as config has it;
of a mixture of experts whose actor has router_replay also "experts", without gradient: the columns
EXPERT_FIELDS, which tokens were computed by, and which rows with such columns are computed by;
"value" gives "value", the estimate of the return from the state before the token; "score", and of a model in
training "trained_score", give "score", what a reward model says of the conversation before the token.

All methods are collective over the engine's ranks unless said otherwise. Rows are TensorDicts with at least
prompt_ids, prompt_length, response_ids, response_length, response_mask (see siirl/types.py); a rank may hold
zero rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.engines.train.pieces import Piece
from siirl.engines.weights.bucket import LiveWeights
from siirl.observe.metrics import Metrics

EXPERTS = "experts"
"""The output that is the columns EXPERT_FIELDS."""


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of each response token of a micro-batch, [B, T], with gradient when training.

    Positions past response_length hold zeros. What is in nats is at the temperature of the call.
    """

    log_prob_BT: Tensor | None = None
    """Nats."""
    entropy_BT: Tensor | None = None
    """Nats."""
    full_kl_BT: Tensor | None = None
    """KL divergence from the reference over the whole vocabulary, in nats."""
    top_log_prob_BT: Tensor | None = None
    """[B, T, K], nats: of the words that the rows' top_ids name, or of all."""
    value_BT: Tensor | None = None
    """A critic's value, in units of the reward."""
    score_BT: Tensor | None = None
    """What a reward model says of the conversation before the token."""


@dataclass(frozen=True)
class BatchCounts:
    """Counts over the whole mini-batch, all data-parallel ranks together: what a loss is normalised by."""

    num_tokens: float
    """Sum of response_mask."""
    num_rows: float
    """Rows with at least one trained token."""
    response_width: int
    """The configured response length, for normalisation by a constant."""


LossFn = Callable[[TokenOutputs, TensorDict, BatchCounts], tuple[Tensor, TensorMetrics]]
"""(outputs, micro-batch rows, counts) -> (this micro-batch's share of the loss, scalar; metrics).

It reads nothing from the device, so that the next micro-batch is packed and queued while this one runs.

Shares of all micro-batches and ranks add up to the loss of the mini-batch.
"""


@dataclass(frozen=True)
class AdamStep:
    """One step of AdamW, whatever the configuration says: weight decay is decoupled."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float
    """Of the gradient; 0: any."""


class TrainEngine(ABC):
    """One model of one role.

    Build: `Engine(plan: ModelPlan, cfg: Config, groups: ProcessGroupManager, device)`.
    """

    name: str
    version: int
    """Optimizer steps taken; what weight links compare."""
    dp_rank: int
    dp_size: int
    device: torch.device
    host_parts: dict[str, bool]
    """Of "params", "grads", "optimizer": whether its config keeps it on the host."""

    @abstractmethod
    def compute(self, rows: TensorDict, outputs: tuple[str, ...], temperature: float) -> TensorDict:
        """Forward without gradient; the head's outputs as [B, T] float32 columns, "hidden" as [B, T, D]
        of the type that it computes in, "top_log_prob" as [B, T, K] float32, "top_ids" as int64."""

    @abstractmethod
    def train_mini_batch(
        self, rows: TensorDict, loss_fn: LossFn, outputs: tuple[str, ...], temperature: float
    ) -> Metrics:
        """One optimizer step on this rank's rows of one mini-batch. Advances `version` and the LR schedule.

        Returns the metrics of loss_fn plus grad_norm and lr, of this data-parallel shard (reduce later): all
        ranks of a shard return the same.
        """

    @abstractmethod
    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """HF name -> (full shape, dtype) of every tensor that export_weights yields. No communication."""

    @abstractmethod
    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under HF names, one at a time, cast to `dtype` before the gather.

        In the same order on all ranks. LoRA adapters are merged. Every rank must exhaust the iterator; each
        receives every full tensor.
        """

    def live_weights(self) -> LiveWeights | None:
        """What export_weights yields, in the memory where it is trained, if each rank has all of it there.

        No communication; the same object as long as the memory is the same. None: ask export_weights.
        """
        return None

    def held_pieces(self) -> dict[str, list[Piece]] | None:
        """HF name -> what this rank holds of what export_weights yields, in live memory, in the master type.

        No communication; the same object as long as the memory is the same. None: what is exported is made of
        what is held, as where adapters are merged.
        """
        return None

    def export_adapter(
        self, dtype: torch.dtype | None = None, with_base: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of the LoRA adapter, X.lora_A.weight and X.lora_B.weight, and of its base if wanted.

        For rollout engines that hold both apart (RolloutEngine.takes); otherwise as export_weights.
        """
        raise AssertionError(f"{self.name} has no adapter")

    @abstractmethod
    def take_weights(self, weights: Iterator[tuple[str, Tensor]], share: float) -> None:
        """Move the weights by a share (1: all the way) to full tensors under HF names. No communication.

        Of a model that is not trained: no optimizer is told.
        """

    def copied_weights(self) -> dict[str, Tensor]:
        """What this rank has of the "model" of state_dict, copied to host memory. No communication."""
        raise AssertionError(f"{self.name} keeps no versions")

    def lent_weights(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Meanwhile the model has weights that copied_weights gave; then its own again, bit for bit.

        For an export: nothing is trained in between. No communication.
        """
        raise AssertionError(f"{self.name} keeps no versions")

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "scheduler", "version"}: what torch.distributed.checkpoint takes."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict gave, in place, on this or another number of ranks."""

    @abstractmethod
    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Move the named parts to host memory. Idempotent; nothing to do on CPU."""

    @abstractmethod
    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Bring the named parts back to the device."""

    def hf_config_changes(self) -> dict[str, Any]:
        """Keys of config.json in which a directory of the exported weights differs from model.path. Local.

        What model.override_config changed, for one. A value model has another architecture: a decoder with a
        linear layer `score` (weight [1, D], bias [1]) on every token, as transformers' ForTokenClassification
        with one label.
        """
        return {}

    @abstractmethod
    def flops(self, rows: TensorDict, backward: bool) -> float:
        """Model FLOPs of a pass over this rank's rows: 2N or 6N a token plus causal attention. Local."""
