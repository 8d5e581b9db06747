"""An SGLang engine on the CPU whose processes are killed comes back as it was, and answers the same."""

import logging
import os
import signal
import time

import psutil
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from sglang_on_cpu import sglang_here
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.base import Request, SamplingParams
from siirl.errors import RolloutError
from siirl.parallel.dims import ParallelDims

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [2, 3, 4]]
SAMPLED = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(path, vocab=24, init_std=0.3, head_dim=32, max_positions=256, tokenizer=False)


def build(model_dir):
    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=sglang",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.max_model_len=256",
            "actor_rollout_ref.rollout.max_engine_restarts=2",
            "trainer.deadline_s=240",
            f"trainer.output_dir={model_dir}/outputs",
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", "sglang", "lm", False, (0,), ParallelDims(1), "rollout_actor", ()
    )
    return make_rollout_engine(plan, cfg, None, torch.device("cpu"))


def streamed(engine, after_submit=lambda: None):
    """Answers of a stream by key."""
    stream = engine.stream()
    stream.submit([Request(key, prompt, SAMPLED, key) for key, prompt in enumerate(PROMPTS)])
    after_submit()
    answers = {}
    while stream.num_pending:
        answers |= dict(stream.collect(0.5))
    return answers


def tokens(answers):
    return {key: answer.token_ids for key, answer in answers.items()}


def scheduler(engine):
    """The pid of SGLang's own process, which has the model."""
    children = psutil.Process(engine._process.pid).children(recursive=True)
    (pid,) = (child.pid for child in children if "scheduler" in " ".join(child.cmdline()))
    return pid


@pytest.mark.timeout(280)
def test_an_engine_that_is_lost_comes_back_as_it_was_whichever_of_its_processes_dies(model_dir, caplog):
    """The engine's process, or the scheduler that it starts; beyond the bound the run ends."""
    caplog.set_level(logging.WARNING)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    weights = model.state_dict()
    with sglang_here():
        engine = build(model_dir)
        try:
            engine.load_weights([(name, weights[name]) for name in engine.weight_specs()], 4)
            undisturbed = streamed(engine)
            for lose in (lambda: engine._process.pid, lambda: scheduler(engine)):
                before = engine._process.pid

                def kill_at_work(lose=lose):
                    time.sleep(0.1)
                    os.kill(lose(), signal.SIGKILL)

                found = streamed(engine, kill_at_work)
                assert tokens(found) == tokens(undisturbed)
                for key, answer in found.items():
                    assert answer.log_probs == pytest.approx(undisturbed[key].log_probs, abs=1e-4)
                    assert set(answer.token_versions) == {4}
                assert engine._process.pid != before and engine.drain_restarts() == 1
            (held,) = engine.read_tensor("model.norm.weight")
            assert torch.equal(held, weights["model.norm.weight"])
            assert "started again (2 of 2 times" in caplog.text
            os.kill(engine._process.pid, signal.SIGKILL)
            words = r"killed by SIGKILL.*sglang_agent_0.rollout_rank_0.log, or raise .*max_engine_restarts"
            with pytest.raises(RolloutError, match=words):
                engine.generate(PROMPTS, SAMPLED, range(4))
        finally:
            engine.close()
