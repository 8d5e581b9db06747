"""Under which names, and in which parts, a model's files have the tensors that transformers computes with.

transformers fuses some tensors of the files in its modules, as all experts of a layer, and splits them again
where it saves a model: by that same conversion the parts are found here. No communication.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from siirl.errors import NotSupportedError


class FilePart(NamedTuple):
    """A tensor of the files, as a part of one that the model has."""

    name: str
    """In the files."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In the whole tensor, which is contiguous."""
    first: int
    """Its first element in the whole tensor."""

    @property
    def last(self) -> int:
        """Its last element in the whole tensor."""
        return self.first + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def of(self, whole: Tensor, start: int = 0) -> Tensor:
        """This part of the whole tensor, or of consecutive elements of it from `start` on: a view."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.first - start)


def file_parts(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[FilePart, ...]]:
    """Name in the model's modules -> its parts in the files, for tensors of these names and shapes.

    NotSupportedError if a tensor of the files is no part of one of these.
    """
    own = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    name_of = {_storage(tensor): name for name, tensor in own.items()}
    found: dict[str, list[FilePart]] = {name: [] for name in own}
    for name, part in stored_parts(model, own).items():
        place = FilePart(name, tuple(part.shape), part.stride(), int(part.storage_offset()))
        found[name_of[_storage(part)]].append(place)
    return {name: tuple(parts) for name, parts in found.items()}


def stored_parts(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the model's files have them: file name -> a view of the given one.

    tensors: some of the model's, by the names of its modules without what adapters add to them; also on the
    meta device. NotSupportedError if a tensor of the files is no part of one of them.
    """
    parts = revert_weight_conversion(
        model, {name: x.detach().as_subclass(_Part) for name, x in tensors.items()}
    )
    places = {_storage(tensor) for tensor in tensors.values()}
    for name, part in parts.items():
        if _storage(part) not in places:
            raise NotSupportedError(
                f"not supported yet: model type {model.config.model_type}: {name} of its files is no part of "
                "a tensor that transformers computes with. Use another model."
            )
    return {name: part.as_subclass(Tensor) for name, part in parts.items()}


class _Part(Tensor):
    """A tensor whose parts stay views of it: asked for a contiguous copy, it gives itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
