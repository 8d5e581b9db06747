"""Keys and values as whole rows read them (RowKeys), and their gradients back at the tokens.

The M that are gathered live as long as the attention of a layer: a backward pass gathers them again. They are
M x K x D numbers twice, and in a backward pass their gradients as many: what rows with prompts of their own
would have. Legend: N packed tokens, M keys that rows read, K key-value heads, D head size.
"""

import torch
from torch import Tensor

from siirl.engines.train.sequence_bounds import RowKeys

if torch.cuda.is_available():
    from siirl.engines.train import gathered_keys_triton
else:
    gathered_keys_triton = None


def gathered(k_NKD: Tensor, v_NKD: Tensor, keys: RowKeys | None) -> tuple[Tensor, Tensor]:
    """Keys and values [M, K, D], whose memory lies in that order; those that are given, if keys is None."""
    if keys is None:
        return k_NKD, v_NKD
    if k_NKD.is_cuda and gathered_keys_triton is not None:
        return gathered_keys_triton.gathered(k_NKD, v_NKD, keys)
    return k_NKD.index_select(0, keys.index), v_NKD.index_select(0, keys.index)


def added_up(
    dk_MKD: Tensor, dv_MKD: Tensor, k_NKD: Tensor, v_NKD: Tensor, keys: RowKeys | None
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v, which lie as these do, of those of the gathered ones.

    Added up in fp32 at least, in the order of the M: the same in every run.
    """
    if keys is None:
        return dk_MKD, dv_MKD
    if dk_MKD.is_cuda and gathered_keys_triton is not None:
        return gathered_keys_triton.added_up(dk_MKD, dv_MKD, k_NKD, v_NKD, keys)
    pairs = ((k_NKD, dk_MKD), (v_NKD, dv_MKD))
    dk, dv = (torch.zeros_like(x).index_add_(0, keys.index, grad) for x, grad in pairs)  # it rounds once
    return dk, dv
