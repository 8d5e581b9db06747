"""Full tensors under Hugging Face names, out of a model cut up by tensor, pipeline and expert parallelism."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.engines.train.adapters.lora import adapter_name
from siirl.engines.train.megatron.model import LocalParams
from siirl.engines.train.megatron.parameter_entries import Entry, hf_shapes, runs
from siirl.engines.train.megatron.scope import MegatronScope
from siirl.engines.train.megatron.vision_stage import TOWER
from siirl.parallel.dims import ParallelDims

BUCKET_BYTES = 64 << 20
"""Full tensors are gathered for at least so many bytes at once: small ones together, large ones alone."""


@dataclass(frozen=True)
class _Slot:
    """Entries of which each rank of a gather holds a shard: a dense one, or one expert of each EP rank; all
    experts of a layer, those of a rank after one another, where files have them in one tensor."""

    entries: tuple[Entry, ...]
    stage: int
    is_expert: bool

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What slots that are gathered together have in common."""
        return self.stage, self.is_expert, self.entries[0].untrained

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which it leaves, where the model's leave in this one."""
        return torch.float32 if self.entries[0].untrained else dtype


class Exporter:
    """Gathers the weights of a model. Build and use it on all ranks of the model, inside its scope."""

    def __init__(self, params: LocalParams, scope: MegatronScope, dims: ParallelDims):
        """Collective over the pipeline: ranks tell each other which layers they hold."""
        self._params, self._dims = params, dims
        self._pp = scope.groups.pp
        self._dense, self._expert = scope.groups.tp, scope.groups.tp_ep
        self._shapes = hf_shapes(params.entries)
        slots = self._make_slots(self._stage_of_layers())
        self._base = [slot for slot in slots if not slot.entries[0].adapts]
        self._adapter = [slot for slot in slots if slot.entries[0].adapts]

    def specs(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Hugging Face name -> (shape, type), in the order of `tensors`. No communication."""
        return {
            block.hf: (self._shapes[block.hf], slot.dtype(dtype))
            for slot in self._base
            for entry in slot.entries
            for block in entry.blocks
        }

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights, adapters merged, cast before the gather; memory beyond the weights is about two
        buckets. Collective."""
        return self._tensors(self._base, dtype, merges=True)

    def adapter(self, dtype: torch.dtype, with_base: bool) -> Iterator[tuple[str, Tensor]]:
        """The adapters under X.lora_A.weight and X.lora_B.weight, and the base unmerged. As `tensors`."""
        slots = [*(self._base if with_base else ()), *self._adapter]
        found = self._tensors(slots, dtype, merges=False)
        return ((adapter_name(name) or name, tensor) for name, tensor in found)

    @torch.no_grad()
    def _tensors(
        self, slots: Iterable[_Slot], dtype: torch.dtype, merges: bool
    ) -> Iterator[tuple[str, Tensor]]:
        bucket: list[_Slot] = []
        num_bytes = 0
        for slot in slots:
            if bucket and slot.kind != bucket[0].kind:
                yield from self._gathered(bucket, dtype, merges)
                bucket, num_bytes = [], 0
            bucket.append(slot)
            num_bytes += self._numel(slot) * self._places(slot.is_expert) * dtype.itemsize
            if num_bytes >= BUCKET_BYTES:
                yield from self._gathered(bucket, dtype, merges)
                bucket, num_bytes = [], 0
        if bucket:
            yield from self._gathered(bucket, dtype, merges)

    def _gathered(
        self, bucket: list[_Slot], dtype: torch.dtype, merges: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """One all-gather among the ranks of the stage, then one broadcast to the other stages."""
        sizes = [self._numel(slot) for slot in bucket]
        stage, is_expert, dtype = bucket[0].stage, bucket[0].is_expert, bucket[0].dtype(dtype)
        group, places = (self._expert if is_expert else self._dense), self._places(is_expert)
        some = next(iter(self._params))[0]
        received = torch.empty(places * sum(sizes), dtype=dtype, device=some.device)
        if self._pp.rank() == stage:
            sent = torch.cat([self._local(slot, merges).to(dtype).reshape(-1) for slot in bucket])
            if places == 1:
                received = sent
            else:
                dist.all_gather_into_tensor(received, sent, group=group)
        if self._dims.pp > 1:
            dist.broadcast(received, group=self._pp, group_src=stage)
        for slot, shards in zip(bucket, received.view(places, -1).split(sizes, dim=1), strict=True):
            yield from self._assembled(slot, shards)

    def _assembled(self, slot: _Slot, shards: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors of a slot; shards: a row for each rank of the gather."""
        size, each = self._size(slot.is_expert), self._each(slot)
        full: dict[str, Tensor] = {}
        for number, entry in enumerate(slot.entries):
            for name in dict.fromkeys(block.hf for block in entry.blocks if block.hf):
                if name not in full:
                    full[name] = shards.new_empty(self._shapes[name])
            for place in range(size):
                shard = shards[number // each * size + place]
                shard = shard.view(each, *entry.local_shape(size))[number % each]
                for run in runs(entry, place, size):
                    target = full[run.hf][entry.expert] if entry.stacked else full[run.hf]
                    target = target[run.row : run.row + run.num_rows]
                    if entry.columns is not None:
                        target = target[:, run.column : run.column + shard.shape[1]]
                    target.copy_(shard[run.start : run.start + run.num_rows])
            if not entry.stacked:
                yield from full.items()
                full = {}
        yield from full.items()

    def _local(self, slot: _Slot, merges: bool) -> Tensor:
        """This rank's shard of a slot, its adapters merged or left out."""
        held = (self._params.by_name.get(entry.name) for entry in slot.entries)
        found = []
        for param, entry in (one for one in held if one is not None):
            adapter = self._params.adapters.get(entry.name) if merges else None
            found.append(param if adapter is None else adapter.merged(param))
        return found[0] if len(found) == 1 else torch.stack(found)

    def _numel(self, slot: _Slot) -> int:
        return self._each(slot) * prod(slot.entries[0].local_shape(self._size(slot.is_expert)))

    def _each(self, slot: _Slot) -> int:
        """Entries of which a rank holds a shard."""
        return len(slot.entries) // (self._dims.ep if slot.is_expert else 1)

    def _size(self, is_expert: bool) -> int:
        """Ranks that cut a parameter among them."""
        return self._dims.etp if is_expert else self._dims.tp

    def _places(self, is_expert: bool) -> int:
        """Ranks of a gather."""
        return self._dims.etp * self._dims.ep if is_expert else self._dims.tp

    def _stage_of_layers(self) -> dict[int, int]:
        mine = {entry.layer for _, entry in self._params if entry.layer is not None}
        total = 1 + max(entry.layer or 0 for entry in self._params.entries)
        held = torch.tensor([self._pp.rank() if layer in mine else 0 for layer in range(total)])
        dist.all_reduce(held, group=self._pp)
        return dict(enumerate(held.tolist()))

    def _make_slots(self, stage_of_layer: dict[int, int]) -> list[_Slot]:
        slots: list[_Slot] = []
        experts: dict[tuple[str, int], dict[int, Entry]] = {}
        for entry in self._params.entries:
            if entry.layer is None:
                stage = 0 if entry.name.startswith(("embedding", TOWER)) else self._dims.pp - 1
                slots.append(_Slot((entry,), stage, False))
            elif entry.expert is None:
                slots.append(_Slot((entry,), stage_of_layer[entry.layer], False))
            else:
                kind = entry.name.replace(f"experts.{entry.expert}.", "experts.*.")
                experts.setdefault((kind, entry.layer), {})[entry.expert] = entry
        slots.sort(key=lambda slot: slot.entries[0].untrained)  # a bucket has one type
        for (_, layer), found in experts.items():
            per_rank = len(found) // self._dims.ep
            if found[0].stacked:
                every = tuple(found[expert] for expert in range(len(found)))
                slots.append(_Slot(every, stage_of_layer[layer], True))
                continue
            for first in range(per_rank):
                chosen = tuple(found[first + rank * per_rank] for rank in range(self._dims.ep))
                slots.append(_Slot(chosen, stage_of_layer[layer], True))
        return slots
