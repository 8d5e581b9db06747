"""The memory estimate by phase: within 15% of what was measured on H200s, and advice that holds."""

import argparse
import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import causal_lms
import pytest
from plan_cases import add_agent, compiled, config

from siirl.cli import main
from siirl.compiler.backends import TRAIN_BACKENDS
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.estimate import ENGINE_PARTS, adapter_params, head_lines, read_shape
from siirl.compiler.memory.phases import engine_rows, estimate_record, memory_lines, phase_peaks
from siirl.config import load_config
from siirl.config.root import all_keys
from siirl.dag.spec import DagBuilder, DagSpec
from siirl.findings import Findings
from siirl.show.memory_text import SURE, memory_table, memory_warnings

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
backends_gpu, grpo_gpu = (importlib.import_module(name) for name in ("backends_gpu", "grpo_gpu"))

GIB = 2**30
H200_GIB = 139.8
RESULTS = ROOT / "benchmarks" / "results"
GRPO = ("A_1", "A_1_memory", "A_2", "A_2_tp2", "A_4", "A_4_tp2", "B_1")
COMPILED = ("beside_verl_gpu_A_1", "beside_verl_gpu_B_1")
SPARE_LOGITS_GIB = 32 * 1024 * 151936 * 2 / 2**30
"""What a micro-batch of these keeps of its logits as there is room for it: nothing that it needs."""
WHOLE = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false"
BACKENDS = [
    (file.stem, run)
    for file in sorted(RESULTS.glob("backends_gpu_[sv]*.json"))
    for run in json.loads(file.read_text())["runs"]
]


def peaks(keys: list[str], world: int):
    cfg = load_config(keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, world)
    lines = memory_lines(plan, configs)
    assert not isinstance(lines, str), lines
    return phase_peaks(plan, lines, int(H200_GIB * GIB))


