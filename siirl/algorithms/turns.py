"""Advantages of turns: a whole turn of a conversation is one action, its tokens share one advantage.

Legend: B rows on this rank, T response tokens, K turns. turn_BT numbers the turns of a row from 0 in order;
-1 marks tokens that belong to none (tool output, other agents, padding).
"""

import torch
from torch import Tensor

from siirl.algorithms.advantages import Advantages, discounted_sum


def turn_gae(reward_BT: Tensor, value_BT: Tensor, turn_BT: Tensor, *, gamma: float, lam: float) -> Advantages:
    """Generalised advantages between turns, and the returns of their values; both zero outside turns.

    The reward of a turn is the sum over its tokens and over what lies between it and the next turn; its
    value is that at its first token; discounts count turns. A row without turns has zeros. For several
    agents in one conversation, the turns of all agents are numbered in the order of speaking. No
    communication. Source: "MARFT: Multi-Agent Reinforcement Fine-Tuning" (2025), section 4, with a turn as
    the action.
    """
    num_rows, width = turn_BT.shape
    inside_BT = turn_BT >= 0
    num_turns = int(turn_BT.max()) + 1 if turn_BT.numel() else 0
    if num_turns <= 0:
        return Advantages(torch.zeros_like(reward_BT), torch.zeros_like(reward_BT))
    latest_BT = torch.where(inside_BT, turn_BT, -1).cummax(-1).values  # gaps count for the turn before
    reward_BK = reward_BT.new_zeros(num_rows, num_turns + 1, dtype=torch.float64)
    reward_BK.scatter_add_(1, latest_BT.masked_fill(latest_BT < 0, num_turns), reward_BT.double())
    position_T = torch.arange(width, device=turn_BT.device).expand(num_rows, -1)
    first_BK = torch.full((num_rows, num_turns + 1), width, device=turn_BT.device)
    first_BK.scatter_reduce_(1, turn_BT.masked_fill(~inside_BT, num_turns), position_T, "amin")
    padded_BT = torch.nn.functional.pad(value_BT.double(), (0, 1))
    value_BK = padded_BT.gather(1, first_BK[:, :num_turns])  # 0 for a turn that the row does not have
    next_BK = torch.nn.functional.pad(value_BK[:, 1:], (0, 1))
    delta_BK = reward_BK[:, :num_turns] + gamma * next_BK - value_BK
    advantage_BK = discounted_sum(delta_BK, gamma * lam)
    index_BT = turn_BT.clamp(min=0)

    def of_tokens(value: Tensor) -> Tensor:
        return torch.where(inside_BT, value.gather(1, index_BT), 0).to(reward_BT.dtype)

    return Advantages(of_tokens(advantage_BK), of_tokens(advantage_BK + value_BK))
