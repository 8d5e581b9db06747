"""Engines stay resident between rollouts where everything fits beside them, and the plan says so."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
from plan_cases import add_agent

from siirl.cli import main
from siirl.compiler.choices import FITS, Machine, choice_lines
from siirl.compiler.choose import choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.phases import memory_lines, phase_peaks
from siirl.compiler.plan import Plan
from siirl.config import load_config, with_overrides
from siirl.dag.spec import DagBuilder

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
grpo_gpu = importlib.import_module("grpo_gpu")

GIB = 2**30
H200_GIB = 139.8
ROLLOUT = "actor_rollout_ref.rollout"
AWAKE, SHARE = f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.gpu_memory_utilization"
SEQUENCES = f"{ROLLOUT}.max_num_seqs"
SMALL_BATCHES = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",)


def keys_of(folder: Path, workload: str, *more: str) -> list[str]:
    """The main job of benchmarks/grpo_gpu.py, without the share of the device that it sets."""
    shape = grpo_gpu.SHAPES[workload]
    (folder / "model").mkdir(exist_ok=True)
    sizes = grpo_gpu.COMMON | {name: size for name, size in shape.items() if name != "prompts"}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **sizes}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    arguments = argparse.Namespace(
        train_tokens=40960,
        forward_tokens=81920,
        tensor_parallel=1,
        gpu_memory=0.6,
        gpus=1,
        steps=6,
        keys=[],
        best_flags=False,
    )
    keys = grpo_gpu.overrides(arguments, folder, shape["prompts"])
    return [key for key in keys if not key.startswith(SHARE)] + list(more)


def planned(keys: list[str], gib: float | None, dag=None, world: int = 1):
    cfg = load_config(keys)
    plan, configs = compile_plan(dag or load_dag(cfg), cfg, world)
    machine = Machine("cpu" if cfg.trainer.device == "cpu" else "cuda", gib)
    return plan, configs, *choose(plan, configs, machine)


def chosen(plan: Plan, *keys: str) -> dict:
    """What was chosen for some keys."""
    return {key: value for choice in plan.choices for key, value in choice.keys.items() if key in keys}


def fullest(plan: Plan, configs: dict, gib: float) -> float:
    lines = memory_lines(plan, configs)
    assert not isinstance(lines, str)
    return max(peak.device for peak in phase_peaks(plan, lines, int(gib * GIB))) / GIB


def test_an_engine_stays_awake_with_the_share_that_its_rows_need(tmp_path):
    _, before, plan, configs = planned(keys_of(tmp_path, "A", *SMALL_BATCHES), H200_GIB)
    rollout = configs["rollout_actor"].actor_rollout_ref.rollout
    assert not rollout.free_cache_engine
    # 32 prompts of 256 tokens and 256 responses of 1,024, with the ends of their blocks, of 28 layers with
    # keys and values of 8 heads of 128 numbers, in bf16
    cache = (32 * 256 + 256 * (1024 + 32)) * 28 * 2 * 8 * 128 * 2 / GIB
    assert cache + 3.2 + 8 < rollout.gpu_memory_utilization * H200_GIB < cache + 3.2 + 8 + 1.4
    assert before["rollout_actor"].actor_rollout_ref.rollout.gpu_memory_utilization == 0.5
    assert fullest(plan, configs, H200_GIB) < FITS * H200_GIB
    assert plan.nodes["rollout_actor"].overrides == {AWAKE: False, SHARE: rollout.gpu_memory_utilization}
    assert Plan.from_json(plan.to_json()) == plan
    (line,) = choice_lines(plan)
    share = rollout.gpu_memory_utilization
    start = (
        f"rollout.free_cache_engine=false rollout.gpu_memory_utilization={share}: it stays resident between"
    )
    assert line.startswith(f"agent_0.rollout: {start}")


@pytest.mark.parametrize(
    ("workload", "keys", "gib"),
    [
        ("A", (), H200_GIB),  # micro-batches of 40,960 tokens
        ("A", SMALL_BATCHES, 80.0),
        ("A", SMALL_BATCHES, None),
        ("A", (*SMALL_BATCHES, f"{SHARE}=0.6"), H200_GIB),
        ("A", (*SMALL_BATCHES, f"{AWAKE}=True"), H200_GIB),
        ("A", (*SMALL_BATCHES, f"{AWAKE}=False"), H200_GIB),
        ("A", (*SMALL_BATCHES, "trainer.device=cpu"), H200_GIB),
        ("A", (*SMALL_BATCHES, f"{ROLLOUT}.name=hf"), H200_GIB),
        ("A", (*SMALL_BATCHES, "actor_rollout_ref.model.path=/no/such/model"), H200_GIB),
        ("A", (*SMALL_BATCHES, f"{ROLLOUT}.max_lag=1"), 10_000.0),
        (
            "A",
            (*SMALL_BATCHES, "actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.merge_lora=false"),
            10_000.0,
        ),
        ("B", (), H200_GIB),
    ],
)
def test_an_engine_sleeps_where_all_does_not_fit_or_is_not_known_or_that_was_set(
    tmp_path, workload, keys, gib
):
    _, configs_before, plan, configs = planned(keys_of(tmp_path, workload, *keys), gib)
    awake = configs_before["rollout_actor"].actor_rollout_ref.rollout.free_cache_engine
    assert configs["rollout_actor"].actor_rollout_ref.rollout.free_cache_engine == awake
    assert chosen(plan, AWAKE) == {}
    if gib is None or keys[-1:] in ((), SMALL_BATCHES[-1:], (f"{SHARE}=0.6",)):
        tried = with_overrides(configs["rollout_actor"], {AWAKE: False})
        assert gib is None or fullest(plan, configs | {"rollout_actor": tried}, gib) > FITS * gib


def test_an_engine_without_graphs_needs_less(tmp_path):
    shares = []
    for eager in (False, True):
        keys = keys_of(tmp_path, "A", *SMALL_BATCHES, f"{ROLLOUT}.enforce_eager={eager}")
        _, _, _, configs = planned(keys, H200_GIB)
        shares.append(configs["rollout_actor"].actor_rollout_ref.rollout.gpu_memory_utilization)
    assert shares[0] - shares[1] == pytest.approx(4 / H200_GIB, abs=0.011)


def test_a_share_that_was_set_stays(tmp_path):
    keys = keys_of(tmp_path, "A", *SMALL_BATCHES, f"{SHARE}=0.45")
    _, _, plan, configs = planned(keys, H200_GIB)
    assert plan.nodes["rollout_actor"].overrides == {AWAKE: False}
    assert configs["rollout_actor"].actor_rollout_ref.rollout.gpu_memory_utilization == 0.45


def test_an_engine_that_stays_awake_holds_all_rows_of_a_step_or_else_it_sleeps_with_a_share_that_does(
    tmp_path,
):
    longer = ("data.max_response_length=1100",)
    _, _, plan, _ = planned(keys_of(tmp_path, "B", *SMALL_BATCHES, *longer), H200_GIB)
    assert chosen(plan, AWAKE, SHARE) == {AWAKE: False, SHARE: 0.53}
    longest = ("data.max_response_length=1600",)
    _, _, plan, _ = planned(keys_of(tmp_path, "B", *SMALL_BATCHES, *longest), H200_GIB)
    assert chosen(plan, AWAKE, SHARE) == {SHARE: 0.72}


@pytest.mark.parametrize(("gib", "share"), [(H200_GIB, 0.55), (36.0, 0.35)])
def test_the_share_of_an_engine_that_sleeps_holds_a_step_or_what_fits(tmp_path, gib, share):
    keys = keys_of(tmp_path, "B", *SMALL_BATCHES, f"{AWAKE}=True")
    _, _, plan, configs = planned(keys, gib)
    assert chosen(plan, SHARE) == {SHARE: share}
    lines = memory_lines(plan, configs)
    sampling = [peak for peak in phase_peaks(plan, lines, int(gib * GIB)) if peak.node == "rollout_actor"]
    assert sampling[0].device <= FITS * gib * GIB


def test_an_engine_is_for_no_more_sequences_than_a_step_has(tmp_path):
    keys = [key for key in keys_of(tmp_path, "A") if not key.startswith(SEQUENCES)]
    _, _, plan, _ = planned(keys, H200_GIB)
    assert chosen(plan, SEQUENCES) == {SEQUENCES: 256}


def test_an_engine_on_devices_of_its_own_never_sleeps_and_is_left_alone(tmp_path):
    apart = ["dag.node_config.rollout_actor.placement=0"]
    apart += [
        f"dag.node_config.{node}.placement=1"
        for node in ("actor_old_log_prob", "reference_log_prob", "actor_train")
    ]
    keys = keys_of(tmp_path, "A", *SMALL_BATCHES, "trainer.n_gpus_per_node=2", *apart)
    _, _, plan, _ = planned(keys, H200_GIB, world=2)
    assert chosen(plan, AWAKE) == {}


def test_engines_of_two_agents_on_one_device_sleep_as_ever(tmp_path):
    dag = DagBuilder("two")
    for agent in range(2):
        add_agent(dag, agent)
    alone = ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.actor.use_kl_loss=False")
    keys = keys_of(tmp_path, "B", *SMALL_BATCHES, *alone)
    _, _, plan, _ = planned(keys, 10_000.0, dag.build())
    assert chosen(plan, AWAKE) == {}


def test_the_plan_says_so(tmp_path, capsys):
    keys = keys_of(tmp_path, "A", *SMALL_BATCHES, "trainer.device=cuda")
    assert main(["plan", *keys, f"trainer.device_memory_gib={H200_GIB}"]) == 0
    said = capsys.readouterr().out
    what = "rollout.free_cache_engine=false rollout.gpu_memory_utilization=0.3"
    assert f"agent_0.rollout: {what}: it stays resident between rollouts" in said
    assert main(["plan", *keys, "trainer.device_memory_gib=80"]) == 0
    assert "stays resident" not in capsys.readouterr().out
