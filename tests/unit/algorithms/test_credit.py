"""Credit in episodes of several agents, against cases computed by hand and plain recursions, in float64."""

import random
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from siirl.algorithms.advantages import ADVANTAGES, compute_advantage
from siirl.algorithms.aggregate import aggregate_loss
from siirl.algorithms.episode_credit import (
    Scores,
    join_scores,
    joint_key,
    over_candidates,
    rows_of_episode,
    speaker_moments,
    team_score,
    token_units,
    turn_rows,
    whiten_speakers,
)
from siirl.algorithms.turns import NO_TURNS, Chains, Turns, gae_marft
from siirl.config import load_config, with_overrides
from siirl.config.algorithm_table import AGGREGATIONS, GROUPED
from siirl.errors import ConfigError
from siirl.nodes.interaction_credit import estimate
from siirl.observe.metrics import Metrics
from siirl.types import branch_id

X = -1
TURN = torch.tensor(  # two episodes; speaker 0 has two rows in the first, speaker 1 one row in each
    [
        [0, 0, X, 2, X],
        [4, 4, 4, X, X],
        [1, X, 3, 3, X],
        [0, X, 1, 1, 1],
    ]
)
EPISODE, SPEAKER = torch.tensor([7, 7, 7, 9]), torch.tensor([0, 0, 1, 1])
NOTHING = torch.tensor([], dtype=torch.int64)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_the_turns_of_rows_and_what_follows_them():
    turns = Turns.of(TURN)
    assert turns.row_U.tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert turns.number_U.tolist() == [0, 2, 4, 1, 3, 0, 1]
    assert turns.reach_BT[0].tolist() == [0, 0, 0, 1, 1]
    value = torch.arange(20, dtype=torch.float64).view(4, 5)
    close(turns.sum(value), f64(0 + 1 + 2, 3 + 4, 5 + 6 + 7 + 8 + 9, 10 + 11, 12 + 13 + 14, 15 + 16, 54))
    close(turns.first(value), f64(0, 3, 5, 10, 12, 15, 17))
    close(turns.spread(f64(1, 2, 3, 4, 5, 6, 7), torch.float64)[0], f64(1, 1, 0, 2, 0))
    none = Turns.of(TURN[:0])
    assert len(none) == 0 and none.spread(f64(), torch.float32).shape == (0, 5)
    outside = Turns.of(torch.full((2, 3), -1))
    assert len(outside) == 0 and outside.sum(torch.ones(2, 3)).shape == (0,)


def test_chains_go_over_rows_in_the_order_of_speaking():
    chains = Chains.of(torch.tensor([5, 5, 3, 5, 3]), torch.tensor([4, 0, 1, 2, 0]))
    close(chains.to_go(f64(1, 10, 100, 1000, 10000), 0.5), f64(1, 510.25, 100, 1000.5, 10050))
    close(chains.to_go(f64(1, 2, 3, 4, 5), 0.0), f64(1, 2, 3, 4, 5))
    assert Chains.of(NOTHING, NOTHING).pack(f64()).shape == (0, 0)


def test_the_team_score_is_that_of_the_others_of_the_episode():
    solver = Scores(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]), f64(1, 2, 4))
    critic = Scores(torch.tensor([1, 0]), torch.tensor([1, 1]), f64(10, 20))
    judge = Scores(torch.tensor([1]), torch.tensor([2]), f64(100))
    every = join_scores(solver, critic, judge)
    close(team_score(solver.episode_M, solver.speaker_M, join_scores(critic, judge)), f64(20, 55, 55))
    close(team_score(solver.episode_M, solver.speaker_M, every), f64(20, 55, 55))
    close(team_score(critic.episode_M, critic.speaker_M, every), f64((3 + 100) / 2, 1))
    close(team_score(judge.episode_M, judge.speaker_M, solver), f64(3))
    close(team_score(torch.tensor([8]), torch.tensor([0]), every), f64(0))
    empty = Scores(NOTHING, NOTHING, f64())
    close(team_score(solver.episode_M, solver.speaker_M, empty), f64(0, 0, 0))
    assert team_score(NOTHING, NOTHING, every).shape == (0,)
    assert team_score(NOTHING, NOTHING, empty).shape == (0,)
    assert rows_of_episode(EPISODE, SPEAKER).tolist() == [2, 2, 1, 1]


