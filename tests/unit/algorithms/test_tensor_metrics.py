"""Metrics of micro-batches: the numbers of Metrics, and no loss waits for its device."""

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from siirl.algorithms.policy_losses import POLICY_LOSSES
from siirl.algorithms.tensor_metrics import TensorMetrics, masked_sums
from siirl.config import Config, load_config, with_overrides
from siirl.engines.train.base import BatchCounts, LossFn, TokenOutputs
from siirl.nodes.policy_loss import make_loss_fn
from siirl.nodes.preference_train import _bradley_terry, pair_loss_fn
from siirl.nodes.value_model import make_value_loss_fn
from siirl.observe.metrics import Metrics

ACTOR = "actor_rollout_ref.actor"
B, T = 4, 3


def test_what_is_read_at_once_is_what_is_read_one_by_one():
    torch.manual_seed(0)
    found, want = TensorMetrics(), Metrics()
    for number in range(7):
        total, weight, most = torch.rand(()), torch.randint(5, ()), torch.rand((), dtype=torch.float64)
        micro_batch = TensorMetrics()
        micro_batch.mean("a", total, weight)
        micro_batch.mean("b", weight, 2)
        micro_batch.max("most", most)
        micro_batch.sum("sum", number)
        micro_batch.later(lambda number=number: Metrics({"turn": ("mean", float(number), 1.0)}))
        found.merge(micro_batch, "x/")
        want.mean("x/a", float(total), float(weight))
        want.mean("x/b", float(weight), 2)
        want.max("x/most", float(most))
        want.sum("x/sum", number)
        want.mean("x/turn", number)
    assert found.read() == want
    assert TensorMetrics().read() == Metrics()


def test_sums_leave_out_what_the_mask_hides_and_are_taken_in_float64():
    mask = torch.tensor([[True, False], [True, True]])
    first = torch.tensor([[1.0, torch.nan], [1e-9, 2.0]])
    sums = masked_sums([first, mask.float()], mask)
    assert [x.dtype for x in sums] == [torch.float64] * 2
    assert sums[0].item() == 1.0 + first[1, 0].double().item() + 2.0 and sums[1].item() == 3


def actor_loss(**keys: Any) -> LossFn:
    return make_loss_fn(
        with_overrides(base_config(), {f"{ACTOR}.{name}": value for name, value in keys.items()})
    )


@functools.cache
def base_config() -> Config:
    return load_config([])


CORRECTED = {
    "rollout_correction.weight": "truncate",
    "rollout_correction.reject": "max_k3",
    "rollout_correction.reject_divergence": 1.0,
    "opsm_delta": 0.1,
    "entropy_coeff": 0.01,
    "use_kl_loss": True,
    "loss_agg_mode": "seq-mean-token-mean",
}
LOSSES: dict[str, LossFn] = {
    **{name: actor_loss(**{"policy_loss.loss_mode": name}) for name in POLICY_LOSSES.names()},
    "corrected": actor_loss(**CORRECTED),
    "value": make_value_loss_fn(base_config().critic),
    "pairs": pair_loss_fn(_bradley_terry, "loss"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_reads_from_its_device(name):
    """A meta tensor has no numbers: to read one, or to make a shape of them, fails."""
    columns = {f"{name}_log_prob": torch.zeros(B, T) for name in ("old", "rollout", "ref")}
    columns |= {name: torch.zeros(B, T) for name in ("advantage", "value", "return_")}
    columns |= {"response_mask": torch.ones(B, T).bool(), "picked": torch.ones(B, T).bool()}
    columns |= {"turn_id": torch.zeros(B, T).long(), "speaker": torch.zeros(B).long()}
    columns |= {"pair_id": torch.arange(B) // 2, "is_better": torch.arange(B) % 2 > 0}
    columns["pair_share"] = torch.ones(B, dtype=torch.float64)
    rows = TensorDict({name: column.to("meta") for name, column in columns.items()}, batch_size=[B])
    made = {name: torch.zeros(B, T, device="meta", requires_grad=True) for name in ("log_prob", "entropy")}
    made |= {name: torch.zeros(B, T, device="meta", requires_grad=True) for name in ("value", "score")}
    outputs = TokenOutputs(**{f"{name}_BT": value_BT for name, value_BT in made.items()})
    loss, _ = LOSSES[name](outputs, rows, BatchCounts(B * T, B, T))
    loss.backward()
    assert loss.shape == () and loss.is_meta