def write_config(folder: Path, sizes: dict) -> None:
    (folder / "model").mkdir()
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **grpo_gpu.COMMON, **sizes}
    config.pop("prompts", None)
    (folder / "model" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", [*(f"grpo_gpu_{name}" for name in GRPO), *COMPILED])
def test_peaks_of_grpo_on_h200s_are_within_15_percent_of_the_estimate(name, tmp_path):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    measured = {key: found["median"] for key, found in result["metrics"].items()}
    workload, gpus = result["workload"], result["gpus"]

    def said(name: str, default: float) -> float:
        found = re.search(f"--{name} ([0-9.]+)", result["command"])
        return type(default)(found[1]) if found else default

    write_config(tmp_path, grpo_gpu.SHAPES[workload])
    arguments = argparse.Namespace(
        train_tokens=said("train-tokens", 40960),
        forward_tokens=81920,
        tensor_parallel=result["tensor_parallel"],
        gpu_memory=said("gpu-memory", 0.6),
        gpus=gpus,
        steps=6,
        keys=result["keys"],
        best_flags=False,
    )
    found = peaks(grpo_gpu.overrides(arguments, tmp_path, grpo_gpu.SHAPES[workload]["prompts"] * gpus), gpus)
    asleep = measured["memory/load_device_gib"] - measured["memory/load_reserved_gib"]
    spare = SPARE_LOGITS_GIB if name in COMPILED else 0
    for peak in found:
        needed = measured[f"memory/{peak.node}_peak_gib"] - spare * (peak.node == "actor_train")
        assert peak.tensors / GIB == pytest.approx(needed, rel=0.15), peak
    rollout = next(peak for peak in found if peak.node == "rollout_actor")
    train = next(peak for peak in found if peak.node == "actor_train")
    assert rollout.device / GIB == pytest.approx(measured["memory/rollout_actor_device_gib"], rel=0.15)
    on_device = measured["memory/actor_train_reserved_gib"] + asleep - spare
    assert train.device / GIB == pytest.approx(on_device, rel=0.15)
    assert max(found, key=lambda peak: peak.device) is train or on_device < rollout.device / GIB


@pytest.mark.parametrize(("name", "run"), BACKENDS)
def test_peaks_of_both_strategies_on_h200s_are_within_15_percent_of_the_estimate(name, run, tmp_path):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    settings, values = result["settings"], result["runs"][run]
    measured = {
        key: value["median"] if isinstance(value, dict) else value
        for key, value in values.items()
        if key.startswith("memory/")
    }
    write_config(tmp_path, backends_gpu.SHAPES[settings["shape"]].sizes)
    keys = [key for key in result["keys"][run] if ".model.path=" not in key]
    found = peaks([*keys, f"actor_rollout_ref.model.path={tmp_path}/model"], settings["gpus"])
    if "memory/peak_gib" in measured:
        assert max(peak.tensors for peak in found) / GIB == pytest.approx(
            measured["memory/peak_gib"], rel=0.15
        )
    else:
        rollout = next(peak for peak in found if peak.node == "rollout_actor")
        assert rollout.device / GIB == pytest.approx(measured["memory/device_gib"], rel=0.15)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_under_fsdp_a_rank_holds_its_share_of_all_experts(family, tmp_path):
    sizes = causal_lms.tiny_config(family)
    sizes.save_pretrained(tmp_path)
    num, of_experts = causal_lms.num_params(sizes), 3 * 4 * 32 * (16 if "qwen" in family else 64)
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}")
    shape = read_shape(cfg, "actor")
    assert (shape.params, shape.expert_params, shape.moe_layers, shape.top_k) == (num, of_experts, 2, 2)
    plan, configs = compile_plan(load_dag(cfg), cfg, 4)
    held = {line.what: line.num_bytes for line in memory_lines(plan, configs)["agent_0.actor"]}
    assert held["parameters"] == held["gradients"] == held["optimizer"] / 2 == -(-num // 4) * 4
    assert held["gradients of a layer"] > of_experts * (2 + 4)


def test_experts_that_are_dealt_over_ranks_are_not_gathered(tmp_path):
    causal_lms.tiny_config("qwen3_moe").save_pretrained(tmp_path)
    held = {}
    for ranks in (1, 4):
        key = f"actor_rollout_ref.actor.fsdp_config.expert_parallel_size={ranks}"
        cfg = config(f"actor_rollout_ref.model.path={tmp_path}", key)
        plan, configs = compile_plan(load_dag(cfg), cfg, 4)
        lines = memory_lines(plan, configs)["agent_0.actor"]
        held[ranks] = {line.what: line.num_bytes for line in lines if "update" in line.during}
    of_experts = 3 * 4 * 32 * 16
    assert held[4]["parameters"] == held[1]["parameters"]
    assert held[1]["gathered layers"] - held[4]["gathered layers"] == 2 * of_experts * 2
    assert held[1]["gradients of a layer"] - held[4]["gradients of a layer"] == of_experts * (2 + 4)
    assert held[4]["experts in compute"] == 2 * of_experts // 4 * 2


@pytest.mark.parametrize("adapts", [False, True])
def test_a_model_that_stays_whole_has_all_weights_and_gradients_on_each_rank(adapts, tmp_path):
    """1.7B on four ranks: fp32 master weights, bf16 in compute, gradients added up in fp32."""
    write_config(tmp_path, grpo_gpu.SHAPES["A"])
    held = {}
    for reshards in (True, False):
        keys = [
            f"actor_rollout_ref.model.path={tmp_path}/model",
            *["actor_rollout_ref.model.lora_rank=8"] * adapts,
        ]
        keys += [
            f"actor_rollout_ref.{role}.fsdp_config.reshard_after_forward={reshards}"
            for role in ("actor", "ref")
        ]
        cfg = config(*keys)
        plan, configs = compile_plan(load_dag(cfg), cfg, 4)
        lines = memory_lines(plan, configs)["agent_0.actor"]
        held[reshards] = {line.what: line.num_bytes for line in lines if "update" in line.during}
    shape, whole = read_shape(cfg, "actor"), held[False]
    assert whole.pop("gathered layers") == 2 * shape.params
    assert held[True].pop("gathered layers") == 2 * (2 * shape.layer_params + shape.embedding_params)
    trained = adapter_params(cfg.actor_rollout_ref.model, shape) or shape.params
    assert whole.pop("whole gradients") + whole["gradients"] == 4 * trained
    assert whole == held[True]


@pytest.mark.parametrize(("world", "more"), [(1, False), (4, True)])
def test_a_small_model_has_whole_gradients_where_ranks_share_them(world, more, tmp_path):
    write_config(tmp_path, grpo_gpu.SHAPES["B"] | {"num_hidden_layers": 2})
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}/model")
    assert 4 * read_shape(cfg, "actor").params < 2**31
    plan, configs = compile_plan(load_dag(cfg), cfg, world)
    held = {line.what: line.num_bytes for line in memory_lines(plan, configs)["agent_0.actor"]}
    assert held["gradients"] + held.get("whole gradients", 0) == 4 * read_shape(cfg, "actor").params
    assert ("whole gradients" in held) == more


