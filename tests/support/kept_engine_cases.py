"""A vLLM engine that stays when its worker goes, as the next worker finds it: on a CPU and on a GPU."""

import contextlib
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.base import Request, SamplingParams
from siirl.launch.engine_keeper import EngineKeeper
from siirl.parallel.dims import ParallelDims

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11], [3 * i % 20 + 2 for i in range(70)]]
"""The last fills blocks of the prefix cache."""
SHORT = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=180, ignore_eos=True)


def check_an_engine_that_stays(model_dir, device, monkeypatch, *keys: str, between: Callable = lambda: None):
    """Its worker goes while requests run; the next one gets it, without a trace of the first.

    between: called when it waits.
    """
    keeper = EngineKeeper(load_config([]))
    for name, descriptor in keeper.descriptors().items():
        monkeypatch.setenv(name, str(descriptor))
    first, second = weights_of(model_dir)
    with contextlib.closing(keeper):
        fresh = build(model_dir, device, *keys)
        load(fresh, second)
        expected, pids = fresh.generate(PROMPTS, SHORT, range(4)), []
        load(fresh, first)
        others = fresh.generate(PROMPTS, SHORT, range(4))
        assert others != expected, "the weights tell"
        engine = fresh
        for _ in range(2):
            pids.append(engine._process.pid)
            stream = engine.stream()
            stream.submit([Request(key, prompt, LONG, key) for key, prompt in enumerate(PROMPTS)])
            stream.collect(0.2)
            go(engine)
            keeper.settle()
            between()
            engine = build(model_dir, device, *keys)
            assert engine.weight_version == -1
            load(engine, second)
            assert engine.generate(PROMPTS, SHORT, range(4)) == expected
            assert engine._process.pid == pids[0]
            load(engine, first, version=5)
            assert [[one.token_ids for one in row] for row in engine.generate(PROMPTS, SHORT, range(4))] == [
                [one.token_ids for one in row] for row in others
            ]
        engine.close()


def weights_of(model_dir):
    """Two sets of them."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draw = torch.Generator().manual_seed(3)
    return first, {name: t + 0.05 * torch.randn(t.shape, generator=draw) for name, t in first.items()}


def build(model_dir, device, *keys):
    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.max_model_len=256",
            "trainer.deadline_s=240",
            f"trainer.output_dir={model_dir}/outputs",
            *keys,
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "rollout_actor", ()
    )
    return make_rollout_engine(plan, cfg, None, torch.device(device))


def load(engine, weights, version=4):
    device = engine._device
    engine.load_weights([(name, weights[name].to(device)) for name in engine.weight_specs()], version)


def go(engine):
    """Be gone, as a worker that was killed: the engine hears of it by its connection."""
    process = engine._process._process
    process._channel.close()
    process._process.leave()
