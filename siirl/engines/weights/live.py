"""A model's weights in the memory in which they are trained, for who reads them there."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage


class HeldMemory:
    """The places of some tensors, and views of them. Their storages stay there as long as these views do."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views = [tensor.detach() for tensor in tensors]
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._addresses = [*map(Tensor.data_ptr, tensors)]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._sizes = [*map(UntypedStorage.nbytes, self._storages)]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these lie where those did, one by one: the same storages, of the same sizes, in which they
        have the same first bytes, shapes, strides and types.

        One comparison after the other, each in a loop of C: in a sync all that is touched comes from far.
        """
        return (
            [*map(Tensor.data_ptr, tensors)] == self._addresses
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and all(map(Tensor.is_set_to, tensors, self._views))
            and [*map(UntypedStorage.nbytes, self._storages)] == self._sizes
        )


class LiveWeights:
    """Whole tensors under the names of the model's files: views of live memory, the same in every step.

    As an iterable it is what export_weights yields, in the master type.
    """

    def __init__(self, tensors: Mapping[str, Tensor], memory: Sequence[Tensor] = ()) -> None:
        """memory: where all of the model lies."""
        self._tensors = dict(tensors)
        self._memory = HeldMemory(memory)
        self._sizes: dict[torch.dtype | None, int] = {}
        self._readers: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def lies_in(self, memory: Sequence[Tensor]) -> bool:
        """Whether the model still lies in the memory that these are views of, see HeldMemory."""
        return self._memory.is_of(memory)

    def num_bytes(self, dtype: torch.dtype | None) -> int:
        """Of all tensors, once floating ones are of `dtype`; None: of their own."""
        if dtype not in self._sizes:
            types = (
                (x, dtype if dtype and x.is_floating_point() else x.dtype) for x in self._tensors.values()
            )
            self._sizes[dtype] = sum(x.numel() * found.itemsize for x, found in types)
        return self._sizes[dtype]

    def read_until(self, done: Callable[[], None]) -> None:
        """Somebody reads them in the background: `done` returns once that has ended."""
        self._readers.append(done)

    def settle(self) -> None:
        """Wait for those who read: the weights are about to change, or to go."""
        while self._readers:
            self._readers.pop()()
