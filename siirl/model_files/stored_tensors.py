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
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from siirl.disk import naming, why_unwritten
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
    """Writes a DCP folder whose index does not hold the path it was written to, all of it or an OSError."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """OSError, with the number of the system's error, if an item of the plan was not written.

        torch loses what goes wrong in a thread of the writer, and the number of the error in any.
        """
        folder = Path(self.path)
        num_bytes = sum(map(_num_bytes, plan.items))
        try:
            with naming(folder):
                written = super().write_data(plan, planner)
        except RuntimeError as error:
            raise why_unwritten(folder, num_bytes) from error
        if len(written.wait()) != len(plan.items):
            raise why_unwritten(folder, num_bytes)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with naming(Path(self.path) / INDEX_FILE):
            super().finish(metadata, results)


class ChunkedTensor(Tensor):
    """A tensor of which the chunks are written that it lists (__create_chunk_list__)."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(self.dtype), size=self.shape
                ),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]


def _num_bytes(item: WriteItem) -> int:
    """Of the tensor that an item of a plan writes, about."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


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
        try:
            dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # which is no Exception
            first = next((failure for failure, _ in error.failures.values()), error)
            raise CheckpointError(f"{folder} cannot be read: {type(first).__name__}: {first}") from error


def files_read(tensors: dict[str, Tensor], folder: Path) -> set[str]:
    """Names of the files in a DCP folder that `load_tensors` reads on this rank. Needs only the index."""
    metadata = TensorReader(folder).read_metadata()
    stored = {name: tensor for name, tensor in tensors.items() if name in metadata.state_dict_metadata}
    items = create_default_local_load_plan(stored, metadata).items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


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
