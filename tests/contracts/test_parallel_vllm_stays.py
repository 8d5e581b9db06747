"""A vLLM engine of two ranks on the CPU whose workers go: the next ones find it as if it had just started."""

import pytest
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from kept_engine_cases import check_an_engine_that_stays
from later import needed

from siirl.parallel.process_groups import ProcessGroupManager

needed("vllm")


def stays(rank, world_size, model_dir, keys):
    patch = pytest.MonkeyPatch()
    groups = ProcessGroupManager([(0, 1)], "gloo", 300)
    check_an_engine_that_stays(model_dir, "cpu", patch, *keys, groups=groups)


@pytest.mark.slow
@pytest.mark.timeout(460)
@pytest.mark.parametrize("way", ["by_loaders", "in_place"])
def test_a_vllm_engine_of_two_ranks_stays_without_a_trace_of_its_workers(way, tmp_path):
    """Its workers map nothing of ranks that have gone; in place, they find out anew where weights land."""
    shape = {"vocab": 24, "init_std": 0.3, "head_dim": 32, "max_positions": 256, "tokenizer": False}
    model_dir = make_tiny_model_dir(tmp_path / "model", **shape)
    keys = (f"actor_rollout_ref.rollout.replace_weights={way}",)
    run_workers(stays, 2, model_dir, keys, deadline_s=430)
