"""`siirl plan --search`: what it prints fits, is accepted as printed, and is the fastest there is."""

import json
import re
from dataclasses import replace

import pytest

from siirl.cli import main
from siirl.compiler.choose import choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import H200
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.memory.estimate import GIB
from siirl.compiler.memory.phases import memory_lines, phase_peaks
from siirl.config import load_config, with_overrides
from siirl.launch.devices import named_machine

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
ROW = 1280
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = [
    f"actor_rollout_ref.{group}.{key}"
    for group in ("actor", "ref")
    for key in ("strategy=megatron", "megatron.param_dtype=bfloat16", "megatron.param_offload=False")
]


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return [
        "algorithm.adv_estimator=grpo",
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "data.train_batch_size=128",
        "data.max_prompt_length=256",
        "data.max_response_length=1024",
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.model.use_liger=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.enforce_eager=False",
        f"{ROLLOUT}.max_num_seqs=512",
        "trainer.device_memory_gib=139.8",
    ]


def searched(capsys, keys):
    """[(seconds, GiB, overrides)] of the layouts that are printed, best first, and all that is printed."""
    assert main(["plan", "--search", "--device", "h200", *keys]) == 0
    out = capsys.readouterr().out
    shown = r"^\d\. ([\d.]+) s a step \(.*\), (\d+) GiB in \w+\n   ((?:.*\\\n)*.*)$"
    found = re.findall(shown, out, re.MULTILINE)
    words = [[] if text == "as it is" else text.replace("\\\n", "").split() for _, _, text in found]
    return [(float(s), int(gib), own) for (s, gib, _), own in zip(found, words, strict=True)], out


def printed_is_accepted(capsys, keys, layouts):
    for seconds, gib, overrides in layouts:
        command = [*keys, *overrides]
        assert main(["check", "--elsewhere", *command]) == 0
        assert "does not fit" not in capsys.readouterr().err
        assert main(["plan", "--explain", "--device", "h200", *command]) == 0
        assert f"step: {seconds:.1f} s" in capsys.readouterr().out
        assert main(["plan", *command]) == 0
        verdicts = re.findall(r"fits 139.8 GiB: yes, (\d+) GiB in", capsys.readouterr().out)
        assert max(map(int, verdicts)) == gib


@pytest.mark.heavy
def test_megatron_layouts_are_found_in_the_order_in_which_they_were_measured(keys, capsys):
    """Of 1.7B on four H200s data parallel was fastest, then TP 2 x PP 2, then TP 4; rollouts by TP 1."""
    layouts, out = searched(capsys, [*keys, *MEGATRON, "trainer.n_gpus_per_node=4"])
    assert len(layouts) == 5 and layouts == sorted(layouts, key=lambda one: one[0])
    best = layouts[0][2]
    assert not any("model_parallel_size" in text and not text.endswith("=1") for text in best)
    assert not any("placement" in text for text in best)
    assert {  # micro-batches of one row, as the run has them, are slower than those that the plan chooses
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=auto",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=auto",
    } <= {*best}
    as_it_is = float(re.search(r"as it is: ([\d.]+) s", out)[1])
    assert layouts[0][0] < as_it_is  # which has micro-batches of one row
    printed_is_accepted(capsys, [*keys, *MEGATRON, "trainer.n_gpus_per_node=4"], layouts[::4])


