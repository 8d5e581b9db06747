"""Where rows begin and end among packed tokens, and which of them share a prompt.

Legend: N packed tokens, P those of shared prompts, R those of their responses, G such prompts, S segments,
M keys that all segments read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.engines.train.transfers import sent

MOST_GATHERED = 2.0
"""Keys for each token up to which rows that share prompts read them in one call of attention (RowKeys).

For that call a response's keys and values are copied with those of its prompt. Token budgets count a shared
prompt once, so where prompts are long beside responses, the copies would have no bound. Up to here they and
their gradients take less than the values that an MLP of the layer has, which are not there yet in a forward
pass, and are gone in a backward pass: the peak that the memory estimate counts stays the peak. Beyond, they
also take longer than a second call of attention does.
"""


LEAST_WIDTH = 16
"""Tokens to which the shortest rows are padded, where rows are padded to powers of two."""


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

    response_lengths: tuple[tuple[int, ...], ...]
    """Tokens of each of its responses that has a segment: none of one token has, as nothing follows it."""

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Tokens of all responses to each prompt together."""
        return tuple(map(sum, self.response_lengths))

    @cached_property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with one of its responses."""
        rows = zip(self.prompt_lengths, self.response_lengths, strict=True)
        return max(prompt + max(own, default=0) for prompt, own in rows)

    @cached_property
    def prompts(self) -> slice:
        """Their tokens in the batch."""
        return slice(0, sum(self.prompt_lengths))

    @cached_property
    def responses(self) -> slice:
        """The tokens of their responses."""
        return slice(self.prompts.stop, self.prompts.stop + sum(self.totals))

    @cached_property
    def before(self) -> list[range]:
        """Of each segment of a prompt or a response, the tokens before its own in its row."""
        prompts = pairwise(accumulate(self.prompt_lengths, initial=0))
        runs = zip(prompts, self.response_lengths, strict=True)
        return [range(0)] * len(self.prompt_lengths) + [range(*prompt) for prompt, own in runs for _ in own]


@dataclass(frozen=True)
class RowKeys:
    """The tokens whose keys and values each segment reads, one segment after the other: M in all.

    Those of a prompt, or of a row that shares nothing, are its own; those of a response are its prompt's and
    then its own. So a causal mask that ends with the last query and the last key together is that of whole
    rows, by one call of a kernel for all segments.
    """

    index: Tensor
    """int64 [M], the token of each."""

    ends: Tensor
    """int32 [S + 1], first of each segment among the M, then M."""

    longest: int
    """Most that a segment reads."""

    num_tokens: int
    """N."""

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Where each token stands among the M: its first place in what follows, int32 [N + 1]; int64 [M].

        The places of a token ascend. Made by the device when a backward pass first asks; the host waits for
        nothing.
        """
        token_M, place_M = self.index.sort(stable=True)
        token_N = torch.arange(self.num_tokens + 1, device=token_M.device)
        return torch.searchsorted(token_M, token_N, out_int32=True), place_M


