"""Advantage estimators against float64 recursions written from the papers, and published packages."""

import itertools
import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl.algorithms.advantages import (
    ADVANTAGES,
    Advantages,
    compute_advantage,
    discounted_sum,
    register_advantage,
)
from siirl.errors import ConfigError, RewardError

GAMMA, LAM = 0.97, 0.9
OPTIONS = {
    "norm_adv_by_std_in_grpo": True,
    "gamma": GAMMA,
    "lam": LAM,
    "weight_factor_in_cpgd": "STD_weight",
    "gdpo_rewards": {"right": 2.0, "short": 0.5},
}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """12 rows of 9 tokens in groups of 5, 4, 2 and 1 with holes in the mask; one row trains no token."""
    rng = random.Random(seed)
    width, ids = 9, [7] * 5 + [-3] * 4 + [10**12] * 2 + [0]
    rng.shuffle(ids)
    mask, reward = [], []
    for row in range(len(ids)):
        length = rng.randint(2, width)
        mask.append([t < length and rng.random() < 0.8 and row != 4 for t in range(width)])
        reward.append([rng.gauss(0, 1) if t < length else 0.0 for t in range(width)])
    value = [[rng.gauss(0, 1) for _ in range(width)] for _ in ids]
    words = torch.tensor([[[rng.gauss(0, 1) for _ in range(5)] for _ in range(width)] for _ in ids])
    words = words.to(dtype).softmax(-1)
    return {
        "reward": torch.tensor(reward, dtype=dtype),
        "response_mask": torch.tensor(mask),
        "group_id": torch.tensor(ids),
        "value": torch.tensor(value, dtype=dtype),
        "old_log_prob": words[..., 0].log(),
        "old_prob_square": (words**2).sum(-1),
        "baseline_score": torch.tensor([rng.gauss(0, 1) for _ in ids], dtype=dtype),
        "reward_part": torch.tensor([[rng.gauss(0, 1), 7.5 * rng.randint(0, 1)] for _ in ids], dtype=dtype),
    }


