"""The routers of DeepSeek and GLM-4-MoE, by transformers' arithmetic.

Megatron's own knows no weights that do not sum up to 1, and ranks a group by another number of its experts.

DeepSeek-V3 and GLM-4-MoE: the likeliest experts are those with the greatest sigmoid plus a bias, which
nothing trains here, among the experts of the best groups; their weights follow from the sigmoids alone.
DeepSeek-V2: softmax, no bias. Sources: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.2.2, and "DeepSeek-V3
technical report" (2024), section 2.1.2. Legend: N tokens, E experts, G groups, e experts of a group, K
experts of a token.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from siirl.engines.train.megatron.weights import CHOICE_BIAS

GROUP_RANKERS = {"sigmoid": 2, "softmax": 1}
"""Function of the logits -> so many of its experts say how good a group is."""


class GroupRouter(TopKRouter):
    """Read of the configuration: moe_router_num_groups and the fields beside it.

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
