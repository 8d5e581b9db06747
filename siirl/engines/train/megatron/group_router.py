"""The router of DeepSeek-V3 and GLM-4-MoE, by transformers' arithmetic.

Megatron's own knows no weights that do not sum up to 1, and ranks a group by another number of its experts.

The likeliest experts are those with the greatest sigmoid plus a bias, which nothing trains here, among the
experts of the best groups; their weights follow from the sigmoids alone. Source: DeepSeek-AI, "DeepSeek-V3
technical report" (2024), section 2.1.2. Legend: N tokens, E experts, G groups, K experts of a token.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from siirl.engines.train.megatron.weights import CHOICE_BIAS

GROUP_RANKERS = 2
"""So many of its experts say how good a group is."""


class GroupRouter(TopKRouter):
    """Read of the configuration: moe_router_num_groups and the fields beside it; moe_router_pre_softmax says
    that the weights of the chosen experts are left as they are, and do not sum up to 1."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.register_buffer(CHOICE_BIAS, bias.to(torch.cuda.current_device()))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [N, E], zeros but for the chosen, and which those are. No communication."""
        config = self.config
        logit_NE = logits.view(-1, config.num_moe_experts)
        score_NE = (logit_NE if logit_NE.dtype == torch.float64 else logit_NE.float()).sigmoid()
        rank_NE = score_NE.detach() + self.get_buffer(CHOICE_BIAS)
        rank_NE = _in_groups(rank_NE, config.moe_router_num_groups, config.moe_router_group_topk)
        _, chosen_NK = rank_NE.topk(self.topk, dim=-1)
        weight_NK = score_NE.gather(-1, chosen_NK)
        if not config.moe_router_pre_softmax:
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
        weight_NK = weight_NK * config.moe_router_topk_scaling_factor
        weight_NE = torch.zeros_like(score_NE).scatter(-1, chosen_NK, weight_NK)
        return weight_NE, torch.zeros_like(score_NE, dtype=torch.bool).scatter(-1, chosen_NK, True)


def _in_groups(rank_NE: Tensor, num_groups: int, num_chosen: int) -> Tensor:
    """The ranks of experts that are in the best groups; -inf of the others."""
    if num_chosen == num_groups:
        return rank_NE
    of_group_NGe = rank_NE.view(len(rank_NE), num_groups, -1)
    group_NG = of_group_NGe.topk(GROUP_RANKERS, dim=-1).values.sum(-1)
    best = group_NG.topk(num_chosen, dim=-1).indices
    others_NG = torch.ones_like(group_NG, dtype=torch.bool).scatter(-1, best, False)
    return of_group_NGe.masked_fill(others_NG.unsqueeze(-1), float("-inf")).view_as(rank_NE)
