"""What ranks that share the tokens of a packed batch do alike: each predicts what follows its own tokens.

Legend: N packed tokens, n those of this rank, M response tokens.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.engines.train.packed.packing import PackedBatch


def own_predictions(packed: PackedBatch, index_n: Tensor, num_tokens: int) -> PackedBatch:
    """The packed rows with the predictions only that this rank's tokens make, maybe none.

    index_n: those tokens, of so many in all.
    """
    place_N = torch.full((num_tokens,), -1, device=index_n.device)
    place_N[index_n] = torch.arange(len(index_n), device=place_N.device)
    place_M = place_N[packed.predict_index]
    own_M = place_M >= 0
    return replace(
        packed,
        predict_index=place_M[own_M],
        target=packed.target[own_M],
        cell=packed.cell[own_M],
        ref_hidden=None if packed.ref_hidden is None else packed.ref_hidden[own_M],
        top_ids=None if packed.top_ids is None else packed.top_ids[own_M],
    )


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over ranks that all compute the same loss of it: each gets its own gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
