"""Tensors whose device memory can be given back and refilled, while every reference to them stays valid."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Storages that were emptied on the device, and their bytes in host memory.

    Works on storages, not tensors: views, tied parameters and whatever FSDP or the optimizer remember of a
    tensor stay as they are, and see the same values after `restore`.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def __bool__(self) -> bool:
        return bool(self._copies)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of `tensors` to host memory (pinned, if on CUDA) and free them on the device."""
        assert not self._copies, "already taken"
        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            host = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda
            ).untyped_storage()
            host.copy_(storage, non_blocking=False)
            self._copies.append((storage, host))
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self) -> None:
        """Refill the storages, and free the host memory."""
        for storage, host in self._copies:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=False)
        self._copies.clear()
