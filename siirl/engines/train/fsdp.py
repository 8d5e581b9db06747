"""The FSDP2 strategy: weights, gradients and optimizer state of one model, sharded over its ranks."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from siirl.config import Config
from siirl.dag.plan import ModelPlan
from siirl.data.model_files import weights_digest
from siirl.data.rows import take_rows
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs, TrainEngine
from siirl.engines.train.frozen_base import FrozenBase
from siirl.engines.train.fsdp_model import build_sharded, compute_dtype, fsdp_modules, is_small, mesh_of
from siirl.engines.train.fsdp_state import (
    base_names,
    exported,
    exported_adapter,
    load_training_state,
    specs,
    training_state,
)
from siirl.engines.train.hf_model import config_changes, torch_dtype
from siirl.engines.train.language_model import model_flops, run_packed
from siirl.engines.train.offload import HostCopies
from siirl.engines.train.optimizer import make_adamw, scaled_to_norm, set_learning_rate
from siirl.engines.train.packing import (
    PackedBatch,
    count_micro_batches,
    new_columns,
    pack_rows,
    row_lengths,
    split_rows,
)
from siirl.engines.train.schedules import learning_rate
from siirl.engines.train.settings import engine_settings
from siirl.errors import CheckpointError, NumericsError
from siirl.observe.metrics import Metrics
from siirl.observe.spans import note, phase
from siirl.parallel.process_groups import ProcessGroups

MAX_SKIPPED_STEPS = 5
"""So many optimizer steps in a row may be skipped for non-finite gradients; one more ends the run."""


class FSDPEngine(TrainEngine):
    """A model of any head trained (or only run) by FSDP2 on the ranks of its plan, CPU or CUDA.

    Build it on all ranks of the plan together: it communicates. A plan with dp_replicate > 1 is HSDP. The
    learning rate follows the number of optimizer steps taken; schedules that need the total are told by
    `set_total_steps`.
    """

    def __init__(
        self,
        plan: ModelPlan,
        cfg: Config,
        groups: ProcessGroups,
        device: torch.device,
        base: "FSDPEngine | None" = None,
    ):
        """base: the engine, on the same ranks, whose frozen weights this one uses; its own are adapters."""
        self.name = plan.name
        self.version = 0
        self.device = torch.device(device)
        self._settings = engine_settings(plan, cfg)
        self._group = groups.get(plan.ranks)
        self.dp_rank = dist.get_rank(self._group)
        self.dp_size = len(plan.ranks)
        self._mesh, self._shard_group = mesh_of(plan, groups, self.device)
        self._model = build_sharded(
            self._settings, self._mesh, self._group, self.device, plan.trains, base._model if base else None
        )
        self._base = base._base if base else FrozenBase(self._model)
        self._base.onload(self.name)
        self._accumulates_locally = plan.dims.dp_shard == 1 or is_small(self._model)
        optim = self._settings.optim
        self._optimizer = make_adamw(self._trained(), optim) if optim else None
        self._total_steps = optim.total_training_steps if optim else 0
        self._num_skipped = 0
        fsdp = self._settings.fsdp
        self.host_parts = {
            "params": fsdp.param_offload,
            "grads": plan.trains and self._settings.grad_offload,
            "optimizer": plan.trains and fsdp.optimizer_offload,
        }
        self._host = {part: HostCopies() for part in ("params", "grads", "optimizer")}

    def set_total_steps(self, total_steps: int) -> None:
        """Tell the learning-rate schedule the optimizer steps of the run; a total in the config wins."""
        if self._settings.optim and not self._settings.optim.total_training_steps:
            self._total_steps = total_steps

    def compute(self, rows: TensorDict, outputs: tuple[str, ...], temperature: float) -> TensorDict:
        """Outputs of the head for response tokens, [B, T] float32, where `rows` are; no gradient."""
        self._require_on_device("params")
        self._check_outputs(outputs)
        home = rows["response_ids"].device
        limit, lengths = self._settings.forward_limit, row_lengths(rows)
        (num_micro,) = self._reduce([count_micro_batches(lengths, limit)], dist.ReduceOp.MAX)
        columns = new_columns(rows, outputs, self._hidden_size, compute_dtype(self._settings), home)
        self._model.eval()
        with torch.no_grad():
            for index in split_rows(lengths, limit, int(num_micro), self._hidden_size):
                with phase("micro_batch"):
                    batch = _packed(take_rows(rows, index), self.device)
                    for name, value_BT in run_packed(self._model, batch, temperature, outputs).items():
                        columns[name][index] = value_BT.to(home)
        for module in fsdp_modules(self._model):
            module.reshard()  # weights that stayed gathered would miss what the next step or load changes
        return TensorDict(columns, batch_size=rows.batch_size)

    def train_mini_batch(
        self, rows: TensorDict, loss_fn: LossFn, outputs: tuple[str, ...], temperature: float
    ) -> Metrics:
        """One optimizer step on the mini-batch of which each rank holds `rows`, maybe none; see TrainEngine.

        A mini-batch without trained tokens, or with a gradient that is not finite, changes nothing: the step
        is skipped and counted (skipped_step); NumericsError after MAX_SKIPPED_STEPS non-finite gradients in a
        row.
        """
        assert self._optimizer is not None, f"{self.name} is not trained"
        self._require_on_device("params", "grads", "optimizer")
        self._check_outputs(outputs)
        limit, lengths = self._settings.train_limit, row_lengths(rows)
        mask_BT = rows["response_mask"]
        (num_micro,) = self._reduce([count_micro_batches(lengths, limit)], dist.ReduceOp.MAX)
        totals = self._reduce([int(mask_BT.sum()), int(mask_BT.any(dim=1).sum())], dist.ReduceOp.SUM)
        counts = BatchCounts(totals[0], totals[1], self._settings.response_width)
        metrics = Metrics()
        if not counts.num_tokens:
            metrics.mean("skipped_step", 1.0)
            return metrics
        self._model.train()
        micro_batches = split_rows(lengths, limit, int(num_micro), self._hidden_size)
        for number, index in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            self._model.set_is_last_backward(is_last)
            if self._accumulates_locally:
                self._model.set_requires_gradient_sync(is_last)
            with phase("micro_batch"):
                self._backward(take_rows(rows, index), loss_fn, counts, outputs, temperature, metrics)
        with phase("optimizer_step"):
            self._step(metrics)
        return metrics

    def _backward(
        self,
        rows: TensorDict,
        loss_fn: LossFn,
        counts: BatchCounts,
        outputs: tuple[str, ...],
        temperature: float,
        metrics: Metrics,
    ) -> None:
        """Add the gradient of one micro-batch; a rank without rows runs along on a dummy."""
        batch = _packed(rows, self.device)
        columns = run_packed(self._model, batch, temperature, outputs)
        nothing = sum(value_BT.sum() for value_BT in columns.values()) if batch.is_dummy else 0.0
        if not batch.num_rows:
            nothing.backward()
            return
        tokens = TokenOutputs(**{f"{name}_BT": value_BT for name, value_BT in columns.items()})
        loss, loss_metrics = loss_fn(tokens, rows.to(self.device), counts)
        metrics.merge(loss_metrics)
        (loss + nothing).backward()

    def _step(self, metrics: Metrics) -> None:
        """Clip, step, count: or skip, when the gradient is not finite."""
        grads = [p.grad for p in self._trained()]
        norm = scaled_to_norm(grads, self._settings.grad_clip, self._shard_group)
        lr = learning_rate(self._settings.optim, self.version, self._total_steps)
        finite = math.isfinite(norm)
        if finite:
            metrics.mean("grad_norm", norm)
            set_learning_rate(self._optimizer, lr)
            self._optimizer.step()
            self.version += 1
            self._num_skipped = 0
        else:
            self._num_skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        metrics.mean("lr", lr)
        metrics.mean("skipped_step", 0.0 if finite else 1.0)
        if self._num_skipped > MAX_SKIPPED_STEPS:
            raise NumericsError(
                f"{self.name}: the gradient norm is {norm} after {self.version} optimizer steps, not finite "
                f"{self._num_skipped} times in a row: the weights or the data are broken. Lower optim.lr, or "
                "go back to a checkpoint."
            )

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return specs(self._model.hf, self._master_dtype)

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        self._require_on_device("params")
        return exported(self._model.hf, dtype or self._master_dtype)

    def export_adapter(
        self, dtype: torch.dtype | None = None, with_base: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        self._require_on_device("params")
        return exported_adapter(self._model.hf, dtype or self._master_dtype, with_base)

    def state_dict(self) -> dict[str, Any]:
        """See TrainEngine. Tensors are the engine's own DTensors, so reading into them in place is enough.

        With adapters: those alone, and "base", which weights they are on.
        """
        self._require_on_device("params", "optimizer")
        scheduler = {"total_steps": self._total_steps, "num_skipped": self._num_skipped}
        return training_state(self._model.hf, self._optimizer) | {
            "scheduler": scheduler,
            "version": self.version,
            **({"base": self._base_weights} if self._base_weights["names"] else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_on_device("params", "optimizer")
        self._check_base(state)
        load_training_state(self._model.hf, self._optimizer, state)
        self.version = int(state["version"])
        self._num_skipped = int(state["scheduler"]["num_skipped"])

    @functools.cached_property
    def _base_weights(self) -> dict[str, Any]:
        """Which weights stay as model.path has them; the digest on the first rank, which has read them."""
        path, names = Path(self._settings.model.path).expanduser().absolute(), base_names(self._model.hf)
        digest = weights_digest(path) if names and self.dp_rank == 0 else None
        return {"path": str(path), "digest": digest, "names": names}

    def _check_base(self, state: dict[str, Any]) -> None:
        """CheckpointError if adapters are loaded that were trained on other weights than these."""
        saved, own = state.get("base"), self._base_weights
        if saved and own["digest"] and saved["digest"] != own["digest"]:
            raise CheckpointError(
                f"{self.name}: its adapter was trained on other weights ({saved['path']}) than those of "
                f"model.path={own['path']}: it means nothing on them. Set model.path to those."
            )

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        for part, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted and self.device.type != "cpu" and not self._host[part]:
                with phase("offload", part=part):
                    self._host[part].take(self._local_tensors(part))
        if params and self.device.type != "cpu":
            self._base.offload(self.name)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        for part, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted and self._host[part]:
                with phase("onload", part=part):
                    self._host[part].restore()
        if params:
            self._base.onload(self.name)

    def hf_config_changes(self) -> dict[str, Any]:
        return config_changes(type(self._model.hf).__name__, self._settings.head)

    def flops(self, rows: TensorDict, backward: bool) -> float:
        return model_flops(self._model.hf, row_lengths(rows), backward)

    @property
    def _hidden_size(self) -> int:
        return self._model.hf.config.hidden_size

    @property
    def _master_dtype(self) -> torch.dtype:
        return torch_dtype(self._settings.fsdp.model_dtype, "fsdp_config.model_dtype")

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _reduce(self, numbers: list[float], op: dist.ReduceOp) -> list[float]:
        """Reduce a few numbers over all ranks of the model, through host memory."""
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total, op, group=self._group)
        return total.tolist()

    def _local_tensors(self, part: str) -> Iterator[Tensor]:
        """This rank's tensors of a part, as plain tensors."""
        for param in self._model.parameters():
            if part == "params" and param.requires_grad:
                yield param.to_local()
            elif part == "grads" and param.grad is not None:
                yield param.grad.to_local()
            elif part == "optimizer" and self._optimizer:
                state = self._optimizer.state.get(param, {})
                yield from (state[name].to_local() for name in ("exp_avg", "exp_avg_sq") if name in state)

    def _require_on_device(self, *parts: str) -> None:
        away = [part for part in parts if self._host[part] or (part == "params" and self._base)]
        assert not away, f"{self.name}: {', '.join(away)} are offloaded: call onload first"

    def _check_outputs(self, outputs: tuple[str, ...]) -> None:
        unknown = set(outputs) - set(self._model.outputs)
        assert not unknown, f"{self.name} has no output {', '.join(sorted(unknown))}"


def _packed(rows: TensorDict, device: torch.device) -> PackedBatch:
    """The rows of a micro-batch, packed, and noted in the trace."""
    batch = pack_rows(rows, device)
    note(rows=batch.num_rows, tokens=batch.input_ids.numel())
    return batch