@pytest.mark.heavy
@pytest.mark.parametrize("lag", [0, 1])
def test_the_first_is_the_fastest_of_all_that_fit(lag, keys, capsys):
    """Each layout of two GPUs that there is, compiled from its command line and looked at one by one."""
    keys = [*keys, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.max_lag={lag}"]
    layouts, out = searched(capsys, keys)
    nodes = ("actor_old_log_prob", "reference_log_prob", "actor_train")
    apart = ["dag.node_config.rollout_actor.placement=0"]
    apart += [f"dag.node_config.{node}.placement=1" for node in nodes]
    times = []
    for placed, tp in (([], 1), ([], 2), *([(apart, 1)] if lag else [])):
        base = load_config([*keys, *placed, f"{ROLLOUT}.tensor_model_parallel_size={tp}"])
        times += list(brute_force(base))
    assert layouts[0][0] <= 1.02 * min(times)
    assert ("tried with rollout.max_lag" in out) == (not lag)
    printed_is_accepted(capsys, keys, layouts[:2])


def brute_force(base):
    """The predicted step of each size of micro-batches that fits."""
    for doublings in range(7):
        budget = ROW << doublings
        policy = "actor_rollout_ref"
        cfg = with_overrides(
            base,
            {
                f"{policy}.actor.use_dynamic_bsz": True,
                f"{policy}.actor.ppo_max_token_len_per_gpu": budget,
                f"{policy}.rollout.log_prob_use_dynamic_bsz": True,
                f"{policy}.rollout.log_prob_max_token_len_per_gpu": 2 * budget,
                f"{policy}.ref.log_prob_use_dynamic_bsz": True,
                f"{policy}.ref.log_prob_max_token_len_per_gpu": 2 * budget,
            },
        )
        machine = named_machine(cfg, replace(H200, gib=139.8))
        plan, configs = choose(*compile_plan(load_dag(cfg), cfg, 2), machine)
        lines, time = memory_lines(plan, configs), step_time(plan, configs, H200)
        assert isinstance(time, StepTime) and not isinstance(lines, str)
        if max(peak.device for peak in phase_peaks(plan, lines, int(139.8 * GIB))) <= 0.9 * 139.8 * GIB:
            yield time.step_s


def test_what_does_not_fit_is_skipped_and_said(keys, capsys):
    small = [key for key in keys if "device_memory" not in key] + ["trainer.device_memory_gib=20"]
    layouts, out = searched(capsys, [*small, "trainer.n_gpus_per_node=2"])
    assert layouts == [] and "none fits" in out and "0 fit" in out


def test_a_workflow_that_places_its_nodes_keeps_them_where_they_are(keys, capsys):
    placed = [*keys, "trainer.n_gpus_per_node=2", "dag.node_config.rollout_actor.placement=0-1"]
    layouts, _ = searched(capsys, placed)
    assert layouts and not any("placement" in text for _, _, overrides in layouts for text in overrides)


def test_a_run_that_is_wrong_is_refused_as_by_plan(keys, capsys):
    assert main(["plan", "--search", *keys, "trainer.n_gpus_per_node=2", "data.train_batch_size=0"]) == 2
    assert "train_batch_size" in capsys.readouterr().err


MOE = SHAPE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 768,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B, with two layers less: 46 do not divide by four stages, and do with embedding and head."""


@pytest.mark.heavy
def test_experts_are_spread_and_layers_cut_as_they_divide(keys, tmp_path, capsys):
    """30B on 16 GPUs of 80 GiB: as it is, each has all experts of half the layers; what is printed fits."""
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    run = [key for key in keys if "device_memory" not in key and "micro_batch" not in key]
    run += [*MEGATRON[:1], "trainer.device_memory_gib=79.6", "trainer.n_gpus_per_node=8", "trainer.nnodes=2"]
    run += ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"]
    layouts, out = searched(capsys, run)
    assert re.search(r"as it is: .* more than 90% of a device", out)
    assert len(layouts) == 5 and layouts == sorted(layouts, key=lambda one: one[0])
    assert any("expert_model_parallel_size" in word for _, _, words in layouts for word in words)
    for _, gib, overrides in layouts:
        sizes = {
            key.rpartition(".")[2]: value for key, _, value in (word.partition("=") for word in overrides)
        }
        assert gib <= 0.9 * 79.6
        if sizes.get("pipeline_model_parallel_size") == "4":
            assert sizes["account_for_embedding_in_pipeline_split"] == "true"
    for _, _, overrides in layouts[::4]:
        assert main(["check", "--elsewhere", *run, *overrides]) == 0


def test_a_run_that_its_sizes_alone_refuse_is_searched_and_the_reason_is_said(keys, capsys):
    """As many prompts as GPUs, and engines of one GPU on twice as many."""
    run = [*keys, *MEGATRON, "trainer.n_gpus_per_node=8", "trainer.nnodes=2", "data.train_batch_size=8"]
    run = [key for key in run if "mini_batch_size" not in key and "train_batch_size=128" not in key]
    layouts, out = searched(capsys, run)
    assert "an engine has at most 8 GPUs: those of one machine" in out
    assert layouts and "as it is: refused: " in out and "8 prompts of a batch for 16" in out
    assert all(f"{ROLLOUT}.tensor_model_parallel_size=" in " ".join(words) for _, _, words in layouts)


def test_what_fits_only_with_parts_in_host_memory_is_shown_so(keys, capsys):
    chosen = ("device_memory", "micro_batch", "checkpointing", "use_liger", "enforce_eager", "max_num_seqs")
    small = [
        key for key in keys if not any(name in key for name in (*chosen, "batch_size=128", "mini_batch"))
    ]
    small += ["trainer.device_memory_gib=46", "trainer.n_gpus_per_node=1", "data.train_batch_size=8"]
    layouts, out = searched(capsys, small)
    assert layouts and "more than 90% of a device" in out
    assert all("optimizer_offload=true" in " ".join(words) for _, _, words in layouts)


def test_a_share_and_a_cut_of_layers_that_somebody_set_do_not_bound_the_search(keys, capsys):
    """Stages of 12 and 16 layers, of the reference too, and an engine with nine tenths of each device."""
    cut = "megatron.override_transformer_config.num_layers_in_first_pipeline_stage=12"
    pipeline = "megatron.pipeline_model_parallel_size=2"
    own = [f"actor_rollout_ref.{group}.{key}" for group in ("actor", "ref") for key in (cut, pipeline)]
    run = [*keys, *MEGATRON, *own, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.gpu_memory_utilization=0.9"]
    layouts, out = searched(capsys, run)
    assert "more than 90% of a device" in out
    assert len(layouts) == 5 and all(
        f"{ROLLOUT}.gpu_memory_utilization=auto" in words for *_, words in layouts
    )
    for group in ("actor", "ref"):
        assert f"actor_rollout_ref.{group}.{cut.partition('=')[0]}=null" in layouts[0][2]
    printed_is_accepted(capsys, run, layouts[:1])