@pytest.mark.parametrize("world", [1, 2])
def test_the_base_of_a_service_stays_gathered_on_one_rank(world, tmp_path):
    write_config(tmp_path, grpo_gpu.SHAPES["A"])
    keys = [f"actor_rollout_ref.model.path={tmp_path}/model", "actor_rollout_ref.model.lora_rank=8"]
    cfg = load_config(keys, "serve")
    plan, configs = compile_plan(load_dag(cfg), cfg, world)
    (line,) = (x for x in memory_lines(plan, configs)["agent_0.actor"] if x.what == "gathered layers")
    assert ("generate" in line.during) == (world == 1)
    assert line.num_bytes == 2 * read_shape(cfg, "actor").params or world > 1


def test_phases_that_do_not_coexist_are_not_added_up(tmp_path):
    write_config(tmp_path, grpo_gpu.SHAPES["A"])
    keys = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "algorithm.adv_estimator=grpo",
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    ]
    keys += ["trainer.n_gpus_per_node=1"]
    found = {}
    for most in (0, 2):
        restarts = f"actor_rollout_ref.rollout.max_engine_restarts={most}"
        found[most] = {peak.node: peak for peak in peaks([*keys, restarts], 1)}
    rollout, train = found[0]["rollout_actor"], found[0]["actor_train"]
    awake = {what for (_, what), _ in rollout.parts.items()}
    assert "share of the device" in awake
    assert not awake & {"activations", "gradients", "optimizer"}
    assert "share of the device" not in {what for _, what in train.parts}
    moments = train.parts["agent_0.actor", "optimizer"]
    assert rollout.host == moments
    assert train.host == 0
    kept = train.parts["agent_0.actor", "parameters"] / 2  # for an engine that may come back, in bfloat16
    assert [found[2][name].host for name in ("rollout_actor", "actor_train")] == [moments + kept, kept]
    assert found[2]["actor_train"].parts == train.parts
    by_folder = {
        peak.node: peak for peak in peaks([*keys, "actor_rollout_ref.rollout.weight_link=checkpoint"], 1)
    }
    assert by_folder["actor_train"].host == 2 * kept, "and what the folder's next changes are applied to"


