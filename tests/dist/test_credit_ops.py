"""The advantage op on rows of an interaction of two agents, on one rank and on two, against cases by hand."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers
from tensordict import TensorDict

from siirl.config import Config, load_config, with_overrides
from siirl.config.batch import batch_of
from siirl.data.rows import take_rows
from siirl.errors import DagError
from siirl.nodes.advantage import advantage
from siirl.nodes.filter import pf_ppo
from siirl.nodes.mini_batches import mini_batches
from siirl.nodes.trained_tokens import ShownRow, TrainedTokens
from siirl.observe.metrics import Metrics

X = -1
WIDTH = 5
# Two tasks of two episodes each. Agent 0 speaks in turns 0 and 2, in episode 1 in two rows; agent 1 in
# turn 1, but not in episode 3.
SOLVER = {
    "row_id": [0, 2, 3, 4, 6],
    "group_id": [0, 0, 0, 1, 1],
    "episode_id": [0, 1, 1, 2, 3],
    "speaker": [0, 0, 0, 0, 0],
    "response_length": [5, 2, 1, 4, 3],
    "turn_id": [[0, 0, X, 2, 2], [0, 0, X, X, X], [2, X, X, X, X], [0, X, 2, 2, X], [0, 0, 0, X, X]],
    "env_reward": [[0, 1, 0, 0, 0], [0] * 5, [0] * 5, [0, 0, 0, 2, 0], [0] * 5],
    "score": [1.0, 0.0, 2.0, 0.0, 0.5],
    "value": [
        [0.5, 9, 9, 0.25, 9],
        [0.1, 9, 9, 9, 9],
        [0.2, 9, 9, 9, 9],
        [0.3, 9, 0.4, 9, 9],
        [0.6, 9, 9, 9, 9],
    ],
}
VERIFIER = {
    "row_id": [0, 2, 4],
    "group_id": [0, 0, 1],
    "episode_id": [0, 1, 2],
    "speaker": [1, 1, 1],
    "response_length": [2, 3, 1],
    "turn_id": [[1, 1, X, X, X], [1, 1, 1, X, X], [1, X, X, X, X]],
    "env_reward": [[0] * 5, [0, 0, 4, 0, 0], [0] * 5],
    "score": [3.0, 1.0, 5.0],
    "value": [[0.7, 9, 9, 9, 9], [0.8, 9, 9, 9, 9], [0.9, 9, 9, 9, 9]],
}
GRPO = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}
CREDIT = "algorithm.credit"
MODE = "actor_rollout_ref.actor.loss_agg_mode"


def rows_of(agent: dict) -> TensorDict:
    columns = {name: torch.tensor(value) for name, value in agent.items()}
    columns |= {name: columns[name].float() for name in ("score", "value", "env_reward")}
    columns["response_mask"] = columns["turn_id"] >= 0
    return TensorDict(columns, batch_size=[len(agent["row_id"])])


@functools.cache
def default_config() -> Config:
    return load_config([])


def context(keys: dict, others: dict[int, TensorDict]) -> SimpleNamespace:
    cfg = with_overrides(default_config(), keys)
    common = {
        "group": dist.group.WORLD,
        "state": {},
        "is_shard_leader": True,
        "node_id": "advantage",
        "agent": 0,
        "node": SimpleNamespace(env_rewards=True),
    }
    return SimpleNamespace(cfg=cfg, metrics=Metrics(), others=others, trained=None, taken=None, **common)


def run_cases(rank: int, world: int, cases: list[tuple[dict, tuple, tuple]]) -> list[dict]:
    """(config, columns dropped of the solver's rows, columns of the verifier's) -> what the op gives.

    Task t lies on rank t % world.
    """
    found = []
    for keys, dropped, joined in cases:
        solver, verifier = rows_of(SOLVER), rows_of(VERIFIER)
        mine = take_rows(solver, solver["group_id"] % world == rank).exclude(*dropped)
        theirs = take_rows(verifier, verifier["group_id"] % world == rank)
        columns = ("episode_id", "speaker", "turn_id", "response_length", "env_reward", *joined)
        ctx = context(keys, {1: theirs.select(*columns)} if joined else {})
        out = advantage(ctx, mine)
        found.append(
            {
                "advantage": out["advantage"].tolist(),
                "return": out["return_"].tolist() if "return_" in out.keys() else None,
                "metrics": ctx.metrics.entries,
            }
        )
    return found


def run_shares(rank: int, world: int, cases: list[dict]) -> list[dict]:
    """config -> (episode, turn) -> shares of the rewards of the solver's turns, as a run would write them."""
    found = []
    for keys in cases:
        mine, theirs = (
            take_rows(rows, rows["group_id"] % world == rank) for rows in (rows_of(SOLVER), rows_of(VERIFIER))
        )
        mine["sample_index"] = mine["group_id"] + 10
        ctx = context(keys, {1: theirs.exclude("value")})
        ctx.trained = TrainedTokens()
        advantage(ctx, mine)
        first_only, both = (
            [ShownRow(0, index, "", 0, 0) for index in indices] for indices in ([10], [10, 11])
        )
        shares = ctx.trained.found(both).shares
        assert ctx.trained.found(first_only).shares.keys() == {key for key in shares if key[1] < 2}
        found.append({(episode, turn): share for (_, episode, turn), share in shares.items()})
    return found


