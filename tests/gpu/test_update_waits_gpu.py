"""The host queues a whole update: it waits for the device as often for one micro-batch as for ten."""

import warnings
from collections import Counter

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from tensordict import TensorDict
from train_engine_cases import Scenario

from siirl.config import load_config
from siirl.engines.train.base import LossFn
from siirl.nodes.policy_loss import make_loss_fn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKEND = "cpu:gloo,cuda:nccl"
ACTOR = "actor_rollout_ref.actor"
BF16 = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bfloat16"
SHAPE = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "init_std": 0.1}
OUTPUTS = ("log_prob", "entropy")
SIZES = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
)
AT_MOST = 6
"""Of an optimizer step: metrics, the norm, and what AdamW does."""


def the_loss() -> LossFn:
    """GRPO's, with the terms and the corrections that are usual."""
    keys = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.tis_imp_ratio_cap=2")
    return make_loss_fn(load_config(list(keys)))


def rows_of(step: int) -> TensorDict:
    rows = cases.sample_rows(step)
    for name in ("old_log_prob", "rollout_log_prob", "ref_log_prob"):
        rows[name] = torch.full(rows["response_mask"].shape, -2.0)
    return rows


def waits(rank: int, world: int, path: str, size: int) -> tuple[Counter, Counter]:
    """Where an update and a pass without gradient wait for the device, in micro-batches of so many rows."""
    overrides = (BF16, *(f"{key}={size}" for key in SIZES))
    engine, _ = cases.build_engine(Scenario("", 1, overrides=overrides, device="cuda:0"), path)
    loss_fn, found = the_loss(), []
    calls = (
        lambda step: engine.train_mini_batch(rows_of(step), loss_fn, OUTPUTS, 1.0),
        lambda step: engine.compute(rows_of(step), OUTPUTS, 1.0),
    )
    for call in calls:
        call(0)
        call(0)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            call(0)
            torch.cuda.set_sync_debug_mode("default")
        places = (f"{x.filename}:{x.lineno}" for x in caught if "synchroniz" in str(x.message))
        found.append(Counter(places))
    return found[0], found[1]


def test_an_update_waits_for_the_device_as_often_whatever_its_micro_batches(tmp_path):
    path = str(make_tiny_model_dir(tmp_path, **SHAPE))
    one, many = (run_workers(waits, 1, path, size, backend=BACKEND)[0] for size in (cases.NUM_ROWS, 1))
    assert many[0] == one[0], (one[0], many[0])
    assert sum(one[0].values()) <= AT_MOST, one[0]
    assert many[1] == one[1] == Counter(), (one[1], many[1])
