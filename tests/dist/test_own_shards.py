"""Every rank reads its own rows of a model's files, each byte once."""

import resource
import tempfile
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from safetensors import safe_open
from train_engine_cases import Scenario

from siirl.engines.train.fsdp import fsdp_model
from siirl.model_files.weight_slices import SafetensorsFolder


def build_both_ways(scenario: Scenario, path: str) -> dict:
    """Bytes that this rank read, and what differs from the same model as the first rank reads it for all."""
    read = []
    part = SafetensorsFolder.part
    SafetensorsFolder.part = lambda *given: read.append(part(*given)) or read[-1]
    own, _ = cases.build_engine(scenario, path)
    num_bytes = sum(tensor.nbytes for tensor in read)
    SafetensorsFolder.part = part
    by_rows, fsdp_model.parts_to_read = fsdp_model.parts_to_read, lambda *_: None
    whole, _ = cases.build_engine(scenario, path)
    fsdp_model.parts_to_read = by_rows
    theirs = dict(whole._model.named_parameters())
    wrong = [
        name
        for name, param in own._model.named_parameters()
        if not torch.equal(param.to_local(), theirs[name].to_local())
    ]
    buffers = dict(whole._model.named_buffers())
    wrong += [name for name, one in own._model.named_buffers() if not torch.equal(one, buffers[name])]
    return {"bytes": num_bytes, "wrong": wrong}


CASES = {
    "tied": ({}, Scenario("", 4)),
    "untied, two replicas": ({"tie": False}, Scenario("", 4, fsdp_size=2)),
    "experts": ({"family": "qwen3_moe"}, Scenario("", 4)),
    "bf16 files": ({"dtype": "bfloat16"}, Scenario("", 4)),
    "adapters": ({}, Scenario("", 4, overrides=("actor_rollout_ref.model.lora_rank=4",))),
}


def build_all(rank: int, world: int, paths: dict[str, str]) -> dict[str, dict]:
    return {name: build_both_ways(CASES[name][1], path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def built():
    with tempfile.TemporaryDirectory() as root:
        paths = {
            name: make_tiny_model_dir(f"{root}/{place}", **keys)
            for place, (name, (keys, _)) in enumerate(CASES.items())
        }
        sizes = {name: tensor_bytes(path) for name, path in paths.items()}
        found = run_workers(build_all, 4, {name: str(path) for name, path in paths.items()}, deadline_s=240)
        yield sizes, found


def tensor_bytes(path: Path) -> int:
    with safe_open(path / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())


@pytest.mark.parametrize("name", CASES)
def test_ranks_read_each_byte_once_and_have_what_one_rank_would_have_given_them(built, name):
    sizes, found = built
    replicas = 2 if CASES[name][1].fsdp_size else 1
    assert [one[name]["wrong"] for one in found] == [[]] * 4
    read = [one[name]["bytes"] for one in found]
    assert sum(read) == replicas * sizes[name]
    assert max(read) <= 0.3 * replicas * sizes[name]


def peak_bytes(rank: int, world: int, path: str) -> int:
    """By how much the most memory that the process ever had grows while the model is built."""
    cases.build_engine(Scenario("", world), f"{path}/small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cases.build_engine(Scenario("", world), f"{path}/large")
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_no_rank_has_the_whole_model_in_memory():
    with tempfile.TemporaryDirectory() as root:
        make_tiny_model_dir(f"{root}/small")
        large = make_tiny_model_dir(f"{root}/large", hidden=1024, mlp=4096, layers=2, heads=8)
        size = tensor_bytes(large)
        grown = run_workers(peak_bytes, 4, root, deadline_s=240)
    assert size > 100e6
    assert max(grown) < 0.8 * size, "a quarter of the file, and as much in the shards"
