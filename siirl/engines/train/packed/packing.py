"""Rows of a micro-batch to packed tokens and back: no padding reaches the model.

Legend: B rows on this rank, P prompt tokens, T response tokens, N packed tokens, M response tokens among
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.config.teacher import WHOLE
from siirl.data.image_reader import ImageReader
from siirl.data.rows import take_rows
from siirl.engines.train.packed.micro_batches import prompt_numbers, repeated_prompt_tokens
from siirl.engines.train.packed.sequence_bounds import SequenceBounds, SharedPrompts
from siirl.engines.train.transfers import sent
from siirl.engines.train.vision.packed_images import (
    PackedImages,
    Segment,
    black_image,
    with_images_read,
)
from siirl.errors import DataError
from siirl.types import EXPERT_FIELDS


@dataclass(frozen=True)
class PackedBatch:
    """The N tokens of a micro-batch, one segment after the other, and where the results of M of them belong.

    The last response token of a row is left out, as nothing follows it.
    """

    input_ids: Tensor
    """int64 [1, N]."""
    position_ids: Tensor
    """int64 [1, N]; of a vision model [3, 1, N]."""
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
    top_ids: Tensor | None = None
    """[M, K], likewise."""
    images: PackedImages | None = None
    """Of a vision model."""
    experts: Tensor | None = None
    """[N, W], of the rows' fields EXPERT_FIELDS, if they have them."""
    places: tuple[Tensor, Tensor] | None = None
    """Of each packed token its row, and its column in prompt and response together, int64 [N]; None of a
    dummy."""

    @property
    def num_tokens(self) -> int:
        """Tokens on this rank, without what fills its share up."""
        return self.input_ids.numel() if self.bounds.shard is None else self.bounds.shard.num_tokens

    def to_cells(self, value_M: Tensor) -> Tensor:
        """Values of response tokens in their places, [B, T], zero elsewhere; differentiable.

        Numbers in float32; vectors [M, D] keep their type. Of a dummy: zeros that still hang on the graph, so
        that every rank runs the same backward; words have none.
        """
        value_M = value_M.float() if value_M.ndim == 1 else value_M
        shape = (self.num_rows, self.width, *value_M.shape[1:])
        if self.is_dummy:
            zeros = value_M.new_zeros(shape)
            return zeros + 0.0 * value_M.sum() if value_M.is_floating_point() else zeros
        flat = value_M.new_zeros(self.num_rows * self.width, *value_M.shape[1:])
        return flat.index_copy(0, self.cell, value_M).view(shape)


def packed_lengths(rows: TensorDict) -> list[int]:
    """Tokens that pack_rows keeps of each row: none of one without a response, else all but the last."""
    kept_B = (rows["prompt_length"] + rows["response_length"] - 1) * (rows["response_length"] > 0)
    return kept_B.tolist()


def packed_tokens(rows: TensorDict, share_prompts: bool) -> int:
    """Tokens that pack_rows makes of the rows, but the one of a dummy."""
    lengths = packed_lengths(rows)
    used = [row for row, length in enumerate(lengths) if length]
    again = repeated_prompt_tokens(take_rows(rows, used)) if share_prompts and used else []
    return sum(lengths) - sum(again)


