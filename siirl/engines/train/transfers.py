"""Tensors to the device and back: the host packs and queues ahead while the device computes.

And tensors whose device memory is given back for a while: every reference to them stays valid.
"""

from collections.abc import Iterable, Mapping

import torch
from tensordict import TensorDict
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`. CUDA: by way of pinned memory, in the order of the current stream."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned block until then
    return tensor.to(device)


def sent_rows(rows: TensorDict, device: torch.device) -> TensorDict:
    """The tensor columns of rows on `device`, as `sent` brings them; object columns stay."""
    columns = {name: rows.get(name) for name in rows.keys()}
    moved = {name: sent(x, device) if isinstance(x, Tensor) else x for name, x in columns.items()}
    return TensorDict(moved, batch_size=rows.batch_size)


class Arrivals:
    """Outputs of micro-batches on their way into the columns of all rows, on the host.

    Of CUDA each is written when the next one is queued, so that the device always has work: the host waits
    for the copy alone, not for what was queued since.
    """

    def __init__(self, columns: Mapping[str, Tensor]):
        self._columns = columns
        self._last: tuple[list[int], dict[str, Tensor], torch.cuda.Event] | None = None

    def take(self, index: list[int], found: Mapping[str, Tensor]) -> None:
        """The outputs of the rows at `index`."""
        coming = {}
        for name, value in found.items():
            column = self._columns[name]
            if value.is_cuda and not column.is_cuda:
                coming[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                coming[name].copy_(value, non_blocking=True)
            else:
                column[index] = value.to(column.device)
        copied = torch.cuda.current_stream().record_event() if coming else None
        self.finish()
        if copied is not None:
            self._last = (index, coming, copied)

    def finish(self) -> None:
        """Write what is still on its way."""
        if self._last is not None:
            index, coming, copied = self._last
            copied.synchronize()
            for name, value in coming.items():
                self._columns[name][index] = value
            self._last = None


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