@pytest.mark.parametrize(
    "extra",
    [
        ["actor_rollout_ref.model.enable_gradient_checkpointing=false"],
        ["actor_rollout_ref.rollout.gpu_memory_utilization=0.9"],
        [WHOLE],
        [
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=400000",
        ],
        ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.ref.strategy=megatron"],
    ],
)
@pytest.mark.heavy
def test_what_the_plan_advises_fits_and_is_accepted(extra, tmp_path, capsys):
    write_config(tmp_path, {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36})
    command = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "algorithm.adv_estimator=grpo",
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "data.train_batch_size=512",
        "actor_rollout_ref.actor.ppo_mini_batch_size=128",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "trainer.n_gpus_per_node=8",
        "trainer.device_memory_gib=61",
        *extra,
    ]
    line = verdict(command)
    assert "does not fit 61 GiB" in line
    keys = re.search(r"With (.+?): \d+ GiB in", line).group(1).split()
    assert (WHOLE.replace("=false", "=True") in keys) == (WHOLE in extra)
    assert "fits 61 GiB: yes" in verdict([*command, *keys])
    code = main(["check", "--elsewhere", *command])
    needs = int(re.search(r"does not fit 61 GiB: (\d+)", capsys.readouterr().err).group(1))
    assert code == (2 if needs > 61 * SURE else 0)
    assert main(["check", "--elsewhere", *command, *keys]) == 0
    assert "does not fit" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "logits"),
    [(1, 1024 * 150_000 * 2), (4, 4 * 1024 * 150_000 * 2), (16, 2**28 * 2)],
)
def test_logits_are_kept_whole_where_they_are_few_and_in_chunks_where_not(rows, logits):
    """Rows of 1,024 tokens and 150,000 words in bf16: 2 GiB are seven rows, a chunk is 2^28 logits."""
    plan = compiled(add_one_agent(), 1)
    cfg = config(f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}")
    [update] = [
        line
        for line in head_lines(plan.models["agent_0.actor"], cfg, 150_000, 64, 2)
        if "update" in line.during
    ]
    of_the_weight = 150_000 * 64 * (4 + 2 + 2)  # its gradient in fp32 and twice in bf16
    assert update.num_bytes == logits + of_the_weight


def add_one_agent() -> DagSpec:
    dag = DagBuilder("one")
    add_agent(dag)
    return dag.build()


def test_an_interaction_is_one_phase_in_which_all_its_policies_generate(tmp_path):
    write_config(tmp_path, grpo_gpu.SHAPES["A"])
    dag = DagBuilder("pair")
    above = add_agent(dag, 0)["rollout"]
    add_agent(dag, 1, dependencies=[above])
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}/model")
    plan, configs = compile_plan(dag.build(), cfg, 2)
    lines = memory_lines(plan, configs)
    assert not isinstance(lines, str), lines
    found = {peak.node: peak.parts for peak in phase_peaks(plan, lines, int(H200_GIB * GIB))}
    assert found.keys() == {"rollout_0", "train_0", "train_1"}
    for agent in (0, 1):
        assert found["rollout_0"][f"agent_{agent}.rollout", "KV cache"] > 0
        assert (f"agent_{agent}.rollout", "KV cache") not in found["train_0"]


def test_a_device_holds_the_buffer_through_which_weights_are_written_in_place(tmp_path):
    """In all phases, once. A model that is smaller than the buffer takes as much as it has."""
    small = grpo_gpu.SHAPES["B"] | {"num_hidden_layers": 1, "vocab_size": 1000}
    found, way = {}, "actor_rollout_ref.rollout.replace_weights"
    more = "actor_rollout_ref.rollout.weight_buffer_gib"
    for name, sizes in (("A", grpo_gpu.SHAPES["A"]), ("small", small)):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, sizes)
        keys = [f"actor_rollout_ref.model.path={tmp_path / name}/model", "trainer.device=cuda"]
        keys += ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.dtype=bfloat16"]
        before, after = (peaks([*keys, f"{way}={one}"], 1) for one in ("by_loaders", "in_place"))
        found[name] = {late.tensors - early.tensors for early, late in zip(before, after, strict=True)}
        large = peaks([*keys, f"{way}=in_place", f"{more}=1.5"], 1)
        found[f"{name} of 1.5"] = {
            late.tensors - early.tensors for early, late in zip(before, large, strict=True)
        }
    shape = read_shape(load_config(keys), "rollout")
    assert not isinstance(shape, str), shape
    assert 2 * shape.params < 512 << 20
    of_small = {2 * shape.params}
    assert found == {"A": {512 << 20}, "A of 1.5": {3 << 29}, "small": of_small, "small of 1.5": of_small}
    vllm, sglang = (
        peaks([*keys, f"actor_rollout_ref.rollout.name={name}"], 1) for name in ("vllm", "sglang")
    )
    by_default = {mine.tensors - other.tensors for mine, other in zip(vllm, sglang, strict=True)}
    assert by_default == of_small, "an engine that takes weights in its own way needs no buffer"