def pack_rows(
    rows: TensorDict,
    device: torch.device,
    share_prompts: bool = False,
    reader: ImageReader | None = None,
) -> PackedBatch:
    """Pack left-padded prompts [B, P] and right-padded responses [B, T] into N tokens on `device`.

    Rows without response tokens are left out. With share_prompts a prompt that several rows have is there
    once. reader: of a vision model, whose tokens have positions in images; where no row has one, a segment
    of one black token is packed last, which predicts nothing.
    DataError if a row has a response but no prompt token.
    """
    prompt_BP, response_BT = rows["prompt_ids"], rows["response_ids"]
    num_rows, width = response_BT.shape
    prompt_B, response_B = rows["prompt_length"], rows["response_length"]
    used_B = response_B > 0
    given = {name: rows[name] for name in ("ref_hidden", "top_ids") if name in rows.keys()}
    if not bool(used_B.any()):
        return _dummy(num_rows, width, device, given, reader)
    if bool((used_B & (prompt_B < 1)).any()):
        row = int((used_B & (prompt_B < 1)).nonzero()[0])
        raise DataError(
            f"row {row} has a response of {int(response_B[row])} tokens and no prompt token: nothing "
            "predicts its first token. Give every prompt at least one token."
        )
    found = _segments(rows, share_prompts)
    ids_BW = torch.cat([prompt_BP, response_BT], dim=1)
    row_S, column_S, length_S = torch.tensor(found.segments, device=ids_BW.device).unbind(1)
    start_S = length_S.cumsum(0) - length_S
    segment_N = torch.repeat_interleave(torch.arange(len(length_S), device=length_S.device), length_S)
    inside_N = torch.arange(len(segment_N), device=length_S.device) - start_S[segment_N]
    column_N = column_S[segment_N] + inside_N
    row_N = row_S[segment_N]
    padding_B = prompt_BP.shape[1] - prompt_B
    answered_BT = torch.arange(width, device=response_B.device) < response_B.unsqueeze(1)
    row_M, place_M = answered_BT.nonzero().unbind(1)
    before_B, first_B = torch.tensor(found.predictors, device=ids_BW.device).unbind(1)
    predict_M = torch.where(place_M == 0, before_B[row_M], first_B[row_M] + place_M - 1)
    ids_N, position_N, images = ids_BW[row_N, column_N], column_N - padding_B[row_N], None
    if reader is not None:
        ids_N, position_N, images, extra = with_images_read(rows, found.segments, ids_N, reader, device)
        if extra:
            length_S = torch.cat([length_S, length_S.new_tensor([extra])])
            segment_N = torch.cat([segment_N, segment_N.new_full((extra,), len(length_S) - 1)])
            inside_N = torch.cat([inside_N, torch.arange(extra, device=inside_N.device)])
    return PackedBatch(
        input_ids=sent(ids_N.unsqueeze(0), device),
        position_ids=sent(position_N.unsqueeze(-2), device),
        bounds=_bounds(length_S, segment_N, inside_N, found.shared, device),
        predict_index=sent(predict_M, device),
        target=sent(response_BT[answered_BT], device),
        cell=sent(answered_BT.flatten().nonzero().squeeze(1), device),
        num_rows=num_rows,
        width=width,
        is_dummy=False,
        **{name: sent(value_BTX[answered_BT], device) for name, value_BTX in given.items()},
        images=images,
        experts=_experts(rows, row_N, column_N, device),
        places=(row_N, column_N),
    )


def _experts(rows: TensorDict, row_N: Tensor, column_N: Tensor, device: torch.device) -> Tensor | None:
    """Those of each packed token, if the rows name some."""
    if EXPERT_FIELDS[0] not in rows.keys():
        return None
    return sent(torch.cat([rows[name] for name in EXPERT_FIELDS], dim=1)[row_N, column_N], device)


@dataclass
class _Segments:
    """How rows lie in a packed batch."""

    segments: list[Segment]
    predictors: list[tuple[int, int]]
    """Of each row: the packed tokens before its first response token, and of that token."""
    shared: tuple[list[int], list[list[int]]] | None
    """Tokens of each shared prompt, and of its responses that have any here."""


