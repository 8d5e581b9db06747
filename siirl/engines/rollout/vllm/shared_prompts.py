"""Decode steps that read what rows share once: which rows those are, and attention in two parts.

A batch has R rows of one token each; where the keys and values of a row are is in its line of the block
table, W blocks wide. Lines that begin with the same ids begin with the same tokens. Neighbours whose lines
do are a run: one part of the attention takes the queries of a run together and reads the shared blocks once
for all of them, the other reads of each row what is its own, and both are put together by the logs of their
sums of exponentials.

Whatever runs are chosen, the result is that of one part up to rounding: each row's keys are cut in two, no
more. Nothing here waits for the device, and what a captured graph reads stays where it is. Needs a CUDA
device and Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 256
"""Blocks of a line that are compared or copied at once."""
HEADS = 16
"""Heads that are put together at once."""
TILE_QUERIES = 64
"""Queries, of tokens and of heads that share keys, that FlashAttention 3 takes together in its small tile."""
LEAST_ROWS = 8
"""Rows of a run that may be, even if they need the large tile."""


@triton.jit
def _count_common(
    table_ptr, stride, seq_lens_ptr, common_ptr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr
):
    """How many leading blocks a row shares with the one before it; the block of its last token is its own."""
    row = tl.program_id(0)
    before = tl.maximum(row - 1, 0)
    length = tl.minimum(tl.load(seq_lens_ptr + row), tl.load(seq_lens_ptr + before))
    full = tl.where(row == 0, 0, tl.maximum(length - 1, 0) // BLOCK_TOKENS)
    mine_ptr = table_ptr + row.to(tl.int64) * stride
    before_ptr = table_ptr + before.to(tl.int64) * stride
    common = full
    for first in range(0, full, TILE):
        place = first + tl.arange(0, TILE)
        inside = place < full
        mine = tl.load(mine_ptr + place, mask=inside, other=0)
        theirs = tl.load(before_ptr + place, mask=inside, other=0)
        common = tl.minimum(common, tl.min(tl.where(inside & (mine != theirs), place, full), axis=0))
    tl.store(common_ptr + row, common)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _common_at(common_ptr, row, rows):
    return tl.load(common_ptr + row, mask=(row >= 0) & (row < rows), other=0)


@triton.jit(do_not_specialize=["rows", "most"])
def _cut_runs(
    common_ptr,
    seq_lens_ptr,
    starts_ptr,
    prefix_lens_ptr,
    shared_ptr,
    suffix_lens_ptr,
    rows,
    most,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Runs of rows. In a run all share the same number of blocks with the row before, so also with the first.

    A row that shares less with the one before it than either of them does with its other neighbour begins a
    run: what all prompts have in common, as a system prompt, does not hold those of one together with others.
    The queries of a run stand at its last row, and other rows have none there: so no line of the block table
    has to be moved for it.
    """
    row = tl.arange(0, ROWS)
    inside = row < rows
    before = _common_at(common_ptr, row - 1, rows)
    mine = _common_at(common_ptr, row, rows)
    after = _common_at(common_ptr, row + 1, rows)
    later = _common_at(common_ptr, row + 2, rows)
    new = (mine == 0) | (mine < tl.maximum(before, after))
    first = tl.associative_scan(tl.where(new, row, 0), 0, _larger)
    place = (row - first) % most
    next_new = (after == 0) | (after < tl.maximum(mine, later)) | ((row - first + 1) % most == 0)
    alone = (place == 0) & next_new
    shared = tl.where(alone, 0, tl.where(new, after, mine))
    tl.store(starts_ptr + row, row - place, mask=inside)
    tl.store(starts_ptr + rows + row, rows, mask=row == 0)
    tl.store(prefix_lens_ptr + row, tl.where(next_new, shared, 0) * BLOCK_TOKENS, mask=inside)
    tl.store(shared_ptr + row, shared, mask=inside)
    length = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    tl.store(suffix_lens_ptr + row, length - shared * BLOCK_TOKENS, mask=inside)


