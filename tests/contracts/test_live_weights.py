"""Weights that a trainer gives where they are trained are those that it exports, in every step."""

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.engines.train.fsdp.fsdp_state import held_tensors
from siirl.engines.weights.bucket import LiveWeights

ALONE = Scenario("one rank", 1)
ADAPTED = Scenario("adapters", 1, overrides=("actor_rollout_ref.model.lora_rank=4",))
SHARDED = Scenario("two ranks", 2)


@pytest.mark.parametrize(("family", "scenario"), [("qwen3", ALONE), ("qwen3_moe", ALONE)])
def test_live_weights_are_what_is_exported_before_and_after_a_step(family, scenario, tmp_path):
    make_tiny_model_dir(tmp_path, family, vocab=64, tokenizer=False)
    assert run_workers(follow, 1, scenario, str(tmp_path)) == [True]


def follow(rank, world, scenario, folder):
    engine, _ = cases.build_engine(scenario, folder)
    live = engine.live_weights()
    same_as_exported(engine, live)
    before = {name: tensor.clone() for name, tensor in live}
    waited = []
    live.read_until(lambda: waited.append(all(torch.equal(before[name], x) for name, x in live)))
    cases.train_steps(engine, scenario, range(1))
    assert waited == [True], "a step waits for who reads, and has changed nothing by then"
    assert engine.live_weights() is live
    same_as_exported(engine, live)
    moved = next(engine._model.hf.parameters())._local_tensor
    moved.data = moved.clone()
    assert engine.live_weights() is not live, "a weight that lies elsewhere is looked for anew"
    same_as_exported(engine, engine.live_weights())
    another_place_is_noticed(engine)
    return any(not torch.equal(before[name], tensor) for name, tensor in live)


def another_place_is_noticed(engine):
    """Also of a parameter that lies in another one's place."""
    hf, live = engine._model.hf, engine.live_weights()
    layer = hf.model.layers[-1].self_attn
    param = layer.q_proj.weight
    layer.q_proj.weight = layer.o_proj.weight
    assert not live.lies_in(held_tensors(hf))
    layer.q_proj.weight = param
    assert engine.live_weights() is live


MEMORY = torch.zeros(4, 4)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(MEMORY.clone()[:2], id="memory"),
        pytest.param(MEMORY[1:3], id="first byte"),
        pytest.param(MEMORY[:3], id="shape"),
        pytest.param(MEMORY.t()[:2], id="strides"),
        pytest.param(MEMORY.view(torch.int32)[:2], id="type"),
    ],
)
def test_a_weight_that_lies_elsewhere_differs_in_its_place(other):
    model = torch.nn.Sequential(torch.nn.Module(), torch.nn.Linear(1, 1))
    model[0].register_buffer("table", MEMORY[:2])
    live = LiveWeights({}, held_tensors(model))
    assert live.lies_in(held_tensors(model))
    model[0].table = other
    assert not live.lies_in(held_tensors(model))


def same_as_exported(engine, live):
    exported = dict(engine.export_weights())
    assert list(dict(live)) == list(exported)
    assert all(torch.equal(tensor, exported[name]) for name, tensor in live)


@pytest.mark.parametrize("scenario", [ADAPTED, SHARDED], ids=lambda scenario: scenario.name)
def test_what_is_sharded_or_to_be_merged_is_exported(scenario, tmp_path):
    make_tiny_model_dir(tmp_path, vocab=64, tokenizer=False)
    assert run_workers(has_none, scenario.world, scenario, str(tmp_path)) == [True] * scenario.world


def has_none(rank, world, scenario, folder):
    engine, _ = cases.build_engine(scenario, folder)
    return engine.live_weights() is None
