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
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    num_tokens: float,
    num_rows: float,
    response_width: int,
    prompt_share_B: Tensor | None = None,
) -> Tensor:
    """This micro-batch's share of the mini-batch loss, a scalar with gradient.

    num_tokens: trained tokens, num_rows: rows with at least one, both over the whole mini-batch and all
    ranks; response_width: the configured response length; prompt_share_B: see prompt_shares, for prompt-mean
    alone. With m the mask:
      token-mean               sum m * loss / num_tokens                              (DAPO, 2025)
      seq-mean-token-mean      sum over rows of (sum m * loss / sum m) / num_rows     (GRPO, 2024)
      seq-mean-token-sum       sum m * loss / num_rows
      seq-mean-token-sum-norm  sum m * loss / (num_rows * response_width)             (Dr. GRPO, 2025)
      prompt-mean              mean over prompts of (sum m * loss / sum m) over the prompt's rows
                               ("The Art of Scaling Reinforcement Learning Compute for LLMs", 2025)
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
        case "prompt-mean" if prompt_share_B is not None:
            return (loss_BT.sum(-1) * prompt_share_B.to(loss_BT.dtype)).sum()
    raise ConfigError(f"loss_agg_mode={mode!r} is not known: known are {', '.join(AGGREGATIONS)}.")


def prompt_shares(num_tokens_P: Tensor, prompt_B: Tensor) -> Tensor:
    """What each trained token of a row counts where prompts count alike, float64 [B].

    num_tokens_P: trained tokens of each of the mini-batch's P prompts, on all ranks; prompt_B: which prompt
    each row is of, 0..P-1. A prompt without trained tokens is none.
    """
    num_tokens_P = num_tokens_P.double()
    num_prompts = (num_tokens_P > 0).sum().clamp(min=1)
    return (1 / (num_tokens_P.clamp(min=1) * num_prompts))[prompt_B]


def masked_row_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, shape [B]; 0 for a row without any."""
    return trained_only(value_BT, mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)


def trained_only(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The value at trained tokens; 0, and no gradient, at all others, whatever stands there (inf, NaN).

    Taken of what goes into a formula, not of what comes out: 0 times the slope of a formula at inf is NaN.
    """
    return torch.where(mask_BT.bool(), value_BT, 0)
