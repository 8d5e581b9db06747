"""A buffer of bytes that another process of this host maps: nameless memory of the host, or CUDA IPC.

And numbers that follow from the bits of tensors, by which the two processes compare what they hold.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLED = 1 << 14
"""Numbers of a buffer that are added up, unless all are."""
AT_ONCE = 1 << 22
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


class SharedBuffer:
    """Memory on `device` that `place` describes to other processes. Free it by close()."""

    def __init__(self, size: int, device: torch.device) -> None:
        """OSError if the host has no room for it."""
        self.size = size
        self._fd: int | None = None
        if device.type == "cuda":
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.place: dict[str, Any] = {"handles": {uuid: ipc_handle(self.data)}}
        else:
            self._fd = _reserve(size)
            # Any process of this user finds it there, also one that this process has not started.
            path, inode = f"/proc/{os.getpid()}/fd/{self._fd}", os.fstat(self._fd).st_ino
            self.data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self.place = {"path": path, "inode": inode}

    def close(self) -> None:
        """Idempotent. Who has mapped the buffer keeps it until it lets go."""
        del self.data
        if self._fd is not None:
            os.close(self._fd)
        self.close = lambda: None


def open_buffer(place: dict[str, Any], size: int, device: torch.device) -> Tensor:
    """The bytes of another process's SharedBuffer, from its `place`; handles of several GPUs may be joined.

    ValueError if it lies on other GPUs than `device`.
    """
    if "path" in place:
        return torch.from_file(place["path"], shared=True, size=size, dtype=torch.uint8)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid not in place["handles"]:
        raise ValueError(f"no weights for GPU {uuid}: they lie on {', '.join(place['handles'])}")
    return open_ipc_handle(place["handles"][uuid], device)


def ipc_handle(buffer: Tensor) -> list:
    """The CUDA IPC handle of a tensor, as JSON values. The tensor must outlive its users."""
    _, arguments = reduce_tensor(buffer)
    return [_to_json(value) for value in arguments]


def open_ipc_handle(handle: list, device: torch.device) -> Tensor:
    """The tensor of ipc_handle, in another process of the same host, on the GPU where it lies."""
    arguments = [_from_json(value) for value in handle]
    arguments[6] = device.index  # its number here, which may be another than there
    return rebuild_cuda_tensor(*arguments)


def _reserve(size: int) -> int:
    """A file descriptor of `size` bytes of memory that has no name: it ends with its last user, however."""
    descriptor = os.memfd_create("siirl-weights")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise OSError(f"no room for a buffer of {size >> 20} MiB in the host's memory: {error}") from error
    return descriptor


_CLASSES = {
    "Tensor": torch.Tensor,
    "TypedStorage": torch.storage.TypedStorage,
    "UntypedStorage": torch.UntypedStorage,
}


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, type):
        return {"class": value.__name__}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return list(value) if isinstance(value, tuple) else value


def _from_json(value: Any) -> Any:
    match value:
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"class": name}:
            return _CLASSES[name]
        case {"dtype": name}:
            return getattr(torch, name)
        case list():
            return torch.Size(value)
    return value


def sampled_sum(data: Tensor, number: int, whole: bool) -> Tensor:
    """The sum of some 4-byte integers of a buffer of bytes, or of all, on its device.

    number: of the call; other ones take other integers.
    """
    values = data[: len(data) // 4 * 4].view(torch.int32)
    step = 1 if whole else max(1, len(values) // SAMPLED)
    return values[number % step :: step].sum(dtype=torch.int64)


def fingerprint(tensor: Tensor) -> Tensor:
    """A number on the tensor's device that differs, but for chance, where any element or its place does."""
    values = tensor.detach().contiguous().view(-1)
    values = values.view(INT_OF_BYTES[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, len(values), AT_ONCE):
        part = values.narrow(0, begin, min(AT_ONCE, len(values) - begin)).to(torch.int64)
        place = torch.arange(begin + 1, begin + 1 + len(part), device=part.device)
        mixed = (part + 1) * (place * MULTIPLIER)
        total = total + (mixed ^ (mixed >> 31)).sum()
    return total