def test_groups_are_by_any_subset_of_keys():
    task, agent = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 0, 0])
    assert joint_key(task).tolist() == [0, 0, 0, 1]
    both = joint_key(task, agent)
    assert both[0] == both[2] and len(both.unique()) == 3
    assert joint_key(task[:0], agent[:0]).shape == (0,)


@pytest.mark.parametrize("by_token", [False, True])
def test_turns_are_rows_with_the_reward_to_go_of_their_speaker(by_token):
    reward = torch.zeros(4, 5, dtype=torch.float64)
    reward[0, 1], reward[0, 3], reward[1, 2], reward[2, 3], reward[3, 4] = 1.0, 2.0, 4.0, 8.0, 16.0
    cut = turn_rows(reward, TURN, EPISODE, SPEAKER, 0.5, by_token)
    close(cut.reward_UL.sum(-1), f64(1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4, 0.5 * 8, 8, 0.5 * 16, 16))
    assert cut.mask_UL.sum(-1).tolist() == [2, 1, 3, 1, 2, 1, 3]
    if by_token:
        assert cut.reward_UL[0].nonzero().tolist() == [[1]] and cut.reward_UL[5].nonzero().tolist() == [[0]]
        assert cut.mask_UL.dtype == torch.bool and cut.mask_UL[1].tolist() == [
            False,
            False,
            False,
            True,
            False,
        ]
    now = turn_rows(reward, TURN, EPISODE, SPEAKER, 0.0, by_token)
    close(now.reward_UL.sum(-1), f64(1, 2, 4, 0, 8, 0, 16))
    number = torch.arange(1.0, 8.0)[:, None] * cut.mask_UL.bool()
    want = [[1, 1, 0, 2, 0], [3, 3, 3, 0, 0], [4, 0, 5, 5, 0], [6, 0, 7, 7, 7]]
    assert cut.whole(number).tolist() == want
    empty = turn_rows(reward[:0], TURN[:0], EPISODE[:0], SPEAKER[:0], 1.0, by_token)
    assert empty.whole(empty.reward_UL).shape == (0, 5)


WHOLE_ONLY = ("gdpo", "optimal_token_baseline")
"""Refused where turns are compared."""


def random_turns(num_rows, width, most_turns, seed):
    """turn_BT of rows with up to most_turns turns, and what lies between them; fp32 rewards."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.rand(num_rows, most_turns - 1, generator=generator).mul(width).long()
    turn = (torch.arange(width)[None, :, None] >= cuts[:, None, :]).sum(-1)
    outside = torch.rand(num_rows, width, generator=generator) < 0.2
    return turn.masked_fill(outside, X), torch.randn(num_rows, width, generator=generator)


@pytest.mark.parametrize("name", [name for name in GROUPED if name not in WHOLE_ONLY])
@pytest.mark.parametrize("option", [True, False])
def test_one_number_for_a_turn_gives_what_its_tokens_give(name, option):
    options = {
        "norm_adv_by_std_in_grpo": option,
        "weight_factor_in_cpgd": "STD_weight" if option else "clip_filter_like_weight",
    }
    for seed in range(4):
        turn, reward = random_turns(12, 30, 5, seed)
        reward[:3] = 0.0
        reward = reward.abs() if name == "maxrl" else reward
        episode, speaker = torch.arange(12) // 2, torch.arange(12) % 2
        found = []
        for by_token in (True, False):
            cut = turn_rows(reward.double(), turn, episode, speaker, 0.9, by_token)
            group = joint_key(episode[cut.turns.row_U] // 3, cut.turns.number_U)
            fields = {"reward": cut.reward_UL, "response_mask": cut.mask_UL, "group_id": group}
            found.append(cut.whole(compute_advantage(name, fields, options).advantage_BT))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
        assert found[0].count_nonzero() > 30


class Largest(TorchDispatchMode):
    """The largest number of values in a tensor that any operation makes."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple) else (out,):
            if isinstance(made, torch.Tensor):
                self.values = max(self.values, made.numel())
        return out


