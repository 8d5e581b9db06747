"""The state of a run at the moment of a save: the live tensors, or copies in host memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from siirl.checkpoint import state_tree
from siirl.checkpoint.together import for_each, rank_in

PARTS = {"model": ("model",), "optimizer": ("optimizer", "scheduler")}


class Stateful(Protocol):
    """What a training engine offers to a checkpoint (siirl.engines.train.base.TrainEngine)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class SavedModel:
    """One model of this rank, as a checkpoint sees it."""

    model: Stateful
    group: dist.ProcessGroup | None
    """The ranks of the model; None: this process alone."""
    hf_path: str | None = None
    """Where its HF config and tokenizer come from."""
    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    """Of "model", "optimizer" (and its schedule), "extra" (the run's state: see save), "hf_model" (also HF
    weights)."""
    load_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    """The same of what is restored."""
    lora_alpha: float | None = None
    """What an export needs to merge adapters."""
    hf_config_changes: dict[str, Any] = field(default_factory=dict)
    """Where its config.json differs from that of hf_path."""
    background_group: dist.ProcessGroup | None = None
    """A second group of the same ranks, gloo, for saves in the background."""
    make_room: Callable[[dict[str, Any]], None] | None = None
    """Told the JSON of what was saved, before its tensors are read into those of state_dict."""


@dataclass(frozen=True)
class StagedModel:
    """What is written of one model."""

    source: SavedModel
    group: dist.ProcessGroup | None
    """Who writes it."""
    values: dict[str, Any]
    tensors: dict[str, Tensor]
    hf_weights: Iterator[tuple[str, Tensor]] | None
    """None if they are not saved."""


@dataclass(frozen=True)
class Staged:
    """What this rank writes of a checkpoint."""

    step: int
    models: dict[str, StagedModel]
    extra: dict[str, Any]
    """On the first rank."""
    rank_values: Any
    """Of each rank, as its tensors."""
    rank_tensors: dict[str, Tensor]


class Stager:
    """Makes what is saved of the models of this rank.

    A copy costs host memory: once this rank's shards (pinned and kept from save to save where there is a
    GPU), and on the first rank of a model the HF weights, if they are saved.
    """

    def __init__(self) -> None:
        self._stagers: dict[str, BlockingAsyncStager] = {}

    def stage(
        self,
        step: int,
        models: Mapping[str, SavedModel],
        extra: dict[str, Any],
        rank_state: dict[str, Any],
        copy: bool,
    ) -> Staged:
        """The state of now. copy: in host memory, for a write in the background; else the live tensors.

        Collective over the ranks of a model if its HF weights are copied.
        """
        value, tensors = state_tree.split(rank_state, "rank")
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        staged: dict[str, StagedModel] = {}
        for_each(models, lambda name, model: staged.update({name: self._model(name, model, copy)}))
        return Staged(step, staged, extra, value, tensors)

    def _model(self, name: str, model: SavedModel, copy: bool) -> StagedModel:
        values, tensors = split_state(model)
        weights = None
        if "hf_model" in model.save_contents and model.hf_path:
            weights = model.model.export_weights()
        if copy:
            weights = None if weights is None else _copied(weights, rank_in(model.group) == 0)
            tensors = self._copy(name, tensors)
        group = model.background_group if copy else model.group
        return StagedModel(model, group, values, tensors, weights)

    def _copy(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory; DTensors stay DTensors, so that each rank still writes its own part."""
        if name not in self._stagers:
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            self._stagers[name] = BlockingAsyncStager(cache_staged_state_dict=on_gpu)
        own = {key: tensor.clone() for key, tensor in tensors.items() if tensor.ndim == 0}
        for key, tensor in tensors.items():
            if hasattr(tensor, "__create_write_items__") and not isinstance(tensor, DTensor):
                own[key] = tensor.detach().to("cpu", copy=True)  # a tensor in pieces knows how to copy itself
        others = {key: tensor for key, tensor in tensors.items() if key not in own}
        return self._stagers[name].stage(others) | own


def split_state(model: SavedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors) of the parts that are saved; what belongs to no part, as the version, always is."""
    dropped = {key for part, keys in PARTS.items() if part not in model.save_contents for key in keys}
    values, tensors = {}, {}
    for key, part in model.model.state_dict().items():
        if key not in dropped:
            values[key], part_tensors = state_tree.split(part, key)
            tensors |= part_tensors
    return values, tensors


def _copied(weights: Iterator[tuple[str, Tensor]], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """All weights at once, in host memory, if this rank keeps them; every rank exhausts the iterator."""
    held = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights if keep]
    return iter(held)