def rows_for(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The batch, with rewards that an estimator takes: for maxrl none below 0, one group without success."""
    fields = batch(seed, dtype)
    if name == "maxrl":
        fields["reward"] = fields["reward"].clamp(min=0) * (fields["group_id"] != -3)[:, None]
    return fields


def lists(fields: dict[str, torch.Tensor]) -> SimpleNamespace:
    return SimpleNamespace(**{name: value.tolist() for name, value in fields.items()})


def over_tokens(per_row: list[float], mask: list[list[bool]]) -> list[list[float]]:
    return [[a if m else 0.0 for m in row] for a, row in zip(per_row, mask, strict=True)]


def peers(b: SimpleNamespace, row: int) -> list[int]:
    return [i for i, group in enumerate(b.group_id) if group == b.group_id[row]]


def oracle_grpo(b, with_std=True):
    score = [math.fsum(r) for r in b.reward]
    out = []
    for i in range(len(score)):
        group = [score[j] for j in peers(b, i)]
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        out.append((score[i] - statistics.fmean(group)) / (std + 1e-6 if with_std else 1.0))
    return over_tokens(out, b.response_mask)


def oracle_rloo(b):
    score = [math.fsum(r) for r in b.reward]
    out = []
    for i in range(len(score)):
        others = [score[j] for j in peers(b, i) if j != i]
        out.append(score[i] - statistics.fmean(others) if others else 0.0)
    return over_tokens(out, b.response_mask)


def oracle_opo(b):
    score, length = [math.fsum(r) for r in b.reward], [sum(m) for m in b.response_mask]
    out = []
    for i in range(len(score)):
        group = peers(b, i)
        baseline = sum(length[j] * score[j] for j in group) / max(sum(length[j] for j in group), 1)
        out.append(score[i] - baseline)
    return over_tokens(out, b.response_mask)


def oracle_optimal_token_baseline(b):
    """Trained tokens of each row one after the other: what they earn from there on, and the energy so far."""
    earned, energy = [], []
    for i, row_mask in enumerate(b.response_mask):
        places = [t for t, on in enumerate(row_mask) if on]
        earned.append([math.fsum(b.reward[i][t:]) for t in places])
        spent = [1 - 2 * math.exp(b.old_log_prob[i][t]) + b.old_prob_square[i][t] for t in places]
        energy.append([math.fsum(spent[: s + 1]) for s in range(len(places))])
    out = [[0.0] * len(row) for row in b.reward]
    for i, row_mask in enumerate(b.response_mask):
        for s, t in enumerate(t for t, on in enumerate(row_mask) if on):
            rows = [j for j in peers(b, i) if len(earned[j]) > s]
            mean = sum(energy[j][s] * earned[j][s] for j in rows) / sum(energy[j][s] for j in rows)
            out[i][t] = earned[i][s] - mean
    return out


def oracle_gpg(b):
    plain = oracle_grpo(b, with_std=False)
    trained = {group for group, m in zip(b.group_id, b.response_mask, strict=True) if any(m)}
    alpha = len(trained) / len({g for g, row in zip(b.group_id, plain, strict=True) if any(row)})
    return [[alpha * a for a in row] for row in plain]


def oracle_maxrl(b):
    """The score of the mean over successes, less that over all rows, written as weights of the rows."""
    score = [math.fsum(r) for r in b.reward]
    out = []
    for i in range(len(score)):
        group = [score[j] for j in peers(b, i)]
        successes = math.fsum(group)
        out.append(len(group) * score[i] / successes - 1.0 if successes > 0 else 0.0)
    return over_tokens(out, b.response_mask)


def oracle_gdpo(b):
    found = [0.0] * len(b.group_id)
    for number, weight in enumerate((2.0, 0.5)):
        part = [row[number] for row in b.reward_part]
        for i in range(len(found)):
            group = [part[j] for j in peers(b, i)]
            std = statistics.stdev(group) if len(group) > 1 else 0.0
            found[i] += weight * (part[i] - statistics.fmean(group)) / (std + 1e-6)
    trained = [a for a, mask in zip(found, b.response_mask, strict=True) if any(mask)]
    mean, std = statistics.fmean(trained), statistics.stdev(trained)
    return over_tokens([(a - mean) / (std + 1e-6) for a in found], b.response_mask)


def oracle_grpo_passk(b):
    score = [math.fsum(r) for r in b.reward]
    out = []
    for i in range(len(score)):
        ranked = sorted((score[j] for j in peers(b, i)), reverse=True)
        lead = ranked[0] - ranked[1] if len(ranked) > 1 and score[i] == ranked[0] else 0.0
        out.append(lead / (statistics.stdev(ranked) + 1e-6) if lead else 0.0)
    return over_tokens(out, b.response_mask)


def steps_of(b, row) -> list[tuple[int, float]]:
    """(position, reward) of the policy's tokens; rewards between two of them count for the earlier."""
    steps: list[list] = []
    for t, trained in enumerate(b.response_mask[row]):
        if trained:
            steps.append([t, 0.0])
        if steps:
            steps[-1][1] += b.reward[row][t]
    return [(t, r) for t, r in steps]


def oracle_gae(b):
    advantage = [[0.0] * len(r) for r in b.reward]
    return_ = [[0.0] * len(r) for r in b.reward]
    for row in range(len(b.reward)):
        last, next_value = 0.0, 0.0
        for t, reward in reversed(steps_of(b, row)):
            value = b.value[row][t]
            last = reward + GAMMA * next_value - value + GAMMA * LAM * last
            next_value = value
            advantage[row][t], return_[row][t] = last, last + value
    return advantage, return_


def oracle_to_go(b, gamma=GAMMA):
    out = [[0.0] * len(r) for r in b.reward]
    for row in range(len(b.reward)):
        running = 0.0
        for t, reward in reversed(steps_of(b, row)):
            running = reward + gamma * running
            out[row][t] = running
    return out


def oracle_remax(b):
    to_go = oracle_to_go(b, gamma=1.0)
    return [
        [x - base if m else 0.0 for x, m in zip(row, mask, strict=True)]
        for row, mask, base in zip(to_go, b.response_mask, b.baseline_score, strict=True)
    ]


def whitened(advantage, mask):
    kept = [a for row, m in zip(advantage, mask, strict=True) for a, on in zip(row, m, strict=True) if on]
    mean, scale = statistics.fmean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    return [
        [(a - mean) / scale if on else 0.0 for a, on in zip(row, m, strict=True)]
        for row, m in zip(advantage, mask, strict=True)
    ]


ORACLES = {
    "grpo": oracle_grpo,
    "rloo": oracle_rloo,
    "opo": oracle_opo,
    "optimal_token_baseline": oracle_optimal_token_baseline,
    "gpg": oracle_gpg,
    "maxrl": oracle_maxrl,
    "gdpo": oracle_gdpo,
    "grpo_passk": oracle_grpo_passk,
    "gae": lambda b: whitened(oracle_gae(b)[0], b.response_mask),
    "reinforce_plus_plus": lambda b: whitened(oracle_to_go(b), b.response_mask),
    "reinforce_plus_plus_baseline": lambda b: whitened(oracle_grpo(b, with_std=False), b.response_mask),
    "remax": oracle_remax,
    "cpgd": oracle_grpo,
}


def test_every_registered_estimator_has_an_oracle():
    by_turn = {"gae_marft"}  # tests/unit/algorithms/test_credit.py
    assert set(ADVANTAGES.names()) - by_turn == set(ORACLES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ORACLES)
def test_an_estimator_equals_the_recursion_of_its_paper(name, seed):
    fields = rows_for(name, seed)
    got = compute_advantage(name, fields, OPTIONS).advantage_BT
    torch.testing.assert_close(got, torch.tensor(ORACLES[name](lists(fields)), dtype=torch.float64), **CLOSE)


def test_the_weights_of_cpgd():
    fields = batch()
    plain = torch.tensor(oracle_grpo(lists(fields), False), dtype=torch.float64)
    trained, with_signal = int(fields["response_mask"].any(-1).sum()), int((plain != 0).any(-1).sum())
    for rows, name, scale in (
        (fields, "naive", 1.0),
        (fields, "clip_filter_like_weight", trained / with_signal),
    ):
        got = compute_advantage("cpgd", rows, OPTIONS | {"weight_factor_in_cpgd": name}).advantage_BT
        torch.testing.assert_close(got, plain * scale, **CLOSE)
    one_group = {name: value.clone() for name, value in fields.items()}
    one_group["reward"][one_group["group_id"] != one_group["group_id"][0]] = 0.0
    options = OPTIONS | {"weight_factor_in_cpgd": "clip_filter_like_weight"}
    got = compute_advantage("cpgd", one_group, options).advantage_BT
    naive = compute_advantage("cpgd", one_group, OPTIONS | {"weight_factor_in_cpgd": "naive"}).advantage_BT
    share = trained / int((naive != 0).any(-1).sum())
    torch.testing.assert_close(got, naive * min(3.0, share), **CLOSE)


@pytest.mark.parametrize(("name", "most"), [("gpg", 4), ("cpgd", 3)])
def test_rows_that_differ_by_the_rounding_of_a_kl_have_no_signal(name, most):
    """Equal scores less a KL of identical weights: by that noise a step was scaled up or not."""
    reward_BT = torch.tensor([[1.0], [0.0], *[[0.5]] * 6])
    noise_BT = torch.tensor([0, 0, 1, -1, 2, -3, 1, 0])[:, None] * 3e-8
    fields = {
        "reward": reward_BT,
        "response_mask": torch.ones(8, 1, dtype=torch.bool),
        "group_id": torch.arange(8) // 2,
    }
    options = OPTIONS | {"weight_factor_in_cpgd": "clip_filter_like_weight"}
    exact = compute_advantage(name, fields, options).advantage_BT
    assert float(exact[0]) == pytest.approx(0.5 * most)
    got = compute_advantage(name, fields | {"reward": reward_BT + noise_BT}, options).advantage_BT
    torch.testing.assert_close(got, exact, atol=1e-6, rtol=1e-6)


def test_a_row_at_the_mean_of_its_group_does_not_make_the_group_one_without_signal():
    """GPG scales by groups: of 13 with scores 0, 0.5 and 1 all have a signal, by rows it was 39 / 26."""
    fields = {
        "reward": torch.tensor([0.0, 0.5, 1.0] * 13)[:, None],
        "response_mask": torch.ones(39, 1, dtype=torch.bool),
        "group_id": torch.arange(39) // 3,
    }
    got = compute_advantage("gpg", fields, OPTIONS).advantage_BT
    assert got[:, 0].tolist() == [-0.5, 0.0, 0.5] * 13
    fields["reward"][:3] = 1.0
    assert compute_advantage("gpg", fields, OPTIONS).advantage_BT[5, 0] == pytest.approx(0.5 * 13 / 12)


def test_grpo_without_deviation_is_the_distance_from_the_mean():
    fields = batch()
    got = compute_advantage("grpo", fields, OPTIONS | {"norm_adv_by_std_in_grpo": False}).advantage_BT
    torch.testing.assert_close(
        got, torch.tensor(oracle_grpo(lists(fields), False), dtype=torch.float64), **CLOSE
    )


def test_the_return_of_gae_is_advantage_plus_value_before_whitening():
    fields = batch()
    got = compute_advantage("gae", fields, OPTIONS).return_BT
    torch.testing.assert_close(got, torch.tensor(oracle_gae(lists(fields))[1], dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("name", ORACLES)
def test_single_precision_loses_only_its_own_rounding(name):
    fields = rows_for(name, dtype=torch.float32)
    got = compute_advantage(name, fields, OPTIONS).advantage_BT
    wide = {k: v.double() if v.is_floating_point() else v for k, v in fields.items()}
    want = compute_advantage(name, wide, OPTIONS).advantage_BT
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ORACLES)
def test_rows_may_come_in_any_order_and_on_any_rank(name):
    fields = rows_for(name, 1)
    want = compute_advantage(name, fields, OPTIONS).advantage_BT
    shards = [torch.nonzero(fields["group_id"] == g).squeeze(-1).flip(0) for g in (7, 0, 10**12, -3)]
    shards = [shards[0], torch.cat(shards[1:]), torch.zeros(0, dtype=torch.long)]
    parts = [{k: v[rows] for k, v in fields.items()} for rows in shards]
    sums = []
    for part in parts:
        compute_advantage(name, part, OPTIONS, lambda totals: sums.append(totals) or totals)
    for rows, part in zip(shards, parts, strict=True):
        got = compute_advantage(name, part, OPTIONS, lambda totals: torch.stack(sums).sum(0)).advantage_BT
        torch.testing.assert_close(got, want[rows], **CLOSE)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_empty_single_and_untrained_rows_give_finite_numbers(name, num_rows):
    fields = {k: v[:num_rows] for k, v in rows_for(name).items()}
    fields["response_mask"] = torch.zeros_like(fields["response_mask"])
    got = compute_advantage(name, fields, OPTIONS).advantage_BT
    assert got.shape == fields["reward"].shape and (got == 0).all()


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "opo", "maxrl"]
)
@pytest.mark.parametrize("score", [0.1, 0.0, 1 / 3])
def test_a_group_of_equal_outcomes_carries_no_signal_at_all(name, score):
    reward = torch.zeros(7, 3)
    reward[:, 2] = score
    fields = {
        "reward": reward,
        "response_mask": torch.ones(7, 3, dtype=torch.bool),
        "group_id": torch.tensor([5] * 6 + [8]),
    }
    assert (compute_advantage(name, fields, OPTIONS).advantage_BT == 0).all()


