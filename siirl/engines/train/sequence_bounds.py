"""Where rows begin and end among packed tokens, and which of them share a prompt.

Legend: N packed tokens, P those of shared prompts, R those of their responses, G such prompts, S segments.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts that several rows of a packed batch share.

    They are the first segments of the batch; the responses of the first prompt follow, then those of the
    second, and so on; then whatever shares nothing.
    """

    prompt_ends: Tensor
    """int32 [G + 1], on the model's device: first token of each prompt, then P."""

    response_ends: Tensor
    """int32 [G + 1]: first token of the responses of each prompt, counted from P, then R."""

    prompt_lengths: tuple[int, ...]
    """Tokens of each prompt."""

    response_lengths: tuple[int, ...]
    """Tokens of all its responses together; 0 where each is of one token, which nothing follows."""

    longest_row: int
    """Tokens of the longest prompt with one of its responses."""

    @property
    def prompts(self) -> slice:
        """Their tokens in the batch."""
        return slice(0, sum(self.prompt_lengths))

    @property
    def responses(self) -> slice:
        """The tokens of their responses."""
        return slice(sum(self.prompt_lengths), sum(self.prompt_lengths) + sum(self.response_lengths))


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of a packed batch that this rank has, of several that share it in equal parts."""

    group: dist.ProcessGroup
    """Those ranks, in the order of their tokens."""

    tokens: slice
    """Its tokens."""

    num_tokens: int
    """How many of them are of rows; what fills the batch up comes last."""


@dataclass(frozen=True)
class SequenceBounds:
    """Where S segments begin and end among N packed tokens; tensors are on the model's device.

    A segment is a row, or, where rows share prompts, a prompt or a response.
    """

    cu_seqlens: Tensor
    """int32 [S + 1], first token of each segment, then N."""
    padded_index: Tensor
    """int64 [N], the place of each token in a right-padded batch [S * max_length]."""
    max_length: int
    """Tokens of the longest segment."""
    shared: SharedPrompts | None = None
    """Of rows that share prompts."""
    shard: SequenceShard | None = None
    """Where several ranks share the N tokens."""

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @cached_property
    def parts(self) -> tuple[tuple[slice, "SequenceBounds"], ...]:
        """Tokens and bounds of the shared prompts, and of all behind them."""
        if self.shared is None:
            return ((slice(None), self),)
        length_S, num = self.cu_seqlens.diff(), len(self.shared.prompt_lengths)
        behind = slice(self.shared.prompts.stop, None)
        halves = ((self.shared.prompts, length_S[:num]), (behind, length_S[num:]))
        return tuple((tokens, bounds_of(lengths)) for tokens, lengths in halves if len(lengths))


def with_segment(bounds: SequenceBounds, length: int) -> SequenceBounds:
    """The bounds with one more segment at the end, which shares nothing."""
    longest = max(bounds.max_length, length)
    segment_N, inside_N = bounds.padded_index // bounds.max_length, bounds.padded_index % bounds.max_length
    more = bounds.num_sequences * longest + torch.arange(length, device=inside_N.device)
    return replace(
        bounds,
        cu_seqlens=torch.cat([bounds.cu_seqlens, bounds.cu_seqlens[-1:] + length]),
        padded_index=torch.cat([segment_N * longest + inside_N, more]),
        max_length=longest,
    )


def bounds_of(length_S: Tensor) -> SequenceBounds:
    """Bounds of segments of given lengths that share nothing."""
    ends = torch.nn.functional.pad(length_S.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(length_S.max())
    segment_N = torch.repeat_interleave(length_S)
    inside_N = torch.arange(len(segment_N), device=length_S.device) - ends[segment_N]
    return SequenceBounds(ends, segment_N * longest + inside_N, longest)
