"""From per-token losses to one number, by counts over the whole mini-batch.

Legend: B rows of this micro-batch, T response tokens. The counts cover the mini-batch on all ranks, so that
the shares of its micro-batches add up to the same loss however its rows are split.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from siirl.config.algorithm_table import AGGREGATIONS
from siirl.errors import ConfigError


class TokenLoss(NamedTuple):
    """A loss per token, not masked and not aggregated, and what to report of it."""

    loss_BT: Tensor
    """It carries gradient."""
    stats: dict[str, Tensor]
    """Name -> [B, T] without gradient; report their mean over trained tokens."""


def aggregate_loss(
    loss_BT: Tensor, mask_BT: Tensor, mode: str, num_tokens: float, num_rows: float, response_width: int
) -> Tensor:
    """This micro-batch's share of the mini-batch loss, a scalar with gradient.

    num_tokens: trained tokens, num_rows: rows with at least one, both over the whole mini-batch and all
    ranks; response_width: the configured response length. With m the mask:
      token-mean               sum m * loss / num_tokens                              (DAPO, 2025)
      seq-mean-token-mean      sum over rows of (sum m * loss / sum m) / num_rows     (GRPO, 2024)
      seq-mean-token-sum       sum m * loss / num_rows
      seq-mean-token-sum-norm  sum m * loss / (num_rows * response_width)             (Dr. GRPO, 2025)
    Rows without trained tokens add nothing; zero counts give 0, not NaN. No communication. ConfigError for an
    unknown mode.
    """
    mask_BT = mask_BT.bool()
    loss_BT = trained_only(loss_BT, mask_BT)
    rows = max(num_rows, 1.0)
    match mode:
        case "token-mean":
            return loss_BT.sum() / max(num_tokens, 1.0)
        case "seq-mean-token-sum":
            return loss_BT.sum() / rows
        case "seq-mean-token-mean":
            return (loss_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)).sum() / rows
        case "seq-mean-token-sum-norm":
            return loss_BT.sum() / (rows * response_width)
    raise ConfigError(f"loss_agg_mode={mode!r} is not known: known are {', '.join(AGGREGATIONS)}.")


def masked_row_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, shape [B]; 0 for a row without any."""
    return trained_only(value_BT, mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)


def trained_only(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The value at trained tokens; 0, and no gradient, at all others, whatever stands there (inf, NaN).

    Taken of what goes into a formula, not of what comes out: 0 times the slope of a formula at inf is NaN.
    """
    return torch.where(mask_BT.bool(), value_BT, 0)
