"""The way of weights into an engine's process: pieces of memory that it maps; and what is kept of them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from siirl.config import Config
from siirl.engines.rollout.served.kept_weights import KeptWeights
from siirl.engines.rollout.served.shared_buffer import SharedBuffer
from siirl.engines.rollout.weight_loading import WeightSpecs, tensor_names
from siirl.engines.train.adapters.lora import adapter_name, add_lora
from siirl.engines.train.hf_model import model_class

BUCKET_BYTES = 256 << 20
"""Weights reach the engine in pieces of this size, or of the largest tensor."""
ALIGN_BYTES = 16

Bucket = dict[str, Any]
"""What of a buffer the engine shall load, see BucketInfo of native_transfer.py."""


class WeightTransfer:
    """Packs whole tensors, in the engine's types, into a buffer that its process reads; may keep them all.

    What is kept is for a process that takes the place of the first one. It lies in host memory: on a CPU the
    process reads the weights there in the first place; on a GPU it is a copy of what passes through a buffer
    of the device.
    """

    def __init__(self, specs: WeightSpecs, device: torch.device, keeps: bool) -> None:
        """specs: of the engine's weights; adapters come another way."""
        self._specs, self._device = specs, device
        self._sizes = {name: _room(*spec) for name, spec in specs.items() if adapter_name(name) is None}
        self.kept = KeptWeights(sum(self._sizes.values()), device) if keeps else None

    @contextmanager
    def buffer(self) -> Iterator[SharedBuffer]:
        """The memory that the process maps during an update. RolloutError if the host has no room for it."""
        if self.kept is not None:
            self.kept.restart()
        if self.kept is not None and self._device.type == "cpu":
            yield self.kept.buffer
            return
        largest, total = max(self._sizes.values()), sum(self._sizes.values())
        buffer = SharedBuffer(max(largest, min(total, BUCKET_BYTES)), self._device)
        try:
            yield buffer
        finally:
            buffer.close()

    def fill(
        self, weights: Iterator[tuple[str, Tensor]], buffer: SharedBuffer
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """Put as many tensors into the buffer as fit, or a bucket has; describe each filling, give its bytes.

        A buffer that is kept is filled once, from its begin to its end.
        """
        entries: list[tuple[str, torch.dtype, list[int], int]] = []
        begin = end = 0
        stays = self.kept is not None and buffer is self.kept.buffer
        for name, tensor in weights:
            shape, dtype = self._specs[name]
            room = _room(shape, dtype)
            if entries and end + room - begin > min(buffer.size, BUCKET_BYTES):
                yield self._described(entries), buffer.data[begin:end]
                entries, begin = [], end if stays else 0
                end = begin
            size = math.prod(shape) * dtype.itemsize
            buffer.data[end : end + size].view(dtype).view(shape).copy_(tensor)
            entries.append((name, dtype, list(shape), end))
            end += room
        if entries:
            yield self._described(entries), buffer.data[begin:end]

    @contextmanager
    def keeping(self, bucket: Bucket, data: Tensor) -> Iterator[Bucket]:
        """Copy the bytes of a bucket while the process loads it, where they are to be kept and are not yet.

        Gives what another process is to load in the place of it, with size and place.
        """
        if self.kept is None or self._device.type == "cpu":
            yield bucket
            return
        begin = self.kept.reserve(len(data))
        copying = self.kept.copying(begin, data)
        first = bucket["starts"][0]
        starts = [begin + start - first for start in bucket["starts"]]
        buffer = self.kept.buffer
        try:
            yield bucket | {"starts": starts, "size": buffer.size, "place": buffer.place}
        finally:
            copying.result()

    def close(self) -> None:
        """Free what is kept. Idempotent."""
        if self.kept is not None:
            self.kept.close()

    def _described(self, entries: list[tuple[str, torch.dtype, list[int], int]]) -> Bucket:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {
            "names": [name for name, _, _, _ in entries],
            "dtypes": [str(dtype).removeprefix("torch.") for _, dtype, _, _ in entries],
            "shapes": [shape for _, _, shape, _ in entries],
            "starts": [start for _, _, _, start in entries],
        }


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor in a buffer: rounded up, so that each starts where any type may."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


def joined_places(places: list[dict[str, Any]]) -> dict[str, Any]:
    """One place for the workers of an engine: the first rank's memory, or the handles of all GPUs."""
    if "path" in places[0]:
        return places[0]
    return {"handles": {uuid: handle for place in places for uuid, handle in place["handles"].items()}}


def weights_of_directory(hf_config: Any, cfg: Config, adapted: bool) -> tuple[WeightSpecs, dict[str, str]]:
    """Names, shapes and types of the tensors of a Hugging Face directory, and of its adapter."""
    dtype, source = cfg.actor_rollout_ref.rollout.dtype, cfg.actor_rollout_ref.model
    torch_dtype = (hf_config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        model = model_class(hf_config, "lm").from_config(
            hf_config, dtype=torch_dtype, trust_remote_code=source.trust_remote_code
        )
    model.tie_weights()
    if adapted:
        add_lora(model, source, cfg.trainer.seed)
    return tensor_names(model)
