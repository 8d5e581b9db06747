"""torch.distributed.checkpoint as this project uses it: tensors only, and an index that can run no code."""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from siirl.errors import CheckpointError

INDEX_FILE = ".metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    },
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """DCP keeps its index as a pickle: read the index's own classes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(f"the checkpoint's .metadata refers to {module}.{name}: no DCP index does.")
        return super().find_class(module, name)


class TensorReader(dcp.FileSystemReader):
    """Reads a DCP folder without unpickling anything but the classes of its index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / INDEX_FILE, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorWriter(dcp.FileSystemWriter):
    """Writes a DCP folder whose index does not hold the path it was written to."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def save_tensors(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write tensors: DTensors from all their shards, others once. Collective over the group, if any."""
    writer = TensorWriter(folder, thread_count=2, sync_files=True)
    with _quiet():
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)


def load_tensors(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill tensors in place, however they were sharded when saved. Collective over the group, if any.

    CheckpointError if a name is absent or a shape differs, before anything is changed.
    """
    reader = TensorReader(folder)
    stored = stored_tensors(folder)
    absent = [name for name in tensors if name not in stored]
    other = [
        f"{name} is {tuple(tensor.shape)}, saved as {tuple(stored[name].size)}"
        for name, tensor in tensors.items()
        if name in stored and tuple(stored[name].size) != tuple(tensor.shape)
    ]
    if absent or other:
        raise CheckpointError(
            f"{folder} does not fit this model: absent {absent[:3]}, of another shape {other[:3]} "
            f"({len(absent)} and {len(other)} tensors). Was it saved from another model or LoRA setting?"
        )
    with _quiet():
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and type of the tensors in a DCP folder."""
    metadata = TensorReader(folder).read_metadata()
    return {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