def run_shared(rank: int, world: int, cases: list[dict]) -> list[tuple[dict, dict]]:
    """config -> ((speaker, row_id) -> advantages of its tokens, metrics), where both speak with one policy.

    The KL from the reference is 0.5 at each token of agent 0, and 2 at those of agent 1.
    """
    found = []
    for keys in cases:
        rows = TensorDict.cat([rows_of(SOLVER), rows_of(VERIFIER)])
        rows["old_log_prob"] = rows["rollout_log_prob"] = torch.zeros(len(rows), WIDTH)
        rows["ref_log_prob"] = -0.5 * (1 + 3 * rows["speaker"])[:, None].expand(-1, WIDTH)
        mine = take_rows(rows, rows["group_id"] % world == rank)
        ctx = context(keys, {})
        out = advantage(ctx, mine)["advantage"]
        names = zip(mine["speaker"].tolist(), mine["row_id"].tolist(), strict=True)
        own = [values[mask].tolist() for values, mask in zip(out, mine["response_mask"], strict=True)]
        found.append((dict(zip(names, own, strict=True)), ctx.metrics.entries))
    return found


def by_turn(*rows: tuple[float, ...]) -> torch.Tensor:
    """[B, T] of one value for each turn of each of the solver's rows."""
    out = torch.zeros(len(rows), WIDTH)
    turn_BT = torch.tensor(SOLVER["turn_id"])
    for row, values in enumerate(rows):
        numbers = turn_BT[row][turn_BT[row] >= 0].unique()
        for number, value in zip(numbers, values, strict=True):
            out[row][turn_BT[row] == number] = value
    return out


def by_row(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None] * (torch.tensor(SOLVER["turn_id"]) >= 0)


# Outcomes of the solver's rows, score and environment: 2, 0, 2 | 2, 0.5; scores of the others: 3, 1, 1 | 5, -
MEAN = 4 / 3
CASES = {
    "own score and environment, by task": (
        GRPO, (), (), by_row(2 - MEAN, -MEAN, 2 - MEAN, 0.75, -0.75),
    ),
    "half of the team's score, no environment": (
        GRPO | {f"{CREDIT}.team": 0.5, f"{CREDIT}.turn": 0.0}, (), ("score",),
        by_row(2.5 - 11 / 6, 0.5 - 11 / 6, 2.5 - 11 / 6, 2.5 - 1.5, 0.5 - 1.5),
    ),
    "a quarter of its own score": (
        GRPO | {f"{CREDIT}.own": 0.25, f"{CREDIT}.turn": 0.0}, (), (),
        by_row(0.0, -0.25, 0.25, -0.0625, 0.0625),
    ),
    "the team's score where there is none of its own": (
        GRPO | {f"{CREDIT}.turn": 0.0}, ("score",), ("score",),
        by_row(3 - 5 / 3, 1 - 5 / 3, 1 - 5 / 3, 2.5, -2.5),
    ),
    "by task and turn, each turn's own reward": (
        # scores of an episode are means over its rows: turn 0 gets 1, 0 | 0, 0.5; turn 2 gets 1, 1 | 2
        GRPO | {f"{CREDIT}.group_by": ["task", "turn"], f"{CREDIT}.turn_gamma": 0.0}, (), (),
        by_turn((0.5, 0.0), (-0.5,), (0.0,), (-0.25, 0.0), (0.25,)),
    ),
    "by task and turn, rewards to go": (
        # turn 0: 2, 1 | 2, 0.5; turn 2: 1, 1 | 2
        GRPO | {f"{CREDIT}.group_by": ["task", "turn"]}, (), (),
        by_turn((0.5, 0.0), (-0.5,), (0.0,), (0.75, 0.0), (-0.75,)),
    ),
    "each episode counts alike": (
        # tokens 4, 2 + 1, 3, 3: of 13 in 4 episodes
        GRPO | {f"{CREDIT}.equal_weight": "episode"}, (), (),
        by_row(2 - MEAN, -MEAN, 2 - MEAN, 0.75, -0.75) * 13 / 4 / torch.tensor([[4], [3], [3], [3], [3.0]]),
    ),
    "each episode counts alike in a mean over rows": (
        # shares 1, 1 + 1, 1, 1: of 5 in 4 episodes
        GRPO | {f"{CREDIT}.equal_weight": "episode", MODE: "seq-mean-token-mean"}, (), (),
        by_row(2 - MEAN, -MEAN, 2 - MEAN, 0.75, -0.75) * 5 / 4 / torch.tensor([[1], [2], [2], [1], [1.0]]),
    ),
}  # fmt: skip


