"""What all training strategies do alike: a step that counts, clips or skips, and moving parts to the host."""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs, TrainEngine
from siirl.engines.train.optimizer import learning_rate
from siirl.engines.train.packed.micro_batches import (
    MicroBatchLimit,
    bundles_of,
    count_bundles,
    row_lengths,
    sharing_pays,
    split_bundles,
)
from siirl.engines.train.packed.packing import PackedBatch, pack_rows
from siirl.engines.train.pieces import Piece
from siirl.engines.train.settings import EngineSettings
from siirl.engines.train.transfers import HostCopies, sent_rows
from siirl.engines.weights.bucket import HeldMemory
from siirl.errors import CheckpointError, NumericsError
from siirl.model_files.directory import weights_digest
from siirl.observe.metrics import Metrics
from siirl.observe.spans import note, phase, waiting

MAX_SKIPPED_STEPS = 5
"""So many optimizer steps in a row may be skipped for non-finite gradients; one more ends the run."""
PARTS = ("params", "grads", "optimizer")


class SteppingEngine(TrainEngine):
    """A training engine whose strategy says how gradients, their norm and an update are made."""

    _optimizer: Any
    """None for a model that is never trained."""
    _data_group: dist.ProcessGroup
    """The ranks that together hold a mini-batch, a shard each."""
    _is_first: bool
    """Whether this is the first of the model's ranks."""
    _rounds = 0
    """Micro-batches come in whole rounds of so many, one at least; 0: in any number."""

    def __init__(
        self, name: str, settings: EngineSettings, device: torch.device, host_parts: dict[str, bool]
    ):
        self.name = name
        self.version = 0
        self.device = torch.device(device)
        self.host_parts = host_parts
        self._settings = settings
        self._host = {part: HostCopies() for part in PARTS}
        self._total_steps = settings.optim.total_training_steps if settings.optim else 0
        self._num_skipped = 0
        self._pieces: tuple[HeldMemory, dict[str, list[Piece]] | None] | None = None

    @property
    @abstractmethod
    def _outputs(self) -> tuple[str, ...]:
        """Names of what the head gives."""

    @abstractmethod
    def _train(
        self,
        rows: TensorDict,
        loss_fn: LossFn,
        counts: BatchCounts,
        outputs: tuple[str, ...],
        temperature: float,
    ) -> Metrics:
        """Gradients of a mini-batch with trained tokens, then `_step`."""

    @abstractmethod
    def _clip(self, max_norm: float) -> float:
        """Scale the gradient, which is complete by now, to a norm of at most this; the norm before."""

    @abstractmethod
    def _update(self) -> None:
        """Step, at the learning rate that is set."""

    @abstractmethod
    def _local_tensors(self, part: str) -> Iterator[Tensor]:
        """This rank's tensors of a part, as plain tensors."""

    @abstractmethod
    def _live_pieces(self) -> dict[str, list[Piece]]:
        """HF name -> what this rank holds of the weight, in live memory."""

    @abstractmethod
    def _frozen_names(self) -> list[str]:
        """HF names of what a training state leaves out: with adapters, the weights that stay as they are."""

    @property
    @abstractmethod
    def _hidden_size(self) -> int:
        """Of the model, by which rows cost."""

    def held_pieces(self) -> dict[str, list[Piece]] | None:
        """See TrainEngine."""
        self._require_on_device("params")
        memory = self._held_memory()
        if self._pieces is None or not self._pieces[0].is_of(memory):
            self._pieces = HeldMemory(memory), None if self._frozen_names() else self._live_pieces()
        return self._pieces[1]

    def _held_memory(self) -> list[Tensor]:
        """The tensors in whose memory all pieces lie."""
        return [*self._local_tensors("params")]

    @torch.no_grad()
    def take_weights(self, weights: Iterator[tuple[str, Tensor]], share: float) -> None:
        assert self._optimizer is None, f"{self.name} is trained: its optimizer has its weights"
        self._require_on_device("params")
        pieces = self._live_pieces()
        for name, whole in weights:
            for local, offset in pieces.get(name, ()):
                ends = zip(offset, local.shape, strict=True)
                part = whole[tuple(slice(first, first + size) for first, size in ends)]
                local.lerp_(part.to(local), share)

    def set_total_steps(self, total_steps: int) -> None:
        """Tell the learning-rate schedule the optimizer steps of the run; a total in the config wins."""
        if self._settings.optim and not self._settings.optim.total_training_steps:
            self._total_steps = total_steps

    def train_mini_batch(
        self, rows: TensorDict, loss_fn: LossFn, outputs: tuple[str, ...], temperature: float
    ) -> Metrics:
        """One optimizer step on the mini-batch of which each shard holds `rows`, maybe none; see TrainEngine.

        A mini-batch without trained tokens, or with a gradient that is not finite, changes nothing: the step
        is skipped and counted (skipped_step); NumericsError after MAX_SKIPPED_STEPS non-finite gradients in a
        row.
        """
        assert self._optimizer is not None, f"{self.name} is not trained"
        self._require_on_device(*PARTS)
        self._check_outputs(outputs)
        mask_BT = rows["response_mask"]
        totals = self._reduce([int(mask_BT.sum()), int(mask_BT.any(dim=1).sum())], dist.ReduceOp.SUM)
        counts = BatchCounts(totals[0], totals[1], self._settings.response_width)
        if counts.num_tokens:
            return self._train(rows, loss_fn, counts, outputs, temperature)
        metrics = Metrics()
        metrics.mean("skipped_step", 1.0)
        return metrics

    def _share(
        self,
        columns: dict[str, Tensor],
        batch: PackedBatch,
        rows: TensorDict,
        loss_fn: LossFn,
        counts: BatchCounts,
        metrics: TensorMetrics,
    ) -> Tensor:
        """The loss of one micro-batch; of a rank without rows, 0 with the graph of the dummy it ran."""
        nothing = sum(value_BT.sum() for value_BT in columns.values()) if batch.is_dummy else 0.0
        if not batch.num_rows:
            return nothing
        tokens = TokenOutputs(**{f"{name}_BT": value_BT for name, value_BT in columns.items()})
        loss, found = loss_fn(tokens, sent_rows(rows, self.device), counts)
        metrics.merge(found)
        return loss + nothing

    def _step(self, read: Callable[[], Metrics]) -> Metrics:
        """Clip, step, count: or skip, when the gradient is not finite. read: gives the mini-batch's metrics.

        They are read when the norm has come, on which the device works until then: it is idle once.
        """
        with phase("clip_gradients"):
            norm = self._clip(self._settings.grad_clip)
        with phase("read_metrics"):
            metrics = read()
        with phase("optimizer_step"):
            self._finish_step(metrics, norm)
        return metrics

    def _finish_step(self, metrics: Metrics, norm: float) -> None:
        lr = learning_rate(self._settings.optim, self.version, self._total_steps)
        finite = math.isfinite(norm)
        if finite:
            metrics.mean("grad_norm", norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._update()
            self.version += 1
            self._num_skipped = 0
        else:
            self._num_skipped += 1
        self._optimizer.zero_grad()
        metrics.mean("lr", lr)
        metrics.mean("skipped_step", 0.0 if finite else 1.0)
        if self._num_skipped > MAX_SKIPPED_STEPS:
            raise NumericsError(
                f"{self.name}: the gradient norm is {norm} after {self.version} optimizer steps, not finite "
                f"{self._num_skipped} times in a row: the weights or the data are broken. Lower optim.lr, or "
                "go back to a checkpoint."
            )

    def _counts_state(self) -> dict[str, Any]:
        """The counts of a checkpoint."""
        scheduler = {"total_steps": self._total_steps, "num_skipped": self._num_skipped}
        return {"scheduler": scheduler, "version": self.version}

    def _load_counts(self, state: dict[str, Any]) -> None:
        self.version = int(state["version"])
        self._num_skipped = int(state["scheduler"]["num_skipped"])

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        for part, wanted in zip(PARTS, (params, grads, optimizer), strict=True):
            if wanted and self.device.type != "cpu" and not self._host[part]:
                with phase("offload", part=part):
                    self._host[part].take(self._local_tensors(part))

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        for part, wanted in zip(PARTS, (params, grads, optimizer), strict=True):
            if wanted and self._host[part]:
                with phase("onload", part=part):
                    self._host[part].restore()

    def _reduce(
        self, numbers: list[float], op: dist.ReduceOp, group: dist.ProcessGroup | None = None
    ) -> list[float]:
        """Reduce a few numbers over the ranks of a mini-batch, or those given, through host memory."""
        total = torch.tensor(numbers, dtype=torch.float64)
        with waiting():
            dist.all_reduce(total, op, group=group or self._data_group)
        return total.tolist()

    def _shares_prompts(self, rows: TensorDict) -> bool:
        """Whether a prompt of several rows is computed once: exact where all layers see whole rows."""
        return self._seen_back >= max(row_lengths(rows), default=0) and sharing_pays(rows)

    @property
    @abstractmethod
    def _seen_back(self) -> float:
        """Tokens of a row that every layer sees from any token: inf for all; 0 not to share prompts."""

    def _split(self, rows: TensorDict, limit: MicroBatchLimit) -> list[list[int]]:
        """Row indices of the micro-batches: as many on every rank of a mini-batch. Collective over those."""
        bundles = bundles_of(rows, limit, self._hidden_size, self._shares_prompts(rows))
        (most,) = self._reduce([count_bundles(bundles, limit)], dist.ReduceOp.MAX)
        num, unit = int(most), max(1, self._rounds)
        return split_bundles(bundles, limit, max(self._rounds, -(-num // unit) * unit))

    def _packed(self, rows: TensorDict, share_prompts: bool = False) -> PackedBatch:
        """The rows of a micro-batch, packed, and noted in the trace."""
        batch = pack_rows(rows, self.device, share_prompts, self._settings.image_reader)
        note(rows=batch.num_rows, tokens=batch.input_ids.numel())
        return batch

    @functools.cached_property
    def _base_weights(self) -> dict[str, Any]:
        """Which weights stay as model.path has them; their digest on the first rank."""
        path = Path(self._settings.model.path).expanduser().absolute()
        names = self._frozen_names()
        digest = weights_digest(path) if names and self._is_first else None
        return {"path": str(path), "digest": digest, "names": names}

    def _base_state(self) -> dict[str, Any]:
        """With adapters: {"base": which weights they are on}."""
        return {"base": self._base_weights} if self._base_weights["names"] else {}

    def _check_base(self, state: dict[str, Any]) -> None:
        """CheckpointError if adapters are loaded that were trained on other weights than these."""
        saved, own = state.get("base"), self._base_weights
        if saved and own["digest"] and saved["digest"] != own["digest"]:
            raise CheckpointError(
                f"{self.name}: its adapter was trained on other weights ({saved['path']}) than those of "
                f"model.path={own['path']}: it means nothing on them. Set model.path to those."
            )

    def _is_away(self, part: str) -> bool:
        """Whether a part is in host memory."""
        return bool(self._host[part])

    def _require_on_device(self, *parts: str) -> None:
        away = [part for part in parts if self._is_away(part)]
        assert not away, f"{self.name}: {', '.join(away)} are offloaded: call onload first"

    def _check_outputs(self, outputs: tuple[str, ...]) -> None:
        unknown = set(outputs) - set(self._outputs)
        assert not unknown, f"{self.name} has no output {', '.join(sorted(unknown))}"
