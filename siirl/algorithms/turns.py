"""Turns of conversations: which tokens belong to which, sums along episodes, and advantages between turns.

Legend: B rows on this rank, T response tokens, U turns of these rows, C chains (of turns that follow each
other), K turns of the longest chain. turn_BT numbers the turns of an episode in the order of speaking,
counted over all its agents; -1 marks tokens that belong to none (tool output, other agents, padding). The
turns of an episode may lie in several rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from siirl.algorithms.advantages import WHITEN, Advantages, built_in, discounted_sum


@dataclass(frozen=True)
class Turns:
    """The turns of some rows, by row, then by number. No communication."""

    row_U: Tensor
    """Where each was spoken."""
    number_U: Tensor
    """Which of its row it is."""
    token_BT: Tensor
    """The turn (0..U-1) that a token is of, -1: none."""
    reach_BT: Tensor
    """The same, where what follows a turn in its row (a tool's answer, padding) is of that turn, too."""

    @classmethod
    def of(cls, turn_BT: Tensor) -> "Turns":
        """Find the turns; their numbers ascend along a row."""
        inside_BT = turn_BT >= 0
        stride = int(turn_BT.max()) + 1 if turn_BT.numel() else 1
        row_BT = torch.arange(len(turn_BT), device=turn_BT.device)[:, None].expand_as(turn_BT)
        key_U, index_N = torch.unique((row_BT * stride + turn_BT)[inside_BT], return_inverse=True)
        token_BT = torch.full_like(turn_BT, -1)
        token_BT[inside_BT] = index_N
        reach_BT = token_BT.cummax(-1).values if turn_BT.numel() else token_BT
        return cls(key_U // max(stride, 1), key_U % max(stride, 1), token_BT, reach_BT)

    def __len__(self) -> int:
        return len(self.row_U)

    def sum(self, value_BT: Tensor) -> Tensor:
        """Sum over each turn and what follows it in its row, float64 [U]. Tokens before any turn are lost."""
        total_U = torch.zeros(len(self), dtype=torch.float64, device=value_BT.device)
        belongs_BT = self.reach_BT >= 0
        return total_U.index_add_(0, self.reach_BT[belongs_BT], value_BT[belongs_BT].double())

    def first(self, value_BT: Tensor) -> Tensor:
        """The value at the first token of each turn, float64 [U]."""
        num_rows, width = self.token_BT.shape
        place_BT = torch.arange(width, device=value_BT.device).expand(num_rows, -1)
        inside_BT = self.token_BT >= 0
        first_U = torch.full((len(self),), width, device=value_BT.device)
        first_U.scatter_reduce_(0, self.token_BT[inside_BT], place_BT[inside_BT], "amin")
        return value_BT[self.row_U, first_U].double()

    def last(self, value_BT: Tensor) -> Tensor:
        """The value at the last token of each turn, [U]; int64 stays exact."""
        found_U = value_BT.new_zeros(len(self))
        inside_BT = self.token_BT >= 0
        found_U[self.token_BT[inside_BT]] = value_BT[inside_BT]
        return found_U

    def spread(self, value_U: Tensor, dtype: torch.dtype) -> Tensor:
        """Give every token the value of its turn, [B, T]; zero outside turns."""
        inside_BT = self.token_BT >= 0
        value_BT = torch.zeros(self.token_BT.shape, dtype=dtype, device=value_U.device)
        value_BT[inside_BT] = value_U[self.token_BT[inside_BT]].to(dtype)
        return value_BT


@dataclass(frozen=True)
class Chains:
    """Turns in the order in which they follow each other, as a matrix [C, K] with zeros at the end."""

    chain_U: Tensor
    place_U: Tensor

    @classmethod
    def of(cls, chain_U: Tensor, order_U: Tensor) -> "Chains":
        """Turns of equal chain_U belong together, in the order of order_U."""
        _, index_U, count_C = torch.unique(chain_U, return_inverse=True, return_counts=True)
        sorted_U = order_U.argsort(stable=True)
        sorted_U = sorted_U[index_U[sorted_U].argsort(stable=True)]
        start_C = count_C.cumsum(0) - count_C
        place_U = torch.empty_like(index_U)
        place_U[sorted_U] = torch.arange(len(index_U), device=index_U.device) - start_C[index_U[sorted_U]]
        return cls(index_U, place_U)

    def pack(self, value_U: Tensor) -> Tensor:
        """Values of turns as a matrix, float64 [C, K]."""
        shape = (int(self.chain_U.max()) + 1, int(self.place_U.max()) + 1) if len(self.chain_U) else (0, 0)
        packed_CK = torch.zeros(shape, dtype=torch.float64, device=value_U.device)
        packed_CK[self.chain_U, self.place_U] = value_U.double()
        return packed_CK

    def unpack(self, value_CK: Tensor) -> Tensor:
        """Values of the matrix as those of turns, [U]."""
        return value_CK[self.chain_U, self.place_U]

    def to_go(self, value_U: Tensor, gamma: float) -> Tensor:
        """The value of a turn and of all later ones of its chain, discounted per turn, float64 [U]."""
        return self.unpack(discounted_sum(self.pack(value_U), gamma))


NO_TURNS = torch.empty(0, 4, dtype=torch.float64)
"""other_turns where no other agent's are known."""


@built_in("gae_marft", across_ranks=WHITEN)
def gae_marft(
    reward_BT: Tensor,
    value_BT: Tensor,
    turn_BT: Tensor,
    episode_B: Tensor,
    other_turns_M4: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Advantages:
    """Generalised advantages between the turns of an episode, the same for all tokens of a turn; whitened.

    The reward of a turn is the sum over its tokens and over what lies between it and the next in its row; its
    value is that at its first token; discounts count turns. other_turns: (episode, number, value, reward) of
    turns of other agents in these episodes: the value after a turn is then that of whoever speaks next, by
    that agent's critic. Without them the rows' own turns follow each other. The return is advantage + value.
    Source: "MARFT: Multi-Agent Reinforcement Fine-Tuning" (2025), section 4, with a turn as the action.
    """
    turns, others = Turns.of(turn_BT), other_turns_M4.to(reward_BT.device)
    num_own = len(turns)
    episode_U = torch.cat([episode_B[turns.row_U], others[:, 0].long()])
    number_U = torch.cat([turns.number_U, others[:, 1].long()])
    chains = Chains.of(episode_U, number_U)
    value_CK = chains.pack(torch.cat([turns.first(value_BT), others[:, 2]]))
    reward_CK = chains.pack(torch.cat([turns.sum(reward_BT), others[:, 3]]))
    delta_CK = reward_CK + gamma * pad(value_CK[:, 1:], (0, 1)) - value_CK
    advantage_CK = discounted_sum(delta_CK, gamma * lam)
    advantage_U = chains.unpack(advantage_CK)[:num_own]
    return_U = chains.unpack(advantage_CK + value_CK)[:num_own]
    dtype = reward_BT.dtype
    return Advantages(turns.spread(advantage_U, dtype), turns.spread(return_U, dtype))
