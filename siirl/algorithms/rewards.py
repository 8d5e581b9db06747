"""From the score of a row to rewards of its tokens.

Legend: B rows on this rank, T response tokens.
"""

import torch
from torch import Tensor


def score_to_token_reward(score_B: Tensor, response_length_B: Tensor, width: int) -> Tensor:
    """Give the row's score to its last response token: fp32 [B, width], zero elsewhere.

    A row without response tokens has no place for a reward and gets none. No communication.
    """
    position_T = torch.arange(width, device=score_B.device)
    is_last_BT = position_T == (response_length_B[:, None] - 1)
    return torch.where(is_last_BT, score_B[:, None].float(), 0)


def overlong_penalty(
    response_length_B: Tensor, max_response_length: int, buffer_length: int, penalty_factor: float
) -> Tensor:
    """Penalty of long responses, fp32 [B], between -penalty_factor and 0: add it to the score.

    0 up to max_response_length - buffer_length, then falling linearly to -penalty_factor at
    max_response_length.
    Source: DAPO (2025), equation 13.
    """
    excess_B = response_length_B.float() - (max_response_length - buffer_length)
    return -penalty_factor * (excess_B / buffer_length).clamp(0.0, 1.0)