def whole_batch(found: list[list[dict]], case: int, name: str) -> torch.Tensor:
    return torch.tensor([row for rank in found for row in rank[case][name]])


@pytest.fixture(scope="module")
def function(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.py"
    path.write_text(
        "def by_half(keys):\n    return keys['episode'] // 2\n\n\ndef wrong(keys):\n    return [0]\n"
    )
    return path


MARFT = {"algorithm.adv_estimator": "gae_marft", "algorithm.gamma": 0.9, "algorithm.lam": 0.8}


def plain_marft(chains: bool, turn: float) -> list[list[tuple[float, float]]]:
    """(advantage, return) of the solver's turns, row by row: plain recursions over hand-written episodes.

    turn: the weight of what the environment gave.
    """
    turns = {  # number: (value, reward, row); the verifier's rewards count by the team's weight, 0.5
        0: {0: (0.5, turn, 0), 1: (0.7, 0.5 * 3.0, None), 2: (0.25, 1.0, 0)},
        1: {0: (0.1, 0.0, 1), 1: (0.8, 0.5 * (1.0 + turn * 4.0), None), 2: (0.2, 1.0, 2)},
        2: {0: (0.3, 0.0, 3), 1: (0.9, 0.5 * 5.0, None), 2: (0.4, turn * 2.0, 3)},
        3: {0: (0.6, 0.5, 4)},
    }
    rows: list[list[tuple[float, float]]] = [[] for _ in range(5)]
    for episode in turns.values():
        last, next_value, found = 0.0, 0.0, {}
        for number in sorted(episode, reverse=True):
            value, reward, row = episode[number]
            if row is None and not chains:
                continue
            last = reward + 0.9 * next_value - value + 0.9 * 0.8 * last
            next_value, found[number] = value, (row, last, last + value)
        for number in sorted(found):
            row, one, total = found[number]
            if row is not None:
                rows[row].append((one, total))
    return rows


SHARES = {
    (0, 0): (0, 0, 0.5, 0), (0, 2): (0.25, 1.5, 0, -1), (1, 0): (0, 0.5, 0, -0.25), (1, 2): (0.5, 0.5, 0, 0),
    (2, 0): (0, 0, 0, 0), (2, 2): (0, 2.5, 1, -0.75), (3, 0): (0.125, 0, 0, -0.5),
}  # fmt: skip
"""(episode, turn) -> own, team, env, shaping: a quarter of its own, half of the other's and of what the
environment gave, and a penalty of up to 1 for responses of two to five tokens."""


def test_the_shares_of_a_turn_are_those_of_its_reward():
    weights = {f"{CREDIT}.own": 0.25, f"{CREDIT}.team": 0.5, f"{CREDIT}.turn": 0.5}
    length = "actor_rollout_ref.rollout.response_length"
    penalty = {"enable": True, "len": 4, "penalty_factor": 1.0}
    penalty = {f"reward_model.overlong_buffer.{name}": value for name, value in penalty.items()}
    keys = GRPO | weights | penalty | {length: 5}
    by_turn = keys | {f"{CREDIT}.group_by": ["task", "turn"]}
    halves = {key: SHARES[key] for key in SHARES if key[0] != 1}
    halves |= {(1, 0): (0, 0.25, 0, -0.25), (1, 2): (0.25, 0.25, 0, 0)}  # two rows, a score
    for world in (1, 2):
        ranks = run_workers(run_shares, world, [keys, by_turn])
        for case, expected in enumerate((SHARES, halves)):
            found = {key: share for rank in ranks for key, share in rank[case].items()}
            names = ("own", "team", "env", "shaping")
            assert {key: tuple(share[name] for name in names) for key, share in found.items()} == expected


def test_advantages_in_an_interaction_are_those_by_hand_on_one_rank_and_on_two(function):
    group_by = [f"{function}:by_half", "agent"]  # the same groups as by task
    cases = [case[:3] for case in CASES.values()]
    cases.append((GRPO | {f"{CREDIT}.group_by": group_by}, (), ()))
    want = [case[3] for case in CASES.values()]
    want.append(want[0])
    chained = (MARFT | {f"{CREDIT}.team": 0.5, f"{CREDIT}.turn": 0.25}, (), ("value", "score"))
    alone = (MARFT, (), ())
    white = ({"algorithm.adv_estimator": "grpo", f"{CREDIT}.normalize": "agent"}, (), ())
    ungrouped = [
        ({"algorithm.adv_estimator": name} | groups, (), ())
        for name in ("gae", "gae_marft", "reinforce_plus_plus")
        for groups in ({}, {f"{CREDIT}.group_by": ["task", "agent", "turn"]})
    ]
    every = [*cases, chained, alone, white, *ungrouped]
    found = {world: run_workers(run_cases, world, every) for world in (1, 2)}
    for ranks in found.values():
        for rank in ranks:  # what estimators compare that compare no groups means nothing to them
            for number in range(len(every) - len(ungrouped), len(every), 2):
                assert rank[number] == rank[number + 1], every[number]
        for number, expected in enumerate(want):
            got = whole_batch(ranks, number, "advantage")
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=0, msg=f"{number}: {got}")
        for number, chains, turn in ((len(want), True, 0.25), (len(want) + 1, False, 1.0)):
            plain = plain_marft(chains, turn)
            returns = by_turn(*[[total for _, total in row] for row in plain])
            torch.testing.assert_close(whole_batch(ranks, number, "return"), returns, atol=1e-6, rtol=0)
            raw = by_turn(*[[one for one, _ in row] for row in plain])
            mask = by_turn(*[[1] * len(row) for row in plain])
            kept = raw[mask > 0]
            whitened = (raw - kept.mean()) / kept.std() * mask
            torch.testing.assert_close(whole_batch(ranks, number, "advantage"), whitened, atol=1e-5, rtol=0)
        last = whole_batch(ranks, len(want) + 2, "advantage")
        kept = last[torch.tensor(SOLVER["turn_id"]) >= 0]
        assert kept.mean().abs() < 1e-6 and (kept.std() - 1).abs() < 1e-6
    metrics = Metrics()
    for rank in found[2]:
        metrics.merge(Metrics(rank[0]["metrics"]))
    values = metrics.values()
    assert values["speaker_0/length"] == pytest.approx(13 / 7)
    assert values["turn_2/length"] == pytest.approx(5 / 3)
    assert values["turn_2/reward"] == pytest.approx((1 + 2 + 2) / 3)
    assert values["turn_0/reward"] == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert values["reward/zero_std_groups"] == values["speaker_0/zero_std_groups"] == 0

    def values_of(name: str) -> dict[str, float]:
        joined = Metrics()
        for rank in found[2]:
            joined.merge(Metrics(rank[list(CASES).index(name)]["metrics"]))
        return joined.values()

    values = values_of("half of the team's score, no environment")  # outcomes: 2.5, 0.5, 2.5 | 2.5, 0.5
    assert values["reward/score"] == pytest.approx(0.7) and values["reward/total"] == pytest.approx(1.7)
    assert (values["reward/score_max"], values["reward/score_min"]) == (2, 0), "of the scores themselves"
    values = values_of("by task and turn, each turn's own reward")
    assert (values["turn_0/zero_std_groups"], values["turn_2/zero_std_groups"]) == (0, 1)


