"""Keys of speed and memory that nobody set are chosen by the plan; what somebody set is never touched."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import config

from siirl.cli import main
from siirl.compiler.choices import FITS, Kept, Machine, choice_lines
from siirl.compiler.choose import PACKAGES, choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.estimate import GIB
from siirl.compiler.memory.phases import memory_lines, phase_peaks
from siirl.compiler.plan import Plan
from siirl.config import load_config, print_config, with_overrides
from siirl.config.checks import contradictions
from siirl.config.resolve import get, is_set
from siirl.config.root import all_keys
from siirl.errors import ConfigError

POLICY = "actor_rollout_ref"
ACTOR, MODEL, ROLLOUT, REF = (f"{POLICY}.{group}" for group in ("actor", "model", "rollout", "ref"))
DYNAMIC, TOKENS = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
ROWS, CHECKPOINTING = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{MODEL}.enable_gradient_checkpointing"
LOG_PROB = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
H200 = Machine("cuda", 139.8, (9, 0), frozenset(PACKAGES))
SIZES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
}


def model(folder: Path, size: str = "0.6B", **more: object) -> str:
    """The key of a model of this shape."""
    folder.mkdir(exist_ok=True)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(kind | heads | SIZES[size] | more))
    return f"{MODEL}.path={folder}"


def planned(machine: Machine, *keys: str, world: int = 1, kept: Kept | None = None):
    cfg = config(f"{ROLLOUT}.name=vllm", f"{ACTOR}.ppo_mini_batch_size=4", *keys)
    return choose(*compile_plan(load_dag(cfg), cfg, world), machine, kept)


def chosen(plan: Plan) -> dict[str, object]:
    """Key -> what was chosen last, of any model."""
    return {key: value for choice in plan.choices for key, value in choice.keys.items()}


def test_on_a_large_gpu_nothing_is_slow_that_nobody_asked_for(tmp_path):
    plan, configs = planned(H200, model(tmp_path), "data.train_batch_size=128", f"{ROLLOUT}.n=8")
    trains = configs["actor_train"].actor_rollout_ref
    assert trains.actor.use_dynamic_bsz and trains.actor.ppo_max_token_len_per_gpu >= 16384
    assert not trains.model.enable_gradient_checkpointing
    assert trains.model.compile_layers and not trains.model.use_liger
    assert trains.model.attention_kernels == "flash_attn_4"
    before = configs["actor_old_log_prob"].actor_rollout_ref.rollout
    assert before.log_prob_use_dynamic_bsz and before.log_prob_max_token_len_per_gpu >= 32768
    samples = configs["rollout_actor"].actor_rollout_ref.rollout
    assert not samples.enforce_eager
    assert (samples.max_num_seqs, samples.max_num_batched_tokens) == (1024, 16384)
    cache = (128 * 512 + 1024 * 512) * 28 * 2 * 8 * 128 * 2 / GIB  # a prompt of 8 responses is there once
    assert cache + 1.2 + 4 < samples.gpu_memory_utilization * 139.8 < cache + 1.2 + 20
    assert plan.chosen_for == "1 x GPUs of 140 GiB, with fla-core and flash-attn-4 and liger-kernel"
    assert all(reason and key in " ".join(choice_lines(plan)) for key, reason in spoken(plan))
    assert Plan.from_json(plan.to_json()) == plan


def spoken(plan: Plan) -> Iterator[tuple[str, str]]:
    for choice in plan.choices:
        yield from ((key.removeprefix(f"{POLICY}."), choice.reason) for key in choice.keys)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gib", [16.0, 24.0, 48.0, 80.0, 139.8])
@pytest.mark.parametrize("lengths", [(512, 512), (1024, 8192), (128, 32)])
def test_what_is_chosen_takes_no_more_memory_than_there_is_or_than_without(tmp_path, size, gib, lengths):
    keys = [f"data.max_{what}_length={n}" for what, n in zip(("prompt", "response"), lengths, strict=True)]
    cfg = config(f"{ROLLOUT}.name=vllm", "data.train_batch_size=64", model(tmp_path, size), *keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, 1)
    peaks = []
    for one, of_nodes in ((plan, configs), choose(plan, configs, Machine("cuda", gib))):
        lines = memory_lines(one, of_nodes)
        assert not isinstance(lines, str)
        peaks.append({peak.node: peak.device / GIB for peak in phase_peaks(one, lines, int(gib * GIB))})
    assert all(after <= max(FITS * gib, peaks[0][node] + 1e-6) for node, after in peaks[1].items())


@pytest.mark.parametrize(
    ("keys", "still"),
    [
        ([f"{ROWS}=4"], {DYNAMIC: False, f"{ROLLOUT}.log_prob_use_dynamic_bsz": True}),
        ([f"{DYNAMIC}=false"], {DYNAMIC: False, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False}),
        ([f"{DYNAMIC}=true", f"{TOKENS}=5000"], {TOKENS: 5000, LOG_PROB: 5000}),
        ([f"{TOKENS}=5000"], {DYNAMIC: True, TOKENS: 5000, LOG_PROB: 5000}),
        ([f"{CHECKPOINTING}=true"], {CHECKPOINTING: True}),
        ([f"{MODEL}.use_liger=true"], {f"{MODEL}.compile_layers": False, f"{MODEL}.use_liger": True}),
        ([f"{MODEL}.attention_kernels=torch"], {f"{MODEL}.attention_kernels": "torch"}),
        ([f"{ROLLOUT}.enforce_eager=true"], {f"{ROLLOUT}.enforce_eager": True}),
        ([f"{ROLLOUT}.max_num_seqs=1000"], {f"{ROLLOUT}.max_num_seqs": 1000}),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.41"], {f"{ROLLOUT}.gpu_memory_utilization": 0.41}),
    ],
)
def test_what_somebody_set_is_never_touched(tmp_path, keys, still):
    plan, configs = planned(H200, model(tmp_path), *keys)
    for node in ("actor_train", "actor_old_log_prob", "rollout_actor"):
        for key, value in still.items():
            of_others = {DYNAMIC: "actor_train", LOG_PROB: "actor_old_log_prob"}
            if of_others.get(key, node) == node and "log_prob_use" not in key:
                assert get(configs[node], key) == value
    last = "log_prob_use_dynamic_bsz"
    for key in (key for key in still if last in key):
        assert get(configs["actor_old_log_prob"], key) == still[key]
    assert not any(is_set(load_config(keys), key) for key in chosen(plan))


def test_a_token_budget_that_was_set_too_small_is_refused_as_ever(tmp_path):
    _, configs = planned(H200, model(tmp_path), f"{TOKENS}=500")
    assert any(
        f"{TOKENS}=500 is less than the longest row" in str(x) for x in contradictions(configs["actor_train"])
    )


def test_every_key_that_is_chosen_is_auto_and_no_other(tmp_path):
    keys = set(chosen(planned(H200, model(tmp_path), "data.train_batch_size=128")[0]))
    assert keys and all(all_keys()[key].rule.auto for key in keys)
    written = print_config(load_config([]))
    for name in (key for key, known in all_keys().items() if known.rule.auto):
        assert f"{name.rsplit('.', 1)[-1]}: auto" in written


def test_auto_takes_back_what_a_preset_or_a_node_has_set():
    cfg = with_overrides(
        load_config([f"{DYNAMIC}=true", f"{ROLLOUT}.enforce_eager=false"]), {DYNAMIC: "auto"}
    )
    assert not is_set(cfg, DYNAMIC) and not cfg.actor_rollout_ref.actor.use_dynamic_bsz
    assert not is_set(cfg, f"{ROLLOUT}.log_prob_use_dynamic_bsz") and is_set(cfg, f"{ROLLOUT}.enforce_eager")
    with pytest.raises(ConfigError, match=r"grad_clip=auto: expected a number, got str"):
        load_config([f"{ACTOR}.grad_clip=auto"])
    with pytest.raises(ConfigError, match=r"use_dynamic_bsz=often: expected true or false or auto, got str"):
        load_config([f"{DYNAMIC}=often"])


@pytest.mark.parametrize(
    ("machine", "key", "value"),
    [
        (Machine("cpu", 8.0), f"{MODEL}.compile_layers", None),
        (Machine("cpu", 8.0), f"{ROLLOUT}.enforce_eager", None),
        (Machine("cpu", 8.0), DYNAMIC, True),
        (Machine(), DYNAMIC, True),
        (Machine(), TOKENS, 1024),  # one of the longest rows, as without an estimate nothing larger is safe
        (Machine(), f"{ROLLOUT}.enforce_eager", False),
        (Machine(), CHECKPOINTING, None),
        (Machine("cuda", 139.8, (8, 0), frozenset(PACKAGES)), f"{MODEL}.attention_kernels", None),
        (Machine("cuda", 139.8), f"{MODEL}.attention_kernels", None),
        (Machine("cuda", 16.0), CHECKPOINTING, True),
    ],
)
def test_choices_follow_the_machine(tmp_path, machine, key, value):
    size = "1.7B" if machine.gib == 16.0 else "0.6B"
    assert chosen(planned(machine, model(tmp_path, size))[0]).get(key) == value


@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (80.0, r"; \d\d of 80 GiB$"),
        (20.0, r"; [\d.]+ of 20 GiB$"),
        (8.0, r"; actor_train takes \d\d of 8 GiB even so$"),
    ],
)
def test_a_choice_says_what_fits_or_that_it_does_not(tmp_path, gib, said):
    """What is too full in phases of other nodes is no part of it."""
    plan, _ = planned(Machine("cuda", gib), model(tmp_path))
    reasons = {key: choice.reason for choice in plan.choices for key in choice.keys}
    assert re.search(said, reasons[TOKENS]), reasons
    for taken, there in re.findall(r"([\d.]+) of ([\d.]+) GiB$", "\n".join(reasons.values()), re.M):
        assert float(taken) <= float(there)


def test_kernels_are_chosen_only_where_they_were_compared(tmp_path):
    for keys in ([f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=float32"], []):
        other = {} if keys else {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
        found = chosen(planned(H200, model(tmp_path, **other), *keys)[0])
        assert not {f"{MODEL}.compile_layers", f"{MODEL}.attention_kernels"} & found.keys()


@pytest.mark.parametrize("machine", [H200, Machine("cpu", 8.0)], ids=["gpu", "cpu"])
def test_the_base_that_tenants_share_has_compiled_layers_where_a_job_has_them(tmp_path, machine):
    keys = [model(tmp_path), "data.max_prompt_length=64", "data.max_response_length=64"]
    cfg = load_config([*keys, f"trainer.device={machine.device}", "trainer.n_gpus_per_node=1"], "serve")
    plan, configs = choose(*compile_plan(load_dag(cfg), cfg, 1), machine)
    compiled = machine.device == "cuda"
    assert {one.actor_rollout_ref.model.compile_layers for one in configs.values()} == {compiled}
    assert chosen(plan).get(f"{MODEL}.compile_layers", False) == compiled


@pytest.mark.parametrize(
    ("machine", "values", "kernels"),
    [
        (H200, {}, "fla"),
        (replace(H200, packages=frozenset()), {}, "torch"),
        (replace(H200, triton="3.3.1"), {}, "fla"),
        (replace(H200, triton="3.6.0"), {}, "torch"),
        (replace(H200, triton="3.7.1"), {}, "fla"),
        (replace(H200, triton="3.6.0", capability=(10, 0)), {}, "fla"),
        (H200, {"linear_key_head_dim": 512}, None),
        (Machine("cpu", 8.0), {}, None),
    ],
)
def test_states_are_computed_by_fla_where_it_is_installed_and_has_kernels(tmp_path, machine, values, kernels):
    more = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **values}
    plan, _ = planned(machine, model(tmp_path, **more), f"{ROLLOUT}.name=hf")
    assert chosen(plan).get(f"{MODEL}.attention_kernels") == kernels
    why = "needs Triton 3.7.1 or later, here is" if machine.packages else "fla-core is not installed"
    slow = any(why in line and "slow" in line for line in choice_lines(plan))
    assert slow == (kernels == "torch")
    assert chosen(plan).get(f"{MODEL}.compile_layers", False) == (machine.device == "cuda")
    assert f"{MODEL}.attention_kernels" not in chosen(
        planned(machine, model(tmp_path, **more), f"{ROLLOUT}.name=hf", f"{MODEL}.attention_kernels=torch")[0]
    )


def test_with_fla_micro_batches_are_as_large_as_what_its_kernels_keep_lets_them_be(tmp_path):
    more = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 32}
    keys = (f"{ROLLOUT}.name=hf", "data.train_batch_size=128", f"{ROLLOUT}.n=8", f"{CHECKPOINTING}=false")
    tokens = []
    for kernels in ("torch", "fla"):
        chooses = f"{MODEL}.attention_kernels={kernels}"
        tokens.append(chosen(planned(H200, model(tmp_path, "1.7B", **more), *keys, chooses)[0])[TOKENS])
    assert tokens[1] >= 2 * tokens[0]


def test_a_model_of_unknown_memory_gets_micro_batches_of_one_of_the_longest_rows(tmp_path):
    plan, _ = planned(H200, f"{MODEL}.path={tmp_path / 'nowhere'}")
    assert chosen(plan)[TOKENS] == 1024
    assert any("no estimate of larger ones" in line for line in choice_lines(plan))


def test_a_run_that_goes_on_keeps_what_was_chosen_on_the_same_devices(tmp_path):
    path = model(tmp_path)
    kept = Kept.of(planned(H200, path, "data.train_batch_size=128", f"{TOKENS}=9000")[0])
    assert Kept.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept
    kept = Kept(kept.chosen_for, tuple(one for one in kept.choices if CHECKPOINTING not in one.keys))
    again, configs = planned(H200, path, "data.train_batch_size=128", kept=kept)
    assert configs["actor_train"].actor_rollout_ref.model.enable_gradient_checkpointing  # as it was
    assert all("as at the start of the run" in line for line in choice_lines(again))
    assert Kept.of(again) == kept  # so checkpoints of a run that has gone on equal those of one that has not
    twice, _ = planned(H200, path, "data.train_batch_size=128", kept=Kept.of(again))
    assert twice == again
    set_since, _ = planned(H200, path, f"{MODEL}.compile_layers=false", kept=kept)
    assert f"{MODEL}.compile_layers" not in chosen(set_since)
    smaller, _ = planned(Machine("cuda", 80.0), path, "data.train_batch_size=128", kept=kept)
    assert not any("as at the start" in line for line in choice_lines(smaller))


def test_several_ranks_keep_weights_gathered_where_they_fit(tmp_path):
    key = f"{ACTOR}.fsdp_config.reshard_after_forward"
    for size, gib, value in (("1.7B", 139.8, False), ("8B", 48.0, None), ("0.6B", 139.8, False)):
        plan, _ = planned(Machine("cuda", gib), model(tmp_path, size), "trainer.n_gpus_per_node=4", world=4)
        assert chosen(plan).get(key) == value


def test_check_and_plan_say_what_was_chosen_and_why(tmp_path, capsys):
    keys = [model(tmp_path), "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.n=8"]
    keys += ["trainer.device=cuda", "trainer.device_memory_gib=139.8", "data.train_batch_size=64"]
    assert main(["plan", *keys]) == 0
    assert "chosen for 1 x GPUs of 140 GiB" in (said := capsys.readouterr().out)
    assert "agent_0.actor: model.enable_gradient_checkpointing=false: activations fit: " in said
    assert main(["check", "--elsewhere", *keys]) == 0
    assert "chosen: agent_0.rollout: rollout.enforce_eager=false: CUDA graphs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "cut"),
    [("megatron", "megatron.context_parallel_size"), ("fsdp", "ulysses_sequence_parallel_size")],
)
def test_a_micro_batch_that_is_cut_holds_the_longest_row(tmp_path, strategy, cut):
    """One row, as of a model whose memory is not known. Megatron's budget is that of all ranks."""
    path = model(tmp_path, model_type="smollm3" if strategy == "fsdp" else "qwen3_vl")
    seeing = ["data.dataset_type=vlm"] if strategy == "megatron" else []
    rows = ("data.max_prompt_length=32", "data.max_response_length=5")
    keys = (path, *seeing, f"{ACTOR}.strategy={strategy}", f"{ACTOR}.{cut}=2", *rows)
    plan, configs = planned(H200, *keys, world=2)
    assert chosen(plan)[TOKENS] == (40 if strategy == "megatron" else 19)
    assert not [problem for cfg in configs.values() for problem in contradictions(cfg)]