@dataclass(eq=False)
class Taps:
    """What a convolution of so many tokens reads."""

    place_N1: Tensor
    """int32: tokens before each in its segment."""
    begin_M: Tensor | None = None
    """int64: the tokens that read some of a shared prompt before their segment."""
    source_WM: Tensor | None = None
    """int64: the token so many before each of them in its row; -1 where there is none."""


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of a packed batch that this rank has, of several that share it in equal parts."""

    group: dist.ProcessGroup
    """Those ranks, in the order of their tokens."""

    tokens: slice
    """Its tokens."""

    num_tokens: int
    """How many of them are of rows; what fills the batch up comes last."""


@dataclass(eq=False)
class SequenceBounds:
    """Where S segments begin and end among N packed tokens; tensors are on the model's device.

    A segment is a row, or, where rows share prompts, a prompt or a response. Not frozen, though nothing
    changes it: torch's compiler (2.11) reads the fields of a frozen argument of a compiled layer, compiles
    the layer again for another number of prompts, and gives up after eight.
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
    alike: tuple[tuple[Tensor, "SequenceBounds"], ...] = ()
    """The tokens and bounds of rows that are padded together, if what is computed of a row shall not depend
    on how long the others are."""
    taps: Taps | None = None
    """Of models with convolutions, while their layers compute."""

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @cached_property
    def keys(self) -> RowKeys | None:
        """What rows of which some share a prompt read, made on the host; None where none do, or where it
        would be more than MOST_GATHERED for each token."""
        if self.shared is None:
            return None
        shared, num_tokens, device = self.shared, len(self.padded_index), self.cu_seqlens.device
        again = sum(map(len, shared.before))
        if num_tokens + again > MOST_GATHERED * num_tokens:
            return None
        own = pairwise(accumulate(chain(shared.prompt_lengths, *shared.response_lengths), initial=0))
        runs = [
            run for before, ends in zip(shared.before, own, strict=True) for run in (before, range(*ends))
        ]
        runs.append(range(shared.responses.stop, num_tokens))
        first, length = torch.tensor([(run.start, len(run)) for run in runs]).unbind(1)
        end = length.cumsum(0)
        index_M = torch.arange(num_tokens + again) + (first - end + length).repeat_interleave(length)
        behind = self.cu_seqlens[len(shared.before) + 1 :] + again
        ends = torch.nn.functional.pad(end[1:-1:2], (1, 0)).to(torch.int32)
        longest = max(self.max_length, shared.longest_row)
        return RowKeys(sent(index_M, device), torch.cat([sent(ends, device), behind]), longest, num_tokens)

    @cached_property
    def parts(self) -> tuple[tuple[slice, "SequenceBounds"], ...]:
        """Tokens and bounds of the shared prompts, and of all behind them."""
        if self.shared is None:
            return ((slice(None), self),)
        length_S, num = self.cu_seqlens.diff(), len(self.shared.prompt_lengths)
        behind = slice(self.shared.prompts.stop, None)
        halves = ((self.shared.prompts, length_S[:num]), (behind, length_S[num:]))
        return tuple((tokens, bounds_of(lengths)) for tokens, lengths in halves if len(lengths))

    @cached_property
    def _prompt_of(self) -> Tensor:
        """Of each segment behind the shared prompts its prompt; G of those that share none."""
        shared = self.shared
        own = [number for number, lengths in enumerate(shared.response_lengths) for _ in lengths]
        num = len(shared.prompt_lengths)
        alone = self.num_sequences - num - len(own)
        return sent(torch.tensor(own + [num] * alone, dtype=torch.int64), self.cu_seqlens.device)

    def started_by(self, x_GX: Tensor) -> Tensor:
        """What each segment behind the shared prompts starts with, of what these leave behind: zeros where it
        shares none."""
        return torch.cat([x_GX, torch.zeros_like(x_GX[:1])]).index_select(0, self._prompt_of)


def taps_of(bounds: SequenceBounds, width: int) -> Taps:
    """What a convolution of so many tokens reads. The host waits for nothing."""
    place_N1 = (bounds.padded_index % bounds.max_length).to(torch.int32).unsqueeze(1)
    shared = bounds.shared
    if shared is None or width == 1:
        return Taps(place_N1)
    counts = torch.tensor([len(lengths) for lengths in shared.response_lengths])
    prompt_G, own_S = torch.tensor(shared.prompt_lengths), torch.tensor([*chain(*shared.response_lengths)])
    prompt_S, end_S = (x.repeat_interleave(counts) for x in (prompt_G, prompt_G.cumsum(0)))
    begin_S = own_S.cumsum(0) - own_S + prompt_G.sum()
    place, segment = (own_S > torch.arange(width - 1).unsqueeze(1)).nonzero().unbind(1)
    begin_M, back_W1 = begin_S[segment] + place, torch.arange(width).unsqueeze(1)
    before_WM = back_W1 - place  # of the prompt, from its end
    of_prompt_WM = torch.where(before_WM <= prompt_S[segment], end_S[segment] - before_WM, -1)
    source_WM = torch.where(before_WM > 0, of_prompt_WM, begin_M - back_W1)
    return Taps(place_N1, *(sent(x, bounds.cu_seqlens.device) for x in (begin_M, source_WM)))


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
        taps=None,
    )


def bounds_of(length_S: Tensor, width: int | None = None) -> SequenceBounds:
    """Bounds of segments of given lengths that share nothing. width: to which they are padded, if at all."""
    ends = torch.nn.functional.pad(length_S.cumsum(0), (1, 0)).to(torch.int32)
    longest = width or int(length_S.max())
    segment_N = torch.repeat_interleave(length_S)
    inside_N = torch.arange(len(segment_N), device=length_S.device) - ends[segment_N]
    return SequenceBounds(ends, segment_N * longest + inside_N, longest)


def bounds_of_alike(lengths: Sequence[int], device: torch.device) -> SequenceBounds:
    """Bounds, on the device, of rows that share nothing, each padded to the next power of two, from
    LEAST_WIDTH on, together with those of that width."""
    starts, groups = list(accumulate(lengths, initial=0)), dict[int, list[int]]()
    for row, length in enumerate(lengths):
        groups.setdefault(max(LEAST_WIDTH, 1 << (length - 1).bit_length()), []).append(row)
    alike = []
    for width, rows in sorted(groups.items()):
        tokens = torch.cat([torch.arange(starts[row], starts[row] + lengths[row]) for row in rows])
        own = bounds_of(sent(torch.tensor([lengths[row] for row in rows]), device), width)
        alike.append((sent(tokens, device), own))
    whole = alike[0][1] if len(alike) == 1 else bounds_of(sent(torch.tensor(lengths), device))
    return replace(whole, alike=tuple(alike) if len(alike) > 1 else ())
