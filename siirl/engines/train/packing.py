"""Rows to packed micro-batches and back: no padding reaches the model.

Legend: B rows on this rank, P prompt tokens, T response tokens, N packed tokens, M response tokens among
them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.row_cost import row_cost
from siirl.engines.train.attention import SequenceBounds
from siirl.errors import ConfigError, DataError


@dataclass(frozen=True)
class MicroBatchLimit:
    """How much a micro-batch may hold; exactly one of the limits is set."""

    max_tokens: int | None = None
    """A row with more makes a micro-batch of its own."""
    max_rows: int | None = None

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.max_tokens, self.max_rows) if limit is not None]
        if len(limits) != 1 or limits[0] < 1:
            raise ConfigError(
                f"micro-batch limit of {self.max_tokens} tokens and {self.max_rows} rows: set one, to 1 or "
                "more. Either use_dynamic_bsz=True and a token budget, or a micro-batch size."
            )


def row_lengths(rows: TensorDict) -> list[int]:
    """Real tokens of each row, prompt and response together, on the host."""
    return (rows["prompt_length"] + rows["response_length"]).tolist()


def packed_lengths(rows: TensorDict) -> list[int]:
    """Tokens that pack_rows keeps of each row: none of one without a response, else all but the last."""
    kept_B = (rows["prompt_length"] + rows["response_length"] - 1) * (rows["response_length"] > 0)
    return kept_B.tolist()


def count_micro_batches(lengths: Sequence[int], limit: MicroBatchLimit) -> int:
    """How many micro-batches the rows need; 0 for no rows. Pure."""
    if limit.max_rows is not None:
        return -(-len(lengths) // limit.max_rows)
    return len(_first_fit(lengths, limit.max_tokens))


def split_rows(lengths: Sequence[int], limit: MicroBatchLimit, num: int, hidden_size: int) -> list[list[int]]:
    """Row indices of `num` micro-batches of about equal cost, the dearest first; some may be empty. Pure.

    num: at least count_micro_batches(lengths, limit); the largest count of all ranks, so that the k-th
    micro-batches of all ranks run together and are alike. Longest-processing-time greedy: the next dearest
    row goes to the cheapest micro-batch with room.
    """
    assert num >= count_micro_batches(lengths, limit), (num, limit)
    costs = [row_cost(length, hidden_size) for length in lengths]
    bins = _balance(lengths, costs, limit, num)
    if bins is None:
        bins = _first_fit(lengths, limit.max_tokens)
        bins += [[] for _ in range(num - len(bins))]
    bins.sort(key=lambda rows: -sum(costs[row] for row in rows))
    return [sorted(rows) for rows in bins]


def _balance(
    lengths: Sequence[int], costs: Sequence[int], limit: MicroBatchLimit, num: int
) -> list[list[int]] | None:
    """Greedy balance under the limit; None when it paints itself into a corner."""
    bins: list[list[int]] = [[] for _ in range(num)]
    room = [limit.max_tokens if limit.max_rows is None else limit.max_rows] * num
    heap = [(0, index) for index in range(num)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        size = lengths[row] if limit.max_rows is None else 1
        full = []
        while heap and bins[heap[0][1]] and size > room[heap[0][1]]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, index = heap[0]
        bins[index].append(row)
        room[index] -= size
        heapq.heapreplace(heap, (cost + costs[row], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing bin packing by tokens."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        index = next((i for i, left in enumerate(room) if lengths[row] <= left), None)
        if index is None:
            bins.append([])
            room.append(max_tokens)
            index = len(bins) - 1
        bins[index].append(row)
        room[index] -= lengths[row]
    return bins


@dataclass(frozen=True)
class PackedBatch:
    """The N tokens of a micro-batch, one row after the other, and where the results of M of them belong.

    The last response token of a row is left out, as nothing follows it.
    """

    input_ids: Tensor
    """int64 [1, N]."""
    position_ids: Tensor
    """int64 [1, N]."""
    bounds: SequenceBounds
    predict_index: Tensor
    """int64 [M], the packed token whose hidden state predicts each response token."""
    target: Tensor
    """int64 [M], the id of that response token."""
    cell: Tensor
    """int64 [M], the place of that response token in the flattened [B, T]."""
    num_rows: int
    """B."""
    width: int
    """T."""
    is_dummy: bool
    """There was nothing to compute: one token only keeps this rank in step with the others' collectives."""
    ref_hidden: Tensor | None = None
    """[M, D], the rows' field of that name, if they have it."""

    def to_cells(self, value_M: Tensor) -> Tensor:
        """Values of response tokens in their places, [B, T], zero elsewhere; differentiable.

        Numbers in float32; vectors [M, D] keep their type. Of a dummy: zeros that still hang on the graph, so
        that every rank runs the same backward.
        """
        value_M = value_M.float() if value_M.ndim == 1 else value_M
        shape = (self.num_rows, self.width, *value_M.shape[1:])
        if self.is_dummy:
            return value_M.new_zeros(shape) + 0.0 * value_M.sum()
        flat = value_M.new_zeros(self.num_rows * self.width, *value_M.shape[1:])
        return flat.index_copy(0, self.cell, value_M).view(shape)


