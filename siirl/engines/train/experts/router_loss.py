"""The load-balancing loss of the routers of a mixture of experts, over the tokens of a whole mini-batch.

Of a layer: E / (K T^2) sum_e P_e F_e, where P_e adds up the probability of expert e over the T tokens of the
mini-batch and F_e counts those that chose it among their K; summed over layers. It is 1 for each layer whose
experts are all alike. As F has no gradient, the loss is a sum over tokens once F is known: a pass ahead of
the mini-batch counts it, and each micro-batch then adds its share.
Source: Fedus et al., "Switch Transformers" (2021), equation 4; K choices and whole mini-batches as
megatron-core's aux_loss. Legend: N packed tokens, E experts.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl.errors import NotSupportedError


class RouterLoss:
    """Watches the routers of a model by hooks; nothing communicates but what a caller hands in."""

    def __init__(self, hf: PreTrainedModel, coefficient: float):
        recorder = (hf._can_record_outputs or {}).get("router_logits")
        if recorder is None:
            raise NotSupportedError(
                f"not supported yet: fsdp_config.moe_aux_loss_coeff={coefficient}: {type(hf).__name__} "
                "does not say what its routers are (router_logits in _can_record_outputs). Set it to 0."
            )
        self._index, self._coefficient = recorder.index, coefficient
        self._routers = [module for module in hf.modules() if isinstance(module, recorder.target_class)]
        self._counts: list[Tensor] = []
        self._weights: list[Tensor] = []
        """Per layer [E]: what the probability of each expert weighs."""
        self._shares: list[Tensor] | None = None
        """None: what passes is not ours, or it is computed again for a backward pass."""
        self._num_tokens = 0
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(functools.partial(self._see, layer))

    def count(self, passes: Callable[[], int], add_up: Callable[[list[float]], list[float]]) -> None:
        """Learn what the tokens of a mini-batch choose.

        passes: runs this rank's rows without gradient, and says how many tokens these were. add_up: sums
        numbers over all ranks of the mini-batch.
        """
        self._counts = [torch.zeros(router.num_experts, dtype=torch.int64) for router in self._routers]
        self._weights = []
        num_tokens = passes()
        sizes = [len(counts) for counts in self._counts]
        *chosen, total = add_up([*(n for counts in self._counts for n in counts.tolist()), num_tokens])
        device = next(self._routers[0].parameters()).device
        parts = torch.tensor(chosen, dtype=torch.float64).split(sizes)
        self._counts = []
        self._weights = [
            (self._coefficient * len(part) / (router.top_k * max(total, 1.0) ** 2) * part).float().to(device)
            for router, part in zip(self._routers, parts, strict=True)
        ]

    def begin(self, num_tokens: int) -> None:
        """A micro-batch of so many tokens that count follows, ahead of others; without, one that does not."""
        self._shares, self._num_tokens = [], num_tokens

    def end(self) -> Tensor | float:
        """The loss of the micro-batch that `begin` announced: its share of that of the mini-batch."""
        shares, self._shares = self._shares, None
        return sum(shares) if shares else 0.0

    def _see(self, layer: int, router: nn.Module, _: Any, found: tuple[Tensor, ...]) -> None:
        logits_NE = found[self._index][: self._num_tokens].float()
        if self._counts:
            if self._shares is not None:
                chosen = logits_NE.topk(router.top_k).indices.flatten()
                counts = self._counts[layer].to(chosen.device)
                self._counts[layer] = counts + torch.bincount(chosen, minlength=len(counts))
        elif self._weights and torch.is_grad_enabled():
            share = (logits_NE.softmax(-1).sum(0) * self._weights[layer]).sum()
            if self._shares is not None:
                self._shares.append(share)
