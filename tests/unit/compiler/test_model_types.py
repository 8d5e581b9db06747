"""Models that an engine cannot train are refused by `siirl check`, under each strategy, with the reason."""

import json
import re
from contextlib import nullcontext

import causal_lms
import pytest
from plan_cases import config

from siirl.cli import main
from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import with_overrides
from siirl.config.common import STRATEGIES
from siirl.errors import NotSupportedError, PlacementError
from siirl.findings import refuse
from siirl.model_files.hf_config import load_hf_config
from siirl.models.families import known_types, types_with
from siirl.models.trained import LENGTH_DEPENDENT, why_not, why_not_so_long

NOT_IN_VLLM = types_with(lambda row: row.vllm.why_not == "vLLM has no model of this type")
OF_ANY_HEAD = known_types("fsdp", "value")
VISION_MODELS = types_with(lambda row: row.sees_images)

ACTOR = "actor_rollout_ref.actor"
REFUSED = {
    "deepseek_v32": ({"kv_lora_rank": 512, "n_routed_experts": 256}, "kv_lora_rank=512"),
    "gpt_oss": (
        {"num_local_experts": 32, "quantization_config": {"quant_method": "quark"}},
        "quant_method=quark is not read: fp8 and mxfp4 are",
    ),
    "phimoe": ({"num_local_experts": 16}, "no model type"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
    "olmo_hybrid": ({"linear_num_value_heads": 32}, "would leak between packed rows"),
    "qwen3_next": ({"layer_types": ["linear_attention"] * 2}, "linear_attention alone|takes no packed rows"),
    "qwen3_next ": ({"num_hidden_layers": 3}, "linear_attention alone|takes no packed rows"),
    "llama4": ({"text_config": {"num_local_experts": 16}}, "a text_config"),
    "glm4v_moe": ({"vision_config": {"depth": 24}}, "a vision_config"),
    "qwen2_vl": ({"vision_config": {"depth": 32}}, "a vision_config"),
    "gemma3_text": ({"final_logit_softcapping": 1.0}, "final_logit_softcapping=1.0"),
    "nemotron": ({}, "nemotron is no model type whose results"),
    "falcon": ({}, "falcon is no model type whose results"),
    "doge": ({}, "doge is no model type whose results"),
}


def check(folder, strategy: str, **model) -> None:
    """Compile a run of a model, as `siirl check` does."""
    (folder / "config.json").write_text(json.dumps(model))
    cfg = config(f"actor_rollout_ref.model.path={folder}", f"{ACTOR}.strategy={strategy}")
    compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_no_engine_computes_is_refused_by_its_trait(tmp_path, kind, strategy):
    values, words = REFUSED[kind]
    kind = kind.strip()
    with pytest.raises(
        NotSupportedError, match=f"strategy={strategy}: {kind}.*(Use|use) a usual model"
    ) as caught:
        check(tmp_path, strategy, model_type=kind, **values)
    assert any(word in str(caught.value) for word in words.split("|")), caught.value


VLLM = "actor_rollout_ref.rollout.name=vllm"
GRANITE = {
    **{"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    **{"logits_scaling": 8.0, "attention_multiplier": 0.1},
}


@pytest.mark.parametrize(
    ("values", "keys", "words"),
    [
        ({}, (f"{ACTOR}.strategy=megatron",), r"takes no packed rows\). Set strategy=fsdp"),
        (
            {"model_type": "qwen3_5_text"},
            ("actor_rollout_ref.model.use_liger=True",),
            "Liger kernels in a qwen3_5_text",
        ),
        ({"num_experts": 0}, (f"{ACTOR}.ulysses_sequence_parallel_size=2",), None),
        (
            {"linear_num_value_heads": 9, "linear_num_key_heads": 3},
            (f"{ACTOR}.ulysses_sequence_parallel_size=2",),
            "does not divide the 9 value heads",
        ),
        ({"linear_num_value_heads": 9, "vocab_size": 99}, (), "linear_num_value_heads=9, no multiple of"),
        ({"num_hidden_layers": 4}, (VLLM,), "Set actor_rollout_ref.rollout.name=hf"),
        ({}, (VLLM,), "No other engine of siirl samples it: .* has all weights on each rank: 148 GiB"),
        ({}, (), None),
        (GRANITE, (), None),
        (GRANITE | {"layer_types": ["attention"] * 2}, (), None),
        (GRANITE | {"layer_types": ["mamba"] * 2}, (), "of kind linear_attention alone"),
        (GRANITE | {"layer_types": None}, (), "of kind linear_attention alone"),
        (GRANITE | {"layer_types": ["moe", "attention"]}, (), "of kind moe"),
        (GRANITE | {"time_step_limit": [0.1, 1.0]}, (), r"time_step_limit=\[0.1, 1.0\]"),
        (GRANITE, ("actor_rollout_ref.model.use_liger=True",), "Liger kernels in a granitemoehybrid"),
        (
            GRANITE,
            (f"{ACTOR}.ulysses_sequence_parallel_size=2",),
            "ulysses_sequence_parallel_size=2 for a gra",
        ),
        (GRANITE, (VLLM,), "Set actor_rollout_ref.rollout.name=hf"),
    ],
)
def test_layers_with_states_are_trained_as_far_as_they_were_compared(tmp_path, values, keys, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next", **values}))
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}", *keys)
    with nullcontext() if words is None else pytest.raises(NotSupportedError, match=words):
        compile_plan(load_dag(cfg), cfg, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_type_by_another_name_is_that_type_and_runs_no_code_of_its_own(tmp_path, strategy):
    own = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    sizes = {"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(own | sizes))
    keys = (f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.model.trust_remote_code=True")
    cfg = config(*keys, f"{ACTOR}.strategy={strategy}", "actor_rollout_ref.rollout.name=vllm")
    refuse(check_trained_model(cfg, "actor", "the policy"))
    built = load_hf_config(cfg.actor_rollout_ref.model)
    assert (built.model_type, built.n_routed_experts) == ("deepseek_v3", 384)
    lora = with_overrides(cfg, {"actor_rollout_ref.model.lora_rank": 4})
    with pytest.raises(NotSupportedError, match=r"compressed keys and values \(deepseek_v3"):
        refuse(check_trained_model(lora, "actor", "the policy"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bailing_moe_v2", "bailing_moe_v2, of which transformers has no model"),
        ("nemotron_h", "nemotron_h, some of whose layers are an MLP alone"),
        ("gemma4", "gemma4, whose layers have heads of two sizes"),
        ("gemma4_text", "gemma4_text, whose layers have heads of two sizes"),
        ("falcon_h1", "falcon_h1, each of whose layers has a state beside keys and values"),
    ],
)
def test_types_that_are_asked_for_are_refused_by_their_own_reason(tmp_path, kind, words, strategy):
    with pytest.raises(NotSupportedError, match=words):
        check(tmp_path, strategy, model_type=kind)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_other_model_that_transformers_knows_is_refused_with_a_reason(strategy):
    kinds = set(causal_lms.model_types()) - set(known_types(strategy))
    assert len(kinds) > 100
    for kind in kinds:
        assert kind in why_not({"model_type": kind}, strategy), kind


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_of_the_router_that_nobody_would_add_is_refused(tmp_path, strategy):
    with pytest.raises(NotSupportedError, match=r"output_router_logits=True .*override_config"):
        check(tmp_path, strategy, model_type="qwen3_moe", num_experts=128, output_router_logits=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    model = "actor_rollout_ref.model"
    keys = (f"{model}.path={tmp_path}", f"{ACTOR}.strategy={strategy}")
    cfg = config(*keys, f"{model}.override_config={{router_aux_loss_coef: 0.01}}")
    with pytest.raises(NotSupportedError, match=r"router_aux_loss_coef=0\.01: .*moe_aux_loss_coeff"):
        compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "qwen3"}, r"moe_aux_loss_coeff=0\.1: this model has no experts"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, None),
        (
            {"model_type": "glm4_moe", "n_routed_experts": 8},
            r"moe_aux_loss_coeff=0\.1 for a glm4_moe: .* Set it to 0",
        ),
    ],
)
def test_a_balancing_loss_is_for_experts(tmp_path, model, words):
    (tmp_path / "config.json").write_text(json.dumps(model))
    weight = f"{ACTOR}.fsdp_config.moe_aux_loss_coeff=0.1"
    engine = "actor_rollout_ref.rollout.name=hf"
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}", f"{ACTOR}.use_kl_loss=True", weight, engine)
    with pytest.raises(NotSupportedError, match=words) if words else nullcontext():
        compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("deepseek_v3", "rollout.name=vllm trainer.device=cpu", r"deepseek_v3 in vLLM: .*for 256 with 64"),
        ("deepseek_v2", "model.attention_kernels=flash_attn_4", r"flash_attn_4 in a deepseek_v2"),
        (
            "llama",
            "model.attention_kernels=fla",
            "fla in a llama: it has no gated delta nets, and no Mamba-2",
        ),
        ("qwen3_next", "model.attention_kernels=fla", "fla in a qwen3_next: linear_key_head_dim=512 is more"),
        ("deepseek_v3", "model.lora_rank=4", "LoRA adapters on compressed keys"),
        ("gpt2", "model.lora_rank=4", "LoRA adapters of a gpt2, whose matrices are stored as"),
        (
            "deepseek_v3",
            "model.lora_rank=4 actor_rollout_ref.actor.strategy=megatron",
            "LoRA adapters on comp",
        ),
    ],
)
def test_what_a_type_has_not_been_seen_with_is_refused(tmp_path, kind, key, words):
    experts = {} if kind in ("gpt2", "llama", "qwen3_next") else {"n_routed_experts": 8, "n_group": 2}
    experts |= {"linear_key_head_dim": 512} if kind == "qwen3_next" else {}
    experts |= {"kv_lora_rank": 256} if "vllm" in key else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **experts}))
    keys = f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.name=hf"
    compile_plan(load_dag(cfg := config(*keys)), cfg, 1)
    first, *others = key.split()
    cfg = config(*keys, f"actor_rollout_ref.{first}", *others)
    with pytest.raises(NotSupportedError, match=words):
        compile_plan(load_dag(cfg), cfg, 1)