def pack_rows(rows: TensorDict, device: torch.device) -> PackedBatch:
    """Pack left-padded prompts [B, P] and right-padded responses [B, T] into N tokens on `device`.

    Rows without response tokens are left out. DataError if a row has a response but no prompt token.
    """
    prompt_BP, response_BT = rows["prompt_ids"], rows["response_ids"]
    (num_rows, num_prompt), width = prompt_BP.shape, response_BT.shape[1]
    prompt_B, response_B = rows["prompt_length"], rows["response_length"]
    used_B = response_B > 0
    ref_BTD = rows["ref_hidden"] if "ref_hidden" in rows.keys() else None
    if not bool(used_B.any()):
        return _dummy(num_rows, width, device, ref_BTD)
    if bool((used_B & (prompt_B < 1)).any()):
        row = int((used_B & (prompt_B < 1)).nonzero()[0])
        raise DataError(
            f"row {row} has a response of {int(response_B[row])} tokens and no prompt token: nothing "
            "predicts its first token. Give every prompt at least one token."
        )
    column = torch.arange(num_prompt + width, device=prompt_BP.device)
    start_B1 = (num_prompt - prompt_B).unsqueeze(1)
    end_B1 = (num_prompt + response_B - 1).unsqueeze(1)
    kept = (column >= start_B1) & (column < end_B1) & used_B.unsqueeze(1)
    answered_BT = column[:width] < response_B.unsqueeze(1)
    ids = torch.cat([prompt_BP, response_BT], dim=1)[kept]
    positions = (column - start_B1)[kept]
    predicts = (column >= num_prompt - 1).expand(num_rows, -1)[kept]
    lengths = (prompt_B + response_B - 1)[used_B]
    return PackedBatch(
        input_ids=ids.unsqueeze(0).to(device),
        position_ids=positions.unsqueeze(0).to(device),
        bounds=_bounds(lengths, positions, device),
        predict_index=predicts.nonzero().squeeze(1).to(device),
        target=response_BT[answered_BT].to(device),
        cell=answered_BT.flatten().nonzero().squeeze(1).to(device),
        num_rows=num_rows,
        width=width,
        is_dummy=False,
        ref_hidden=None if ref_BTD is None else ref_BTD[answered_BT].to(device),
    )


def _bounds(length_S: Tensor, position_N: Tensor, device: torch.device) -> SequenceBounds:
    """Bounds of sequences of the given lengths, whose tokens stand at position_N within their sequence."""
    max_length = int(length_S.max())
    sequence_N = torch.repeat_interleave(torch.arange(len(length_S), device=length_S.device), length_S)
    ends = torch.nn.functional.pad(length_S.cumsum(0), (1, 0)).to(torch.int32)
    return SequenceBounds(ends.to(device), (sequence_N * max_length + position_N).to(device), max_length)


def _dummy(num_rows: int, width: int, device: torch.device, ref_BTD: Tensor | None) -> PackedBatch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return PackedBatch(
        input_ids=zero.unsqueeze(0),
        position_ids=zero.unsqueeze(0),
        bounds=SequenceBounds(ends, zero, 1),
        predict_index=zero,
        target=zero,
        cell=zero,
        num_rows=num_rows,
        width=width,
        is_dummy=True,
        ref_hidden=None if ref_BTD is None else ref_BTD.new_zeros(1, ref_BTD.shape[-1], device=device),
    )


def new_columns(
    rows: TensorDict, outputs: Sequence[str], hidden_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Name -> zeros for an output of response tokens: [B, T] float32; "hidden" [B, T, D] of dtype."""
    shape = rows["response_ids"].shape
    return {
        name: torch.zeros(*shape, hidden_size, dtype=dtype, device=device)
        if name == "hidden"
        else torch.zeros(shape, device=device)
        for name in outputs
    }
