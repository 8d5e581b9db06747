"""The cost model: its constants are what a fit gives, and it predicts steps that it was not fitted to."""

import importlib
import json
import re
import sys
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from plan_cases import add_agent, config

from siirl.cli import main
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import DEVICES, H200
from siirl.compiler.cost.lengths import RowTokens, lengths_of
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.cost.work import (
    LEAST_SAVING,
    PackedRows,
    model_pass,
    packed_rows,
    rollout_work,
    sync_work,
)
from siirl.compiler.memory.estimate import model_shape, read_shape
from siirl.compiler.plan import LinkPlan
from siirl.config import load_config
from siirl.dag.spec import DagBuilder
from siirl.engines.train.packed import micro_batches
from siirl.show.batch_text import explanation

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
fit_costs = importlib.import_module("fit_costs")

MEASURED = ROOT / "docs" / "evidence" / "predictions.md"
MODEL = "actor_rollout_ref.model.path"
WHOLE = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward"
BASE = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=128",
    "data.max_prompt_length=256",
    "data.max_response_length=1024",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.model.use_liger=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40960",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=81920",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=81920",
    "actor_rollout_ref.rollout.enforce_eager=False",
    "actor_rollout_ref.rollout.max_num_seqs=512",
    "trainer.n_gpus_per_node=4",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return list(fit_costs.measured_runs(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def model(runs):
    """The folder of the 1.7B shape."""
    found = next(run for run in runs if run.name == "grpo_gpu_A_1")
    return next(iter(found.configs.values())).actor_rollout_ref.model.path


def predict(keys, device=H200) -> StepTime:
    cfg = load_config(keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node)
    found = step_time(plan, configs, device)
    assert isinstance(found, StepTime), found
    return found


def seconds(found: StepTime) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in found.phases}


def test_the_constants_are_what_the_fit_gives(runs):
    fitted = fit_costs.fit(runs).constants
    assert fitted.keys() == H200.constants.keys()
    for name, constant in H200.constants.items():
        assert constant.value == pytest.approx(fitted[name].value, rel=0.01), name


def test_every_constant_names_files_that_exist_or_says_that_it_was_not_measured():
    for constant in H200.constants.values():
        if constant.source.startswith("not measured"):
            continue
        prefix = ""
        for name in constant.source.split(", "):
            full = name if "_gpu_" in name else prefix + name
            prefix = re.match(
                r"(grpo|backends_gpu_speed|backends_gpu_vllm|experts|memory_checkpoint)_(gpu_)?", full
            )[0]
            assert full in (*fit_costs.FITTED, *fit_costs.EXPERTS, fit_costs.HOST), full
            assert (ROOT / "benchmarks" / "results" / f"{full}.json").is_file()


def test_steps_that_were_held_out_are_predicted_within_20_percent(runs):
    held_out = [run for run in runs if not run.fitted]
    assert len(held_out) >= 10 and sum(run.today for run in held_out) >= 3
    for run in runs:
        found = fit_costs.predicted(run, H200)
        bound = 0.2 if run.card == "h200" else 0.3  # experts on H100s: worst where FSDP gathers them
        assert found.step_s == pytest.approx(run.seconds["time/step_s"], rel=bound), run.name
        for phase in ("actor_train", "actor_old_log_prob", "reference_log_prob"):
            if fit_costs.TIMES[phase] in run.seconds:
                measured = run.seconds[fit_costs.TIMES[phase]]
                assert seconds(found)[phase] == pytest.approx(measured, rel=bound), (run.name, phase)


LAYOUTS = {
    "grpo_gpu_A_2": ("", "_tp2"),
    "grpo_gpu_A_4": ("", "_tp2"),
    "backends_gpu_speed_1.7B_4_": ("dp4 megatron", "tp2pp2 megatron", "tp4 megatron"),
    "backends_gpu_speed_1.7B_4_tp2pp2 ": ("fsdp", "megatron"),
    "backends_gpu_vllm_1.7B_4_": ("dp4 megatron", "tp2pp2 megatron", "tp4 megatron"),
    "experts_gpu_30B-A3B-8_2_ep2 ": ("megatron", "fsdp_dealt", "fsdp"),
    "experts_gpu_30B-A3B-8_4_ep4 ": ("megatron", "fsdp_dealt", "fsdp"),
    "long_tail_vllm_gpu ": ("lag 1", "lag 0"),
    "long_tail_vllm_gpu_apart ": ("lag 2", "lag 0"),
}
"""The same work in several layouts, as files and strategies name them: the fastest first."""


@pytest.mark.parametrize("work", LAYOUTS)
def test_layouts_are_predicted_in_the_order_in_which_they_were_measured(work, runs):
    by_name = {run.name: run for run in runs}
    found = [by_name[f"{work}{layout}"] for layout in LAYOUTS[work]]
    measured = [run.seconds["time/step_s"] for run in found]
    assert measured == sorted(measured)
    predicted = [fit_costs.predicted(run, H200).step_s for run in found]
    assert predicted == sorted(predicted)


def test_the_page_has_the_errors_of_today(runs):
    assert "\n".join(fit_costs.errors(runs)) in MEASURED.read_text()


def test_layouts_that_were_measured_are_ranked_as_measured(runs):
    """1.7B on four devices: DP 4, then TP 2 x PP 2, then TP 4; a rollout of TP 1 before one of TP 2."""
    trainers = [f"backends_gpu_speed_1.7B_4_{name} megatron" for name in ("dp4", "tp2pp2", "tp4")]
    for names in (trainers, ["grpo_gpu_A_4", "grpo_gpu_A_4_tp2"]):
        found = [next(run for run in runs if run.name == name) for name in names]
        measured = [run.seconds["time/step_s"] for run in found]
        ours = [fit_costs.predicted(run, H200).step_s for run in found]
        assert measured == sorted(measured) and ours == sorted(ours)


def test_the_arithmetic_of_a_pass_is_that_of_its_matrices(model):
    """1.7B on 256 rows of 256 + 1,024 tokens, by hand: 924 + 163 TFLOP of products, 48 of attention."""
    cfg = load_config([*BASE, f"{MODEL}={model}", "trainer.n_gpus_per_node=1", "data.train_batch_size=32",
                       "actor_rollout_ref.actor.ppo_mini_batch_size=16"])  # fmt: skip
    plan, _ = compile_plan(load_dag(cfg), cfg, 1)
    shape = read_shape(cfg, "actor")
    layer = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144
    body, head = 2 * 28 * layer * 256 * 1280, 2 * 151936 * 2048 * 256 * 1024
    attention = 28 * 256 * 4 * 1280**2 / 2 * 2048
    work = {}
    for name, of, today in (("ref", "ref", True), ("actor", "actor", True), ("before", "actor", False)):
        alone = PackedRows(RowTokens(256, 1024), 1)
        found = model_pass(plan.models[f"agent_0.{of}"], cfg, shape, alone, 1.0, 1, today)
        (work[name],) = found.stages
        assert found.bubble == 0
    assert work["ref"]["matmul"] == pytest.approx(body + head, rel=1e-3)
    assert work["ref"]["attention"] == pytest.approx(attention)
    assert work["actor"]["matmul"] == pytest.approx(3 * (body + head), rel=1e-3)
    assert work["before"]["matmul"] == pytest.approx(3 * body + 4 * head, rel=1e-3)  # logits were made twice
    assert work["ref"].keys() == {"matmul", "attention", "activations", "memory", "link", "launch"}
    assert work["ref"]["launch"] == 28 * ceil(256 / (81920 // 1280))
    assert work["ref"]["link"] == 0


@pytest.mark.parametrize(
    ("keys", "today", "compiled"),
    [
        ((), True, False),
        (
            ("actor_rollout_ref.model.compile_layers=True", "actor_rollout_ref.model.use_liger=False"),
            True,
            True,
        ),
        (("actor_rollout_ref.actor.strategy=megatron",), True, True),
        (("actor_rollout_ref.actor.strategy=megatron",), False, False),
    ],
)
def test_compiled_layers_have_a_rate_of_their_own(model, keys, today, compiled):
    cfg = load_config([*BASE, *keys, f"{MODEL}={model}"])
    plan, _ = compile_plan(load_dag(cfg), cfg, 4)
    packed = PackedRows(RowTokens(256, 1024), 1)
    found = model_pass(plan.models["agent_0.actor"], cfg, read_shape(cfg, "actor"), packed, 1.0, 4, today)
    (work,) = found.stages
    assert ("activations_compiled" in work, "activations" in work) == (compiled, not compiled)


def test_a_prompt_is_computed_once_for_the_samples_that_a_micro_batch_has_room_for(model):
    """By hand: 32 prompts of 256 tokens and 8 responses each of 1,024; 270,336 of 327,680 tokens."""
    keys = [*BASE, f"{MODEL}={model}", "trainer.n_gpus_per_node=1", "data.train_batch_size=32",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16"]  # fmt: skip
    tokens, ref = RowTokens(256, 1024), "actor_rollout_ref.ref"

    def packed(*more, lengths=tokens, name="ref"):
        cfg = load_config([*keys, *more])
        return packed_rows(compile_plan(load_dag(cfg), cfg, 1)[0].models[f"agent_0.{name}"], cfg, lengths)

    whole = packed()
    assert whole.row * 256 == 270336
    assert whole.square == 256**2 / 8 + 1280**2 - 256**2
    assert packed(f"{ref}.log_prob_max_token_len_per_gpu=4096").together == 3  # 256 + 3 x 1,024 fit
    assert packed(f"{ref}.log_prob_max_token_len_per_gpu=1280").together == 1
    assert packed("actor_rollout_ref.rollout.n=1").together == 1
    assert packed(lengths=RowTokens(100, 1024)).together == 1  # saves 8%: the attention in two parts costs 6%
    apart = [f"actor_rollout_ref.{x}.strategy=megatron" for x in ("actor", "ref")]
    assert packed(*apart) == whole and packed(*apart, name="actor") == packed(name="actor")
    assert LEAST_SAVING == micro_batches.LEAST_SAVING


def test_a_model_that_stays_whole_is_gathered_once_for_a_mini_batch(model):
    """1.7B on four devices: of bf16 weights and fp32 gradients three quarters come from other ranks."""
    received = {}
    for reshards in (True, False):
        cfg = config(*BASE, f"{MODEL}={model}", f"{WHOLE}={reshards}")
        plan, _ = compile_plan(load_dag(cfg), cfg, 4)
        shape, packed = read_shape(cfg, "actor"), PackedRows(RowTokens(256, 1024), 1)
        work = model_pass(plan.models["agent_0.actor"], cfg, shape, packed, 1.0, 8)
        received[reshards] = work.stages[0]["link"] / (shape.params * 3 / 4)
    steps, micro_batches = 2, 2 * 4  # of 32 rows of 1,280 tokens
    assert received[True] == pytest.approx(micro_batches * (2 + 2 + 4))
    assert received[False] == pytest.approx(steps * (2 + 4))


def test_recomputation_adds_a_forward_pass_of_the_layers(model):
    plain = [*BASE, f"{MODEL}={model}"]
    again = [*plain, "actor_rollout_ref.model.enable_gradient_checkpointing=True"]
    one, other = predict(plain), predict(again)
    assert seconds(other)["actor_train"] > 1.2 * seconds(one)["actor_train"]
    assert seconds(other)["reference_log_prob"] == seconds(one)["reference_log_prob"]


def test_a_stage_that_waits_and_the_fullest_one_decide_a_pipeline(model):
    keys = [*BASE, f"{MODEL}={model}"]
    for group in ("actor", "ref"):
        keys += [f"actor_rollout_ref.{group}.strategy=megatron",
                 f"actor_rollout_ref.{group}.megatron.param_dtype=bfloat16",
                 f"actor_rollout_ref.{group}.megatron.pipeline_model_parallel_size=2"]  # fmt: skip
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    few, many = (
        next(phase for phase in predict([*keys, f"{budget}={most}"]).phases if phase.name == "actor_train")
        for most in (81920, 5120)
    )
    computed = few.seconds - few.parts["to the host and back"]
    assert few.parts["pipeline bubble"] / computed == pytest.approx(1 / 5, rel=0.01)  # 4 micro-batches
    assert many.parts["pipeline bubble"] < 0.1 * few.parts["pipeline bubble"]


def test_nodes_on_ranks_of_their_own_run_beside_others_and_a_lag_hides_the_rollout(model):
    keys = [f"{MODEL}={model}", "actor_rollout_ref.rollout.name=vllm", "data.max_response_length=1024"]
    lag = ["actor_rollout_ref.rollout.max_lag=1", *keys]
    found = {}
    for name, more in (("together", keys), ("apart", keys), ("lag", lag)):
        dag = DagBuilder("apart")
        rollout = dag.node("rollout_0", "MODEL_INFERENCE", "ROLLOUT", placement="0-1")
        trained = "0-1" if name == "together" else "2-3"
        reward = dag.node("reward_0", "COMPUTE", "REWARD", dependencies=[rollout])
        advantage = dag.node("advantage_0", "COMPUTE", "ADVANTAGE", dependencies=[reward])
        dag.node("train_0", "MODEL_TRAIN", "ACTOR", dependencies=[advantage], placement=trained)
        cfg = config(*more)
        plan, configs = compile_plan(dag.build(), cfg, 4)
        time = step_time(plan, configs, H200)
        assert isinstance(time, StepTime)
        found[name] = time
    rollout, train = seconds(found["apart"])["rollout_0"], seconds(found["apart"])["train_0"]
    assert found["apart"].step_s == pytest.approx(sum(seconds(found["apart"]).values()))
    assert seconds(found["together"])["rollout_0"] == pytest.approx(
        rollout + H200.constants["wake"].seconds(1)
    )
    beside = found["lag"].beside  # two batches in flight: weights that are read serve both
    assert (
        rollout / 2 < beside < rollout and max(beside, train) <= found["lag"].step_s < found["apart"].step_s
    )


def explain(capsys, *keys):
    code = main(["plan", "--explain", *keys])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_says_where_the_time_goes_what_it_assumes_and_what_it_does_not_count(model, capsys):
    keys = [*BASE, f"{MODEL}={model}", f"{WHOLE}=True", f"{WHOLE.replace('.actor.', '.ref.')}=True"]
    code, out, _ = explain(capsys, *keys)
    assert code == 0
    step_s = float(re.search(r"step: ([\d.]+) s", out)[1])
    assert step_s == pytest.approx(predict(keys).step_s, abs=0.06)
    for said in ("actor_train ", "weights and KV cache", "not counted: function_reward", "devices are H200s",
                 "rows of 256 + 1,024 tokens"):  # fmt: skip
        assert said in out
    _, shorter, _ = explain(capsys, *keys, "--tokens", "256+256")
    assert float(re.search(r"step: ([\d.]+) s", shorter)[1]) < step_s / 2
    assert "256 + 256 tokens, geometric with the mean that is said; the longest of a step 1,024" in shorter
    _, other, _ = explain(capsys, *keys, "--device", "h100")
    assert "no step was measured on h100" in other
    assert float(re.search(r"step: ([\d.]+) s", other)[1]) > step_s
    _, on_cpu, why = explain(capsys, *keys, "trainer.device=cpu", "trainer.device_memory_gib=999")
    assert "nothing is fitted for CPUs" in on_cpu, why


def test_a_step_of_milliseconds_is_not_told_as_none(model):
    found = predict([*BASE, f"{MODEL}={model}"])
    scale = 0.00123 / found.step_s
    phases = [
        replace(phase, parts={what: scale * s for what, s in phase.parts.items()}) for phase in found.phases
    ]
    told = explanation(replace(found, phases=phases, step_s=0.00123), "h200", 1)
    assert "step: 0.0012 s; " in told and " 0.00 " not in told


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--device", "abacus"], "nothing is known of it"),
        (["--tokens", "many"], "--tokens many"),
        (["--tokens", "256+0"], "--tokens 256+0"),
        ([f"{MODEL}=/no/model"], "cannot be predicted"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_the_reason(more, said, model, capsys):
    code, _, err = explain(capsys, *BASE, f"{MODEL}={model}", *more)
    assert code == 2 and said in err


def test_a_conversation_and_code_of_the_user_are_named_and_not_counted(model):
    dag = DagBuilder("pair")
    above = add_agent(dag, 0)["rollout"]
    add_agent(dag, 1, dependencies=[above])
    plan, configs = compile_plan(dag.build(), config(f"{MODEL}={model}"), 2)
    found = step_time(plan, configs, H200)
    assert isinstance(found, StepTime)
    assert any("rollout_0: a conversation" in line for line in found.not_counted)
    assert not {"rollout_0", "rollout_1"} & seconds(found).keys() and "train_1" in seconds(found)


def test_experts_that_a_token_does_not_choose_cost_nothing(model):
    raw = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
           "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 6144,
           "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}  # fmt: skip
    from siirl.compiler.cost.work import active_layer_params

    active = active_layer_params(model_shape(raw)) * 48 + 2 * 151936 * 2048
    assert active == pytest.approx(3.3e9, rel=0.03)  # Qwen3-30B-A3B: 3.3 billion are active
    link = LinkPlan("agent_0.weights", "agent_0.actor", "agent_0.rollout", (0,), "local")
    plan, _ = compile_plan(load_dag(cfg := config(f"{MODEL}={model}")), cfg, 1)
    alone = sync_work(link, plan.models["agent_0.actor"], cfg, model_shape(raw), 8)
    assert alone == {"sync_tensor": 18867}  # tensors of its files; nothing is gathered


MEGATRON = "actor_rollout_ref.actor.strategy=megatron"
TP, PP = (f"actor_rollout_ref.actor.megatron.{x}_model_parallel_size" for x in ("tensor", "pipeline"))


@pytest.mark.parametrize(
    ("keys", "world", "link", "network"),
    [
        ((), 4, 3 / 4, 0),  # FSDP: three of four shards
        ((MEGATRON,), 4, 0, 0),
        ((MEGATRON, f"{TP}=4"), 4, 3 / 4, 0),
        ((MEGATRON, f"{PP}=2"), 4, 1 / 2, 0),  # the other stage
        ((MEGATRON, f"{TP}=2", f"{PP}=2"), 8, 1 / 4, 1 / 2),  # stages are on two machines
    ],
)
def test_a_weight_sync_gathers_what_a_rank_does_not_hold(keys, world, link, network, model):
    machines = ["trainer.n_gpus_per_node=4", f"trainer.nnodes={world // 4}"]
    cfg = load_config([*BASE[:-1], *machines, *keys, f"{MODEL}={model}"])
    plan, _ = compile_plan(load_dag(cfg), cfg, world)
    ((found,), shape) = plan.links.values(), read_shape(cfg, "actor")
    work = sync_work(found, plan.models["agent_0.actor"], cfg, shape, 4)
    assert work.get("link", 0) == pytest.approx(link * 2 * shape.params)
    assert work.get("network", 0) == pytest.approx(network * 2 * shape.params)


def test_offloaded_parts_come_to_a_device_for_each_phase_that_needs_them_and_go_back(model):
    """FSDP on four devices, in fp32: of 1.7B parameters a quarter, and two moments of each in an update."""
    away = [f"actor_rollout_ref.actor.fsdp_config.{x}_offload=True" for x in ("param", "optimizer")]
    keys = [*BASE, f"{MODEL}={model}"]
    here, there = predict(keys), predict([*keys, *away])
    shard = 4 * read_shape(load_config(keys), "actor").params / 4
    moved = {phase.name: phase.parts.get("to the host and back", 0) for phase in there.phases}
    of_weights = 2 * shard / H200.constants["host"].value
    assert moved.pop("actor_train") == pytest.approx(3 * of_weights, rel=1e-6)
    for phase in ("actor_old_log_prob", "weights of agent_0.rollout"):
        assert moved.pop(phase) == pytest.approx(of_weights, rel=1e-6)
    assert not any(moved.values())
    assert there.step_s - here.step_s == pytest.approx(5 * of_weights, rel=1e-6)
    assert any("offloaded parts go at the rate" in line for line in there.assumed)


def test_an_engine_over_two_machines_sums_over_the_network(model):
    """16 rows of 1,024 tokens: two sums of each of 28 layers, of 2,048 values, go around 4 devices twice, and
    each waits for the way to the other machine."""
    cfg = load_config([*BASE, f"{MODEL}={model}"])
    plan, _ = compile_plan(load_dag(cfg), cfg, 4)
    engine = plan.models["agent_0.rollout"]
    shape, tokens = read_shape(cfg, "actor"), RowTokens(256, 1024)
    work = {}
    for tp in (2, 4):
        wide = replace(engine, dims=replace(engine.dims, tp=tp))
        work[tp] = rollout_work(wide, cfg, shape, tokens, 16, 139 * 2**30, 180, 2)
    assert "network" not in work[2]
    assert work[4]["network"] == 16 * 1024 * 28 * 2 * 2 * 2048 * 2 * 3 / 4
    assert "decode_hop" not in work[2]
    assert work[4]["decode_hop"] == 1024 * 28 * 2 * 2  # of each sum, to the other machine and back


def test_a_cache_holds_rows_that_begin_in_turn_on_average_half_as_long_as_they_get():
    assert RowTokens(256, 1024).held == 256 + 1024  # all end together
    assert RowTokens(256, 1024, (1024,)).held == 256 + 512
    lengths = lengths_of("100+600").up_to(100_000)
    assert lengths.held == pytest.approx(100 + 600, rel=0.02)  # geometric: as long to go as on average


def test_every_device_has_every_constant():
    assert all(kind.constants.keys() == H200.constants.keys() for kind in DEVICES.values())


def test_a_file_of_a_call_that_was_cut_counts_with_the_steps_that_it_has(tmp_path, monkeypatch):
    whole = json.loads((fit_costs.RESULTS / "backends_gpu_speed_1.7B_1_tp1.json").read_text())
    cut = whole | {"complete": False, "runs": {"fsdp": whole["runs"]["fsdp"], "megatron": {}}}
    (tmp_path / "backends_gpu_speed_cut.json").write_text(json.dumps(cut))
    grpo = json.loads((fit_costs.RESULTS / "grpo_gpu_A_1.json").read_text())
    (tmp_path / "grpo_gpu_none.json").write_text(json.dumps(grpo | {"complete": False, "metrics": {}}))
    monkeypatch.setattr(fit_costs, "RESULTS", tmp_path)
    found = [run.name for run in fit_costs.measured_runs(tmp_path)]
    assert found == ["backends_gpu_speed_cut fsdp"]
