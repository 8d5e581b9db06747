"""A buffer of bytes that another process of this host maps: a file in shared memory, or CUDA IPC."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

SHARED_MEMORY = Path("/dev/shm")


class SharedBuffer:
    """Memory on `device` that `place` describes to other processes. Free it by close()."""

    def __init__(self, size: int, device: torch.device) -> None:
        """OSError if the host has no room for it."""
        self.size = size
        self._path: Path | None = None
        if device.type == "cuda":
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.place: dict[str, Any] = {"handles": {uuid: ipc_handle(self.data)}}
        else:
            self._path = _reserve(size)
            self.data = torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)
            self.place = {"path": str(self._path)}

    def close(self) -> None:
        """Idempotent. Who has mapped the buffer keeps it until it lets go."""
        del self.data
        if self._path is not None:
            self._path.unlink(missing_ok=True)
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


def _reserve(size: int) -> Path:
    """A file of `size` bytes that exist: in shared memory, or in the temporary folder if that is full."""
    error = OSError("no shared memory")
    for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix="siirl-weights-", dir=folder)
            try:
                os.posix_fallocate(descriptor, 0, size)
                return Path(name)
            except OSError as failed:
                Path(name).unlink()
                error = failed
            finally:
                os.close(descriptor)
    raise OSError(
        f"no room for a buffer of {size >> 20} MiB in {SHARED_MEMORY} or {tempfile.gettempdir()}"
    ) from error


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
