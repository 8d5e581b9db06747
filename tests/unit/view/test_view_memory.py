"""The memory of each phase on the page: the plan's estimate beside what the ranks measured."""

import json
from pathlib import Path

import pytest
from viewed_runs import write_run

from siirl import main_dag
from siirl.compiler.memory.estimate import GIB
from siirl.view.memory_phases import memory_phases
from siirl.view.view_page import read_run

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def phase(node: str, tensors: float, device: float, ranks: str = "0-3") -> dict:
    """A phase as job.json has it; GiB."""
    parts = [["agent_0.actor", "params", tensors * GIB], ["agent_0.rollout", "share of the device", 0]]
    sizes = {"tensors": tensors * GIB, "device": device * GIB, "host": 0}
    return {"node": node, "ranks": ranks, **sizes, "parts": parts}


def test_what_an_h200_measured_stands_beside_the_estimate_of_its_phase():
    result = json.loads((RESULTS / "grpo_gpu_A_1_memory.json").read_text())
    series = {name: dict(enumerate(found["all"], 3)) for name, found in result["metrics"].items()}
    told = [phase("rollout_actor", 22.5, 120.0), phase("actor_train", 100.0, 116.0)]
    told += [phase("later", 1.0, 2.0)]
    job = {"memory_estimate": {"device_gib": 139.8, "assumed": False, "phases": told}}
    found = memory_phases(job, series)
    phases = {one["name"]: one for one in found["phases"]}
    assert list(phases)[:3] == ["rollout_actor", "actor_train", "later"], "phases of the plan, in its order"
    assert {"load", "weight_sync", "free"} <= phases.keys() and "host" not in phases
    assert phases["actor_train"]["peak"] == [104.8, 3] and phases["actor_train"]["reserved"] == [113.4, 3]
    assert phases["actor_train"]["estimate"]["tensors"] == 100.0
    assert phases["actor_train"]["estimate"]["parts"] == [["agent_0.actor", "params", 100.0]]
    assert "peak" not in phases["later"] and phases["load"]["estimate"] is None
    assert found["text"] == ["rollout_actor took the most: 118.7 GiB of a device's 139.8 GiB."]
    far = memory_phases({"memory_estimate": {"phases": [phase("actor_train", 50.0, 60.0)]}}, series)
    assert "estimate in actor_train by +110%." in far["text"][1]


def test_of_several_ranks_the_fullest_estimate_and_of_several_steps_the_first_highest_count():
    told = [phase("train", 3.0, 5.0, "0-3"), phase("train", 4.0, 6.0, "4-7"), phase("train", 1.0, 2.0, "8")]
    series = {"memory/train_peak_gib": {1: 2.0, 2: 4.5, 3: 4.5, 4: 1.0}, "memory/host_peak_gib": {1: 7.0}}
    found = memory_phases({"memory_estimate": {"phases": told}}, series)
    (train,) = found["phases"]
    assert (train["estimate"]["ranks"], train["estimate"]["device"]) == ("4-7", 6.0)
    assert train["peak"] == [4.5, 2] and found["host"] == [7.0, 1]


def test_a_run_without_devices_says_so_and_shows_its_processes(tmp_path):
    folder = write_run(tmp_path / "run")
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps(job | {"memory_estimate": {"left_out": "no GPU"}}))
    shown = read_run(folder)["memory"]
    assert shown["phases"] == [] and shown["text"] == [
        "There is no estimate: no GPU.",
        "No rank has measured the memory of a device: it has none, or no step is done yet.",
    ]


@pytest.mark.parametrize(
    "told", [None, 7, [], {"phases": 7}, {"phases": [7, {}]}, {"device_gib": "x", "phases": [{"node": {}}]}]
)
def test_an_estimate_that_is_none_is_passed_over(told):
    assert memory_phases({"memory_estimate": told}, {})["phases"] == []
    odd = {**phase("a", 1.0, 2.0), "parts": [7, [1, 2], [{}, "x", "y"]]}
    assert memory_phases({"memory_estimate": {"phases": [odd]}}, {})["phases"][0]["estimate"]["parts"] == []


def test_a_run_writes_its_estimate_into_its_folder_when_it_starts(tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(main_dag, "_launch", lambda launcher, job, cfg, plan: jobs.append(job) or 0)
    monkeypatch.setattr(main_dag, "check_start", lambda cfg, launcher: None)
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
    keys = [f"actor_rollout_ref.model.path={model}", "data.train_files=a", "data.val_files=b"]
    keys += [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=1",
        f"trainer.output_dir={tmp_path}/out",
    ]
    for device, gib in (("cuda", "33"), ("cpu", "null")):
        assert main_dag.main([*keys, f"trainer.device={device}", f"trainer.device_memory_gib={gib}"]) == 0
    folder = jobs[0].prepare().parent
    shown = read_run(folder)["memory"]
    assert shown["device_gib"] == 33 and not shown["assumed"]
    assert {"rollout_actor", "actor_train"} <= {one["name"] for one in shown["phases"]}
    assert all(one["estimate"]["device"] > 0.6 for one in shown["phases"]), "a context at least"
    jobs[1].prepare()
    shown = read_run(folder)["memory"]
    assert shown["on_host"] and {"rollout_actor", "actor_train"} <= {one["name"] for one in shown["phases"]}
    assert (
        "all processes together" in shown["text"][1] and f"{shown['device_gib']:.4g} GiB" in shown["text"][1]
    )
