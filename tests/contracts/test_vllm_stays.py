"""A vLLM engine on the CPU whose worker goes: the next one finds it as if it had just started."""

import pytest
from fixtures_tiny import make_tiny_model_dir
from kept_engine_cases import check_an_engine_that_stays
from later import needed

needed("vllm")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_vllm_engine_stays_without_a_trace_of_its_worker(keep_kv, tmp_path, monkeypatch):
    """With rollout.keep_kv the prefix cache outlives updates, and the same versions come again."""
    shape = {"vocab": 24, "init_std": 0.3, "head_dim": 32, "max_positions": 256, "tokenizer": False}
    model_dir = make_tiny_model_dir(tmp_path / "model", **shape)
    keys = []
    if keep_kv:
        keys = ["actor_rollout_ref.rollout.keep_kv=true", "actor_rollout_ref.rollout.max_lag=1"]
    check_an_engine_that_stays(model_dir, "cpu", monkeypatch, *keys)
