"""The experts that tokens are computed by: seen, or given in place of those that a router would choose.

A router takes the likeliest experts of a token by one call of topk over all experts, whatever it does with
groups of them before; the weights of these follow from what it ranked, or from the numbers that this call
returns. Given experts take the place of its result, so their weights, and the gradient of the router, are
those of the model as it is now. Legend: N tokens, K experts of each, L layers, W = L K.

Sources: Zheng et al., "Group sequence policy optimization" (2025), section 5.3, and "Stabilizing
reinforcement learning with LLMs" (2025), for those of the trainer's own pass; Ma et al., "Stabilizing MoE
reinforcement learning by aligning training and inference routers" (2025), for those of the rollout engine.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from siirl.errors import NotSupportedError
from siirl.models.sizes import RouterChoices, router_choices


class RouterReplay:
    """The routers of a model, or of a part of it; nothing communicates."""

    def __init__(self, routers: Sequence[nn.Module], choices: RouterChoices):
        self.choices = choices
        """How many there are."""
        self._given: list[Tensor | None] = [None] * len(routers)
        self._seen: list[Tensor | None] = [None] * len(routers)
        for layer, router in enumerate(routers):
            router.forward = functools.partial(self._route, layer, router.forward)

    @classmethod
    def of_model(cls, hf: PreTrainedModel) -> "RouterReplay":
        """All routers of a model of transformers. NotSupportedError if it does not say what they are."""
        recorder = (hf._can_record_outputs or {}).get("router_logits")
        choices = router_choices(hf.config.get_text_config().to_dict())
        if recorder is None or choices is None:
            raise NotSupportedError(
                f"not supported yet: router_replay for a {type(hf).__name__}, which does not say what its "
                "routers are (router_logits in _can_record_outputs). Set router_replay.mode=disabled."
            )
        routers = [module for module in hf.modules() if isinstance(module, recorder.target_class)]
        assert len(routers) == choices.layers, "other routers than config.json says"
        return cls(routers, choices)

    def give(self, expert_NW: Tensor | None) -> None:
        """The experts of the tokens of the passes that follow, until others are given; -1: the router's own.

        None: the router's own for all.
        """
        parts = (
            [None] * len(self._given) if expert_NW is None else expert_NW.long().chunk(len(self._given), 1)
        )
        self._given = list(parts)

    def give_layer(self, layer: int, expert_NK: Tensor | None) -> None:
        """The same of one router."""
        self._given[layer] = expert_NK

    def seen(self) -> Tensor:
        """Those of the last pass, int16 [N, W]."""
        return torch.cat([self.seen_in_layer(layer) for layer in range(len(self._seen))], dim=1)

    def seen_in_layer(self, layer: int) -> Tensor:
        """The same of one router, [N, K]."""
        seen_NK = self._seen[layer]
        assert seen_NK is not None, "a router that nothing has passed"
        return seen_NK.short()

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        choice = _Choice(self._given[layer], self.choices.experts)
        with choice:
            found = forward(*args, **kwargs)
        assert choice.expert_NK is not None, "a router that does not choose by topk"
        self._seen[layer] = choice.expert_NK
        return found


class _Choice(TorchFunctionMode):
    """Inside of it, topk over all experts takes what is given."""

    def __init__(self, given_NK: Tensor | None, num_experts: int):
        super().__init__()
        self.expert_NK: Tensor | None = None
        self._given_NK, self._num_experts = given_NK, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return found
        assert self.expert_NK is None, "a router that chooses in several steps"
        value_NK, own_NK = found
        if self._given_NK is not None:
            own_NK = torch.where(self._given_NK < 0, own_NK, self._given_NK)
            value_NK = args[0].gather(-1, own_NK)
        self.expert_NK = own_NK
        return value_NK, own_NK


def put_experts(
    columns: dict[str, Tensor], index: list[int], places: tuple[Tensor, Tensor], expert_NW: Tensor
) -> None:
    """Write those of tokens to EXPERT_FIELDS of their rows.

    index: the rows of the micro-batch. places: of each token its row there, and its column in prompt and
    response together.
    """
    row_N, column_N = (place_N.cpu() for place_N in places)
    row_N, expert_NW = torch.tensor(index)[row_N], expert_NW.cpu()
    first = 0
    for column_BCW in columns.values():
        last = first + column_BCW.shape[1]
        here_N = (column_N >= first) & (column_N < last)
        column_BCW[row_N[here_N], column_N[here_N] - first] = expert_NW[here_N].to(column_BCW.dtype)
        first = last