@pytest.mark.parametrize("rows", [2, 3, 6])
@pytest.mark.parametrize("rate", [0.07, 0.5, 0.9])
def test_maxrl_climbs_the_truncated_log_likelihood_in_expectation(rows, rate):
    """Over all outcomes of a prompt: the slope of the sum of pass@k / k for k below the number of rows."""
    slope = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=rows):
        chance = math.prod(rate if success else 1 - rate for success in outcome)
        fields = {"reward": torch.tensor(outcome, dtype=torch.float64)[:, None]}
        fields |= {"response_mask": torch.ones(rows, 1), "group_id": torch.zeros(rows)}
        advantage = compute_advantage("maxrl", fields, OPTIONS).advantage_BT[:, 0].tolist()
        of_log_prob = [1 / rate if success else -1 / (1 - rate) for success in outcome]
        slope += chance * sum(a * g for a, g in zip(advantage, of_log_prob, strict=True)) / rows
    assert slope == pytest.approx(sum((1 - rate) ** (k - 1) for k in range(1, rows)), rel=1e-9)


def test_gdpo_tells_rows_apart_whose_rewards_have_the_same_sum():
    """No reward counts more for its scale; one that is the same for all rows of a group counts nothing."""
    part = torch.tensor([[1.0, 0, 3], [0, 1, 3], [0, 0, 3], [1, 0, 3]], dtype=torch.float64)
    fields = {"response_mask": torch.ones(4, 1), "group_id": torch.zeros(4)}
    options = OPTIONS | {"gdpo_rewards": {"a": 1.0, "b": 1.0, "c": 1.0}}
    first, scaled = (
        compute_advantage("gdpo", fields | {"reward_part": part * scale}, options).advantage_BT[:, 0]
        for scale in (torch.ones(3), torch.tensor([1.0, 1000.0, -5.0]))
    )
    assert first[0] != first[1] and first[0] == first[3] and first[2] == first.min()
    torch.testing.assert_close(first, scaled, rtol=1e-4, atol=1e-4)


