"""Adapters on one frozen base: each trains as if it had a copy of its own, and there is one copy."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from some_cases import some
from torch import Tensor, nn
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import Config, load_config, with_overrides
from siirl.data.rows import take_rows
from siirl.engines.engine_registry import make_train_engine
from siirl.engines.train.fsdp.fsdp_engine import FSDPEngine
from siirl.parallel.process_groups import ProcessGroupManager

MODEL = "actor_rollout_ref.model"
ADAPTERS: dict[str, dict[str, Any]] = {
    "agent_0.actor": {f"{MODEL}.lora_rank": 4},
    "agent_1.actor": {f"{MODEL}.lora_rank": 2, f"{MODEL}.lora_alpha": 3},
    "agent_2.actor": {f"{MODEL}.lora_rank": 3, f"{MODEL}.target_modules": ("q_proj", "down_proj")},
}
"""Adapters of several ranks, scales and targets on one base; their rows are those of other steps."""
SHARED_ROWS = "agent_1.actor"
"""Its ranks share each row, those of the others do not."""


def scenario_of(name: str, world: int) -> Scenario:
    return Scenario("", world, sizes=(("cp", world),) if name == SHARED_ROWS else ())


def build(
    name: str, role: str, cfg: Config, groups: ProcessGroupManager, base: FSDPEngine | None
) -> FSDPEngine:
    ranks = tuple(range(groups.world.size()))
    dims, _ = cases.dims_of(scenario_of(name, len(ranks)), ranks)
    agent = int(name[6])
    plan = ModelPlan(name, agent, role, "fsdp", "lm", role == "actor", ranks, dims, "n", ("n",))
    if base is not None:
        plan = replace(plan, base=base.name)
    cfg = with_overrides(cfg, ADAPTERS[f"agent_{agent}.actor"])
    engine = make_train_engine(plan, cfg, groups, torch.device("cpu"), base)
    assert isinstance(engine, FSDPEngine)
    return engine


def train(engines: dict[str, FSDPEngine]) -> dict[str, dict[str, Any]]:
    """Two steps of each engine in turn, on rows of its own: adapters, losses and log-probs."""
    found: dict[str, dict[str, Any]] = {name: {"losses": []} for name in engines}
    for step in range(2):
        for agent, (name, engine) in enumerate(engines.items()):
            rows = mine(10 * agent + step, engine)
            metrics = engine.train_mini_batch(
                rows, cases.policy_loss, ("log_prob", "entropy"), cases.TEMPERATURE
            )
            found[name]["losses"].append(metrics.values()["grad_norm"])
    for name, engine in engines.items():
        found[name]["adapter"] = {key: value.clone() for key, value in engine.export_adapter()}
        found[name]["merged"] = {key: value.clone() for key, value in engine.export_weights()}
        columns = engine.compute(mine(7, engine), ("log_prob",), cases.TEMPERATURE)
        found[name]["log_prob"] = columns["log_prob"]
    return found


def mine(step: int, engine: FSDPEngine):
    return take_rows(cases.sample_rows(step), cases.rows_of_rank(engine.dp_rank, engine.dp_size, "even"))


def num_bytes(models: list[nn.Module]) -> int:
    """Of the storages of all parameters, each once."""
    storages = {}
    for model in models:
        for param in model.parameters():
            storage = param.to_local().untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def shared_and_apart(rank: int, world: int, path: str) -> dict[str, Any]:
    ranks = tuple(range(world))
    wanted = [group for name in ADAPTERS for group in cases.dims_of(scenario_of(name, world), ranks)[1]]
    groups = ProcessGroupManager(list(dict.fromkeys(wanted)), "gloo", 60)
    cfg = load_config(cases.overrides_for(path))
    apart = {name: build(name, "actor", cfg, groups, None) for name in ADAPTERS}
    shared: dict[str, FSDPEngine] = {}
    for name in ADAPTERS:
        shared[name] = build(name, "actor", cfg, groups, shared.get("agent_0.actor"))
    reference = build("agent_1.ref", "ref", cfg, groups, shared["agent_0.actor"])
    start = reference.compute(mine(7, reference), ("log_prob",), cases.TEMPERATURE)["log_prob"]
    result = {"shared": train(shared), "apart": train(apart)}
    again = reference.compute(mine(7, reference), ("log_prob",), cases.TEMPERATURE)["log_prob"]
    assert again.equal(start), "the reference changed while adapters were trained"
    check_offload([*shared.values(), reference])
    again = reference.compute(mine(7, reference), ("log_prob",), cases.TEMPERATURE)["log_prob"]
    assert again.equal(start), "the base came back otherwise than it went"
    models = {name: engine._model for name, engine in [*shared.items(), ("reference", reference)]}
    base = num_bytes([models["reference"]])
    result["bytes"] = {
        "base": base,
        "all": num_bytes(list(models.values())),
        "adapters": sum(num_bytes([model]) - base for model in models.values()),
        "apart": num_bytes([engine._model for engine in apart.values()]),
    }
    return result


def check_offload(engines: list[FSDPEngine]) -> None:
    """The base leaves once nobody needs it, and comes back for the first who does; on CPU as on a GPU."""
    frozen = engines[0]._base
    for engine in engines:
        assert engine._base is frozen and not frozen
        frozen.offload(engine.name)
    assert frozen and not any(tensor.untyped_storage().nbytes() for tensor in frozen.tensors())
    with pytest.raises(AssertionError, match="params are offloaded"):
        engines[1].export_weights()
    frozen.onload(engines[-1].name)
    assert not frozen


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Its vocabulary and widths do not divide by the ranks, so that shards are padded."""
    return str(make_tiny_model_dir(tmp_path_factory.mktemp("model"), heads=6, head_dim=8, init_std=0.2))


@pytest.mark.parametrize("world", some([1, 2, 3], 2))
def test_adapters_on_one_base_train_as_on_copies_and_there_is_one_copy(model, world):
    for result in run_workers(shared_and_apart, world, model, deadline_s=120):
        for name in ADAPTERS:
            shared, apart = result["shared"][name], result["apart"][name]
            assert shared["losses"] == apart["losses"] and min(shared["losses"]) > 0
            assert shared["log_prob"].equal(apart["log_prob"])
            for kind in ("adapter", "merged"):
                equal(shared[kind], apart[kind])
            assert any(value.any() for key, value in shared["adapter"].items() if "lora_B" in key)
        found = result["bytes"]
        assert found["all"] == found["base"] + found["adapters"]
        assert found["apart"] == 3 * found["base"] + found["adapters"]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].equal(other[name]), name
