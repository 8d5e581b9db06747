"""Weights that come to vLLM's workers in buckets, through its own interface for that."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from siirl.engines.weights.shared_buffer import open_buffer
from siirl.models.families import family_of
from siirl.models.in_vllm import InVLLM

TRANSFER_BACKEND = "siirl"
"""Name under which vLLM finds BucketTransfer."""


@dataclass
class NoInfo(WeightTransferInitInfo):
    """A bucket transfer needs no rendezvous."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Tensors in one buffer of bytes; all values are JSON."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    starts: list[int]
    """First byte of each tensor."""
    size: int
    """Bytes of all tensors."""
    place: dict[str, Any]
    """Where the buffer is (SharedBuffer.place)."""


class BucketTransfer(WeightTransferEngine):
    """vLLM's weight-transfer interface over shared memory: of the GPU (CUDA IPC), or of the host."""

    init_info_cls = NoInfo
    update_info_cls = BucketInfo

    def __init__(self, config: Any, *others: Any) -> None:
        super().__init__(config, *others)
        self._source: tuple[str, Tensor] | None = None  # what is mapped, and the mapping
        self.saw: Callable[[str, Tensor], None] | None = None  # told of what is loaded
        self._copied: dict[str, Tensor] = {}

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Nothing to meet."""

    def start_weight_update(self) -> None:  # from 0.25 on; before, vLLM's worker does this
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._load_copied()

    def receive_weights(self, update_info: BucketInfo, load_weights: Callable | None = None) -> None:
        """Load a bucket. The model keeps references until a layer is complete, so it gets copies."""
        buffer = self._buffer(update_info)
        copies = [(name, part.clone()) for name, part in _cut(buffer, update_info)]
        if self.saw is not None:
            for copy in copies:
                self.saw(*copy)
        (load_weights or self.model.load_weights)(self._for_loaders(copies))
        if buffer.is_cuda:
            torch.cuda.synchronize()

    def shutdown(self) -> None:
        """Let go of the buffer."""
        self._source = None

    def _for_loaders(self, weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights as vLLM's loaders take them into an engine that runs; those that they copy past that
        are kept until `finish_weight_update`."""
        config = getattr(self, "model_config", None)  # 0.24 has none here; InVLLM.since refuses what needs it
        row = InVLLM() if config is None else family_of(config.hf_config.model_type).vllm
        for name, weight in weights:
            experts, _, part = name.rpartition(".")
            if part in row.by_expert and experts.endswith(".experts"):
                for number, of_one in enumerate(weight):
                    yield f"{experts}.{number}.{row.by_expert[part]}", of_one
            elif name.endswith(row.copied) if row.copied else False:
                self._copied[name] = weight
            else:
                yield name, weight

    def _load_copied(self) -> None:
        """Load what was kept, and renew the copies that attention has of sinks."""
        if not self._copied:
            return
        self.model.load_weights(self._copied.items())
        self._copied = {}
        for layer in self.model.modules():
            sinks, attention = layer._parameters.get("sinks"), getattr(layer, "attn", None)
            own = getattr(getattr(attention, "impl", None), "sinks", None)
            if sinks is not None and own is not None and own.data_ptr() != sinks.data_ptr():
                own.copy_(sinks)

    def _buffer(self, info: BucketInfo) -> Tensor:
        key = str(info.place)
        if self._source is None or self._source[0] != key:
            self._source = None  # let go of the one before first
            device = getattr(self, "device", None) or torch.device("cuda", torch.cuda.current_device())
            self._source = (key, open_buffer(info.place, info.size, device))
        return self._source[1]

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Part of the interface of 0.24; siirl's links send the weights."""
        raise RuntimeError("weights are sent by a siirl weight link")


WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, BucketTransfer)


def _cut(buffer: Tensor, info: BucketInfo) -> Iterator[tuple[str, Tensor]]:
    for name, dtype_name, shape, start in zip(info.names, info.dtypes, info.shapes, info.starts, strict=True):
        dtype = getattr(torch, dtype_name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        yield name, buffer[start : start + size].view(dtype).view(shape)