ON_MEGATRON = "actor.strategy=megatron"
OSS_20B = {
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_attention_heads": 64,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize(
    ("rollout", "changes", "keys", "words"),
    [
        ("hf", {"swiglu_limit": 5.0}, (), ""),
        ("vllm", {}, (), ""),
        ("vllm", {"swiglu_limit": 1.0}, (), r"a gpt_oss in vLLM: with swiglu_limit=1\.0 .*rollout\.name=hf"),
        ("hf", {}, ("model.attention_kernels=flash_attn_4",), r"flash_attn_4 for attention sinks \(gpt_oss"),
        ("hf", {}, (ON_MEGATRON, "model.attention_kernels=flash_attn_4"), "flash_attn_4 for attention sinks"),
        ("hf", {}, (ON_MEGATRON,), ""),
        ("hf", {"attention_bias": False}, (ON_MEGATRON,), ""),
        ("hf", {}, ("actor.fsdp_config.expert_parallel_size=5",), "does not divide the 32 experts"),
        ("hf", {}, ("model.lora_rank=4",), "LoRA adapters on experts"),
        ("hf", {"quantization_config": {"quant_method": "mxfp4"}}, (), ""),
        ("hf", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, (), r"fmt=e5m2 is not read"),
    ],
)
def test_gpt_oss_is_trained_as_it_was_compared(tmp_path, rollout, changes, keys, words):
    (tmp_path / "config.json").write_text(json.dumps(OSS_20B | changes))
    group = "actor_rollout_ref"
    cfg = config(
        f"{group}.model.path={tmp_path}",
        f"{group}.rollout.name={rollout}",
        *(f"{group}.{key}" for key in keys),
    )
    with pytest.raises((NotSupportedError, PlacementError), match=words) if words else nullcontext():
        compile_plan(load_dag(cfg), cfg, 5 if any("parallel_size" in key for key in keys) else 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "qwen3"}, ""),
        (OSS_20B, ""),
        (OSS_20B | {"swiglu_limit": 1.0}, r"a gpt_oss in vLLM: .*swiglu_limit.*teacher\.strategy=fsdp"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 2}, ""),
        ({"model_type": "afmoe"}, "an? afmoe in vLLM: .*were not tested"),
        ({"model_type": "bloom"}, "bloom is no model type whose results"),
        ({"model_type": "qwen3_vl"}, "a qwen3_vl with data.dataset_type=llm"),
    ],
)
def test_a_teacher_in_vllm_is_of_a_type_that_was_seen_in_both_engines(tmp_path, model, words):
    (tmp_path / "config.json").write_text(json.dumps(model))
    cfg = config(
        f"teacher.model.path={tmp_path}",
        "teacher.strategy=vllm",
        "actor_rollout_ref.actor.policy_loss.loss_mode=distill",
    )
    with pytest.raises(NotSupportedError, match=words) if words else nullcontext():
        compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.parametrize(
    ("model", "ranks", "words"),
    [
        ({"model_type": "qwen3"}, 2, "expert_parallel_size=2: this model has no experts. Set it to 1"),
        ({"model_type": "qwen3_moe", "num_experts": 6}, 4, "does not divide the 6 experts of a layer"),
        ({"model_type": "qwen3_moe", "num_experts": 6}, 2, ""),
        ({"model_type": "glm4_moe", "n_routed_experts": 8}, 4, ""),
    ],
)
def test_experts_are_dealt_where_there_are_some_for_each_rank(tmp_path, model, ranks, words):
    (tmp_path / "config.json").write_text(json.dumps(model))
    cfg = config(
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.rollout.name=hf",
        f"{ACTOR}.fsdp_config.expert_parallel_size={ranks}",
    )
    with pytest.raises(NotSupportedError, match=words) if words else nullcontext():
        plan, _ = compile_plan(load_dag(cfg), cfg, ranks)
        assert plan.models["agent_0.actor"].dims.ep == ranks