def test_agents_of_one_policy_are_compared_and_normalised_each_among_its_own_rows():
    by_agent = {f"{CREDIT}.group_by": ["task", "agent"]}
    cases = [GRPO, GRPO | by_agent, GRPO | by_agent | {f"{CREDIT}.normalize": "agent"}]
    parts = run_workers(run_shared, 2, [*cases, GRPO | {"algorithm.use_kl_in_reward": True}])
    together, apart, white, _ = ({**one[0], **other[0]} for one, other in zip(*parts, strict=True))
    metrics = Metrics(parts[0][3][1])
    metrics.merge(Metrics(parts[1][3][1]))
    kl = {name: value for name, value in metrics.values().items() if name.endswith("/kl")}
    assert kl == pytest.approx({"reward/kl": 8.5 / 8, "speaker_0/kl": 0.5, "speaker_1/kl": 2.0})
    # outcomes in task 0: 2, 0, 2 of agent 0, 3 and 5 of agent 1
    assert [together[0, 0][0], together[1, 0][0]] == pytest.approx([2 - 12 / 5, 3 - 12 / 5])
    assert [apart[0, row][0] for row in (0, 2, 3, 4, 6)] == pytest.approx(
        [2 - MEAN, -MEAN, 2 - MEAN, 0.75, -0.75]
    )
    assert [apart[1, 0][0], apart[1, 2][0]] == pytest.approx([-1.0, 1.0])
    for speaker in (0, 1):
        values = torch.tensor([value for (who, _), row in white.items() if who == speaker for value in row])
        assert values.mean().abs() < 1e-6 and (values.std() - 1).abs() < 1e-6