def estimated(turn, reward, overrides, options):
    """What the advantage node makes of rows of one speaker, two of a task, where turns are compared."""
    ids, zero = torch.arange(len(turn)), torch.zeros(len(turn), dtype=torch.int64)
    columns = {"episode_id": ids, "group_id": ids // 2, "speaker": zero, "turn_id": turn, "reward": reward}
    columns |= {"response_mask": turn >= 0, "env_reward": reward, "rollout_log_prob": reward}
    overrides = overrides | {"algorithm.credit.group_by": ["task", "turn"]}
    ctx = SimpleNamespace(
        cfg=with_overrides(load_config([]), overrides), metrics=Metrics(), others={}, node_id="advantage"
    )
    return estimate(ctx, TensorDict(columns, [len(turn)]), columns, options)


def test_comparing_turns_takes_memory_for_the_tokens_not_for_turns_times_tokens():
    turn = torch.arange(64).repeat_interleave(4).expand(16, -1).contiguous()
    reward = torch.randn(turn.shape, generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        found = estimated(
            turn, reward, {"algorithm.adv_estimator": "grpo"}, {"norm_adv_by_std_in_grpo": True}
        )
    assert found.advantages.advantage_BT.shape == turn.shape and len(found.outcome_U) == 16 * 64
    assert largest.values <= 2 * turn.numel()


OWN = """
from siirl.algorithms.advantages import Advantages, register_advantage

@register_advantage("own_by_turn", needs=("reward", "response_mask", "group_id", "rollout_log_prob"))
def own_by_turn(reward_BT, response_mask_BT, group_id_B, rollout_log_prob_BT):
    return Advantages((reward_BT.sum(-1, keepdim=True) + rollout_log_prob_BT) * response_mask_BT)
"""


def test_an_estimator_of_the_users_gets_the_tokens_of_each_turn(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    turn = torch.tensor([[0, 0, X, 1], [0, X, 1, 1]])
    reward = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]])
    found = estimated(turn, reward, {"algorithm.adv_estimator": f"{tmp_path}/own.py:own_by_turn"}, {})
    want = f64([15 + 1, 15 + 2, 0, 8 + 8], [240 + 16, 0, 192 + 64, 192 + 128]).float()
    assert found.advantages.advantage_BT.tolist() == want.tolist()


def test_an_estimator_of_one_tests_user_is_unknown_to_the_next_test():
    assert "own_by_turn" not in ADVANTAGES.names()


def test_grpo_by_turn_compares_each_turn_with_the_same_turn_of_other_samples():
    """Two samples of a task, two turns each, rewards 1, 5 and 0, 5: only the first turn tells them apart."""
    turn = torch.tensor([[0, 0, X, 1], [0, X, 1, 1]])
    reward = torch.zeros(2, 4, dtype=torch.float64)
    reward[0, 1], reward[0, 3], reward[1, 3] = 1.0, 5.0, 5.0
    cut = turn_rows(reward, turn, torch.tensor([0, 1]), torch.tensor([0, 0]), gamma=0.0)
    fields = {
        "reward": cut.reward_UL,
        "response_mask": cut.mask_UL,
        "group_id": joint_key(cut.turns.number_U),
    }
    got = compute_advantage("grpo", fields, {"norm_adv_by_std_in_grpo": False}).advantage_BT
    close(cut.whole(got), f64([0.5, 0.5, 0, 0], [-0.5, 0, 0, 0]))


def test_each_speaker_is_normalised_by_itself_also_over_ranks():
    generator = torch.Generator().manual_seed(0)
    advantage = torch.randn(6, 7, dtype=torch.float64, generator=generator) * 3 + 1
    mask = torch.rand(6, 7, generator=generator) > 0.3
    speaker = torch.tensor([0, 2, 0, 2, 2, 0])
    parts = [slice(0, 2), slice(2, 6), slice(6, 6)]
    moments = sum(speaker_moments(advantage[part], mask[part], speaker[part], 3) for part in parts)
    white = torch.cat([whiten_speakers(advantage[p], mask[p], speaker[p], moments) for p in parts])
    for one in (0, 2):
        mine = advantage[speaker == one][mask[speaker == one]]
        want = (mine - mine.mean()) / (mine.var() + 1e-8).sqrt()
        close(white[speaker == one][mask[speaker == one]], want)
    assert (white[~mask] == 0).all()