@pytest.mark.parametrize(("world", "fsdp_size", "ranks"), [(4, -1, 2), (4, 2, 4), (1, -1, 2), (8, 4, 2)])
def test_experts_are_dealt_to_all_ranks_that_share_one_copy_of_the_weights(tmp_path, world, fsdp_size, ranks):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    keys = (f"actor_rollout_ref.model.path={tmp_path}", f"{ACTOR}.fsdp_config.fsdp_size={fsdp_size}")
    cfg = config(*keys, f"{ACTOR}.fsdp_config.expert_parallel_size={ranks}")
    with pytest.raises(PlacementError, match="ranks share one copy of the weights") as caught:
        compile_plan(load_dag(cfg), cfg, world)
    for fix in re.search(r"Set it to ([\d or]+)[.,]", str(caught.value))[1].split(" or "):
        cfg = config(*keys, f"{ACTOR}.fsdp_config.expert_parallel_size={fix}")
        compile_plan(load_dag(cfg), cfg, world)


def test_kernels_in_the_place_of_each_expert_are_refused_under_fsdp(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128}))
    model = "actor_rollout_ref.model"
    cfg = config(f"{model}.path={tmp_path}", f"{model}.use_liger=True")
    with pytest.raises(NotSupportedError, match="kernels take the place of each expert"):
        compile_plan(load_dag(cfg), cfg, 1)


