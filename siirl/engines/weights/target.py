"""What weights are brought to, and what it needs: every tensor exactly once, of the right shape."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from siirl.config import Config
from siirl.engines.rollout.base import TensorShare, WeightPart
from siirl.engines.train.adapters.lora import add_lora, plain_name
from siirl.engines.train.base import TrainEngine
from siirl.engines.train.hf_model import keep_float32, model_class
from siirl.errors import DataError, WeightSyncError
from siirl.model_files.directory import check_weight_files
from siirl.model_files.file_parts import stored_parts
from siirl.model_files.weight_slices import SafetensorsFolder

WeightSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> (shape, dtype)."""


@dataclass
class SharedBase:
    """A base that several engines use."""

    loaded: bool = False
    """It has its weights, which never change afterwards."""


FIX = "Build trainer and rollout from the same model.path and override_config."


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], specs: WeightSpecs, aliases: dict[str, str], engine: str
) -> Iterator[tuple[str, Tensor]]:
    """Pass weights on under the names of `specs`, each once; no communication.

    aliases: further names of tied tensors -> their name in specs; a tensor that arrives under several of its
    names is passed on the first time. WeightSyncError for an unknown or repeated name, another shape or
    another kind of dtype at once, for missing tensors at the end.
    """
    seen: set[str] = set()
    passed: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise WeightSyncError(
                f"weight {name!r} arrived twice in one sync at {engine!r}: names must differ."
            )
        seen.add(name)
        own_name = check_weight(name, tensor, specs, aliases, engine)
        if own_name not in passed:
            passed.add(own_name)
            yield own_name, tensor
    check_complete(passed, specs, engine)


def stored_weights(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names from a model directory's safetensors files, one at a time; further are left.

    DataError if the directory has none, or lacks one of them.
    """
    check_weight_files(folder)
    wanted = set(names)
    with SafetensorsFolder(folder) as files:
        for name in filter(wanted.__contains__, files.names()):
            yield name, files.tensor_slice(name)[...]
            wanted.remove(name)
    if wanted:
        raise DataError(
            f"{folder} lacks {len(wanted)} tensors of its model, {', '.join(sorted(wanted)[:5])}: judges and "
            "teachers are language models, with their output head. Give another directory."
        )


class WeightTarget(Protocol):
    """What a weight link asks of the engine that it brings weights to; see RolloutEngine."""

    takes: WeightPart
    weight_version: int
    reads_live: bool
    """Whether it takes weights where they are trained (LiveWeights), if its rank has them whole."""

    @property
    def keeps(self) -> TensorShare: ...

    def kept_boxes(self) -> dict[str, list[Any]] | None: ...

    def expect_parts(self, arriving: Any) -> None: ...

    def weight_specs(self) -> WeightSpecs: ...

    def expect_weights(self) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


class FollowedWeights:
    """A model on a training engine as a target: a teacher that is a policy, older.

    Takes a share of the weights that arrive; the rest stays what the model has."""

    takes: WeightPart = "merged"
    weight_version = -1
    """None: a moving average moves also where the policy did not."""
    reads_live = False
    keeps: TensorShare = "all"

    def __init__(self, engine: TrainEngine, share: float):
        self._engine, self._share = engine, share

    def kept_boxes(self) -> dict[str, list[Any]] | None:
        """It keeps whole tensors."""

    def expect_parts(self, arriving: Any) -> None:
        """None come."""

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._engine.weight_specs()

    def expect_weights(self) -> None:
        """Its weights are on the device already."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """WeightSyncError unless every weight of the model arrives once; no communication."""
        checked = checked_weights(weights, self.weight_specs(), {}, self._engine.name)
        self._engine.take_weights(checked, self._share)


class StoredTarget(Protocol):
    """A rollout engine that nobody trains for."""

    weight_version: int

    def weight_specs(self) -> WeightSpecs: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


def load_stored(engine: StoredTarget, path: str) -> None:
    """Give a rollout engine the weights of a model's directory, if it has none: at first, and after a sleep
    that gave them back. Collective over the ranks of its shard."""
    if engine.weight_version < 0:
        engine.load_weights(stored_weights(Path(path).expanduser(), engine.weight_specs()), 0)


def check_weight(name: str, tensor: Tensor, specs: WeightSpecs, aliases: dict[str, str], engine: str) -> str:
    """The name under which the engine knows this weight. WeightSyncError if it is not what specs say.

    Floating types may differ (the engine casts); an integer tensor for a floating one may not.
    """
    own_name = aliases.get(name, name)
    if own_name not in specs:
        raise WeightSyncError(f"weight {name!r} is unknown to rollout engine {engine!r}: other model. {FIX}")
    shape, dtype = specs[own_name]
    if tuple(tensor.shape) != shape:
        raise WeightSyncError(
            f"weight {name!r} has shape {list(tensor.shape)}, rollout engine {engine!r} needs {list(shape)}: "
            f"other model. {FIX}"
        )
    if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
        raise WeightSyncError(
            f"weight {name!r} has dtype {tensor.dtype}, rollout engine {engine!r} needs {dtype}: "
            f"other model. {FIX}"
        )
    return own_name


def check_complete(arrived: set[str], specs: WeightSpecs, engine: str) -> None:
    """WeightSyncError unless every name of `specs` has arrived."""
    missing = [name for name in specs if name not in arrived]
    if missing:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise WeightSyncError(
            f"{len(missing)} of {len(specs)} weights did not arrive at rollout engine {engine!r} ({some}): "
            f"it would mix old and new weights. {FIX}"
        )


def tensor_names(model: PreTrainedModel) -> tuple[WeightSpecs, dict[str, str]]:
    """(name -> shape and dtype, tied tensors once; further names of tied tensors -> the name used).

    Names are those of the model's files, which trainers export: see stored_parts.
    """
    first_name: dict[int, str] = {}
    used, further = {}, {}
    for name, tensor in _own_tensors(model).items():
        is_first = first_name.setdefault(id(tensor), name) == name
        (used if is_first else further)[name] = tensor
    parts = stored_parts(model, used)
    name_at = {_place(part): name for name, part in parts.items()}
    specs = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
    aliases = {name: name_at[_place(part)] for name, part in stored_parts(model, further).items()}
    return specs, aliases


def weights_of_directory(hf_config: Any, cfg: Config, adapted: bool) -> tuple[WeightSpecs, dict[str, str]]:
    """Names, shapes and types of the tensors of a Hugging Face directory, and of its adapter."""
    dtype, source = cfg.actor_rollout_ref.rollout.dtype, cfg.actor_rollout_ref.model
    torch_dtype = (hf_config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        model = model_class(hf_config, "lm").from_config(
            hf_config, dtype=torch_dtype, trust_remote_code=source.trust_remote_code
        )
    keep_float32(model)
    model.tie_weights()
    if adapted:
        add_lora(model, source, cfg.trainer.seed)
    return tensor_names(model)


def stored_tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """All of the model's tensors as its files have them: file name -> a view of the model's own memory."""
    return stored_parts(model, _own_tensors(model))


def _own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: Tensor) -> tuple[int, int, torch.Size]:
    return _storage(tensor), tensor.storage_offset(), tensor.shape