@pytest.mark.parametrize("mode", [mode for mode in AGGREGATIONS if mode != "prompt-mean"])  # refused with it
@pytest.mark.parametrize("by", ["turn", "row", "episode"])
def test_each_unit_has_the_same_share_of_the_loss(by, mode):
    """The loss's derivatives by what is common to the tokens of a unit are the same for all units."""
    mask = TURN >= 0
    cut = [slice(0, 3), slice(3, 4)]  # rows of an episode are on one rank
    units = [token_units(by, mask[p], TURN[p], EPISODE[p], SPEAKER[p], mode) for p in cut]
    totals = sum(unit.totals() for unit in units)
    weight = torch.cat([unit.weights(totals) for unit in units])
    assert (weight[~mask] == 0).all()
    per_token = torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
    aggregate_loss(per_token * weight, mask, mode, float(mask.sum()), 4, 5).backward()
    unit_of = {
        "turn": Turns.of(TURN).token_BT,
        "row": torch.arange(4)[:, None].expand(4, 5),
        "episode": torch.tensor([0, 0, 1, 2])[:, None].expand(4, 5),
    }[by]
    shares = torch.stack([per_token.grad[mask & (unit_of == unit)].sum() for unit in unit_of[mask].unique()])
    close(shares, shares.mean().expand(len(shares)))
    plain = torch.ones(4, 5, dtype=torch.float64)
    close(per_token.grad.sum(), aggregate_loss(plain, mask, mode, float(mask.sum()), 4, 5))
    none = token_units(by, mask[:0], TURN[:0], EPISODE[:0], SPEAKER[:0], mode)
    assert none.weights(totals).shape == (0, 5) and none.totals().tolist() == [0, 0]


def test_an_unknown_unit_is_refused():
    with pytest.raises(ConfigError, match="known are turn, row, episode"):
        token_units("sentence", TURN >= 0, TURN, EPISODE, SPEAKER, "token-mean")


def plain_episode_gae(turns, gamma, lam):
    """(number, value, reward) of each turn of an episode -> number -> advantage, by recursion."""
    found, last, next_value = {}, 0.0, 0.0
    for number, value, reward in sorted(turns, reverse=True):
        last = reward + gamma * next_value - value + gamma * lam * last
        found[number], next_value = last, value
    return found


def plain_turns(turn, reward, value, rows):
    """(number, value, reward) of each turn in some rows, and number -> (row, tokens), by lists."""
    found, places = [], {}
    for row in rows:
        for k in sorted({k for k in turn[row].tolist() if k >= 0}):
            tokens = [t for t in range(turn.shape[1]) if turn[row, t] == k]
            end = min((t for t in range(tokens[-1] + 1, turn.shape[1]) if turn[row, t] >= 0), default=None)
            found.append((k, float(value[row, tokens[0]]), float(reward[row, tokens[0] : end].sum())))
            places[k] = (row, tokens)
    return found, places


def test_gae_between_turns_of_three_agents_is_the_recursion_over_the_episode():
    generator = torch.Generator().manual_seed(2)
    turn = torch.tensor([[0, 0, X, 3, 3], [X, 6, X, X, X], [0, X, 3, 3, X], [X, X, X, X, X]])
    episode = torch.tensor([1, 1, 2, 2])  # the first has two rows; the last row has no turn of its own
    reward, value = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator)
    reward[1, 0] = 0.0  # before any turn of the row
    where = f64([1, 1], [1, 4], [2, 1], [1, 2], [2, 2], [2, 5])
    others = torch.cat([where, torch.randn(6, 2, dtype=torch.float64, generator=generator)], -1)
    for other in (others, NO_TURNS):
        got = gae_marft(reward, value, turn, episode, other, gamma=0.9, lam=0.8)
        for number in (1, 2):
            own, places = plain_turns(
                turn, reward, value, [row for row in range(4) if episode[row] == number]
            )
            theirs = [(int(k), v, r) for e, k, v, r in other.tolist() if e == number]
            want = plain_episode_gae(own + theirs, 0.9, 0.8)
            for k, v, _ in own:
                row, tokens = places[k]
                close(got.advantage_BT[row, tokens], f64(want[k]).expand(len(tokens)))
                close(got.return_BT[row, tokens], f64(want[k] + v).expand(len(tokens)))
        assert (got.advantage_BT[turn < 0] == 0).all() and (got.return_BT[turn < 0] == 0).all()
    empty = gae_marft(reward[:0], value[:0], turn[:0], episode[:0], NO_TURNS, gamma=1.0, lam=1.0)
    assert empty.advantage_BT.shape == (0, 5)


