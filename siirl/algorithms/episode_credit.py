"""Credit in episodes of several agents: whose reward counts for whom, compared with what, and how much.

Legend: B rows on this rank, T response tokens, U units that are compared with each other (rows, or turns of
rows), L places of a turn, M rows of any agents of the same episodes, S speakers. All rows of an episode are
on this rank. Nothing here communicates: sums that add up over ranks are handed out, and taken in added up.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from siirl.algorithms.groups import Groups
from siirl.algorithms.turns import Chains, Turns
from siirl.errors import ConfigError
from siirl.types import branch_id, branching_turn

GROUP_KEYS = ("task", "agent", "turn", "branch")
"""What the units of a group may have in common."""


def joint_key(*columns: Tensor) -> Tensor:
    """One id for each distinct combination of values, int64 [U]; equal ids mean equal in every column."""
    if not columns or not len(columns[0]):
        return torch.zeros(len(columns[0]) if columns else 0, dtype=torch.int64)
    return torch.unique(torch.stack([column.long() for column in columns], -1), dim=0, return_inverse=True)[1]


class Scores(NamedTuple):
    """Scores of rows, of whichever agents: [M] each."""

    episode_M: Tensor
    speaker_M: Tensor
    score_M: Tensor


def join_scores(*parts: Scores) -> Scores:
    """The scores of several row sets as one."""
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def team_score(episode_B: Tensor, speaker_B: Tensor, scores: Scores) -> Tensor:
    """What the others of an episode got, float64 [B]: the mean over its other speakers; 0 if there are none.

    A speaker's score in an episode is the mean over its rows there. Rows of the row's own speaker among
    `scores` do not count.
    """
    num_rows = len(episode_B)
    episode_N = joint_key(torch.cat([episode_B, scores.episode_M]))
    own_N = joint_key(episode_N, torch.cat([speaker_B, scores.speaker_M]))
    num_speakers = int(own_N.max()) + 1 if len(own_N) else 0  # of all episodes: (episode, speaker) pairs
    score_O = scores.score_M.new_zeros(num_speakers, dtype=torch.float64)
    rows_O = score_O.index_add(0, own_N[num_rows:], torch.ones_like(scores.score_M, dtype=torch.float64))
    score_O = score_O.index_add(0, own_N[num_rows:], scores.score_M.double()) / rows_O.clamp(min=1)
    spoke_O = (rows_O > 0).double()
    episode_O = torch.zeros(num_speakers, dtype=torch.int64).scatter_(0, own_N, episode_N)
    row_E, row_O = episode_N[:num_rows], own_N[:num_rows]
    num_episodes = int(episode_N.max()) + 1 if len(episode_N) else 0
    total_E = score_O.new_zeros(num_episodes).index_add_(0, episode_O, score_O)
    count_E = score_O.new_zeros(num_episodes).index_add_(0, episode_O, spoke_O)
    total_B, count_B = total_E[row_E] - score_O[row_O], count_E[row_E] - spoke_O[row_O]
    return torch.where(count_B > 0, total_B / count_B.clamp(min=1), 0)


def rows_of_episode(episode_B: Tensor, speaker_B: Tensor) -> Tensor:
    """How many rows the speaker of each row has in its episode, int64 [B]."""
    groups = Groups.of(joint_key(episode_B, speaker_B))
    return groups.rows(groups.count_G)


class TurnRows(NamedTuple):
    """The turns of rows as rows of their own: what an estimator for outcomes is given by turn."""

    turns: Turns
    reward_UL: Tensor
    """The outcome at the last place of the turn."""
    mask_UL: Tensor
    """[U, 1], the number of tokens, or [U, T]."""

    def whole(self, value_UL: Tensor) -> Tensor:
        """Values of places of turns as those of the rows' tokens, [B, T]; zero outside turns."""
        token_N, place_N = _places(self.turns, value_UL.shape[1])
        value_BT = value_UL.new_zeros(self.turns.token_BT.shape)
        value_BT[self.turns.token_BT >= 0] = value_UL[token_N, place_N]
        return value_BT


