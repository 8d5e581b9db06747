"""Which rows each optimizer step of a node took, and what its loss made of them: for the ledger."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.engines.train.base import TrainEngine


class TakenRows:
    """What a training node says of its rows while it runs. No communication; reads the device once a step."""

    def __init__(self, rows: TensorDict, engine: TrainEngine, keeps_tokens: bool):
        """engine: before the node runs on it. keeps_tokens: also what is said of each token."""
        self.engine, self.version = engine, engine.version
        self.tokens: dict[str, Tensor] = {}
        """What the last optimizer step on a row said of each token, [B, T] each."""
        self.updates: list[tuple[Tensor, dict[str, Tensor]]] = []
        """Of each optimizer step, which rows it took, bool [B], and means over their trained tokens, [B]."""
        self._mask_BT, self._keeps_tokens = rows["response_mask"], keeps_tokens

    def begin_update(self, mine_B: Tensor) -> None:
        """The next optimizer step takes these rows."""
        self.updates.append((mine_B, {}))

    def __call__(self, place_b: Tensor, columns: Mapping[str, Tensor]) -> None:
        """What the loss says of the tokens of a micro-batch, [b, T] each; see KeptRows."""
        place_b = place_b.cpu()
        mask_bT = self._mask_BT[place_b]
        means = self.updates[-1][1]
        for name, column_bT in columns.items():
            column_bT = column_bT.detach().float()
            if self._keeps_tokens:
                kept_BT = self.tokens.setdefault(name, torch.full(self._mask_BT.shape, torch.nan))
                kept_BT[place_b] = column_bT.cpu()
            if name in ("clip", "weight"):
                here_bT = mask_bT.to(column_bT.device)
                mean_b = (column_bT * here_bT).sum(-1) / here_bT.sum(-1).clamp(min=1)
                means.setdefault(name, torch.full((len(self._mask_BT),), torch.nan))[place_b] = mean_b.cpu()