def test_a_three_agent_two_turn_episode_by_hand():
    """gamma 1, lambda 1: the advantage of a turn is all that follows, less its value."""
    turn = torch.tensor([[0, X, 3, 3]])
    reward = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    value = torch.tensor([[0.25, 9.0, 0.5, 9.0]], dtype=torch.float64)
    others = f64([4, 1, 0.1, 0.0], [4, 2, 0.2, 0.5], [4, 4, 0.3, 2.0], [4, 5, 0.4, 0.0])
    got = gae_marft(reward, value, turn, torch.tensor([4]), others, gamma=1.0, lam=1.0)
    close(got.advantage_BT, f64([3.5 - 0.25, 0, 3.0 - 0.5, 3.0 - 0.5]))
    one_step = gae_marft(reward, value, turn, torch.tensor([4]), others, gamma=1.0, lam=0.0)
    close(one_step.advantage_BT, f64([0.1 - 0.25, 0, 1 + 0.3 - 0.5, 1 + 0.3 - 0.5]))


class Way:
    """An episode of a random tree: its own turns (number, speaker, reward), and who branches off where."""

    def __init__(self, draw: random.Random, ways: list["Way"], begins: int = 0, groups: tuple = ()) -> None:
        self.episode, self.turns, self.others = len(ways), [], {}
        ways.append(self)
        number = begins
        while number == begins or draw.random() < 0.7:
            branches = number > begins - (not groups) and len(ways) < 9 and draw.random() < 0.3
            if branches:
                groups = (*groups, branch_id(self.episode, number))
            self.turns.append(
                (number, draw.randrange(2), float(draw.randrange(9)), groups[-1] if groups else -1)
            )
            if branches:
                count = draw.randint(1, 2)
                self.others[number] = [Way(draw, ways, number, groups) for _ in range(count)]
            number += 1

    def on(self, place: int, speaker: int, gamma: float) -> float | None:
        """What the speaker gets from this turn on, over all candidates there; None: it does not speak."""
        if place == len(self.turns):
            return None
        ones = [self, *self.others.get(self.turns[place][0], ())]
        found = [one.along(place if one is self else 0, speaker, gamma) for one in ones]
        spoken = [value for value in found if value is not None]
        return sum(spoken) / len(spoken) if spoken else None

    def along(self, place: int, speaker: int, gamma: float) -> float | None:
        """The same with the turn of this episode there."""
        _, who, reward, _ = self.turns[place]
        later = self.on(place + 1, speaker, gamma)
        return later if who != speaker else reward + gamma * (later or 0.0)


def test_turns_before_a_branch_are_worth_the_mean_over_its_candidates():
    draw, num_branched = random.Random(3), 0
    for _ in range(300):
        ways, gamma = [], draw.choice((0.0, 0.5, 1.0))
        Way(draw, ways)
        num_branched += len(ways) > 2
        units = [(way, place) for way in ways for place in range(len(way.turns))]
        draw.shuffle(units)
        columns = [(way.episode, way.turns[place]) for way, place in units]
        episode_U = torch.tensor([episode for episode, _ in columns])
        number_U, speaker_U = (torch.tensor([turn[i] for _, turn in columns]) for i in (0, 1))
        reward_U = torch.tensor([turn[2] for _, turn in columns])
        branch_U = torch.tensor([turn[3] for _, turn in columns])
        chain_U = joint_key(episode_U, speaker_U)
        to_go_U = Chains.of(chain_U, number_U).to_go(reward_U, gamma)
        found_U = over_candidates(to_go_U, episode_U, speaker_U, number_U, branch_U, gamma)
        wanted = [way.along(place, way.turns[place][1], gamma) for way, place in units]
        torch.testing.assert_close(found_U, torch.tensor(wanted, dtype=torch.float64), atol=1e-9, rtol=0)
    assert num_branched > 100
