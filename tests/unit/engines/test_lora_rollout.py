"""One base in memory, an adapter for each agent: each engine on it samples as a merged model would."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config, with_overrides
from siirl.data.completions import Request, SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.train.adapters.lora import (
    adapter_name,
    adapters_of,
    add_lora,
    hf_name,
    merged_rows,
    plain_name,
)
from siirl.errors import RolloutError, WeightSyncError
from siirl.parallel.dims import ParallelDims

MODEL = "actor_rollout_ref.model"
PLAN = ModelPlan("agent_0.rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
SAMPLED = SamplingParams(max_tokens=16, n=2, stop_token_ids=(4, 9))
AGENTS = {
    0: {f"{MODEL}.lora_rank": 4},
    1: {f"{MODEL}.lora_rank": 2, f"{MODEL}.target_modules": ("q_proj", "up_proj")},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model_dir(
        tmp_path_factory.mktemp("model"),
        vocab=24,
        init_std=0.3,
        head_dim=32,
        max_positions=64,
        tokenizer=False,
    )


@pytest.fixture(scope="module")
def configs(model_dir):
    engine = ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.dtype=float32"]
    cfg = load_config([*engine, f"{MODEL}.path={model_dir}"])
    return {agent: with_overrides(cfg, keys) for agent, keys in AGENTS.items()}


def trained(model_dir, cfg, seed):
    """(what a trainer sends of a base and an adapter, what it sends merged) under HF names."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    add_lora(model, cfg.actor_rollout_ref.model, seed)
    draw = torch.Generator().manual_seed(seed)
    for _, b, _ in adapters_of(model).values():
        b.data.normal_(0, 0.3, generator=draw)
    apart = {plain_name(name): param.detach() for name, param in model.named_parameters()}
    merged = {hf_name(name): param.detach() for name, param in model.named_parameters() if hf_name(name)}
    for name, (a, b, scale) in adapters_of(model).items():
        merged[name] = merged_rows(merged[name], b=b.detach(), a=a.detach(), scale=scale)
    return apart, merged


def only_adapter(weights):
    return [(name, tensor) for name, tensor in weights.items() if ".lora_" in name]


def engines(configs, name="hf"):
    ranks = {
        f"agent_{agent}.rollout": cfg.actor_rollout_ref.model.lora_rank for agent, cfg in configs.items()
    }
    first = replace(PLAN, backend=name, base=PLAN.name, adapters=ranks)
    second = replace(PLAN, backend=name, name="agent_1.rollout", agent=1, base=PLAN.name)
    owner = make_rollout_engine(first, configs[0], None, torch.device("cpu"))
    return {0: owner, 1: make_rollout_engine(second, configs[1], None, torch.device("cpu"), owner)}


def load(on_base, sent):
    """Agent 1 brings the base, agent 0 its adapter alone."""
    assert {engine.takes for engine in on_base.values()} == {"base_and_adapter"}
    on_base[1].load_weights(sent[1][0].items(), 3)
    assert on_base[0].takes == "adapter" and on_base[0].weight_version == -1
    on_base[0].load_weights(only_adapter(sent[0][0]), 2)


def merged_answers(cfg, weights, params):
    engine = make_rollout_engine(PLAN, cfg, None, torch.device("cpu"))
    engine.load_weights(weights.items(), 0)
    return engine.generate(PROMPTS, params, range(3))


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert [sample.token_ids for sample in one] == [sample.token_ids for sample in other]
        for sample, like in zip(one, other, strict=True):
            assert sample.log_probs == pytest.approx(like.log_probs, abs=1e-4)


def test_engines_on_one_base_sample_as_merged_models_do_and_hold_it_once(model_dir, configs):
    on_base = engines(configs)
    sent = {agent: trained(model_dir, cfg, 5 + agent) for agent, cfg in configs.items()}
    load(on_base, sent)
    for agent, cfg in configs.items():
        same(
            on_base[agent].generate(PROMPTS, SAMPLED, range(3)), merged_answers(cfg, sent[agent][1], SAMPLED)
        )
    models = [engine._model for engine in on_base.values()]
    storages = {p.untyped_storage().data_ptr(): p.nbytes for model in models for p in model.parameters()}
    adapters = [p.nbytes for model in models for name, p in model.named_parameters() if adapter_name(name)]
    tied = "lm_head.weight"
    base = [tensor.nbytes for name, tensor in sent[0][1].items() if name != tied]
    assert sum(storages.values()) == sum(adapters) + sum(base)


@pytest.mark.slow
def test_one_vllm_engine_answers_for_all_adapters_also_at_the_same_time(model_dir, configs, tmp_path):
    rollout = {"max_model_len": 64, "max_engine_restarts": 2}
    vllm = {f"actor_rollout_ref.rollout.{name}": value for name, value in rollout.items()}
    vllm["trainer.output_dir"] = str(tmp_path)
    on_base = engines({agent: with_overrides(cfg, vllm) for agent, cfg in configs.items()}, "vllm")
    greedy = SamplingParams(max_tokens=16, temperature=0)
    try:
        sent = {agent: trained(model_dir, cfg, 5 + agent) for agent, cfg in configs.items()}
        load(on_base, sent)
        expected = {agent: merged_answers(cfg, sent[agent][1], greedy) for agent, cfg in configs.items()}
        assert expected[0][0][0].token_ids != expected[1][0][0].token_ids
        for agent, engine in on_base.items():
            same(engine.generate(PROMPTS, greedy, range(3)), expected[agent])
        streams = {agent: engine.stream() for agent, engine in on_base.items()}
        for stream in streams.values():
            stream.submit([Request(key, prompt, greedy, key) for key, prompt in enumerate(PROMPTS)])
        with pytest.raises(RolloutError, match=r"agent_0.rollout.*requests of its stream are pending"):
            on_base[1].load_weights(only_adapter(sent[1][0]), 4)
        for agent, stream in streams.items():
            answers = {}
            while stream.num_pending:
                answers |= dict(stream.collect(10))
            same([[answers[key]] for key in range(3)], expected[agent])
        again, merged = trained(model_dir, configs[1], 9)
        on_base[1].load_weights(only_adapter(again), 4)
        same(on_base[1].generate(PROMPTS, greedy, range(3)), merged_answers(configs[1], merged, greedy))
        same(on_base[0].generate(PROMPTS, greedy, range(3)), expected[0])
        on_base[0].load_weights(only_adapter(sent[0][0]), 5)
        assert [engine.weight_version for engine in on_base.values()] == [5, 4]
        os.kill(on_base[0]._process.pid, signal.SIGKILL)
        same(on_base[1].generate(PROMPTS, greedy, range(3)), merged_answers(configs[1], merged, greedy))
        same(on_base[0].generate(PROMPTS, greedy, range(3)), expected[0])
        assert sum(engine.drain_restarts() for engine in on_base.values()) == 1
    finally:
        for engine in on_base.values():
            engine.close()


def test_an_adapter_that_is_not_complete_or_brings_a_base_again_is_refused(model_dir, configs):
    on_base = engines(configs)
    weights, _ = trained(model_dir, configs[0], 5)
    on_base[0].load_weights(weights.items(), 0)
    with pytest.raises(WeightSyncError, match=r"1 of \d+ weights did not arrive"):
        on_base[0].load_weights(only_adapter(weights)[1:], 1)
    with pytest.raises(WeightSyncError, match="unknown"):
        on_base[0].load_weights(weights.items(), 1)
    assert on_base[0].weight_version == -1