def test_every_set_of_ranks_has_its_own_peaks_and_a_surplus_its_rows(tmp_path):
    write_config(tmp_path, grpo_gpu.SHAPES["A"])
    dag = DagBuilder("apart")
    add_agent(dag, 0, "0")
    add_agent(dag, 1, "1-2")
    keys = [f"actor_rollout_ref.model.path={tmp_path}/model"]
    caches = []
    for more in ([], ["actor_rollout_ref.rollout.max_lag=1", "actor_rollout_ref.rollout.surplus=0.5"]):
        plan, configs = compile_plan(dag.build(), config(*keys, *more), 3)
        lines = memory_lines(plan, configs)
        assert not isinstance(lines, str), lines
        peaks = phase_peaks(plan, lines, int(H200_GIB * GIB))
        found = {peak.node: peak.ranks for peak in peaks}
        assert found == {"rollout_0": (0,), "train_0": (0,), "rollout_1": (1, 2), "train_1": (1, 2)}
        caches.append([engine_rows(plan, plan.models[f"agent_{agent}.rollout"], configs) for agent in (0, 1)])
    assert caches == [[32, 16], [48, 24]]


@pytest.mark.parametrize("group", ["actor_rollout_ref.actor", "critic"])
@pytest.mark.parametrize(("name", "section"), [("fsdp", "fsdp_config"), ("megatron", "megatron")])
def test_the_advice_knows_every_key_that_offloads_a_trained_model(group, name, section):
    backend = TRAIN_BACKENDS[name]
    known = {key.removeprefix(f"{group}.") for key in all_keys() if key.endswith("_offload")}
    assert {*backend.offloads, *backend.offloads_trained} == {k for k in known if k.startswith(f"{section}.")}


def verdict(keys: list[str]) -> str:
    cfg = load_config(keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, cfg.trainer.n_gpus_per_node)
    (line,) = [text for text in memory_table(plan, configs, None) if "fit" in text]
    return line


def test_a_device_of_unknown_size_is_assumed_in_the_plan_and_no_warning(tmp_path):
    write_config(tmp_path, {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 64})
    cfg = load_config(
        [
            f"actor_rollout_ref.model.path={tmp_path}/model",
            "data.train_files=train.parquet",
            "data.val_files=val.parquet",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.name=vllm",
            "trainer.n_gpus_per_node=1",
        ]
    )
    plan, configs = compile_plan(load_dag(cfg), cfg, 1)
    table = memory_table(plan, configs, None)
    assert any("does not fit 80 GiB" in line and "trainer.n_gpus_per_node=" in line for line in table)
    assert "80 GiB is assumed" in table[-1]
    need = int(re.search(r"does not fit 80 GiB: (\d+)", " ".join(table)).group(1))
    for gib, told, refused in ((None, 0, 0), (0.9 * need, 1, 0), (0.7 * need, 0, 1)):
        found = Findings()
        assert len(memory_warnings(plan, configs, gib, found)) == told
        assert len(found) == refused
    on_cpu = {
        node: dataclasses.replace(node_cfg, trainer=dataclasses.replace(node_cfg.trainer, device="cpu"))
        for node, node_cfg in configs.items()
    }
    assert "does not fit the 16 GiB of this machine" in memory_table(plan, on_cpu, 16.0)[-1]
    record = estimate_record(plan, on_cpu, None)
    assert record["on_host"] and record["device_gib"] == 0.0, "how large the machine is is not known"
    told = json.loads(json.dumps(estimate_record(plan, configs, None)))
    assert (told["device_gib"], told["assumed"]) == (80.0, True)
    assert estimate_record(plan, configs, H200_GIB)["assumed"] is False
    lines = memory_lines(plan, configs)
    assert not isinstance(lines, str)
    found = [(peak.node, peak.tensors, peak.device) for peak in phase_peaks(plan, lines, int(80 * GIB))]
    assert [(phase["node"], phase["tensors"], phase["device"]) for phase in told["phases"]] == found
    assert (
        sum(size for _, what, size in told["phases"][-1]["parts"] if what not in ENGINE_PARTS) == found[-1][1]
    )