def turn_rows(
    reward_BT: Tensor,
    turn_BT: Tensor,
    episode_B: Tensor,
    speaker_B: Tensor,
    gamma: float,
    by_token: bool = False,
    branch_BT: Tensor | None = None,
) -> TurnRows:
    """Each turn as a row of its own, whose outcome is its reward and those of the speaker's later turns.

    gamma discounts by the speaker's turns: 1 is the reward to go, 0 the turn's own. Where an episode branches
    after a turn (branch_BT: field branch_id), the later turns are worth the mean over the candidates there. A
    turn's own reward: see Turns.sum. A turn is one place, which stands for all its tokens; by_token: the
    places of its tokens in their row, which needs memory for turns x T.
    """
    turns, width = Turns.of(turn_BT), turn_BT.shape[1] if by_token else 1
    chain_U = joint_key(episode_B[turns.row_U], speaker_B[turns.row_U])
    outcome_U = Chains.of(chain_U, turns.number_U).to_go(turns.sum(reward_BT), gamma)
    if branch_BT is not None:
        where_U = episode_B[turns.row_U], speaker_B[turns.row_U], turns.number_U
        outcome_U = over_candidates(outcome_U, *where_U, turns.last(branch_BT), gamma)
    token_N, place_N = _places(turns, width)
    mask_UL = torch.zeros(len(turns), width, dtype=torch.bool if by_token else torch.int64)
    mask_UL.index_put_((token_N, place_N), torch.ones((), dtype=mask_UL.dtype), accumulate=not by_token)
    last_U = torch.zeros(len(turns), dtype=torch.int64).scatter_reduce_(0, token_N, place_N, "amax")
    reward_UL = reward_BT.new_zeros(mask_UL.shape)
    reward_UL[torch.arange(len(turns)), last_U] = outcome_U.to(reward_BT.dtype)
    return TurnRows(turns, reward_UL, mask_UL)


def over_candidates(
    to_go_U: Tensor, episode_U: Tensor, speaker_U: Tensor, number_U: Tensor, branch_U: Tensor, gamma: float
) -> Tensor:
    """Rewards to go of turns, where those of an episode that branches go on as the mean over the candidates.

    to_go_U: each along its own episode. The turns of a branch are those of its own, from the candidate on. A
    candidate without a turn of the speaker is passed over. Groups are gone through from the last turn to the
    first, so that candidates that branch later have their own means by then.
    """
    found_U, numbers = to_go_U.double().clone(), number_U.tolist()
    episodes, speakers = episode_U.tolist(), speaker_U.tolist()
    ways: dict[tuple[int, int], list[int]] = defaultdict(list)
    for unit in sorted(range(len(numbers)), key=numbers.__getitem__):
        ways[episodes[unit], speakers[unit]].append(unit)
    candidates: dict[int, set[int]] = defaultdict(set)
    for branch, episode in zip(branch_U.tolist(), episodes, strict=True):
        if branch >= 0:
            candidates[branch] |= {episode, branching_turn(branch)[0]}
    forks: dict[int, list[int]] = defaultdict(list)
    for parent, at in map(branching_turn, candidates):
        forks[parent].append(at)
    worth: dict[tuple[int, int], float] = {}  # what a speaker gets behind a turn with candidates
    for branch in sorted(candidates, key=lambda one: branching_turn(one)[1], reverse=True):
        parent, at = branching_turn(branch)
        for speaker in set(speakers):
            found: dict[int, float] = {}
            for one in candidates[branch]:
                unit = next((unit for unit in ways[one, speaker] if numbers[unit] >= at), None)
                fork = min((turn for turn in forks[one] if turn > at), default=None)
                if fork is not None and (unit is None or fork <= numbers[unit]):
                    value = worth.get((branch_id(one, fork), speaker))
                else:
                    value = None if unit is None else float(found_U[unit])
                found |= {} if value is None else {one: value}
            if not found:
                continue
            worth[branch, speaker] = mean = sum(found.values()) / len(found)
            before = [unit for unit in ways[parent, speaker] if numbers[unit] < at]
            for distance, unit in enumerate(reversed(before), 1):
                found_U[unit] += gamma**distance * (mean - found.get(parent, 0.0))
    return found_U


