"""What a run reports of each speaker and turn: of KL, zero-std groups, scores of a validation."""

from types import SimpleNamespace

import pytest
import torch
from plan_cases import config
from tensordict import TensorDict

from siirl.data.rows import make_rows
from siirl.dialect.dialect import Dialect
from siirl.engines.train.base import BatchCounts, TokenOutputs
from siirl.nodes import advantage
from siirl.nodes.context import Samples
from siirl.nodes.function_reward import report_rewards
from siirl.nodes.interaction_credit import report_zero_std_groups
from siirl.nodes.policy_loss import make_loss_fn
from siirl.observe.metrics import Metrics


def test_kl_and_entropy_are_reported_by_speaker_and_by_turn_over_trained_tokens():
    cfg = config("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=k1")
    turn_BT = torch.tensor([[0, 0, -1, 2], [1, -1, -1, 20]])
    mask_BT = turn_BT >= 0
    log_prob_BT = torch.tensor([[-1.0, -2.0, -9.0, -3.0], [-4.0, -9.0, -9.0, -6.0]])
    rows = TensorDict(
        {
            "response_mask": mask_BT,
            "turn_id": turn_BT,
            "speaker": torch.tensor([0, 3]),
            "advantage": torch.ones(2, 4),
            "ref_log_prob": torch.full((2, 4), -1.0),
        },
        batch_size=[2],
    )
    outputs = TokenOutputs(log_prob_BT.requires_grad_(), torch.arange(8.0).reshape(2, 4))
    values = make_loss_fn(cfg)(outputs, rows, BatchCounts(5, 2, 2))[1].read().values()
    assert values["speaker_0/ref_kl"] == pytest.approx(-(0 + 1 + 2) / 3)
    assert values["speaker_3/ref_kl"] == pytest.approx(-(3 + 5) / 2)
    assert {name: value for name, value in values.items() if name.endswith("entropy") and "turn" in name} == {
        "turn_0/entropy": 0.5,
        "turn_1/entropy": 4.0,
        "turn_2/entropy": 3.0,
        "turn_16/entropy": 7.0,
    }
    assert values["entropy"] == pytest.approx((0 + 1 + 3 + 4 + 7) / 5)
    without = make_loss_fn(cfg)(outputs, rows.exclude("turn_id", "speaker"), BatchCounts(5, 2, 2))[1]
    assert not any("speaker" in name or "turn" in name for name in without.read().values())


def test_kl_in_the_reward_is_reported_for_each_speaker(monkeypatch):
    monkeypatch.setattr(advantage, "sum_over_ranks", lambda ctx, totals: totals)
    cfg = config("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=kl")
    rows = TensorDict(
        {
            "episode_id": torch.arange(3),
            "speaker": torch.tensor([0, 3, 3]),
            "turn_id": torch.tensor([[0, 0], [1, -1], [1, 1]]),
            "score": torch.zeros(3),
            "response_length": torch.tensor([2, 1, 2]),
            "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1]]).bool(),
            "env_reward": torch.zeros(3, 2),
            "old_log_prob": torch.tensor([[-1.0, -2.0], [-5.0, 7.0], [-2.0, -2.0]]),
            "ref_log_prob": torch.full((3, 2), -3.0),
        },
        batch_size=[3],
    )
    ctx = SimpleNamespace(
        cfg=cfg, node_id="advantage", metrics=Metrics(), state={}, agent=0, others={}, trained=None
    )
    advantage.token_reward(ctx, rows)
    values = ctx.metrics.values()
    assert values["speaker_0/kl"] == pytest.approx((2 + 1) / 2)
    assert values["speaker_3/kl"] == pytest.approx((-2 + 1) / 2), "the mean of its rows, each over its tokens"
    assert values["reward/kl"] == pytest.approx((1.5 - 2 + 1) / 3)


def test_zero_std_groups_are_counted_for_each_speaker_in_them():
    metrics = Metrics()
    speaker_U = torch.tensor([0, 1, 0, 0, 1, 1])
    group_U = torch.tensor([5, 5, 7, 7, 9, 9])
    report_zero_std_groups(metrics, "speaker", speaker_U, torch.tensor([1.0, 2, 3, 3, 4, 4]), group_U)
    assert metrics.values() == {"speaker_0/zero_std_groups": 0.5, "speaker_1/zero_std_groups": 0.5}
    report_zero_std_groups(metrics, "turn", speaker_U, torch.tensor([1.0, 1, 3, 2, 4, 4]), group_U)
    assert metrics.values()["turn_0/zero_std_groups"] == 0.5
    assert metrics.values()["turn_1/zero_std_groups"] == 1.0


def scored(limit: int, validate: bool) -> tuple[Metrics, list[dict]]:
    """What is reported of two episodes with two rows each, and of which rows there are samples."""
    say = [{"agent": 0, "turn": 0, "content": "a"}, {"agent": 1, "turn": 1, "content": "b"}]
    extras = [{"agent": a, "episode_id": e, "conversation": say} for e in (0, 1) for a in (0, 1)]
    rows = make_rows(
        {
            "row_id": [0, 1, 2, 3],
            "sample_index": [4, 4, 6, 6],
            "data_source": ["s"] * 4,
            "raw_prompt": ["q"] * 4,
            "ground_truth": ["g"] * 4,
            "extra_info": extras,
            "response_ids": [[1]] * 4,
            "response_length": [1] * 4,
            "turn_id": [[0], [1], [0], [1]],
        }
    )
    scores = make_rows({"score": [1.0, 2.0, 3.0, 5.0], "reward_info": [{}] * 4})
    ctx = SimpleNamespace(
        agent=0,
        validate=validate,
        shown=Samples([], limit, []),
        trained=None,
        metrics=Metrics(),
        node_id="reward",
        cfg=config(),
        dialect=Dialect("small"),
        peers=SimpleNamespace(has_whole_groups=True),
    )
    ctx.tokenizer = SimpleNamespace(decode=lambda tokens, **options: "text")
    report_rewards(ctx, rows, scores)
    return ctx.metrics, ctx.shown.rows


def test_a_validation_has_a_reward_for_each_speaker_of_a_policy():
    values = scored(0, True)[0].values()
    assert values["val/reward/mean"] == 2.75
    assert (values["val/speaker_0/reward/mean"], values["val/speaker_1/reward/mean"]) == (2.0, 3.5)


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1, 2), (2, 4), (-1, 4)])
def test_samples_are_whole_episodes(limit, expected):
    samples = scored(limit, False)[1]
    assert len(samples) == expected
    assert [sample["episode"]["turn"] for sample in samples] == [0, 1, 0, 1][:expected]