QWEN_MOE = {"model_type": "qwen3_moe", "num_experts": 128}
ATTENTION = "q_proj,k_proj,v_proj,o_proj"


@pytest.mark.parametrize(
    ("raw", "targets", "words"),
    [
        (QWEN_MOE, "all-linear", ""),
        (QWEN_MOE, "[q_proj,gate_proj,up_proj]", ""),
        (QWEN_MOE, "[down_proj]", ""),
        ({"model_type": "mixtral", "num_local_experts": 8}, "[w1,w3,w2,o_proj]", ""),
        (QWEN_MOE, "[q_proj,gate_proj]", "gate_proj and up_proj of an expert are adapted together"),
        (QWEN_MOE, "[q_proj,w1]", "has q_proj, k_proj, .*down_proj. Name some of these, or all-linear"),
        (QWEN_MOE, "q_proj", "Name some of these, or all-linear"),
        (QWEN_MOE | {"mlp_only_layers": [0]}, "all-linear", "some of whose layers have none"),
        (QWEN_MOE | {"decoder_sparse_step": 2}, "[down_proj]", "some of whose layers have none"),
        (
            {"model_type": "qwen2_moe", "num_experts": 60},
            "all-linear",
            "of a qwen2_moe: it has them on its att",
        ),
        (OSS_20B, "all-linear", "of a gpt_oss: it has them on its attention only"),
    ],
)
def test_adapters_lie_on_those_experts_on_which_they_were_compared(tmp_path, raw, targets, words):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = "actor_rollout_ref.model"
    lora = (f"{model}.path={tmp_path}", f"{model}.lora_rank=4", f"{model}.target_modules={targets}")
    for strategy in ("fsdp", "megatron"):
        keys = (*lora, f"{ACTOR}.strategy={strategy}")
        cfg = config(*keys)
        if not words:
            compile_plan(load_dag(cfg), cfg, 1)
            continue
        with pytest.raises(NotSupportedError, match=f"LoRA adapters on experts .*{words}"):
            compile_plan(load_dag(cfg), cfg, 1)
        cfg = config(*keys, f"{model}.target_modules=[{ATTENTION}]")
        compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"model_type": "llama", "attention_bias": True},
            r"llama with attention_bias=True\. Set strategy=fsdp",
        ),
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias=True"),
        ({"model_type": "qwen3", "hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation=gelu"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window=null"),
        ({"model_type": "gemma3_text", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "softcapping=50.*strategy=fsdp"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8"),
        ({"model_type": "gemma"}, r"no model type whose results under megatron .* Set strategy=fsdp"),
    ],
)
def test_variants_that_megatron_would_build_differently_are_refused(model, words):
    problem = why_not(model, "megatron")
    assert re.search(words, problem), problem


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n_shared_experts": 0}, "n_shared_experts=0"),
        ({"n_group": 4, "topk_group": 2}, r"n_group=4 \(groups of one expert"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "one expert a token at weight 1"),
        ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, r"tok=3 \(the best groups have 2"),
        (
            {"model_type": "deepseek_v3", "v_head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4},
            r"v_head_dim=24 \(values wider than keys, of 20",
        ),
        ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "attention_bias": True}, ""),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method=noaux_tc"),
        ({"model_type": "deepseek_v2", "n_group": 4, "topk_group": 1, "num_experts_per_tok": 2}, ""),
    ],
)
def test_routers_of_groups_under_megatron_choose_as_those_of_transformers(values, words):
    problem = why_not({"model_type": "glm4_moe", "n_routed_experts": 4} | values, "megatron")
    assert re.search(words, problem) if words else problem == "", problem


