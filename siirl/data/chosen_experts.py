"""The experts that tokens were computed by, as engines say it and as rows have it.

Legend: B rows, P prompt tokens, T response tokens, W numbers of a token, see RouterChoices.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.rows import DTYPES
from siirl.models.sizes import RouterChoices
from siirl.types import EXPERT_FIELDS

Text = TypeVar("Text", bytes, str)
"""Experts as bytes, or these in hex digits."""


def longer(known: Text | None, found: Text | None) -> Text | None:
    """Those of the first tokens of a row, and the ones that have come of all: what is known is kept."""
    return found if known is None or found is None else known + found[len(known) :]


def no_experts(rows: TensorDict, choices: RouterChoices) -> dict[str, Tensor]:
    """EXPERT_FIELDS of rows of which nothing is known."""
    shapes = (rows[name].shape for name in ("prompt_ids", "response_ids"))
    return {
        name: torch.full((*shape, choices.width), -1, dtype=DTYPES[choices.dtype])
        for name, shape in zip(EXPERT_FIELDS, shapes, strict=True)
    }


def expert_columns(
    rows: TensorDict, experts: Sequence[bytes | None], choices: RouterChoices
) -> dict[str, Tensor]:
    """EXPERT_FIELDS of rows, of what an engine has said of each: [B, P, W] and [B, T, W]."""
    columns = no_experts(rows, choices)
    prompt_BPW, response_BTW = columns.values()
    for row, (said, length) in enumerate(zip(experts, rows["prompt_length"].tolist(), strict=True)):
        if said is None:
            continue
        found_NW = torch.from_numpy(np.frombuffer(said, np.int16).reshape(-1, choices.width).copy())
        of_prompt_NW, of_response_NW = found_NW[:length], found_NW[length:]
        start = prompt_BPW.shape[1] - length
        prompt_BPW[row, start : start + len(of_prompt_NW)] = of_prompt_NW
        response_BTW[row, : len(of_response_NW)] = of_response_NW
    return columns
