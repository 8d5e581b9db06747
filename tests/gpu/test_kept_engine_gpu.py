"""A vLLM engine on a GPU whose worker goes: it gives its memory back, and the next worker finds it."""

import pytest
import torch
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from kept_engine_cases import check_an_engine_that_stays

from siirl.parallel.process_groups import ProcessGroupManager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(590),
]
SHARE = 0.3


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_stays_and_sleeps_while_it_waits_if_it_ever_does(sleeps, tmp_path, monkeypatch):
    shape = {"vocab": 128, "init_std": 0.3, "head_dim": 64, "max_positions": 256, "tokenizer": False}
    model_dir = make_tiny_model_dir(tmp_path / "model", dtype="bfloat16", **shape)
    keys = ("dtype=bfloat16", f"gpu_memory_utilization={SHARE}", f"free_cache_engine={sleeps}")
    free_bytes, total_bytes = torch.cuda.mem_get_info()

    def look():
        taken = (free_bytes - torch.cuda.mem_get_info()[0]) / total_bytes
        print(f"\ntaken of the device while the engine waits: {taken:.3f}")
        assert (taken < SHARE / 3) == sleeps

    keys = [f"actor_rollout_ref.rollout.{key}" for key in (*keys, "enforce_eager=True")]
    check_an_engine_that_stays(model_dir, "cuda:0", monkeypatch, *keys, between=look)


def stays_on_two(rank, world_size, model_dir, keys):
    torch.cuda.set_device(rank)
    groups = ProcessGroupManager([(0, 1)], "cpu:gloo,cuda:nccl", 300)
    check_an_engine_that_stays(model_dir, f"cuda:{rank}", pytest.MonkeyPatch(), *keys, groups=groups)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("way", ["by_loaders", "in_place"])
def test_an_engine_of_two_gpus_stays_without_a_trace_of_its_workers(way, tmp_path):
    shape = {"vocab": 128, "init_std": 0.3, "head_dim": 64, "max_positions": 256, "tokenizer": False}
    model_dir = make_tiny_model_dir(tmp_path / "model", dtype="bfloat16", **shape)
    keys = ("dtype=bfloat16", f"gpu_memory_utilization={SHARE}", "enforce_eager=True")
    keys = [f"actor_rollout_ref.rollout.{key}" for key in (*keys, f"replace_weights={way}")]
    run_workers(stays_on_two, 2, model_dir, keys, deadline_s=550, backend="cpu:gloo,cuda:nccl")
