"""LoRA adapters on experts under FSDP2, against peft's on a linear layer for each matrix of each expert."""

import tempfile
from pathlib import Path
from typing import Any

import causal_lms
import pytest
import safetensors.torch
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_adapter_cases import (
    ALL,
    DEALT,
    DOWN,
    GROUPED,
    SEQUENCE_PARALLEL,
    megatron,
    put,
    reference,
    start_of,
    targets_of,
)
from expert_cases import assert_equal_training, unequal_replicas
from fixtures_tiny import make_tiny_model_dir
from recorded_cases import case_of, record_gaps, record_outcome
from train_engine_cases import Scenario

from siirl.model_files.weight_slices import write_adapter
from siirl.models.adapter_targets import ADAPTED, expert_matrices
from siirl.models.families import types_with

ADAPTED_EXPERTS = types_with(lambda row: row.experts and row.experts.adapted)

ONE_ROW = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
EXPERTS = {"qwen3_moe": 6, "mixtral": 5, "few": 3}


@pytest.fixture(scope="module")
def model_dirs() -> dict[str, str]:
    root = Path(tempfile.mkdtemp(prefix="siirl-expert-adapters-"))
    sizes = {"tie": False, "hidden": 64, "init_std": 0.15}
    return {
        name: str(
            make_tiny_model_dir(root / name, "qwen3_moe" if name == "few" else name, experts=num, **sizes)
        )
        for name, num in EXPERTS.items()
    }


def trained(
    rank: int, world: int, scenarios: list[Scenario], paths: dict[str, str], starts: dict[str, dict]
) -> Any:
    """Name -> (weights as they were, outcome, adapters as they leave), from rank 0."""
    found = {}
    for scenario in scenarios:
        engine, _ = cases.build_engine(scenario, paths[scenario.model])
        untouched = {name: weight.clone() for name, weight in engine.export_weights()}
        put(engine, scenario, starts[scenario.name])
        outcome = cases.train(engine, scenario)
        if scenario.strategy == "megatron":
            assert unequal_replicas(engine) == [], scenario.name
        left = {name: x.clone() for name, x in engine.export_adapter(torch.float32)}
        state = cases.whole_tensors(engine.state_dict()["model"])
        found[scenario.name] = untouched, outcome, left, state
    return found if rank == 0 else None


SCENARIOS = [
    Scenario("alone", 1, "mixtral", overrides=ALL),
    Scenario("one row a micro-batch", 1, "qwen3_moe", overrides=(*ALL, ONE_ROW)),
    Scenario("alone, down", 1, "qwen3_moe", overrides=DOWN),
    Scenario("two ranks", 2, "mixtral", split="uneven", overrides=ALL),
    Scenario("two ranks, one without rows", 2, "qwen3_moe", split="first_rank", overrides=ALL),
    Scenario("two ranks, experts dealt", 2, "qwen3_moe", split="uneven", overrides=ALL, sizes=DEALT),
    Scenario("two ranks, down, dealt", 2, "qwen3_moe", overrides=(*DOWN, ONE_ROW), sizes=DEALT),
    Scenario("four ranks, one without experts", 4, "few", split="uneven", overrides=ALL),
    Scenario("two shards, two copies", 4, "mixtral", overrides=ALL, fsdp_size=2),
    Scenario("two copies of dealt experts", 4, "qwen3_moe", overrides=ALL, fsdp_size=2, sizes=DEALT),
    Scenario("two pairs share rows", 4, "qwen3_moe", overrides=ALL, sizes=(("cp", 2),)),
    megatron("megatron alone", 1, "qwen3_moe"),
    megatron("megatron alone, grouped, down", 1, "qwen3_moe", *DOWN, GROUPED),
    megatron("megatron ep2", 2, "qwen3_moe", ep=2),
    megatron("megatron tp2", 2, "mixtral", *ALL, SEQUENCE_PARALLEL, tp=2, etp=2),
    megatron("megatron tp2, experts whole", 2, "mixtral", *ALL, SEQUENCE_PARALLEL, tp=2),
    megatron("megatron pp2, grouped", 2, "qwen3_moe", *ALL, GROUPED, pp=2),
    megatron("megatron ep2, etp2, grouped", 4, "qwen3_moe", *ALL, GROUPED, ep=2, etp=2),
    megatron("megatron tp2, ep2", 4, "qwen3_moe", *ALL, SEQUENCE_PARALLEL, tp=2, ep=2),
    megatron("megatron tp2, pp2", 4, "mixtral", *ALL, SEQUENCE_PARALLEL, tp=2, pp=2, etp=2),
    megatron("megatron cp2, ep2", 4, "qwen3_moe", cp=2, ep=2),
]


@pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_adapters_on_experts_train_as_pefts_on_linear_layers(model_dirs, world):
    scenarios = [scenario for scenario in SCENARIOS if scenario.world == world]
    starts, theirs = {}, {}
    for scenario in scenarios:
        path, targets = model_dirs[scenario.model], targets_of(scenario)
        starts[scenario.name] = start_of(scenario.model, path, targets)
        theirs[scenario.name] = reference(path, targets, starts[scenario.name])
    found = run_workers(trained, world, scenarios, model_dirs, starts, deadline_s=300)[0]
    for scenario in scenarios:
        untouched, ours, left, state = found[scenario.name]
        for name, weight in safetensors.torch.load_file(
            Path(model_dirs[scenario.model]) / "model.safetensors"
        ).items():
            assert torch.equal(untouched[name], weight), name
        assert_equal_training(ours, theirs[scenario.name])
        kind = "mixtral" if scenario.model == "mixtral" else "qwen3_moe"
        record_outcome(case_of(kind, scenario, "expert adapters"), ours, theirs[scenario.name])
        halves = {"lora_A", "lora_B"}
        for half in halves:
            grads = [grad for name, grad in ours.grads.items() if half in name and ".experts." in name]
            assert max(float(grad.abs().max()) for grad in grads) > 1e-4
        assert left.keys() == {name.replace(".default.", ".") for name in starts[scenario.name]}
        assert {name.replace(".default.", ".") for name in state} == left.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, left[name.replace(".default.", ".")]), name


def left_to_peft(rank: int, world: int, kinds: list[str]) -> dict[str, str]:
    """Model type -> what is wrong with the adapter as peft reads it from its files."""
    return {kind: problem for kind in kinds if (problem := wrong_in_peft(kind))}


def wrong_in_peft(kind: str) -> str:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, out = (Path(tempfile.mkdtemp(prefix=f"siirl-{name}-")) for name in ("model", "adapter"))
    causal_lms.write_model(folder, causal_lms.tiny_config(kind))
    scenario = Scenario("", 1, overrides=ALL)
    engine, _ = cases.build_engine(scenario, folder)
    held = engine._live_pieces()
    draw = torch.Generator().manual_seed(1)
    for pieces in held.values():
        for local, _ in pieces:
            local.copy_(torch.randn(local.shape, generator=draw) * 0.1)
    leaves = {name.split(".lora_")[0].rpartition(".")[2] for name in held}
    if leaves != {*ADAPTED, *expert_matrices(kind)}:
        return f"adapters are on {sorted(leaves)}"
    rows = cases.sample_rows(0)
    adapter = {name: x.clone() for name, x in engine.export_adapter(torch.float32)}
    write_adapter(out, adapter, cases.LORA_RANK, cases.LORA_ALPHA, str(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before, _ = cases.reference_outputs(plain, rows)
    expected, _ = cases.reference_outputs(PeftModel.from_pretrained(plain, out), rows)
    if float((expected - before).abs().max()) < 0.01:
        return "peft's adapter changes nothing"
    found = engine.compute(rows, ("log_prob",), cases.TEMPERATURE)["log_prob"]
    difference = float((found - expected).detach().abs().max())
    record_gaps(case_of(kind, scenario, "expert adapters"), {"log_prob": difference})
    return "" if difference < 1e-5 else f"log_prob is off by {difference}"


def test_peft_reads_the_adapter_of_each_type_that_has_them_on_experts():
    assert run_workers(left_to_peft, 1, list(ADAPTED_EXPERTS), deadline_s=200)[0] == {}