def test_a_critic_needs_a_value_head_of_transformers():
    assert why_not({"model_type": "olmo2"}, "fsdp") == ""
    assert "olmo2 with a value head, which transformers does not have" in why_not(
        {"model_type": "olmo2"}, "fsdp", "value"
    )
    assert why_not({"model_type": "qwen3"}, "fsdp", "value") == ""


def test_the_check_of_a_user_says_it(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron"}))
    keys = ("actor_rollout_ref.rollout.n=4", f"actor_rollout_ref.model.path={tmp_path}")
    code = main(["check", "--elsewhere", "algorithm.adv_estimator=grpo", *keys])
    assert code == 2
    assert "strategy=fsdp: nemotron is no model type" in capsys.readouterr().err


def test_a_model_of_its_own_code_is_left_to_its_engine(tmp_path):
    own = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    with pytest.raises(NotSupportedError, match="mine is no model type"):
        check(tmp_path, "fsdp", **own)
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.model.trust_remote_code=True")
    compile_plan(load_dag(cfg), cfg, 1)


ROPES = {
    "dynamic": {"factor": 4.0},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0},
    "proportional": {"factor": 4.0},
    "yarn": {"factor": 4.0},
}
FIRST = 16  # positions of the first training


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_that_follow_the_longest_row_are_refused_from_where_they_do(tmp_path, kind):
    """Against transformers: the rotary embedding of a short row alone, and packed with a longer one."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    assert ROPES.keys() == ROPE_INIT_FUNCTIONS.keys(), "transformers has other types"
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": FIRST} | ROPES[kind]
    positions = FIRST if kind == "dynamic" else 4 * FIRST
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": positions}
    raw = {"model_type": "llama", **sizes, "rope_parameters": rope}

    def follows(longest: int) -> bool:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
        short, long = torch.arange(FIRST // 2), torch.arange(longest)
        (alone, _), (packed, _) = (
            rotary(torch.zeros(1), ids[None]) for ids in (short, torch.cat([short, long]))
        )
        return not torch.equal(alone[0], packed[0, : FIRST // 2])

    for longest in (FIRST, FIRST + 1, 2 * FIRST):
        assert bool(why_not_so_long(raw, longest)) == follows(longest), longest
    assert follows(2 * FIRST) == (kind in LENGTH_DEPENDENT)
    by_layer = raw | {"rope_parameters": {"full_attention": rope}}
    assert bool(why_not_so_long(by_layer, 2 * FIRST)) == follows(2 * FIRST)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_beyond_what_each_is_computed_by_itself_are_refused_by_check(tmp_path, strategy):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512} | ROPES["longrope"]
    model = {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": rope}
    words = r"rope_type=longrope, with rows of up to \d+ tokens: beyond 512 tokens .* to 512, or set another"
    with pytest.raises(NotSupportedError, match=words):
        check(tmp_path, strategy, **model)
    rope["original_max_position_embeddings"] = 4096
    assert not why_not_so_long(model, 4096)


@pytest.mark.parametrize("kind", NOT_IN_VLLM)
def test_vllm_samples_no_types_that_it_does_not_know(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    keys = (f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.name=vllm")
    cfg = config(*keys)
    with pytest.raises(NotSupportedError, match=rf"a {kind} in vLLM: vLLM has no model.*rollout\.name=hf"):
        compile_plan(load_dag(cfg), cfg, 1)
    cfg = config(*keys, "actor_rollout_ref.rollout.name=hf")
    compile_plan(load_dag(cfg), cfg, 1)


WINDOW = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "refused"),
    [
        *((kind, {}, True) for kind in ("qwen2", "qwen2_moe", "qwen3")),
        *((kind, {"use_sliding_window": False}, False) for kind in ("qwen2", "qwen2_moe", "qwen3")),
        ("qwen2", {"max_window_layers": 0}, False),
        ("qwen2", {"max_window_layers": 4}, False),
        ("qwen2", {"sliding_window": None}, False),
        ("qwen3", {"layer_types": ["full_attention"] * 4}, False),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, True),
        ("qwen2_moe", {"max_window_layers": 0}, False),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 2}, False),
    ],
)
def test_vllm_is_refused_where_windows_of_some_layers_would_be_lost(tmp_path, kind, changes, refused):
    """Whose config.json lists its layers, or has only what transformers makes the list of."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | WINDOW | changes))
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.name=vllm")
    words = rf"a {kind} in vLLM: with sliding windows in some.*rollout\.name=hf"
    with pytest.raises(NotSupportedError, match=words) if refused else nullcontext():
        compile_plan(load_dag(cfg), cfg, 1)


@pytest.mark.slow  # imports vLLM
def test_vllm_has_a_model_of_every_other_type_of_language_model():
    registry = pytest.importorskip("vllm", reason="vLLM is not installed").ModelRegistry
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(registry.get_supported_archs())
    kinds = [kind for kind in known_types("fsdp") if kind not in VISION_MODELS]
    lacking = [kind for kind in kinds if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] not in known]
    assert lacking == sorted(NOT_IN_VLLM)
