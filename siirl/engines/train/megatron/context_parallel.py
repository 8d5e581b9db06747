"""Context parallelism over a packed stream of tokens: who holds which tokens, and what they attend to.

The stream of N tokens, whatever rows it holds, is cut into 2 C equal parts for C ranks; rank r holds parts r
and 2 C - 1 - r, so that each has early and late tokens. Keys and values are gathered, queries stay. Legend: n
tokens on this rank, N all tokens, H query heads, K key-value heads, D head size, S runs of consecutive tokens
of one sequence among the n.
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from siirl.engines.train.attention.shared_attention import varlen_kernel
from siirl.engines.train.packed.sequence_bounds import SequenceBounds

MASKED_PAIRS = 1 << 28
"""Queries times keys that attention with a mask has at once: 1 GiB for the mask in fp32."""


@dataclass(frozen=True)
class ContextShard:
    """This rank's share of a packed stream: S runs of tokens.

    Each run attends to the tokens of its row up to its own, those of a shared prompt first.
    """

    group: dist.ProcessGroup
    index_n: Tensor
    """The tokens that it holds, in the order of the stream."""
    restore_N: Tensor
    """Places of the stream's tokens when all shares are put one after the other."""
    query_ends: Tensor
    """int32 [S + 1], first of each run among n, then n."""
    key_ends: Tensor
    """int32 [S + 1], first of each run among the keys that key_index lists, then their number."""
    key_index: Tensor
    """The tokens that are read, one run after the other."""
    longest_query: int
    """Tokens of the longest run."""
    longest_key: int
    """Most tokens that a run reads."""


def context_shard(bounds: SequenceBounds, group: dist.ProcessGroup, device: torch.device) -> ContextShard:
    """The share of this rank; the stream's length must be a multiple of 2 C. No communication."""
    ends = bounds.cu_seqlens.tolist()
    size, rank, total = group.size(), group.rank(), ends[-1]
    part = total // (2 * size)
    assert part * 2 * size == total, f"{total} tokens over {size} ranks"

    def tokens(of_rank: int) -> list[range]:
        return [range(at * part, (at + 1) * part) for at in (of_rank, 2 * size - 1 - of_rank)]

    order = _joined([span for of_rank in range(size) for span in tokens(of_rank)], device)
    restore = torch.empty_like(order)
    restore[order] = torch.arange(total, device=device)
    queries, counts, keys = [], [], []
    prompts = _prompts(bounds)
    for span in tokens(rank):
        for (first, last), prompt in zip(pairwise(ends), prompts, strict=True):
            low, high = max(first, span.start), min(last, span.stop)
            if low < high:
                queries.append(high - low)
                counts.append(len(prompt) + high - first)
                keys += [prompt, range(first, high)]
    return ContextShard(
        group=group,
        index_n=order.view(size, -1)[rank],
        restore_N=restore,
        query_ends=_ends(queries, device),
        key_ends=_ends(counts, device),
        key_index=_joined(keys, device),
        longest_query=max(queries),
        longest_key=max(counts),
    )


def _prompts(bounds: SequenceBounds) -> list[range]:
    """Of each segment the tokens before its own in its row: those of a prompt that it shares, or none."""
    before = [] if bounds.shared is None else bounds.shared.before
    return before + [range(0)] * (bounds.num_sequences - len(before))


def context_attention(
    q_nHD: Tensor,
    k_nKD: Tensor,
    v_nKD: Tensor,
    shard: ContextShard,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens to all tokens before them in their sequences, [n, H, D].

    window: of how many tokens, its own included; None: of all. Gathers keys and values over the group;
    backward adds their gradients up and scatters them.
    """
    k, v = (_gathered(x_nKD, shard) for x_nKD in (k_nKD, v_nKD))
    if q_nHD.is_cuda and q_nHD.dtype in (torch.bfloat16, torch.float16):
        attend, options = varlen_kernel()
        longest = (shard.longest_query, shard.longest_key)
        ends = (shard.query_ends, shard.key_ends)
        seen = (-1 if window is None else window - 1, 0)
        return attend(q_nHD.contiguous(), k, v, *ends, *longest, scale=scale, window_size=seen, **options)
    return _padded(q_nHD, k, v, shard, scale, window)


def _gathered(x_nKD: Tensor, shard: ContextShard) -> Tensor:
    """The keys (or values) of every run, one run after the other."""
    whole = gather_from_sequence_parallel_region(x_nKD.contiguous(), group=shard.group)
    return whole.index_select(0, shard.restore_N[shard.key_index])


def _padded(
    q_nHD: Tensor, k: Tensor, v: Tensor, shard: ContextShard, scale: float | None, window: int | None
) -> Tensor:
    """By SDPA on runs padded to the right, with a mask; for CPUs and fp32. Of many pairs of tokens by some
    queries at a time, whose mask is made again for backward."""
    num_queries, num_keys = shard.query_ends.diff(), shard.key_ends.diff()
    at_q, at_k = _places(num_queries, shard.longest_query), _places(num_keys, shard.longest_key)
    runs, key = len(num_queries), torch.arange(shard.longest_key, device=q_nHD.device)

    def pad(x: Tensor, places: Tensor, longest: int) -> Tensor:
        padded = x.new_zeros(runs * longest, *x.shape[1:]).index_copy(0, places, x)
        return padded.view(runs, longest, *x.shape[1:]).transpose(1, 2)

    def attend(queries: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
        query = torch.arange(first, first + queries.shape[2], device=q_nHD.device)[:, None]
        own = query + (num_keys - num_queries)[:, None, None]
        mask = key <= own
        if window is not None:
            mask &= key > own - window
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask.unsqueeze(1),
            scale=scale if scale is not None else 1 / math.sqrt(q_nHD.shape[-1]),
            enable_gqa=q_nHD.shape[1] != k.shape[1],
        )

    padded = pad(q_nHD, at_q, shard.longest_query)
    keys, values = pad(k, at_k, shard.longest_key), pad(v, at_k, shard.longest_key)
    size = max(1, MASKED_PAIRS // (runs * shard.longest_key))
    if shard.longest_query <= size:
        out = attend(padded, keys, values, 0)
    else:
        again = partial(checkpoint, attend, use_reentrant=False)
        firsts = range(0, shard.longest_query, size)
        parts = zip(padded.split(size, dim=2), firsts, strict=True)
        out = torch.cat([again(part, keys, values, first) for part, first in parts], dim=2)
    return out.transpose(1, 2).reshape(-1, *q_nHD.shape[1:]).index_select(0, at_q)


def _joined(runs: list[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs]).to(device)


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(counts, device=device).cumsum(0), (1, 0)).to(torch.int32)


def _places(counts: Tensor, longest: int) -> Tensor:
    """Where the elements of runs of these lengths lie when each run is padded to `longest`."""
    run = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    first = F.pad(counts.cumsum(0), (1, 0))[:-1]
    return run * longest + torch.arange(len(run), device=counts.device) - first[run]