def _places(turns: Turns, width: int) -> tuple[Tensor, Tensor]:
    """The turn of each token that is in one, and its place there: where it is in the row, if width is T."""
    inside_BT = turns.token_BT >= 0
    place_T = torch.arange(inside_BT.shape[1]).clamp(max=width - 1)
    return turns.token_BT[inside_BT], place_T.expand_as(inside_BT)[inside_BT]


def speaker_moments(advantage_BT: Tensor, mask_BT: Tensor, speaker_B: Tensor, num_speakers: int) -> Tensor:
    """Number, sum and sum of squares over the trained tokens of each speaker, float64 [S, 3]; they add up."""
    kept_BT = torch.where(mask_BT.bool(), advantage_BT.double(), 0)
    moments_B3 = torch.stack([mask_BT.double().sum(-1), kept_BT.sum(-1), (kept_BT**2).sum(-1)], -1)
    return moments_B3.new_zeros(num_speakers, 3).index_add_(0, speaker_B, moments_B3)


def whiten_speakers(advantage_BT: Tensor, mask_BT: Tensor, speaker_B: Tensor, moments_S3: Tensor) -> Tensor:
    """Zero mean and unit variance (n - 1) over all trained tokens of each speaker in the batch."""
    count_B, total_B, total_sq_B = moments_S3[speaker_B].unbind(-1)
    mean_B = total_B / count_B.clamp(min=1)
    variance_B = (total_sq_B - count_B * mean_B**2).clamp(min=0) / (count_B - 1).clamp(min=1)
    white_BT = (advantage_BT.double() - mean_B[:, None]) * torch.rsqrt(variance_B + 1e-8)[:, None]
    return torch.where(mask_BT.bool(), white_BT, 0).to(advantage_BT.dtype)


class TokenUnits(NamedTuple):
    """What counts alike."""

    unit_BT: Tensor
    """Of each token; -1 outside."""
    share_BT: Tensor
    """Of the loss, up to a factor."""

    def totals(self) -> Tensor:
        """The shares' sum and the number of units that have any, float64 [2]; they add up over ranks."""
        return torch.stack([self.share_BT.sum(), (self.shares() > 0).sum().double()])

    def shares(self) -> Tensor:
        """The share of each unit, float64 [U]."""
        inside_BT = self.unit_BT >= 0
        num_units = int(self.unit_BT.max()) + 1 if self.unit_BT.numel() else 0
        share_U = self.share_BT.new_zeros(num_units)
        return share_U.index_add_(0, self.unit_BT[inside_BT], self.share_BT[inside_BT])

    def weights(self, totals: Tensor) -> Tensor:
        """Factors of the advantage, float64 [B, T], with which every unit has the same share of the loss.

        totals: of all ranks. The sum of the shares stays as it is: the average factor of a share is 1.
        """
        total, count = totals.unbind()
        weight_U = torch.where(self.shares() > 0, total / count.clamp(min=1) / self.shares(), 0)
        weight_BT = torch.zeros_like(self.share_BT)
        inside_BT = (self.unit_BT >= 0) & (self.share_BT > 0)
        weight_BT[inside_BT] = weight_U[self.unit_BT[inside_BT]]
        return weight_BT


def token_units(
    by: str, mask_BT: Tensor, turn_BT: Tensor, episode_B: Tensor, speaker_B: Tensor, loss_agg_mode: str
) -> TokenUnits:
    """Which tokens count together: by turn, by row, or by episode (all rows of a speaker in it).

    loss_agg_mode: see siirl.algorithms.aggregate; it says what a token counts without weights. ConfigError
    for an unknown name.
    """
    mask_BT = mask_BT.bool()
    share_BT = mask_BT.double()
    if loss_agg_mode == "seq-mean-token-mean":
        share_BT = share_BT / share_BT.sum(-1, keepdim=True).clamp(min=1)
    match by:
        case "turn":
            unit_BT = Turns.of(turn_BT).token_BT
        case "row":
            unit_BT = torch.arange(len(mask_BT))[:, None].expand_as(mask_BT)
        case "episode":
            unit_BT = joint_key(episode_B, speaker_B)[:, None].expand_as(mask_BT)
        case _:
            raise ConfigError(f"equal weight by {by!r} is not known: known are turn, row, episode.")
    return TokenUnits(torch.where(mask_BT, unit_BT, -1), share_BT)