def refused(rank: int, world: int, keys: dict) -> str:
    with pytest.raises(DagError) as caught:
        advantage(context(keys, {}), rows_of(SOLVER))
    return str(caught.value)


def test_a_group_function_that_returns_no_groups_is_refused(function):
    keys = GRPO | {f"{CREDIT}.group_by": [f"{function}:wrong"]}
    (message,) = run_workers(refused, 1, keys)
    assert "wrong of algorithm.credit.group_by returned [0] for 5 units. Return an int64 tensor" in message


def resampled(rank: int, world: int) -> list[tuple[int, int, int]]:
    """(row_id, episode_id, row_id before) of the rows that PF-PPO draws of the solver's."""
    rows = rows_of(SOLVER)
    rows["old"] = rows["row_id"]
    ctx = context({"algorithm.use_pf_ppo": True}, {})
    ctx.step = 2
    out = pf_ppo(ctx, take_rows(rows, rows["group_id"] % world == rank))
    assert ctx.metrics.values()["resampling/distinct"] < 1
    return list(zip(*(out[name].tolist() for name in ("row_id", "episode_id", "old")), strict=True))


def test_each_draw_of_pf_ppo_is_an_episode_of_its_own_with_all_its_rows():
    drawn = sorted(row for rank in run_workers(resampled, 2) for row in rank)
    assert len({row_id for row_id, _, _ in drawn}) == len(drawn)
    episodes: dict[int, list[int]] = {}
    for _, episode, old in drawn:
        episodes.setdefault(episode, []).append(old)
    assert len(episodes) == 4 and all(rows in ([0], [2, 3], [4], [6]) for rows in episodes.values())
    assert [2, 3] in episodes.values()


EPISODES = ([0, 0, 0, 1, 2, 4, 4, 6], [0, 2, 2, 4, 6, 6, 6], [3, 3, 3], [])


def cut(rank: int, world: int) -> list[list[list[int]]]:
    """Row ids of each mini-batch of this rank, for all EPISODES as they are, then shuffled.

    4 prompts of 2 samples a batch, 2 prompts a mini-batch, 2 epochs.
    """
    keys = {"data.train_batch_size": 4, "actor_rollout_ref.rollout.n": 2}
    keys |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "actor_rollout_ref.actor.ppo_epochs": 2}
    ctx = context(keys, {})
    ctx.step, found = 3, []
    for shuffle_seed in (None, 5):
        for episodes in EPISODES:
            ids = torch.tensor(episodes, dtype=torch.int64)
            rows = TensorDict({"row_id": torch.arange(len(ids)), "episode_id": ids}, [len(ids)])
            mine = take_rows(rows, ids % world == rank)
            chosen = mini_batches(ctx, mine, batch_of(ctx.cfg), shuffle_seed)
            found.append([mine["row_id"][mine_B].tolist() for mine_B in chosen])
    return found


def test_optimizer_steps_are_those_of_the_plan_however_many_rows_an_agent_has():
    """Two mini-batches in each of two epochs, with whole episodes, whether these have many rows or none."""
    (wholes,), (ones, others) = run_workers(cut, 1), run_workers(cut, 2)
    for episodes, whole, one, other in zip([*EPISODES, *EPISODES], wholes, ones, others, strict=True):
        assert len(whole) == len(one) == len(other) == 4
        assert [sorted(mine + theirs) for mine, theirs in zip(one, other, strict=True)] == whole
        for epoch in (whole[:2], whole[2:]):
            assert sorted(epoch[0] + epoch[1]) == list(range(len(episodes)))
            counts = [len({episodes[row] for row in rows}) for rows in epoch]
            assert abs(counts[0] - counts[1]) <= 1 and sum(counts) == len(set(episodes))
    assert wholes[0] == [[0, 1, 2, 3, 4], [5, 6, 7]] * 2 != wholes[len(EPISODES)]
