"""A service whose layers are compiled: right, with one graph for all tenants, that of a job with LoRA."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from service_worker import MOST_RANK, service_of
from test_service_training import (
    ASKED,
    SPECS,
    ByHand,
    adapter_of,
    asked_of,
    created,
    gradient_of,
    off,
    trained,
)
from torch._dynamo.utils import counters

from siirl.engines.train import hf_model
from siirl.engines.train.layer_compiler import merge_linears
from siirl.service.commands import AdapterSpec, CreateModel, Datum, ForwardBackward
from siirl.service.tenants import Tenants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMPILED = "actor_rollout_ref.model.compile_layers=True"
KEYS = (COMPILED,)
ROUNDING = 3e-6


@pytest.fixture
def together(tenants, monkeypatch):
    """Requests of several models go through the layers in one pass, as on a GPU."""
    tenants.engine.prepare(MOST_RANK)
    monkeypatch.setattr(tenants.engine, "_in_turn", False)
    return tenants


def rows_of(lengths: tuple[int, ...]) -> list[Datum]:
    draw = np.random.default_rng(len(lengths))
    found = [draw.integers(2, 64, length + 1) for length in lengths]
    return [Datum(row[:-1].tolist(), {"target_tokens": row[1:].astype(np.int64)}) for row in found]


def pass_of(tenants: Tenants, specs: list[AdapterSpec], lengths: tuple[int, ...]) -> None:
    """With and without gradients, of models that come and go."""
    models = [f"{'abc'[number % 3]}:train:{number}" for number in range(len(specs))]
    for model, spec in zip(models, specs, strict=True):
        tenants.create(CreateModel(model, spec))
    for only_forward in (False, True):
        data = rows_of(lengths)
        tenants.train([ForwardBackward(x, "cross_entropy", {}, data, only_forward) for x in models])
    for session in "abc":
        tenants.release(session)


FULL, RAGGED = (32, 32), (9, 20, 3)
"""Lengths of rows that this CPU's attention pads alike; those of the first need no padding."""


def test_as_tenants_come_and_go_nothing_is_compiled_anew(together):
    for lengths in (FULL, RAGGED, (9, 9)):
        pass_of(together, [AdapterSpec(4, 0)], lengths)
    before = counters["stats"]["unique_graphs"]
    assert before
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in (1, 2, 3, 6, 4, 1):
            for rank in (1, 2, 8):
                pass_of(together, [AdapterSpec(rank, 0)] * number, FULL)
            mixed = [AdapterSpec(1 + i, i, attention=i != 1, mlp=i != 2) for i in range(number)]
            for lengths in (RAGGED, (5,), (7, 7, 7, 7)):
                pass_of(together, mixed, lengths)
    assert counters["stats"]["unique_graphs"] == before


def test_losses_and_gradients_of_several_in_one_pass_are_those_in_float64(service, together):
    ranks = {model: rank for model, (rank, _) in SPECS.items()}
    for model, (rank, seed) in SPECS.items():
        created(together, model, rank, seed)
    by_hand = {model: ByHand(service, adapter_of(together, model), rank) for model, rank in ranks.items()}
    asked = {model: replace(asked_of(model, 0), loss="cross_entropy") for model in ASKED}
    found = together.train(list(asked.values()))
    for (model, command), one in zip(asked.items(), found, strict=True):
        terms = by_hand[model].terms("cross_entropy", command.data)
        terms.sum().backward()
        assert one.loss == pytest.approx(terms.sum().item(), abs=1e-6 * terms.abs().sum().item())
        wanted = {name: part.grad for name, part in by_hand[model].parts.items()}
        assert off(gradient_of(together, model), wanted) < ROUNDING


def test_clients_at_once_are_bit_for_bit_what_each_is_alone(tenants):
    models = list(SPECS)
    at_once = trained(tenants, models)
    for model in models:
        tenants.release(model.partition(":")[0])
    for model in models:
        (alone,) = trained(tenants, [model]).values()
        assert all(torch.equal(alone[name], one) for name, one in at_once[model].items())


Operations = list[list[str]]


def _recorded(graphs: Operations) -> None:
    """Have the graphs of layers said, when linear layers of one input are merged, and run as they are."""

    def compiling(module, inputs):
        merge_linears(module)
        nodes = [node for node in module.graph.nodes if node.op.startswith("call")]
        numbers = (torch.SymInt, torch.SymFloat, torch.Size, int, float)
        of_tensors = [node for node in nodes if not isinstance(node.meta.get("example_value"), numbers)]
        names = [str(getattr(node.target, "__name__", node.target)) for node in of_tensors]
        graphs.append(["split" if name == "chunk" else name for name in names])
        return module.forward

    hf_model.compile_layer = compiling


def graphs_of_job(rank: int, world: int, path: str) -> Operations:
    _recorded(graphs := [])
    model = "actor_rollout_ref.model"
    keys = (COMPILED, f"{model}.enable_gradient_checkpointing=False", f"{model}.lora_rank=4")
    scenario = cases.Scenario("", world, overrides=keys)
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(1))
    return graphs


def graphs_of_server(rank: int, world: int, path: str, folder: str) -> Operations:
    _recorded(graphs := [])
    worker = service_of(path, folder, KEYS)
    tenants = worker.nodes["service"].services["service"].tenants
    tenants.create(CreateModel("a:train:0", AdapterSpec(4, 0)))
    tenants.train([ForwardBackward("a:train:0", "cross_entropy", {}, rows_of(RAGGED), False)])
    return graphs


def test_layers_of_one_tenant_are_compiled_to_the_operations_of_a_job_with_an_adapter(tmp_path):
    path = str(make_tiny_model_dir(tmp_path / "model", init_std=0.1))
    (job,) = run_workers(graphs_of_job, 1, path, deadline_s=600)
    (server,) = run_workers(graphs_of_server, 1, path, str(tmp_path), deadline_s=600)
    assert len(server) == 4 and server == job[:4]