def test_maxrl_refuses_rewards_that_are_no_successes():
    fields = batch()
    with pytest.raises(RewardError, match=r"adv_estimator=maxrl with a reward of -\d.* success rate"):
        compute_advantage("maxrl", fields, OPTIONS)


@given(st.integers(1, 70), st.sampled_from([0.0, 0.3, 0.99, 1.0]), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_discounted_sum_equals_the_recursion_at_every_width(width, discount, seed):
    value = torch.randn(2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    want, running = torch.zeros_like(value), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(width)):
        running = value[:, t] + discount * running
        want[:, t] = running
    torch.testing.assert_close(discounted_sum(value, discount), want, rtol=1e-12, atol=1e-12)


@pytest.mark.heavy
def test_gae_equals_torchrl_on_full_rows():
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    gamma, lam = 31 / 32, 7 / 8  # exact in fp32, in which torchrl holds them
    fields = batch()
    fields["response_mask"] = torch.ones_like(fields["response_mask"])
    value, reward = fields["value"], fields["reward"]
    next_value = torch.nn.functional.pad(value[:, 1:], (0, 1))
    done = torch.zeros_like(fields["response_mask"])
    done[:, -1] = True
    columns = [x.unsqueeze(-1) for x in (value, next_value, reward, done)]
    want_advantage, want_return = functional.generalized_advantage_estimate(gamma, lam, *columns)
    got = ADVANTAGES.get("gae").fn(reward, value, fields["response_mask"], gamma=gamma, lam=lam)
    torch.testing.assert_close(got.advantage_BT, want_advantage.squeeze(-1), **CLOSE)
    torch.testing.assert_close(got.return_BT, want_return.squeeze(-1), **CLOSE)


@pytest.mark.heavy
def test_grpo_equals_torchrl_on_a_group():
    llm = pytest.importorskip("torchrl.objectives.llm")
    from tensordict import TensorDict

    reward = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    transform = llm.MCAdvantage(grpo_size=6, trajectory_return="sum", prompt_key="query")
    rows = [
        TensorDict(
            {"next": {"reward": r[:, None], "done": torch.zeros(4, 1, dtype=torch.bool)}}, batch_size=[4]
        )
        for r in reward
    ]
    want = transform._trajectory_advantage(rows)["advantage"].view(6, 4)
    ones = torch.ones(6, 4, dtype=torch.bool)
    fields = {"reward": reward, "response_mask": ones, "group_id": torch.zeros(6)}
    got = compute_advantage("grpo", fields, OPTIONS).advantage_BT
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_unknown_estimator_is_refused_with_the_known_names():
    with pytest.raises(
        ConfigError, match=r"algorithm.adv_estimator='grop'.*known are grpo.*Did you mean 'grpo'"
    ):
        compute_advantage("grop", batch(), OPTIONS)


def test_an_option_that_is_not_offered_is_named():
    with pytest.raises(ConfigError, match="'gae' takes the option 'gamma'"):
        compute_advantage("gae", batch(), {"lam": 1.0})


def test_a_user_can_register_an_estimator():
    def raw_score(reward_BT, response_mask_BT, *, scale: float = 2.0):
        return Advantages(scale * reward_BT.sum(-1, keepdim=True) * response_mask_BT)

    register_advantage("test_raw_score", needs=("reward", "response_mask"))(raw_score)
    try:
        fields = batch()
        got = compute_advantage("test_raw_score", fields, {"scale": 3.0}).advantage_BT
        torch.testing.assert_close(got, 3 * fields["reward"].sum(-1, keepdim=True) * fields["response_mask"])
        with pytest.raises(ConfigError, match="already registered"):
            register_advantage("test_raw_score", needs=("reward",))(lambda reward_BT: Advantages(reward_BT))
    finally:
        del ADVANTAGES._specs["test_raw_score"]


@pytest.mark.parametrize(
    ("result_of", "gave"),
    [
        (lambda reward_BT: reward_BT, "gave a Tensor, not Advantages"),
        (lambda reward_BT: (reward_BT, reward_BT), "gave a tuple, not Advantages"),
        (lambda reward_BT: None, "gave a NoneType, not Advantages"),
        (lambda reward_BT: Advantages(reward_BT[0]), r"gave advantages of shape \(9,\), not .*\(12, 9\)"),
    ],
)
def test_what_is_no_advantages_is_refused_with_what_to_return(result_of, gave):
    register_advantage("test_none", needs=("reward",))(result_of)
    try:
        with pytest.raises(ConfigError, match=f"algorithm.adv_estimator=test_none {gave}.*Return siirl"):
            compute_advantage("test_none", batch(), OPTIONS)
    finally:
        del ADVANTAGES._specs["test_none"]
