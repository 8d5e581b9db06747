"""Routers: those of DeepSeek and GLM-4-MoE, and those of this rank's stages that see or take experts.

A layer finds the experts of a micro-batch with the micro-batch itself: schedules run the forward pass of one
before the backward pass of another, which may compute a layer again. Legend: n tokens of this rank's share,
N packed tokens, E experts, G groups, e experts of a group, K experts of a token in a layer, W of all layers.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from siirl.data.rows import DTYPES
from siirl.engines.train.experts.router_replay import RouterReplay, put_experts
from siirl.engines.train.megatron.micro_batch import MicroBatch
from siirl.engines.train.megatron.pipeline_stage import Stage
from siirl.engines.train.megatron.weights import CHOICE_BIAS
from siirl.models.sizes import RouterChoices


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


GROUP_RANKERS = {"sigmoid": 2, "softmax": 1}
"""Function of the logits -> so many of its experts say how good a group is."""


class GroupRouter(TopKRouter):
    """By transformers' arithmetic: megatron-core's has weights sum up to 1, and ranks groups otherwise.

    DeepSeek-V3 and GLM-4-MoE: the likeliest experts are those with the greatest sigmoid plus a bias, which
    nothing trains here, among the experts of the best groups; their weights follow from the sigmoids alone.
    DeepSeek-V2: softmax, no bias. Sources: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.2.2, and "DeepSeek-V3
    technical report" (2024), section 2.1.2.

    Read of the configuration: moe_router_num_groups and the fields beside it.

    moe_router_pre_softmax says that the weights of the chosen experts are left as they are, and do not sum up
    to 1.
    """

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self._by_sigmoid = config.moe_router_score_function == "sigmoid"
        if self._by_sigmoid:
            bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
            self.register_buffer(CHOICE_BIAS, bias.to(torch.cuda.current_device()))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [N, E], zeros but for the chosen, and which those are. No communication."""
        config = self.config
        logit_NE = logits.view(-1, config.num_moe_experts)
        logit_NE = logit_NE if logit_NE.dtype == torch.float64 else logit_NE.float()
        score_NE = logit_NE.sigmoid() if self._by_sigmoid else logit_NE.softmax(-1)
        _, chosen_NK = self._ranks(score_NE.detach()).topk(self.topk, dim=-1)
        weight_NK = score_NE.gather(-1, chosen_NK)
        if not config.moe_router_pre_softmax:
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
        weight_NK = weight_NK * config.moe_router_topk_scaling_factor
        weight_NE = torch.zeros_like(score_NE).scatter(-1, chosen_NK, weight_NK)
        return weight_NE, torch.zeros_like(score_NE, dtype=torch.bool).scatter(-1, chosen_NK, True)

    def _ranks(self, score_NE: Tensor) -> Tensor:
        """By which experts are chosen; -inf of those that are not in the best groups."""
        num_groups, num_best = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        rank_NE = score_NE + self.get_buffer(CHOICE_BIAS) if self._by_sigmoid else score_NE
        if num_best == num_groups:
            return rank_NE
        rank_NGe = rank_NE.view(len(rank_NE), num_groups, -1)
        rankers = GROUP_RANKERS[self.config.moe_router_score_function]
        group_NG = rank_NGe.topk(rankers, dim=-1).values.sum(-1)
        best = group_NG.topk(num_best, dim=-1).indices
        others_NG = torch.ones_like(group_NG, dtype=torch.bool).scatter(-1, best, False)
        return rank_NGe.masked_fill(others_NG.unsqueeze(-1), float("-inf")).view_as(rank_NE)
