"""Variable-length attention by its definition, in the place of kernels that run on GPUs only.

Of S sequences among the tokens of queries, and S among those of keys: the last query of each sees all of its
keys, the one before all but the last, and so on. The gradients are those of the out and lse that are given,
which may be of more keys.
"""

import math
from itertools import pairwise
from types import SimpleNamespace

import torch

DRAWN = torch.tensor([7]), torch.tensor([8])
"""What torch's forward kernel gives for its backward."""


def parts(cu_q, cu_k, max_q, max_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert max_q == max(cu_q.diff()) and max_k == max(cu_k.diff())
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        yield slice(a, b), slice(c, d)


def scores_of(q, k, scale, causal):
    scores = torch.einsum("qhd,khd->hqk", q, repeated(k, q)) * scale
    num_q, num_k = scores.shape[1:]
    assert not causal or 0 < num_q <= num_k
    hidden = torch.ones(num_q, num_k, dtype=torch.bool).triu(1 + num_k - num_q)
    return scores.masked_fill(hidden, -math.inf) if causal else scores


def repeated(k, q):
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal):
    assert len(q) == cu_q[-1] and len(k) == len(v) == cu_k[-1]
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[1], len(q))
    for mine, theirs in parts(cu_q, cu_k, max_q, max_k):
        scores = scores_of(q[mine], k[theirs], scale, causal)
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), repeated(v[theirs], q))
        lse[:, mine] = scores.logsumexp(-1)
    return out, lse


def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal):
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for mine, theirs in parts(cu_q, cu_k, max_q, max_k):
        keys, values = repeated(k[theirs], q), repeated(v[theirs], q)
        p = (scores_of(q[mine], k[theirs], scale, causal) - lse[:, mine, None]).exp()
        dp = torch.einsum("qhd,khd->hqk", grad[mine], values)
        ds = p * (dp - (grad[mine] * out[mine]).sum(-1).t()[:, :, None]) * scale
        dq[mine] = torch.einsum("hqk,khd->qhd", ds, keys)
        for to, found in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[mine])),
            (dv, torch.einsum("hqk,qhd->khd", p, grad[mine])),
        ):
            to[theirs] = found.unflatten(1, (k.shape[1], -1)).sum(2)
    return dq, dk, dv


def flash_four_forward(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse
):
    """_flash_attn_fwd of the package flash-attn-4."""
    assert return_lse
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return *forward(q, k, v, *ends, softmax_scale, causal), None, None, None


def flash_four_backward(
    q, k, v, out, dout, lse, *, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
):
    """Its _flash_attn_bwd."""
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return backward(dout, q, k, v, out, lse, *ends, softmax_scale, causal)


def _torch_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
    assert dropout == 0.0 and not debug and all(x.is_contiguous() for x in (q, k, v))
    return *forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal), *DRAWN, None


def _torch_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, unused, *, scale
):
    assert dropout == 0.0 and (seed, unused) == DRAWN
    return backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal)


torch_kernels = SimpleNamespace(
    _flash_attention_forward=_torch_forward, _flash_attention_backward=_torch_backward
)
"""torch.ops.aten."""
