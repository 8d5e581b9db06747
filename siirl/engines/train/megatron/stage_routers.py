"""The routers of this rank's stages, which see what they choose, or take experts that are given.

A layer finds the experts of a micro-batch with the micro-batch itself: schedules run the forward pass of one
before the backward pass of another, which may compute a layer again. Legend: n tokens of this rank's share,
N packed tokens, K experts of a token in a layer, W of all layers.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from siirl.compiler.router_choices import RouterChoices
from siirl.data.rows import DTYPES
from siirl.engines.train.megatron.micro_batch import MicroBatch
from siirl.engines.train.megatron.pipeline_stage import Stage
from siirl.engines.train.router_replay import RouterReplay, put_experts


class StageRouters:
    """Nothing communicates but `whole`."""

    def __init__(self, stages: Sequence[Stage], choices: RouterChoices):
        layers = [layer for stage in stages for layer in stage.decoder.layers if hasattr(layer.mlp, "router")]
        self.choices = choices
        every = stages[0].config.moe_layer_freq
        self._places = [number for number, has_experts in enumerate(every, 1) if has_experts]
        self._replay = RouterReplay([layer.mlp.router for layer in layers], choices)
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._give, place), with_kwargs=True)
            layer.register_forward_hook(functools.partial(self._see, place), with_kwargs=True)

    def _give(self, place: int, layer: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        expert_nW = kwargs["packed_seq_params"].experts
        given_nK = None
        if expert_nW is not None:
            given_nK = expert_nW[:, self._first(layer) :][:, : self.choices.top_k].long()
        self._replay.give_layer(place, given_nK)

    def _see(self, place: int, layer: nn.Module, _: Any, kwargs: dict[str, Any], found: Any) -> None:
        kwargs["packed_seq_params"].seen[self._first(layer)] = self._replay.seen_in_layer(place)

    def _first(self, layer: nn.Module) -> int:
        """Where those of a layer begin among the W, which layers without experts have no part of."""
        return self._places.index(layer.layer_number) * self.choices.top_k

    def put(self, columns: dict[str, Tensor], index: list[int], batch: MicroBatch) -> None:
        """Write what the layers of this rank that have run chose for its tokens."""
        places = batch.packed.places
        if places is None:
            return
        real_n = batch.own_n < len(places[0])
        mine = tuple(place_N.to(batch.own_n.device)[batch.own_n[real_n]] for place_N in places)
        for first, expert_nK in batch.arguments.seen.items():
            of_layer = slice(first, first + self.choices.top_k)
            parts = {name: column_BCW[..., of_layer] for name, column_BCW in columns.items()}
            put_experts(parts, index, mine, expert_nK[real_n])

    def whole(
        self, columns: dict[str, Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> dict[str, Tensor]:
        """What all ranks of a shard have put, on each of them. Collective over the groups, one by one.

        device: where the groups communicate.
        """
        found = {}
        for name, column in columns.items():
            together = column.to(device, torch.int32)
            for group in groups:
                dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            found[name] = together.to(column.device, DTYPES[self.choices.dtype])
        return found
