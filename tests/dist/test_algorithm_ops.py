"""Every algorithm that the configuration offers runs through its op, the same on one rank and on two."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from dist_harness import run_workers
from tensordict import TensorDict

from siirl.algorithms.advantages import compute_advantage
from siirl.config import Config, algorithm_table, load_config, with_overrides
from siirl.config.root import all_keys
from siirl.data.rows import make_rows, objects, take_rows
from siirl.engines.train.base import BatchCounts, TokenOutputs
from siirl.errors import RewardError
from siirl.nodes.advantage import advantage, reward_parts, token_reward
from siirl.nodes.context import DataGroup
from siirl.nodes.function_reward import check_scores, report_groups, report_validation
from siirl.nodes.policy_loss import make_loss_fn
from siirl.observe.metrics import Metrics
from siirl.rewards.scorer import count_values

# what they read is not in `batch`; tests/dist/test_credit_ops.py
ELSEWHERE = {"remax", "gae_marft", "gdpo", "optimal_token_baseline"}
ESTIMATORS = [n for n in all_keys()["algorithm.adv_estimator"].rule.choices if n not in ELSEWHERE]
LOSSES = [
    name for name, row in algorithm_table.LOSSES.items() if not (row.pairs or row.distills)
]  # those have an op of their own, or need teachers


def batch(rows: int = 8, width: int = 5) -> TensorDict:
    """Groups of four rows; lengths and scores differ."""
    generator = torch.Generator().manual_seed(3)
    length = torch.randint(1, width + 1, (rows,), generator=generator)
    return TensorDict(
        {
            "group_id": torch.arange(rows) // 4,
            "score": torch.rand(rows, generator=generator),
            "value": torch.rand(rows, width, generator=generator),
            "response_length": length,
            "response_mask": torch.arange(width) < length[:, None],
            "old_log_prob": -torch.rand(rows, width, generator=generator),
            "ref_log_prob": -torch.rand(rows, width, generator=generator),
        },
        batch_size=[rows],
    )


def advantages(rank: int, world_size: int, copies: bool) -> dict[str, list]:
    """Advantages of this rank's share of the batch, by estimator, and the KL coefficient after one step.

    copies: all ranks hold all rows, as tensor-parallel ranks do, and the first one counts them.
    """
    mine = batch() if copies else batch().chunk(world_size)[rank]
    out = {}
    for name in ESTIMATORS:
        ctx = context(f"algorithm.adv_estimator={name}", "algorithm.gamma=0.9")
        ctx.is_shard_leader = not copies or rank == 0
        out[name] = advantage(ctx, mine)["advantage"].tolist()
    ctx = context("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=True", *ADAPTIVE)
    ctx.is_shard_leader = not copies or rank == 0
    out["shaped"] = advantage(ctx, mine)["advantage"].tolist()
    return out | {"coefficient": [ctx.state["coef"]]}


ADAPTIVE = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")


@functools.cache
def default_config() -> Config:
    return load_config([])


def context(*overrides: str) -> SimpleNamespace:
    """What an op reads of its context, on a rank of the default group."""
    pairs = (text.partition("=") for text in overrides)
    cfg = with_overrides(default_config(), {name: yaml.safe_load(value) for name, _, value in pairs})
    return SimpleNamespace(
        cfg=cfg, group=dist.group.WORLD, metrics=Metrics(), state={}, is_shard_leader=True, node_id="op"
    )


def test_every_estimator_gives_the_same_on_one_rank_on_two_and_on_two_with_the_same_rows():
    (whole,) = run_workers(advantages, 1, False)
    halves, copies = run_workers(advantages, 2, False), run_workers(advantages, 2, True)
    assert set(whole) == {*ESTIMATORS, "shaped", "coefficient"}
    for name, expected in whole.items():
        joined = halves[0][name] + halves[1][name] if name != "coefficient" else halves[1][name]
        for got in (joined, copies[0][name], copies[1][name]):
            assert torch.allclose(torch.tensor(got), torch.tensor(expected), atol=1e-6, rtol=0), name
        assert torch.tensor(expected).abs().max() > 0, name
    assert whole["coefficient"] != [0.001]


def test_a_score_that_float32_does_not_hold_is_an_error_that_names_the_row():
    rows = batch()
    rows["row_id"] = torch.arange(100, 108)
    ctx = SimpleNamespace(cfg=default_config(), node_id="judge", metrics=Metrics())
    score_B = torch.zeros(8, dtype=torch.float64)
    check_scores(ctx, rows, score_B)
    score_B[3] = -1e39
    with pytest.raises(
        RewardError, match=r"node 'judge' scored 1 of 8 .* float32, first row_id 103 with -1e\+39"
    ):
        check_scores(ctx, rows, score_B)
    rows["score"] = score_B
    with pytest.raises(RewardError, match="row_id 103"):
        token_reward(ctx, rows)


def parts_of(rank: int, world_size: int) -> list[list[float]]:
    """GDPO's advantages of this rank's rows, by two rewards."""
    infos = [{"right": float(row % 3 == 0), "short": 0.1 * row, "why": "text"} for row in range(8)]
    rows = batch()
    rows = make_rows({name: rows[name] for name in rows.keys()} | {"reward_info": infos})
    keys = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_rewards={short: 1.0, score: 0.5, right: 2.0}")
    size = 8 // world_size
    return advantage(context(*keys), take_rows(rows, torch.arange(rank * size, (rank + 1) * size)))[
        "advantage"
    ].tolist()


def test_the_advantages_of_several_rewards_are_the_same_on_one_rank_and_on_two():
    (whole,), halves = run_workers(parts_of, 1), run_workers(parts_of, 2)
    got = torch.tensor(halves[0] + halves[1])
    torch.testing.assert_close(got, torch.tensor(whole), atol=1e-6, rtol=0)
    fields = {"reward_part": torch.tensor([[0.1 * row, 0, float(row % 3 == 0)] for row in range(8)])}
    fields["reward_part"][:, 1] = batch()["score"]
    fields |= {"response_mask": batch()["response_mask"], "group_id": batch()["group_id"]}
    want = compute_advantage("gdpo", fields, {"gdpo_rewards": {"a": 1.0, "b": 0.5, "c": 2.0}}).advantage_BT
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_a_reward_that_a_row_does_not_have_is_named():
    rows = make_rows({"score": torch.ones(2), "reward_info": [{"right": 1.0}, {"right": "yes"}]})
    cfg = with_overrides(default_config(), {"algorithm.gdpo_rewards": {"score": 1.0, "right": 1.0}})
    with pytest.raises(RewardError, match="names 'right', of which a row has 'yes'; it has score, right"):
        reward_parts(SimpleNamespace(cfg=cfg, node_id="a", metrics=Metrics()), rows)


@pytest.mark.parametrize("name", LOSSES)
def test_every_policy_loss_trains(name):
    cfg = load_config([f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"])
    rows = batch()
    mask_BT = rows["response_mask"]
    generator = torch.Generator().manual_seed(1)
    rows["advantage"] = torch.randn(mask_BT.shape, generator=generator) * mask_BT
    log_prob_BT = -torch.rand(mask_BT.shape, generator=generator)
    rows["old_log_prob"] = log_prob_BT + 0.05
    rows["picked"] = torch.zeros_like(mask_BT)
    log_prob_BT.requires_grad_()
    counts = BatchCounts(float(mask_BT.sum()), len(rows), mask_BT.shape[1])
    loss, metrics = make_loss_fn(cfg)(TokenOutputs(log_prob_BT, torch.ones(mask_BT.shape)), rows, counts)
    loss.backward()
    assert torch.isfinite(loss)
    assert log_prob_BT.grad[mask_BT].abs().max() > 0
    assert not log_prob_BT.grad[~mask_BT].any()
    assert metrics.read().values()["entropy"] == 1.0


def test_validation_metrics_by_source_and_of_no_rows():
    rows = make_rows({"sample_index": [0, 0, 1, 1], "data_source": ["a", "a", "b", "b"]})
    scored = make_rows({"score": [1.0, 0.0, 0.5, 0.5], "reward_info": [{"hit": 1}, {"hit": 0}, {}, {}]})
    cfg = load_config(["actor_rollout_ref.rollout.val_kwargs.n=2"])
    ctx = SimpleNamespace(cfg=cfg, metrics=Metrics(), peers=DataGroup(None))
    report_validation(ctx, rows, scored)
    report_validation(ctx, take_rows(rows, []), take_rows(scored, []))
    told = zip(objects(rows, "data_source"), objects(scored, "reward_info"), strict=True)
    count_values(ctx.metrics, told, lambda source: ["hit"], validate=True)
    values = ctx.metrics.values()
    assert values["val/reward/mean"] == values["val/reward/part/hit"] == 0.5
    assert values["val/a/reward/mean"] == 0.5 and values["val/b/reward/best_of_2"] == 0.5
    assert values["val/a/reward/best_of_2"] == 1.0 and values["val/a/hit/mean"] == 0.5


def reports_of_split_prompts(rank: int, world_size: int) -> dict[str, float]:
    """What is reported of two prompts with a sample on each rank, where rows lie by their cost."""
    rows = make_rows({"sample_index": [0, 1], "data_source": ["a", "b"]})
    scored = make_rows({"score": [[0.0, 1.0], [1.0, 1.0]][rank], "reward_info": [{}, {}]})
    cfg = load_config(["actor_rollout_ref.rollout.val_kwargs.n=2"])
    peers = DataGroup(dist.group.WORLD, is_shard_leader=True, has_whole_groups=False)
    ctx = SimpleNamespace(
        cfg=cfg, metrics=Metrics(), peers=peers, group=dist.group.WORLD, is_shard_leader=True
    )
    report_validation(ctx, rows, scored)
    report_groups(ctx, rows, scored)
    return ctx.metrics.entries


def test_the_best_sample_of_a_prompt_is_found_wherever_its_samples_lie():
    """A reward model's rows lie by their cost: each rank took the best of those that it had."""
    total = Metrics()
    for entries in run_workers(reports_of_split_prompts, 2):
        total.merge(Metrics(entries))
    values = total.values()
    assert values["val/a/reward/best_of_2"] == 1.0 and values["val/a/reward/mean"] == 0.5
    assert values["val/b/reward/best_of_2"] == 1.0
    assert values["reward/zero_std_groups"] == 0.5