@triton.jit
def _shift_lines(
    table_ptr,
    stride,
    shared_ptr,
    suffix_lens_ptr,
    shifted_ptr,
    width,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The line of each row without the blocks that it shares; 0, which no row has, after its last one."""
    row = tl.program_id(0)
    shared = tl.load(shared_ptr + row)
    own = (tl.load(suffix_lens_ptr + row) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    from_ptr = table_ptr + row.to(tl.int64) * stride + shared
    to_ptr = shifted_ptr + row.to(tl.int64) * width
    for first in range(0, width, TILE):
        place = first + tl.arange(0, TILE)
        block = tl.load(from_ptr + place, mask=place < own, other=0)
        tl.store(to_ptr + place, block, mask=place < width)


@triton.jit(do_not_specialize=["lse_head", "prefix_lse_head"])
def _put_together(
    out_ptr,
    out_row,
    out_head,
    lse_ptr,
    lse_head,
    prefix_ptr,
    prefix_row,
    prefix_head,
    prefix_lse_ptr,
    prefix_lse_head,
    shared_ptr,
    heads,
    width,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of rows that share blocks, the mean of both parts by their sums of exponentials; others stay."""
    row = tl.program_id(0)
    if tl.load(shared_ptr + row) > 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        known = head < heads
        own_lse = tl.load(lse_ptr + head * lse_head + row, mask=known, other=0.0)
        prefix_lse = tl.load(prefix_lse_ptr + head * prefix_lse_head + row, mask=known, other=0.0)
        weight = (1.0 / (1.0 + tl.exp(own_lse - prefix_lse)))[:, None]
        place = tl.arange(0, WIDTH)[None, :]
        inside = known[:, None] & (place < width)
        out_at = out_ptr + row.to(tl.int64) * out_row + head[:, None] * out_head + place
        prefix_at = prefix_ptr + row.to(tl.int64) * prefix_row + head[:, None] * prefix_head + place
        own = tl.load(out_at, mask=inside, other=0.0).to(weight.dtype)
        prefix = tl.load(prefix_at, mask=inside, other=0.0).to(weight.dtype)
        both = own + weight * (prefix - own)
        tl.store(out_at, both.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Runs:
    """The runs of a step's rows, on the device: all int32, of memory that stays where it is."""

    block_table: Tensor
    """Lines as they were given, [R, W]."""
    starts: Tensor
    """Cumulative numbers of queries, [R + 1]: those of a run stand at its last row, other rows have none."""
    prefix_lens: Tensor
    """Shared tokens of the run that stands at a row, [R]; 0 of none, and of a row alone."""
    shared: Tensor
    """Blocks that a row shares with its run, [R]."""
    suffix_lens: Tensor
    """Tokens of a row that it does not, [R]: at least one, but of a row that only fills up a batch."""
    suffix_table: Tensor
    """The lines of those, [R, W]."""
    most: int
    """Rows of a run at most."""


class RunFinder:
    """Finds the runs of a step; its memory is that of the largest batch."""

    def __init__(self, num_rows: int, queries_per_key: int, block_tokens: int, device: torch.device) -> None:
        """num_rows: of the largest batch. queries_per_key: query heads that share one of keys."""
        self._block_tokens, self._num_rows = block_tokens, num_rows
        self._most = max(TILE_QUERIES // queries_per_key, LEAST_ROWS)
        rows = torch.zeros(5, num_rows + 1, dtype=torch.int32, device=device)
        self._starts, self._common, self._shared, self._prefix_lens, self._suffix_lens = rows
        self._suffix_table: Tensor | None = None

    def find(self, block_table: Tensor, seq_lens: Tensor) -> Runs:
        """block_table [R, W] and seq_lens [R], with this step's token: int32, on the device."""
        rows, width = block_table.shape
        if rows > self._num_rows or len(seq_lens) != rows:
            raise RuntimeError(f"{rows} lines of {len(seq_lens)} rows, where at most {self._num_rows} may be")
        if self._suffix_table is None:
            self._suffix_table = block_table.new_zeros(self._num_rows, width)
        if self._suffix_table.shape[1] != width or block_table.stride(1) != 1:
            raise RuntimeError(f"lines of {width} blocks, not of {self._suffix_table.shape[1]} as before")
        runs = Runs(
            block_table,
            self._starts[: rows + 1],
            self._prefix_lens[:rows],
            self._shared[:rows],
            self._suffix_lens[:rows],
            self._suffix_table[:rows],
            self._most,
        )
        stride, tokens = block_table.stride(0), self._block_tokens
        _count_common[(rows,)](block_table, stride, seq_lens, self._common, tokens, TILE)
        _cut_runs[(1,)](
            self._common,
            seq_lens,
            runs.starts,
            runs.prefix_lens,
            runs.shared,
            runs.suffix_lens,
            rows,
            self._most,
            tokens,
            triton.next_power_of_2(self._num_rows),
        )
        _shift_lines[(rows,)](
            block_table, stride, runs.shared, runs.suffix_lens, runs.suffix_table, width, tokens, TILE
        )
        return runs


def attend(attention: Callable[..., Any], runs: Runs, **call: Any) -> Tensor:
    """Attention of a decode step in two parts. Returns call["out"], which it fills.

    attention: FlashAttention's function over pages. call: its arguments for each row's own part, with the
    lines and lengths of `runs`.
    """
    out = call["out"]
    _, lse = attention(**call | {"return_softmax_lse": True})
    prefix, prefix_lse = attention(
        **call
        | {
            "out": None,
            "cu_seqlens_q": runs.starts,
            "max_seqlen_q": runs.most,
            "seqused_k": runs.prefix_lens,
            "block_table": runs.block_table,
            "causal": False,
            "scheduler_metadata": None,  # made by its own kernel, and none has to clear it afterwards
            "num_splits": 1,  # what puts splits together would look at `most` tokens of each row
            "return_softmax_lse": True,
        }
    )
    put_together(out, lse, prefix, prefix_lse, runs.shared)
    return out


def put_together(out: Tensor, lse: Tensor, prefix: Tensor, prefix_lse: Tensor, shared: Tensor) -> None:
    """Add to out, each row's own part, the prefix part: [tokens, heads, width]; their lse: [heads, tokens].

    Rows that share no block (`shared`, [R]) stay as they are.
    """
    if out.stride(2) != 1 or prefix.stride(2) != 1 or lse.stride(1) != 1 or prefix_lse.stride(1) != 1:
        raise RuntimeError("attention gave parts that are not contiguous")
    _, heads, width = out.shape
    _put_together[(len(shared), triton.cdiv(heads, HEADS))](
        out,
        out.stride(0),
        out.stride(1),
        lse,
        lse.stride(0),
        prefix,
        prefix.stride(0),
        prefix.stride(1),
        prefix_lse,
        prefix_lse.stride(0),
        shared,
        heads,
        width,
        HEADS,
        triton.next_power_of_2(width),
    )
