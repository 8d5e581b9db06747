"""An SGLang engine on the CPU whose processes are killed comes back as it was, and answers the same."""

import logging

import psutil
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from served_engines import build, check_it_comes_back, load, two_sets
from sglang_on_cpu import sglang_here

from siirl.data.completions import SamplingParams

SAMPLED = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(path, vocab=24, init_std=0.3, head_dim=32, max_positions=256, tokenizer=False)


def check_near(found, undisturbed):
    """Its tokens, and its log-probs as far as the cache rounds them alike."""
    for key, answer in found.items():
        assert answer.token_ids == undisturbed[key].token_ids
        assert answer.log_probs == pytest.approx(undisturbed[key].log_probs, abs=1e-4)
        assert set(answer.token_versions) == {4}
    assert found.keys() == undisturbed.keys()


def scheduler(engine):
    """The pid of SGLang's own process, which has the model."""
    children = psutil.Process(engine._process.pid).children(recursive=True)
    (pid,) = (child.pid for child in children if "scheduler" in " ".join(child.cmdline()))
    return pid


OWN = pytest.param("its own", marks=pytest.mark.slow)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("process", [OWN, "the scheduler's"])
def test_an_engine_that_is_lost_comes_back_as_it_was_whichever_of_its_processes_dies(
    process, model_dir, caplog
):
    """The engine's process, or the scheduler that it starts; beyond the bound the run ends."""
    caplog.set_level(logging.WARNING)
    weights, norm = two_sets(model_dir)[1], "model.norm.weight"
    with sglang_here():
        engine = build(model_dir, "actor_rollout_ref.rollout.max_engine_restarts=1", name="sglang")
        try:
            load(engine, weights, 4)
            assert torch.equal(*engine.read_tensor(norm), weights[norm])
            victim = scheduler if process == "the scheduler's" else lambda engine: engine._process.pid
            check_it_comes_back(
                engine,
                SAMPLED,
                [lambda: victim(engine)],
                check_near,
                lambda: engine.read_tensor(norm)[0].tolist(),
                caplog,
            )
        finally:
            engine.close()
