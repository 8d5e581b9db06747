"""Where tensors lie, and whether they still do: asked in every weight sync of all tensors of a model."""

from collections.abc import Sequence

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
