"""Sequences that several ranks share under FSDP2: each has some of the tokens, and in attention some heads.

All but attention works on tokens by themselves. Around attention, messages from all ranks to all turn n
tokens with all heads into all tokens with some heads, and back: attention itself sees whole rows, as on one
rank. Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
Legend: R ranks, N packed tokens, n = N / R on each, H heads of queries, K of keys and values, D head size.
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from siirl.engines.train.packed.packing import PackedBatch
from siirl.engines.train.packed.sequence_bounds import SequenceShard, with_segment
from siirl.engines.train.packed.shared_rows import own_predictions
from siirl.errors import NotSupportedError


def own_tokens(packed: PackedBatch, group: dist.ProcessGroup) -> PackedBatch:
    """This rank's tokens of a packed batch, and what they predict; the batch is filled up to equal shares.

    Its bounds stay those of all tokens. No communication.
    """
    ranks, num_tokens = group.size(), packed.input_ids.shape[1]
    extra = -num_tokens % ranks
    share = (num_tokens + extra) // ranks
    tokens = slice(group.rank() * share, (group.rank() + 1) * share)
    bounds = with_segment(packed.bounds, extra) if extra else packed.bounds
    shard = SequenceShard(group, tokens, min(max(num_tokens - tokens.start, 0), share))
    index_n = torch.arange(tokens.start, tokens.stop, device=packed.input_ids.device)
    experts = packed.experts
    if experts is not None:
        experts = F.pad(experts, (0, 0, 0, extra), value=-1)[tokens]
    return replace(
        own_predictions(packed, index_n, num_tokens + extra),
        input_ids=F.pad(packed.input_ids, (0, extra))[..., tokens],
        position_ids=F.pad(packed.position_ids, (0, extra))[..., tokens],
        bounds=replace(bounds, shard=shard),
        experts=experts,
    )


def of_all_tokens(x_nW: Tensor, shard: SequenceShard, num_tokens: int) -> Tensor:
    """Whole numbers of the packed tokens of all ranks, int32 [N, W], without what fills the batch up."""
    x_NW = x_nW.new_empty((shard.group.size() * len(x_nW), *x_nW.shape[1:]), dtype=torch.int32)
    dist.all_gather_into_tensor(x_NW, x_nW.int().contiguous(), group=shard.group)
    return x_NW[:num_tokens]


def whole_sequences(
    q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, shard: SequenceShard
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens with this rank's heads: queries [N, H / R, D], the keys and values that they attend to.

    Keys and values are repeated where their heads do not divide by R; H must.
    """
    ranks, heads = shard.group.size(), q_nHD.shape[1]
    if heads % ranks:
        raise NotSupportedError(
            f"not supported yet: ulysses_sequence_parallel_size={ranks} for a layer of {heads} attention "
            "heads: each rank has whole ones. Set it to a divisor."
        )
    parts = [_for_each_rank(x, ranks) for x in (q_nHD, k_nKD, v_nKD)]
    whole = _Exchange.apply(torch.cat(parts, dim=2), shard.group).flatten(0, 1)
    q, k, v = whole.split([part.shape[2] for part in parts], dim=1)
    return q, k, v


def all_tokens(x_nHD: Tensor, shard: SequenceShard) -> Tensor:
    """All tokens with this rank's share of the heads, [N, H / R, D]; R divides H."""
    return _Exchange.apply(_for_each_rank(x_nHD, shard.group.size()), shard.group).flatten(0, 1)


def own_shares(out_NhD: Tensor, shard: SequenceShard) -> Tensor:
    """This rank's tokens with all heads, [n, H, D], of all tokens with some."""
    ranks = shard.group.size()
    mine = _Exchange.apply(out_NhD.unflatten(0, (ranks, -1)), shard.group)
    return mine.transpose(0, 1).flatten(1, 2)


def _for_each_rank(x_nHD: Tensor, ranks: int) -> Tensor:
    """[R, n, heads of each, D]."""
    heads = x_nHD.shape[1]
    times = math.lcm(heads, ranks) // heads
    x_nHD = x_nHD if times == 1 else x_nHD.repeat_interleave(times, dim=1)
    return x_nHD.unflatten(1, (ranks, -1)).transpose(0, 1)


class _Exchange(torch.autograd.Function):
    """The r-th part of x goes to the r-th rank; the r-th part of what comes out is from it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