def _segments(rows: TensorDict, share_prompts: bool) -> _Segments:
    """Shared prompts, then the responses of each, then rows that share nothing, each in one piece."""
    num_prompt = rows["prompt_ids"].shape[1]
    prompt, response = rows["prompt_length"].tolist(), rows["response_length"].tolist()
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(prompt_numbers(rows) if share_prompts else range(len(rows))):
        if response[row] > 0:
            groups.setdefault(number, []).append(row)
    together = [group for group in groups.values() if len(group) > 1]
    alone = sorted(group[0] for group in groups.values() if len(group) == 1)
    found = _Segments([], [(0, 0)] * len(rows), None)
    at = 0
    for group in together:
        length = prompt[group[0]]
        found.segments.append((group[0], num_prompt - length, length))
        at += length
        for row in group:
            found.predictors[row] = (at - 1, 0)
    for row in (row for group in together for row in group):
        found.predictors[row] = (found.predictors[row][0], at)
        if response[row] > 1:
            found.segments.append((row, num_prompt, response[row] - 1))
            at += response[row] - 1
    if together:
        after = [[response[row] - 1 for row in group if response[row] > 1] for group in together]
        found.shared = ([prompt[group[0]] for group in together], after) if any(after) else None
    for row in alone:
        length = prompt[row] + response[row] - 1
        found.segments.append((row, num_prompt - prompt[row], length))
        found.predictors[row] = (at + prompt[row] - 1, at + prompt[row])
        at += length
    return found


def _bounds(
    length_S: Tensor,
    segment_N: Tensor,
    inside_N: Tensor,
    shared: tuple[list[int], list[list[int]]] | None,
    device: torch.device,
) -> SequenceBounds:
    """Bounds of segments of the given lengths, each token's segment and its place inside."""
    longest = int(length_S.max())
    index_N = sent(segment_N * longest + inside_N, device)
    if shared is None:
        return SequenceBounds(sent(_ends(length_S), device), index_N, longest)
    prompts, after = shared
    totals = [sum(lengths) for lengths in after]
    ends = (sent(_ends(torch.tensor(lengths)), device) for lengths in (prompts, totals))
    common = SharedPrompts(*ends, tuple(prompts), tuple(map(tuple, after)))
    return SequenceBounds(sent(_ends(length_S), device), index_N, longest, common)


def _ends(length_S: Tensor) -> Tensor:
    """0 and the end of each of so many tokens, int32."""
    return torch.nn.functional.pad(length_S.cumsum(0), (1, 0)).to(torch.int32)


def _dummy(
    num_rows: int,
    width: int,
    device: torch.device,
    given: dict[str, Tensor],
    reader: ImageReader | None,
) -> PackedBatch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    ends = torch.arange(2, dtype=torch.int32, device=device)  # made there: a copy would be waited for
    images = None
    if reader is not None:
        images = black_image(reader, zero)
    return PackedBatch(
        input_ids=zero.unsqueeze(0),
        position_ids=zero.unsqueeze(0) if reader is None else zero.expand(3, 1, 1),
        bounds=SequenceBounds(ends, zero, 1),
        predict_index=zero,
        target=zero,
        cell=zero,
        num_rows=num_rows,
        width=width,
        is_dummy=True,
        **{name: value.new_zeros(1, value.shape[-1], device=device) for name, value in given.items()},
        images=images,
    )


def new_columns(
    rows: TensorDict,
    outputs: Sequence[str],
    vectors: Mapping[str, tuple[int, torch.dtype]],
    device: torch.device,
) -> dict[str, Tensor]:
    """Name -> zeros for an output of response tokens: [B, T] float32, or [B, T, width] of a type.

    vectors: name -> (width, type).
    """
    shape = rows["response_ids"].shape
    columns: dict[str, Tensor] = {}
    for name in outputs:
        width, dtype = vectors.get(name, (None, torch.float32))
        if name == "top_log_prob" and "top_ids" in rows.keys():
            width = rows["top_ids"].shape[-1]
        columns[name] = torch.zeros(*shape, *([] if width is None else [width]), dtype=dtype, device=device)
    return columns


def vector_outputs(
    hidden_size: int, dtype: torch.dtype, top_k: int, num_words: int
) -> dict[str, tuple[int, torch.dtype]]:
    """Name -> (width, type) of the outputs of a language model that are vectors. dtype: of hidden states."""
    width = num_words if top_k == WHOLE else min(top_k, num_words)
    top = {"top_log_prob": (width, torch.float32), "top_ids": (width, torch.int64)}
    return {"hidden": (hidden_size, dtype), **top}
